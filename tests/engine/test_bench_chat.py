"""The benchmark of the engine measures what it says: workload, floor, processes, JSON. Never how fast anything is."""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from engine.bench import chat as bench
from engine.bench import floor
from engine.bench.chat_workload import QUICK, Settings, Vocabulary, cells_of
from engine.bench.engines import OURS, PEERS, REFERENCE, SYSTEMS, System, process
from engine.bench.engines.worker import CpuClock, run_batch, run_chat
from engine.bench.floor import ModelSize, Rates, Work, decode_work, prefill_work, size_of
from engine.bench.gguf_file import write_gguf
from tiny_models import VOCAB_SIZE, tiny_model

SIZE = ModelSize(
    weight_bytes=1000, body_parameters=200, head_parameters=50, kv_bytes_per_token=8, operations_per_pair=4
)
RATES = Rates(bytes_per_s=1e3, operations_per_s=1e4, buffer_bytes=1, reading="sum")
WORDS = Vocabulary([[token_id] for token_id in range(20, 90)], {"system": [1], "user": [2], "assistant": [3, 4]}, [5])

# An adapter that continues any prompt with its length and what follows that. BEHAVIOUR stands in for what goes wrong.
FAKE = """
import os, sys
print("noise while loading")

class Engine:
    version = "1.0"

    def __init__(self, settings):
        self.prompts = []

    def generate(self, prompts, num_output_tokens, conversations, record):
        os.write(1, b"noise while generating\\n")
        for index, prompt in enumerate(prompts):
            answer = [len(prompt) + step for step in range(num_output_tokens)]
            BEHAVIOUR
            record(index, answer[:1])
            record(index, answer[1:])
        return [0] * len(prompts)

    def forget(self):
        pass

    def close(self):
        pass
"""


