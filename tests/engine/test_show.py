"""`radixkv show` and `radixkv replay --report`: what is played, what is printed, the page, errors of one line."""

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_helpers import FakeLLM, save_tiny_chat_model

from engine.chats import Conversation, Message
from engine.cli import main
from engine.replay import replay
from engine.show import Words
from radixkv import workloads
from radixkv.traces import write

REPOSITORY = Path(__file__).resolve().parents[2]

ROWS = [
    {"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 3]},
    {"timestamp": 900, "input_length": 600, "output_length": 10, "hash_ids": [1, 9]},
]
CHAT = [
    {"role": role, "content": f"{word} " * 12}
    for role, word in (("user", "apple"), ("assistant", "pear"), ("user", "plum"), ("assistant", "fig"))
]


def run(capsys, *argv):
    """What the command prints to stdout and stderr; it must succeed."""
    status = main(["show", *map(str, argv)])
    out = capsys.readouterr()
    assert status == 0, out.err
    return out.out, out.err


def film_in(path):
    """What a page carries."""
    html = path.read_text(encoding="utf-8")
    return json.loads(gzip.decompress(base64.b64decode(re.search(r'id="film-data">([^<]*)<', html)[1])))


@pytest.fixture
def chats(tmp_path):
    """Two chats of two turns that start alike."""
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"id": name, "messages": CHAT}) for name in "xy"), encoding="utf-8")
    return path


def test_without_a_file_the_builtin_chats_are_played_and_the_tree_is_text(capsys):
    """The shortest thing to type, on a machine without a model."""
    out, err = run(capsys)
    assert err == ""
    assert "built-in chats: 27 requests" in out
    assert "Turn 2: 9" in out  # nine tokens in ten and more were hits
    assert "You teach cooking" in out and "radix tree:" in out
    assert "--html film.html" in out


def test_the_numbers_are_those_of_the_chats(capsys, chats):
    """A second chat with the same words hits all but the last token of the first turn, and so on."""
    out, _ = run(capsys, chats, "--block-size", 4, "--json")
    document = json.loads(out)
    assert document["source"] == "mine" and document["requests"] == 4
    first, second = document["by_turn"]
    one_prompt = first["total_tokens"] // 2
    assert first["hit_tokens"] == one_prompt - 1  # y's, all but the token that is always computed
    whole_turn = one_prompt + len(Words().encode(CHAT[1]["content"] + "\n"))
    assert second["hit_tokens"] == whole_turn + second["total_tokens"] // 2 - 1
    assert document["hit_tokens"] == first["hit_tokens"] + second["hit_tokens"]
    assert document["evicted_blocks"] == 0 and document["nodes"] >= 1
    assert one_prompt == 2 + 12 + 2 + 2  # the frame, the words, a space and a line feed, the frame of the reply


def test_words_give_their_text_back():
    """Hover texts are the words that were said, spaces and all."""
    words = Words()
    for text in ("<|user|>\nHi,  there!\n", "\t\n \n", "ünï 漢字 🙂 a_b<|x y|>", "", "\ufffd\x00"):
        assert words.decode(words.encode(text)) == text
    assert words.encode("<|user|>\n") == words.encode("<|user|>\nHi,")[:2]


def test_the_page_plays_every_kind_of_step(capsys, tmp_path):
    """The built-in chats need a bit more than the pool that is there by default."""
    path = tmp_path / "film.html"
    out, err = run(capsys, "--html", path)
    assert err.startswith(f"wrote {path}: ") and "--html" not in out
    film = film_in(path)
    kinds = {kind for frame in film["frames"] for kind in frame["kinds"]}
    assert {"start", "match", "split", "evict", "allocate", "append", "commit", "free"} <= kinds
    assert len(film["chapters"]) == 27 and "night-train-to-vienna, turn 1" in film["chapters"]
    assert film["frames"][-1]["meters"]["running"] == 0
    assert max(frame["meters"]["running"] for frame in film["frames"]) == 2
    assert any("You teach cooking" in piece for piece in film["pieces"])


def test_a_long_film_is_thinned(capsys, tmp_path):
    """As many pictures as asked for at most, and the page says so."""
    path = tmp_path / "film.html"
    run(capsys, "--html", path, "--max-frames", 20, "--requests", 9)
    assert 10 <= len(film_in(path)["frames"]) <= 20
    assert "thinned evenly" in path.read_text(encoding="utf-8")


