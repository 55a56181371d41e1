"""The command line: what goes to stdout and to stderr, exit statuses, and errors of one line without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_helpers import FakeLLM, save_tiny_chat_model

import engine
from engine.chats import ChatFormatError
from engine.cli import COMMANDS, Command, main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(monkeypatch):
    """`engine` with a fake model behind it; gives the keyword arguments that each `LLM` was made with."""
    calls = []

    def make(model, **options):
        calls.append({"model": model, **options})
        return FakeLLM()

    monkeypatch.setattr(engine, "LLM", make, raising=False)
    monkeypatch.setattr(engine, "SamplingParams", SimpleNamespace, raising=False)
    return calls


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command line."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


class TestHelp:
    def test_help_shows_the_commands_and_examples(self, capsys):
        """The first thing that people type."""
        status, out, err = run(capsys, "--help")
        assert (status, err) == (0, "")
        assert "replay" in out
        assert "radixkv replay --compare" in out

    def test_replay_help_names_every_option(self, capsys):
        """Nothing is offered that is not there."""
        status, out, _ = run(capsys, "replay", "--help")
        assert status == 0
        for option in (
            "chats",
            "compare",
            "report",
            "json",
            "history",
            "concurrency",
            "kv-cache-memory",
            "num-blocks",
            "threads",
        ):
            assert f"--{option}" in out

    def test_version_is_printed(self, capsys):
        """For bug reports."""
        status, out, _ = run(capsys, "--version")
        assert status == 0
        assert out.startswith("radixkv ")

    def test_importing_the_command_line_loads_no_torch(self):
        """`--help` answers at once, and commands without a model run where torch is not installed."""
        code = "import sys, engine.cli; print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestReplay:
    def test_json_alone_goes_to_stdout_and_progress_to_stderr(self, capsys, made):
        """A script reads stdout."""
        status, out, err = run(capsys, "replay", "--json", "--turns", "2", "--conversations", "3", "--compare")
        assert status == 0
        data = json.loads(out)
        assert [(entry["turn"], entry["same_output"]) for entry in data["turns"]] == [(1, True)] * 3 + [(2, True)] * 3
        assert "loading smollm2-135m" in err
        assert "replaying turn 2" in err

    def test_the_table_goes_to_stdout(self, capsys, made):
        """With a row a turn; the built-in chats are played when no file is given."""
        status, out, _ = run(capsys, "replay", "--turns", "1")
        assert status == 0
        assert "night-train-to-vienna" in out
        assert "6 turns of 6 conversations" in out

    def test_options_reach_the_model(self, capsys, made):
        """Each is a promise of the help text."""
        model = ["--model", "m", "--dtype", "bfloat16", "--device", "meta", "--policy", "lru"]
        model += ["--model-impl", "transformers", "--attention", "tree"]
        sizes = ["--block-size", "8", "--num-blocks", "9999", "--concurrency", "3"]
        status, _, _ = run(capsys, "replay", "--conversations", "1", "--turns", "1", *model, *sizes)
        assert status == 0
        (options,) = made
        assert options == {
            "model": "m",
            "dtype": "bfloat16",
            "device": "meta",
            "model_impl": "transformers",
            "attention": "tree",
            "block_size": 8,
            "num_blocks": 9999,
            "policy": "lru",
            "max_num_seqs": 3,
        }

    def test_a_file_of_chats_is_played(self, capsys, made, tmp_path):
        """`--chats` in place of the built-in ones."""
        path = tmp_path / "mine.json"
        path.write_text('[{"role": "user", "content": "hello"}]')
        status, out, _ = run(capsys, "replay", "--chats", str(path), "--json")
        assert status == 0
        assert [entry["conversation"] for entry in json.loads(out)["turns"]] == ["mine"]

    def test_a_real_model_is_played_from_its_directory(self, capsys, tmp_path):
        """Everything at once: files, model, cache, comparison, JSON."""
        pytest.importorskip("transformers", reason="the engine needs transformers")
        chats = tmp_path / "chats.jsonl"
        chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        chats.write_text("\n".join(json.dumps({"id": name, "messages": chat}) for name in "xy"))
        model = save_tiny_chat_model(tmp_path / "model")
        options = [
            "--compare",
            "--json",
            "--ignore-eos",
            "--max-tokens",
            "4",
            "--block-size",
            "4",
            "--num-blocks",
            "256",
        ]
        status, out, err = run(capsys, "replay", "--model", model, "--chats", str(chats), *options)
        assert (status, "Traceback" in err) == (0, False)
        data = json.loads(out)
        assert data["totals"]["same_output"] is True
        assert [entry["output_tokens"] for entry in data["turns"]] == [4] * 4


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ([], "required: COMMAND"),
            (["play"], "invalid choice: 'play'"),
            (["replay", "--turns", "0"], "--turns: must be at least 1, not 0"),
            (["replay", "--turns", "x"], "--turns: 'x' is not a whole number"),
            (["replay", "--max-tokens", "-1"], "--max-tokens: must be at least 1"),
            (["replay", "--dtype", "int8"], "invalid choice: 'int8'"),
            (["replay", "--format", "xml"], "invalid choice: 'xml'"),
            (["replay", "--num-blocks", "8", "--kv-cache-memory", "1GiB"], "not allowed with"),
            (["replay", "--report", "no/such/folder/out.html"], "no/such/folder"),
        ],
    )
    def test_a_bad_argument_is_one_line_and_status_2(self, capsys, arguments, reason):
        """The line says what was wrong and where help is; a screen of usage would bury it."""
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert reason in err
        assert len(err.splitlines()) == 1

    def test_malformed_chats_are_one_line_with_file_and_line_and_no_model_is_loaded(self, capsys, made, tmp_path):
        """Loading a model takes long; a mistake in a file is found before."""
        path = tmp_path / "bad.jsonl"
        path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages"')
        status, out, err = run(capsys, "replay", "--chats", str(path))
        assert (status, out) == (2, "")
        assert err == f"radixkv replay: error: {path}:2: is not valid JSON: Expecting ':' delimiter (column 12)\n"
        assert made == []

    def test_an_error_of_several_lines_becomes_one(self, capsys, monkeypatch, made):
        """Libraries write paragraphs."""

        def fail(*args, **options):
            raise OSError("no such model\n\nread the manual")

        monkeypatch.setattr(engine, "LLM", fail)
        status, _, err = run(capsys, "replay")
        assert status == 2
        assert err.splitlines()[-1] == "radixkv replay: error: no such model read the manual"
        assert "Traceback" not in err

    def test_a_device_that_is_not_there_is_one_line_and_status_2(self, capsys):
        """torch answers with an assertion or a runtime error, which would look like a bug. No model is loaded first."""
        pytest.importorskip("transformers", reason="the engine needs transformers")
        status, out, err = run(capsys, "replay", "--device", "toaster")
        assert (status, out) == (2, "")
        loading, reason = err.splitlines()
        assert loading == "loading smollm2-135m"
        assert "device='toaster'" in reason

    def test_a_pool_too_small_for_any_turn_is_one_line_and_status_2(self, capsys, monkeypatch, made):
        """A table without rows would look like success."""
        monkeypatch.setattr(engine, "LLM", lambda model, **options: FakeLLM(num_blocks=2), raising=False)
        status, out, err = run(capsys, "replay")
        assert (status, out) == (2, "")
        assert "no turn could be played: night-train-to-vienna ended before turn 1 of 5" in err.splitlines()[-1]

    def test_an_unknown_model_is_one_line_and_status_2(self, capsys):
        """The real way of finding a model, with a name behind which there is none."""
        pytest.importorskip("transformers", reason="the engine needs transformers")
        status, out, err = run(capsys, "replay", "--model", "no-such-folder/no-such-model")
        assert (status, out) == (2, "")
        assert "no-such-folder/no-such-model" in err.splitlines()[-1]
        assert "Traceback" not in err

    @pytest.mark.parametrize("module", ["torch", "transformers", "rich"])
    def test_a_missing_library_says_what_to_install(self, capsys, monkeypatch, module):
        """The core installs without them."""

        def fail(arguments):
            raise ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.sub")

        self.replace_replay(monkeypatch, fail)
        status, _, err = run(capsys, "replay")
        assert status == 2
        assert err == f'radixkv replay: error: {module} is not installed: pip install "radixkv[engine]"\n'

    def test_interrupting_ends_with_130(self, capsys, monkeypatch):
        """As the shell expects after Ctrl-C, and without a traceback."""

        def interrupt(arguments):
            raise KeyboardInterrupt

        self.replace_replay(monkeypatch, interrupt)
        status, _, err = run(capsys, "replay")
        assert (status, err) == (130, "radixkv replay: interrupted\n")

    def test_a_bug_keeps_its_traceback(self, monkeypatch):
        """Only what the user gave is the user's mistake."""

        def fail(arguments):
            raise TypeError("a bug")

        self.replace_replay(monkeypatch, fail)
        with pytest.raises(TypeError, match="a bug"):
            main(["replay"])

    def test_a_reader_that_goes_away_ends_the_program_quietly(self, tmp_path):
        """`radixkv … | head -1` is ordinary use."""
        code = (
            "import sys, engine.cli as cli\n"
            "def write(arguments):\n"
            "    while True: print('line')\n"
            "cli.COMMANDS['replay'] = cli.Command('h', lambda parser: None, write, '')\n"
            "sys.exit(cli.main(['replay']))\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""
        process.stderr.close()

    def test_a_chats_error_is_a_value_error(self):
        """The command line catches it as one, and so may library users."""
        assert issubclass(ChatFormatError, ValueError)

    @staticmethod
    def replace_replay(monkeypatch, function) -> None:
        monkeypatch.setitem(COMMANDS, "replay", Command("play", lambda parser: None, function, ""))