def fake_system(folder, name, behaviour="pass", source="fake", module="json"):
    """A system whose adapter is `FAKE`, run by this interpreter."""
    path = folder / f"{name}.py"
    path.write_text(FAKE.replace("BEHAVIOUR", behaviour))
    return System(name, str(path.with_suffix("")), source, module, f"pip install {name}", "made up")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Runs the benchmark with these fake systems and without a model: what was measured, and what was said."""

    def run(*systems, **options):
        monkeypatch.setattr(bench, "SYSTEMS", {system.name: system for system in systems})
        monkeypatch.setattr(bench, "measure_floor", lambda *arguments: (SIZE, RATES))
        monkeypatch.setattr(Vocabulary, "of", lambda model: WORDS)
        said: list[str] = []
        given = {"dtypes": ("float32",), "phases": ("chat",), "rounds": 1, **options}
        measured = bench.measure(QUICK, bench.Options("no model", **given), said.append)
        return measured, said

    return run


class Remembering:
    """An engine with a perfect cache: a token is computed once for all time."""

    version = ""

    def __init__(self):
        self.prompts = []
        self.texts = []

    def generate(self, prompts, num_output_tokens, conversations, record):
        self.prompts += prompts
        num_cached = []
        for index, prompt in enumerate(prompts):
            hits = [_common(prompt, text) for text in self.texts]
            num_cached.append(min(max(hits, default=0), len(prompt) - 1))
            answer = [10 + (len(prompt) + step) % 7 for step in range(num_output_tokens)]
            record(index, answer)
            self.texts.append(prompt + answer[:-1])  # the last one is sampled, not computed
        return num_cached

    def forget(self):
        self.texts.clear()


def _common(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def chat_cell(settings=QUICK, phase="chat"):
    """The cell of a phase that has one."""
    return next(iter(cells_of(settings, WORDS, (phase,))))


class TestWorkload:
    def test_it_is_a_pure_function_of_settings_and_vocabulary(self):
        """Systems in different processes, and rounds on different days, get the same ids."""
        first, second = (list(cells_of(QUICK, WORDS, bench.PHASES)) for _ in range(2))
        assert first == second
        assert first != list(cells_of(replace(QUICK, seed=8), WORDS, bench.PHASES))

    def test_a_prompt_extends_the_last_one_and_its_answer(self):
        """Otherwise there would be nothing to reuse."""
        engine = Remembering()
        script = chat_cell(replace(QUICK, turns=3)).job["script"]
        turns = run_chat(engine, script, True)["turns"]
        answers = [answer for turn in turns for batch in turn for answer in batch["token_ids"]]
        for index in range(2, len(engine.prompts)):
            said = engine.prompts[index - 2] + answers[index - 2] + [5]
            assert engine.prompts[index][: len(said)] == said
            assert len(engine.prompts[index]) == len(said) + QUICK.user_tokens + 2
        assert {tuple(prompt[: QUICK.system_tokens]) for prompt in engine.prompts} == {tuple(script["system"])}

    def test_messages_have_the_promised_lengths_with_their_markers(self):
        """512 tokens are 512 tokens, whatever the template adds."""
        message = WORDS.message("user", 7, random.Random(1))
        assert len(message) == 7
        assert message[0] == 2 and message[-1] == 5
        with pytest.raises(ValueError, match="at least 3"):
            WORDS.message("user", 2, random.Random(1))

    @pytest.mark.parametrize("phase", ["chat", "single", "fanout", "grid"])
    @pytest.mark.parametrize("turns", [1, 2, 4])
    def test_the_floor_counts_what_a_perfect_cache_would_compute(self, phase, turns):
        """A floor that counted more could be passed, one that counted less would flatter nobody, but mislead."""
        settings = replace(QUICK, turns=turns, conversations=3, single_conversations=2, fanouts=(4,))
        cell = chat_cell(settings, phase)
        engine = Remembering()
        if cell.job["do"] == "chat":
            turns_played = run_chat(engine, cell.job["script"], cell.job["together"])["turns"]
        else:
            turns_played = [[run_batch(engine, cell.job["prompts"], cell.job["num_output_tokens"])]]
        batches = [batch for turn in turns_played for batch in turn]
        computed = sum(batch["prompt_tokens"] - batch["cached_tokens"] for batch in batches)
        assert cell.prefill.num_tokens == computed
        assert cell.prefill.num_passes == len(batches)
        assert cell.num_outputs == sum(len(answer) for batch in batches for answer in batch["token_ids"])
        assert cell.num_steps == sum(len(batch["token_ids"][0]) - 1 for batch in batches)

    def test_the_longest_request_fits_what_engines_are_told(self):
        """An engine that takes shorter requests only would refuse the last turn."""
        settings = Settings(turns=9)
        engine = Remembering()
        run_chat(engine, chat_cell(settings).job["script"], True)
        assert max(map(len, engine.prompts)) + settings.output_tokens <= settings.max_model_len


class TestFloor:
    def test_a_step_reads_weights_and_each_kv_once(self):
        """1,000 bytes of weights; contexts of 30 and 20 whose first 10 are shared, at 8 bytes a token."""
        work = decode_work([30, 20], 10)
        assert work == Work(num_passes=1, num_tokens=2, num_logits=2, num_pairs=50, num_kv_tokens=40)
        assert work.num_bytes(SIZE) == 1000 + 40 * 8
        assert work.num_operations(SIZE) == 2 * (2 * 200 + 2 * 50) + 50 * 4
        assert work.floor_s(SIZE, RATES) == pytest.approx(1.320)  # reading 1,320 bytes at 1,000 a second

    def test_a_prefill_computes_what_is_not_cached(self):
        """Prompts of 5 and 4 tokens, of which 0 and 2 are cached: queries see 1..5 and 3..4 keys."""
        work = prefill_work([5, 4], [0, 2])
        assert work == Work(num_passes=1, num_tokens=7, num_logits=2, num_pairs=15 + 7, num_kv_tokens=2)
        operations = 2 * (7 * 200 + 2 * 50) + 22 * 4
        assert work.floor_s(SIZE, RATES) == max((1000 + 16) / 1e3, operations / 1e4)
        slow = replace(RATES, operations_per_s=1e3)
        assert work.floor_s(SIZE, slow) == pytest.approx(operations / 1e3)

    def test_works_add_up(self):
        """Passes one after the other."""
        assert decode_work([3]) + decode_work([4]) == Work(2, 2, 2, 7, 7)

    @pytest.mark.parametrize("is_tied", [False, True])
    def test_the_head_is_read_and_the_embedding_is_not(self, is_tied, tmp_path):
        """Of an embedding, a step reads one row a token. Where it is the head too, all of it is read once."""
        model = tiny_model("llama")
        model.config.tie_word_embeddings = is_tied
        model.config.save_pretrained(tmp_path)
        size = size_of(str(tmp_path), "bfloat16")
        hidden, inner, kv = 64, 96, 2 * 16
        attention = 2 * hidden * hidden + 2 * hidden * kv
        body = 2 * (attention + 3 * hidden * inner)
        norms = 5 * hidden
        assert size == ModelSize(
            weight_bytes=2 * (body + norms + VOCAB_SIZE * hidden),
            body_parameters=body,
            head_parameters=VOCAB_SIZE * hidden,
            kv_bytes_per_token=2 * 2 * 2 * kv,
            operations_per_pair=4 * 2 * 4 * 16,
        )

    def test_shares_are_one_at_the_floor(self):
        """For rates more is better, for times less."""
        floors = {"output/CPU-s": 50.0, "step CPU": 20.0}
        assert bench.share_of_floor("output/CPU-s", 25.0, floors) == 0.5
        assert bench.share_of_floor("step CPU", 40.0, floors) == 0.5
        assert bench.share_of_floor("hit rate", 0.5, floors) is None
        assert bench.share_of_floor("step CPU", None, floors) is None


def batch_of(**changes):
    """What a worker says of one batch of two prompts."""
    batch = {
        "cpu_s": 2.0, "wall_s": 3.0, "ttft_cpu_s": 0.5, "ttft_last_s": 0.9, "ttft_s": 0.8, "step_cpu_s": 0.1,
        "step_s": 0.2, "prompt_tokens": 40, "cached_tokens": 10, "token_ids": [[1, 2], [3, 4]],
    }  # fmt: skip
    return {**batch, **changes}


class TestQuantities:
    def test_rates_count_everything_and_times_are_medians_over_later_turns(self):
        """Two turns of one batch, three of another kind after the cold one."""
        turns = [[batch_of(ttft_cpu_s=0.7)], [batch_of()], [batch_of(ttft_cpu_s=0.4)], [batch_of(cached_tokens=30)]]
        quantities = bench.quantities_of(turns, threads=1)
        assert quantities["output/CPU-s"] == 16 / 8
        assert quantities["output/s"] == pytest.approx(16 / 12)
        assert quantities["hit rate"] == 60 / 160
        assert quantities["TTFT 1 CPU"] == 700
        assert quantities["TTFT CPU"] == 500
        assert quantities["step CPU"] == 100

    def test_polling_is_not_charged_beyond_the_wall(self):
        """A process that waits in a loop uses a core that nobody else could have used better."""
        quantities = bench.quantities_of([[batch_of(cpu_s=9.0, step_cpu_s=0.9, ttft_cpu_s=5.0)]], threads=2)
        assert quantities["output/CPU-s"] == 4 / 6
        assert quantities["step CPU"] == 400
        assert quantities["TTFT 1 CPU"] == 1800

    def test_what_is_not_known_is_not_there(self):
        """A single turn has no later ones, one output no steps, and some systems do not tell their hits."""
        batch = batch_of(cached_tokens=None, step_s=None, step_cpu_s=None)
        assert bench.quantities_of([[batch]], 1).keys() == {"output/CPU-s", "output/s", "TTFT 1 CPU", "TTFT 1"}
        assert "step" not in bench.quantities_of([[batch_of()]], 1, is_one_by_one=True)
        assert "step" in bench.quantities_of([[batch_of(token_ids=[[1, 2]])]], 1, is_one_by_one=True)

    def test_the_clock_counts_the_processes_that_a_system_started(self, tmp_path):
        """vLLM computes in a child; what its front end uses alone would make it look free."""
        if not sys.platform.startswith("linux"):
            pytest.skip("other systems count this process alone")
        import subprocess

        program = "print('up', flush=True)\nwhile True: pass"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                child.stdout.readline()
                clock, own = CpuClock(), CpuClock()
                own._pids = []
                # Until the child has been running: however long that takes on a busy machine.
                start, own_start = clock(), own()
                while clock() - start < 0.05 + own() - own_start:
                    pass
            finally:
                child.kill()


class TestProcesses:
    def test_noise_on_stdout_does_not_mix_with_answers(self, tmp_path):
        """Systems print while they load and compile, from Python and from C."""
        running = process.EngineProcess(fake_system(tmp_path, "noisy"), sys.executable, 1, {})
        try:
            assert running.ask({"do": "load", "settings": {}})["version"] == "1.0"
            batch = running.ask({"do": "batch", "prompts": [[1, 2, 3]], "num_output_tokens": 2})
            assert batch["token_ids"] == [[3, 4]]
        finally:
            running.close()

    @pytest.mark.parametrize(
        ("behaviour", "why"),
        [
            ("raise ValueError('too long')", "ValueError: too long"),
            ("sys.exit('gave up')", "ended with status 1: gave up"),
            ("os.write(2, b'out of memory'); os._exit(9)", "ended with status 9: out of memory"),
            ("answer = answer[1:]", "prompt 0 got 3 tokens, not 4"),
        ],
    )
    def test_a_peer_that_fails_is_named_and_costs_nothing_else(self, behaviour, why, fakes, tmp_path):
        """Minutes of other results must not be lost to it."""
        good = fake_system(tmp_path, "good")
        measured, said = fakes(fake_system(tmp_path, "bad", behaviour), good, rounds=2)
        assert measured.failures == [("float32", "bad", measured.failures[0][2])]
        assert why in measured.failures[0][2]
        assert f"float32: without bad from here on: {measured.failures[0][2]}" in said
        assert len(measured.quantities["float32", "chat", "good"]["output/s"]) == 2
        tables, _ = bench.summarize(measured)
        assert any(table.title.startswith("Failed: bad in float32: ") for table in tables)

    def test_a_missing_peer_is_named_with_its_install_line(self, fakes, tmp_path, capsys):
        """Peers are never dependencies."""
        missing = fake_system(tmp_path, "gone", module="no_such_package_anywhere")
        measured, said = fakes(fake_system(tmp_path, "there"), missing)
        assert said[0] == "without gone: pip install gone"
        assert measured.missing == [missing]
        tables, _ = bench.summarize(measured)
        assert "Not there: gone. To add it: pip install gone" in [table.title for table in tables]

    def test_a_package_that_cannot_be_imported_after_all_is_a_failure(self, fakes, tmp_path):
        """Its own dependencies may be missing or broken."""
        measured, _ = fakes(fake_system(tmp_path, "broken", "import no_such_package_anywhere"))
        assert measured.failures == [("float32", "broken", "No module named 'no_such_package_anywhere'")]

    def test_an_interpreter_that_cannot_start_is_a_clear_error(self, tmp_path):
        """It may have been removed, or be no program."""
        with pytest.raises(process.SystemFailed, match=r"nowhere/python does not start: No such file"):
            process.EngineProcess(fake_system(tmp_path, "any"), str(tmp_path / "nowhere" / "python"), 1, {})

    def test_an_answer_that_never_comes_ends_the_system(self, fakes, tmp_path, monkeypatch):
        """A hanging peer must not hang the benchmark."""
        monkeypatch.setattr(process, "PATIENCE_S", 2.0)
        monkeypatch.setattr(process, "_ENDING_S", 0.1)
        measured, _ = fakes(fake_system(tmp_path, "slow", "import time; time.sleep(600)"))
        assert measured.failures == [("float32", "slow", "no answer for 2 s")]

    def test_a_peer_does_not_see_what_lies_beside_its_adapter(self, fakes, tmp_path):
        """Else our own packages would be imported in its place."""
        check = "assert not any(path and os.path.samefile(path, FOLDER) for path in sys.path if os.path.isdir(path))"
        folder = str(process.WORKER.parent)
        measured, _ = fakes(fake_system(tmp_path, "alone", check.replace("FOLDER", repr(folder))))
        assert measured.failures == []

    def test_variables_of_a_peer_are_its_own(self, fakes, tmp_path):
        """A faster allocator for one system must be asked for, and must not leak into the others."""
        check = "assert os.environ.get('ALLOCATOR') == "
        first = fake_system(tmp_path, "first", f"{check}'fast'", source="first")
        second = fake_system(tmp_path, "second", f"{check}None", source="second")
        measured, _ = fakes(first, second, environment={"first": {"ALLOCATOR": "fast"}})
        assert measured.failures == []


class TestRounds:
    def test_systems_take_turns(self, fakes, tmp_path):
        """A slow minute of the machine then hits all of them."""
        systems = [fake_system(tmp_path, name) for name in ("a", "b")]
        _, said = fakes(*systems, rounds=2, phases=("chat", "grid"))
        measuring = [line for line in said if "round" in line]
        cells = ["chat", "prompt 16, batch 1", "prompt 16, batch 2"]
        assert measuring == [
            f"float32, {cell}, round {number}: {name}" for number in (1, 2) for cell in cells for name in ("a", "b")
        ]

    def test_when_time_is_up_chats_are_still_played_once_and_ours_is_measured_throughout(self, fakes, tmp_path):
        """The promise of 20 minutes holds on slow machines too, and what is compared first comes first."""
        systems = [fake_system(tmp_path, name) for name in ("peer", OURS.name)]
        measured, said = fakes(*systems, rounds=2, phases=("chat", "grid"), minutes=0)
        assert {(cell, name) for _, cell, name in measured.quantities} == {
            ("chat", "peer"),
            ("chat", OURS.name),
            ("prompt 16, batch 1", OURS.name),
            ("prompt 16, batch 2", OURS.name),
        }
        assert all(len(values["output/s"]) == 1 for values in measured.quantities.values())
        assert "float32, prompt 16, batch 1, round 1: no time left for peer" in said

    def test_a_system_is_left_out_where_it_says_nothing_new_or_takes_minutes(self, fakes, tmp_path):
        """One that computes a shared prompt again for each continuation is not asked for 64 of them."""
        narrow = replace(fake_system(tmp_path, "narrow"), max_fanout=1, with_grid=False)
        measured, _ = fakes(narrow, fake_system(tmp_path, "wide"), phases=("grid", "fanout"))
        assert {name for _, _, name in measured.quantities} == {"wide"}


class TestReport:
    def test_answers_that_differ_from_plain_transformers_are_counted(self, fakes, tmp_path):
        """A cache that changes the output is a bug, and the benchmark would show it."""
        reference = fake_system(tmp_path, REFERENCE.name)
        ours = fake_system(tmp_path, OURS.name, "if index == 1: answer[-1] += 1")
        measured, _ = fakes(reference, ours)
        assert measured.same_turns("float32", "chat", REFERENCE.name) == 4
        assert measured.same_turns("float32", "chat", OURS.name) == 2
        tables, results = bench.summarize(measured)
        (same,) = (result for result in results if result.name == "chat: same turns")
        assert (same.ours, same.more["of_turns"]) == (2, 4)
        (chat,) = (table for table in tables if table.title.startswith("float32: chat"))
        assert [row[-1] for row in chat.rows] == ["4/4", "2/4"]

    def test_results_are_ours_over_each_peer(self):
        """By dtype, cell and quantity; a peer without a quantity is left out of it."""
        cell = chat_cell()
        measured = bench.Measured(floors={"float32": (SIZE, RATES)}, cells={"float32": [cell]})
        measured.add("float32", "chat", OURS.name, {"output/CPU-s": 30.0, "hit rate": 0.9})
        measured.add("float32", "chat", OURS.name, {"output/CPU-s": 50.0, "hit rate": 0.9})
        measured.add("float32", "chat", "vllm", {"output/CPU-s": 20.0, "hit rate": 0.6})
        measured.add("float32", "chat", "transformers", {"output/CPU-s": 10.0})
        _, results = bench.summarize(measured)
        found = {(result.name, result.peer_name): result for result in results if result.more["phase"] == "chat"}
        assert found["chat: output/CPU-s", "vllm"].ratio == 2
        assert found["chat: output/CPU-s", "transformers"].ratio == 4
        assert found["chat: hit rate", "vllm"].ratio == pytest.approx(1.5)
        assert len(found) == 3
        best = bench.floors_of(cell, SIZE, RATES)["output/CPU-s"]
        assert found["chat: output/CPU-s", "vllm"].more["share_of_floor"] == pytest.approx(40 / best)
        assert found["chat: output/CPU-s", "vllm"].more["peer_share_of_floor"] == pytest.approx(20 / best)

    def test_a_quantity_that_no_peer_has_stands_alone(self):
        """Ours is worth knowing without peers."""
        measured = bench.Measured(floors={"float32": (SIZE, RATES)}, cells={"float32": [chat_cell()]})
        measured.add("float32", "chat", OURS.name, {"step CPU": 30.0})
        _, results = bench.summarize(measured)
        (step,) = (result for result in results if result.name == "chat: step CPU")
        assert (step.peer, step.peer_name, step.ratio) == (None, None, None)


def run_command(*arguments):
    """`radixkv bench chat` with these arguments."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    bench.run_from_arguments(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A tiny random Llama with a byte-level BPE vocabulary of single characters."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    characters = [chr(33 + number) for number in range(94)] + [chr(192 + number) for number in range(31)] + ["Ġ"]
    tokens = {token: number for number, token in enumerate([*characters, "<|im_start|>", "<|im_end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


class TestWholeBenchmark:
    def test_ours_and_transformers_run_and_agree_in_float32(self, model_directory, capsys, monkeypatch):
        """On a tiny random model: every phase, every way of transformers, tables, and one JSON object last."""
        monkeypatch.setitem(SYSTEMS, "vllm", replace(SYSTEMS["vllm"], module="no_such_package_anywhere"))
        monkeypatch.setattr(bench, "measure_floor", lambda model, dtype, *_: (size_of(model, dtype), RATES))
        systems = [OURS.name, *(peer.name for peer in PEERS if peer.source == "transformers"), "vllm"]
        sizes = ["--quick", "--system-tokens", "24", "--user-tokens", "16"]
        run_command("--model", str(model_directory), *sizes, "--dtypes", "float32", "--systems", *systems)
        captured = capsys.readouterr()
        assert "without vllm: python -m venv" in captured.err
        assert "float32: the floor" in captured.out
        assert bench.UNCACHED in captured.out
        document = json.loads(captured.out.splitlines()[-1])
        assert document["benchmark"] == "chat"
        assert document["failures"] == []
        assert document["threads"] == 1
        assert document["versions"].keys() == set(systems) - {"vllm"}
        assert document["missing"] == {"vllm": SYSTEMS["vllm"].add}
        for result in document["results"]:
            assert {"name", "ours", "peer", "peer_name", "ratio", "unit", "dtype", "phase"} <= result.keys()
        assert {result["phase"] for result in document["results"]} == {"chat", "single", "grid", "fanout", "floor"}
        same = [result for result in document["results"] if result["name"].endswith("same turns")]
        assert len(same) == 2 * 3  # chat and single, each but the reference
        assert all(result["ours"] == result["of_turns"] for result in same)
        hits = {result["peer_name"]: result for result in document["results"] if result["name"] == "chat: hit rate"}
        assert hits["transformers"]["peer"] == 0
        assert hits["transformers-kept"]["ours"] > hits["transformers-kept"]["peer"] > 0  # ours shares the system's too

    def test_the_floor_is_measured_on_small_and_large_buffers(self, model_directory, capsys):
        """What its process tells the parent: sizes, rates, and on what these were measured."""
        floor.main({"model": str(model_directory), "dtype": "bfloat16", "threads": 1, "far_bytes": 1 << 22})
        answer = json.loads(capsys.readouterr().out)
        rates = Rates(**answer["rates"])
        assert ModelSize(**answer["size"]) == size_of(str(model_directory), "bfloat16")
        assert rates.bytes_per_s > 0 and rates.operations_per_s > 0
        assert rates.buffer_bytes in (1 << 20, 1 << 22)
        assert rates.reading in ("sum", "product", "copy")

    def test_ours_failing_is_an_error_after_everything_is_printed(self, fakes, tmp_path, capsys, monkeypatch):
        """What the peers gave is kept, but the exit status must say that something is wrong."""
        monkeypatch.setattr(bench, "_directory_of", str)
        monkeypatch.setattr(
            bench, "SYSTEMS", {OURS.name: fake_system(tmp_path, OURS.name, "raise OSError('no memory')")}
        )
        monkeypatch.setattr(bench, "measure_floor", lambda *arguments: (SIZE, RATES))
        monkeypatch.setattr(Vocabulary, "of", lambda model: WORDS)
        with pytest.raises(ValueError, match="radixkv failed: OSError: no memory"):
            run_command("--quick", "--phases", "chat", "--dtypes", "float32", "--json")
        assert json.loads(capsys.readouterr().out)["failures"] == [
            {"dtype": "float32", "system": OURS.name, "why": "OSError: no memory"}
        ]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--peer-python", "vllm=/no/such/python"], "there is no such program"),
            (["--peer-python", "nobody=/bin/sh"], "NAME=PYTHON with the first one of transformers, vllm, llamacpp"),
            (["--peer-env", "vllm=LD_PRELOAD"], "NAME=VARIABLE=VALUE"),
            (["--gguf", "float32=/no/such/file"], "not a file"),
            (["--systems", "nobody"], "invalid choice"),
            (["--rounds", "0"], "at least 1"),
        ],
    )
    def test_bad_options_are_refused_before_anything_runs(self, arguments, said, capsys):
        """A typing mistake should not cost minutes."""
        with pytest.raises(SystemExit):
            run_command(*arguments)
        assert said in capsys.readouterr().err

    def test_options_of_ours_are_handed_on_only_when_given(self):
        """The engine's own defaults are what is measured otherwise."""
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        _, options = bench.options_from(parser.parse_args(["--model", "m"]))
        assert options.llm == {}
        _, options = bench.options_from(parser.parse_args(["--model", "m", "--attention", "gather"]))
        assert options.llm == {"attention": "gather"}


class TestGguf:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_file_has_the_weights_of_the_directory(self, dtype, model_directory, tmp_path):
        """Read back by transformers, which undoes llama.cpp's order of rotated rows."""
        write_gguf(model_directory, tmp_path / "model.gguf", dtype)
        expected = AutoModelForCausalLM.from_pretrained(model_directory, dtype=getattr(torch, dtype)).state_dict()
        found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor.float(), found[name]), name

    def test_other_models_are_refused_with_the_way_out(self, tmp_path):
        """A wrong conversion would be measured as if it were the model."""
        tiny_model("qwen3").config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"type 'qwen3'.*Give a GGUF file"):
            write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
        tiny_model("llama").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="without a vocabulary"):
            write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