def test_a_trace_that_names_blocks_is_played_block_by_block(capsys, tmp_path):
    """One token stands for a block of the trace; hits are those of the simulator."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    out, _ = run(capsys, path)
    assert "trace: 3 requests, 7 prompt tokens" in out
    assert "The trace names blocks of 512 tokens: each stands as one token here." in out
    document = json.loads(run(capsys, path, "--json", "--requests", 2)[0])
    assert (document["requests"], document["block_size"]) == (2, 1)


def test_a_trace_of_tokens_keeps_its_tokens(capsys, tmp_path):
    """Generated workloads have ids and no text."""
    path = tmp_path / "chat.jsonl"
    write(workloads.generate("chat", 1, num_conversations=3, mean_turns=2, system_tokens=30), path)
    document = json.loads(run(capsys, path, "--json", "--conversations", 2)[0])
    assert document["block_size"] == 16 and document["hit_tokens"] > 0
    assert "The first 2 of" in run(capsys, path, "--requests", 2)[0]


def test_order_pool_and_policy_are_as_asked(capsys, chats):
    """Each option is a promise of the help text."""
    options = ("--json", "--num-blocks", 33, "--block-size", 4, "--policy", "lfu", "--concurrency", 1)
    document = json.loads(run(capsys, chats, *options)[0])
    assert (document["num_blocks"], document["block_size"], document["policy"]) == (33, 4, "lfu")
    assert json.loads(run(capsys, chats, *options, "--in-file-order", "--conversations", 1)[0])["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["FILE", "--format", "mooncake"], "FILE"),
        (["FILE", "--num-blocks", "2"], "out of blocks"),
        (["FILE", "--num-blocks", "0"], "must be at least 1"),
        (["FILE", "--max-frames", "2"], "must be at least 3"),
        (["FILE", "--policy", "best"], "invalid choice: 'best'"),
        (["FILE", "--html", "no-such-folder/film.html"], "a file in a folder that exists"),
        (["FILE", "--html", "FOLDER"], "a file in a folder that exists"),
        (["LENGTHS"], "tells lengths only"),
    ],
)
def test_bad_input_is_one_line_on_stderr(capsys, chats, tmp_path, arguments, message):
    """Exit status 2, no traceback, and nothing written."""
    lengths = tmp_path / "azure.csv"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    places = {"FILE": str(chats), "FOLDER": str(tmp_path), "LENGTHS": str(lengths)}
    assert main(["show", *(places.get(argument, argument) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert places.get(message, message) in err and len(err.splitlines()) == 1
    assert out == ""


def test_help_has_examples(capsys):
    """The first thing that people read."""
    assert main(["show", "--help"]) == 0
    out = capsys.readouterr().out
    assert "radixkv show --html film.html" in out
    for option in (
        "--num-blocks",
        "--block-size",
        "--policy",
        "--requests",
        "--conversations",
        "--max-frames",
        "--json",
    ):
        assert option in out


def test_it_runs_without_torch(chats, tmp_path):
    """On a laptop that has only the cache installed."""
    blocked = ["torch", "transformers", "tokenizers", "numpy", "anywidget", "matplotlib", "rich"]
    page = tmp_path / "film.html"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); "
        f"from engine.cli import main; sys.exit(main(['show', {str(chats)!r}, '--html', {str(page)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "radix tree" in done.stdout and film_in(page)["frames"]


def test_a_name_with_a_script_in_it_does_nothing(capsys, tmp_path):
    """Names of files and chats, and what was said, come from anywhere."""
    nasty = "<script>alert(1)<!--"
    folder = tmp_path / "<script>alert(2)"
    folder.mkdir()
    path = folder / f"{nasty}.jsonl"
    messages = [{"role": role, "content": f"</script>{nasty} "} for role in ("user", "assistant")]
    path.write_text(json.dumps({"id": nasty, "messages": messages}), encoding="utf-8")
    page = tmp_path / "film.html"
    run(capsys, path, "--html", page)
    html = page.read_text(encoding="utf-8")
    assert html.count("<script") == 2 and "<!--" not in html


class TestReport:
    def test_a_chapter_begins_before_the_prompts_of_its_batch_are_submitted(self):
        """What the cache does for a batch must fall under that batch's heading."""
        llm = FakeLLM()
        conversations = [Conversation.from_messages(name, [Message(**m) for m in CHAT[:3]]) for name in "xyz"]
        log = []
        llm.log = log
        params = SimpleNamespace(max_tokens=3)
        replay(llm, conversations, params, concurrency=2, on_batch=lambda turn, names: log.append((turn, names)))
        batches = [(turn, names) for turn in (1, 2) for names in (["x", "y"], ["z"])]
        assert log == [entry for batch in batches for entry in (batch, ("warm", len(batch[1])))]

    def test_a_replay_writes_a_page_with_the_film_and_the_turns(self, capsys, tmp_path):
        """The tree grows turn by turn, with decoded text; time to the first token warm against cold."""
        pytest.importorskip("transformers", reason="the engine needs transformers")
        chats = tmp_path / "chats.jsonl"
        chats.write_text("\n".join(json.dumps({"id": name, "messages": CHAT[:3]}) for name in "xy"), encoding="utf-8")
        page = tmp_path / "replay.html"
        options = ["--compare", "--max-tokens", "6", "--ignore-eos", "--block-size", "4", "--num-blocks", "256"]
        model = save_tiny_chat_model(tmp_path / "model")
        argv = ["replay", "--model", model, "--chats", str(chats), "--report", str(page), *options]
        assert main(argv) == 0
        err = capsys.readouterr().err
        assert f"wrote {page}" in err
        film = film_in(page)
        assert film["chapters"] == ["x, turn 1", "y, turn 1", "x, turn 2", "y, turn 2"]
        kinds = [kind for frame in film["frames"] for kind in frame["kinds"]]
        assert kinds.count("allocate") == kinds.count("free") == 4 and kinds.count("match") == 3
        assert any("apple" in piece for piece in film["pieces"])
        html = page.read_text(encoding="utf-8")
        assert html.count('<figure class="plot">') == 1
        assert "time to the first token" in html and "without the cache" in html
        assert "All outputs are identical with and without the cache." in html

    def test_a_folder_that_is_not_there_is_found_before_a_model_is_loaded(self, capsys, tmp_path):
        """Loading takes long, a replay longer."""
        status = main(["replay", "--report", str(tmp_path / "no" / "replay.html")])
        err = capsys.readouterr().err
        assert status == 2 and "a file in a folder that exists" in err and len(err.splitlines()) == 1
