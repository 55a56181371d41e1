"""The benchmark of the tree measures what it says: workload, checks and JSON. Never how fast anything is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.bench import tree as bench
from engine.bench.peers import OURS_MANAGER, OURS_TREE, PEERS, System
from engine.bench.report import Result, Table, machine, print_report
from engine.cli import main

TINY = bench.Settings(
    requests=40,
    block_sizes=(4, 16),
    pool_tokens=4096,
    leaves=(10, 20),
    evictions=5,
    chain_nodes=12,
    prompts=(64, 256),
    samples=3,
)


def make_ours(block_size):
    """What makes our tree, as the parts of the benchmark want it."""
    return lambda num_tokens: OURS_TREE.make(block_size, num_tokens, None)


class TestWorkload:
    def test_it_is_a_pure_function_of_its_arguments(self):
        """Two systems are compared on the same requests, in different processes."""
        first, second = ([*bench.chat_workload(50, seed=3)] for _ in range(2))
        assert first == second
        assert first != [*bench.chat_workload(50, seed=4)]

    def test_turns_have_the_lengths_that_were_promised(self):
        """40 to 120 tokens of the user and 60 to 180 of the answer, within the longest context."""
        for request in bench.chat_workload(400, seed=1, max_tokens=2048):
            answer = len(request.token_ids) - request.num_prompt_tokens
            assert 60 <= answer <= 180
            assert request.num_prompt_tokens >= 512 + 40
            assert len(request.token_ids) <= 2048

    def test_chats_share_few_system_prompts_and_continue_themselves(self):
        """Without sharing there would be nothing to measure."""
        requests = [*bench.chat_workload(400, seed=1, groups=3, conversations=5)]
        assert len({tuple(request.token_ids[:512]) for request in requests}) == 3
        seen = {tuple(request.token_ids) for request in requests}
        continued = sum(
            any(tuple(request.token_ids[:end]) in seen for end in range(512, request.num_prompt_tokens))
            for request in requests[-50:]
        )
        assert continued > 25

    def test_nothing_is_edited_or_abandoned_where_the_shares_are_zero(self):
        """Each request of a chat then starts with all that was said before."""
        requests = [*bench.chat_workload(20, seed=2, conversations=1, edited=0.0, abandoned=0.0)]
        for before, after in pairwise(requests):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids


class TestMeasuring:
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_the_workload_runs_under_pressure_with_every_match_verified(self, block_size):
        """The pool is too small for all chats, so evictions are timed too."""
        metrics = bench.measure_workload(make_ours(block_size), block_size, TINY)
        assert {"match", "locations", "lock", "insert prefill", "insert finish", "unlock", "evict"} < metrics.keys()
        assert 0 < metrics["hit rate"]["value"] < 1
        assert metrics["Σ per request"]["value"] > 0

    def test_a_match_that_names_other_blocks_fails(self, monkeypatch):
        """A system that is driven wrongly must not look fast."""
        tree = make_ours(4)(4096)
        monkeypatch.setattr(tree, "blocks_of", lambda locations: sorted(locations, reverse=True))
        with pytest.raises(AssertionError, match="other tokens"):
            bench.measure_workload(lambda num_tokens: tree, 4, TINY)

    def test_an_insert_that_forgets_fails(self, monkeypatch):
        """What was just put in must be there."""
        tree = make_ours(4)(4096)
        monkeypatch.setattr(tree, "insert", lambda key, value, num_known: 0)
        with pytest.raises(AssertionError, match="had been put there"):
            bench.measure_workload(lambda num_tokens: tree, 4, TINY)

    def test_the_facade_counts_the_same_requests(self):
        """Its hits are exact to the token, so without pressure there are at least as many as the tree's."""
        roomy = replace(TINY, pool_tokens=1 << 17)
        facade = bench.measure_facade(16, roomy)
        tree = bench.measure_workload(make_ours(16), 16, roomy)
        assert facade["hit rate"]["value"] >= tree["hit rate"]["value"]
        assert facade["Σ without append_token"]["value"] < facade["Σ per request"]["value"]

    def test_the_chain_has_as_many_nodes_as_it_should(self, monkeypatch):
        """A tree that merged them would be measured on something else."""
        metrics = bench.measure_chain(make_ours(16), 16, TINY)
        assert metrics.keys() == {
            "match + locations",
            "match + locations, with branches",
            "lock + unlock, with branches",
        }
        tree = make_ours(16)(4096)
        monkeypatch.setattr(tree, "num_nodes", lambda match: 1)
        with pytest.raises(AssertionError, match="1 nodes, not 12"):
            bench.measure_chain(lambda num_tokens: tree, 16, TINY)

    def test_eviction_look_up_and_admission_verify_what_they_time(self):
        """Each runs to its end at tiny sizes."""
        assert [*bench.measure_evict(make_ours(16), 16, 20, TINY)] == ["evict beside 20 leaves"]
        assert len(bench.measure_lookup(make_ours(16), 16, 256, TINY)) == 2
        admitted = bench.measure_admit(lambda num_tokens: OURS_MANAGER.make(16, num_tokens, None), 16, 64, TINY)
        assert len(admitted) == 2

    def test_memory_covers_at_least_the_tokens_themselves(self):
        """Four bytes a token cannot be avoided by a cache that verifies them."""
        assert bench.measure_memory(16, TINY)["bytes per cached token"]["value"] > 4


class TestWholeBenchmark:
    def test_a_missing_peer_is_a_line_and_not_an_error(self, monkeypatch):
        """Peers are never dependencies."""
        peer = System("Nobody", "ours:OurTree", "tree", "nobody")
        monkeypatch.setattr(bench, "PEERS", (peer,))

        def missing(task, settings):
            raise bench.NotThere("No module named 'nobody'")

        monkeypatch.setattr(bench, "measure_in_child", missing)
        said: list[str] = []
        assert bench.find_peers({}, TINY, said.append) == ({}, ())
        assert said == ["without Nobody: No module named 'nobody'"]

    def test_systems_take_turns_and_the_median_counts(self, monkeypatch):
        """One slow repetition must not decide, nor one slow minute of the machine hit one system only."""
        order = []

        def fake(task, settings):
            order.append(task.system)
            return {"match": {"value": float(len(order)), "p99": 9.0}} if task.part != "probe" else {}

        monkeypatch.setattr(bench, "measure_in_child", fake)
        settings = replace(TINY, block_sizes=(16,))
        measured = bench.run(["workload"], settings, repeat=3, with_peers=True, directories={}, say=lambda line: None)
        trees = [peer.name for peer in PEERS if peer.kind == "tree"]
        assert order[len(PEERS) :] == [OURS_TREE.name, *trees] * 3
        _, results = bench.summarize(measured)
        start, step = len(PEERS) + 1, 1 + len(trees)
        assert [result.ours for result in results] == [start + step] * len(trees)
        assert [result.peer_name for result in results] == trees
        assert results[0].peer == start + step + 1

    def test_a_child_that_fails_is_reported_with_its_last_line(self):
        """Ours failing is a bug, and must not look like a measurement."""
        with pytest.raises(RuntimeError, match="radixkv tree, no such part: KeyError"):
            bench.measure_in_child(bench.Task("no such part", OURS_TREE.name, 16), TINY)

    def test_the_command_prints_tables_and_one_json_object_last(self, capsys):
        """What scripts rely on."""
        arguments = ["--only", "workload", "facade", "--requests", "20", "--block-sizes", "16", "--repeat", "1"]
        assert main(["bench", "tree", *arguments, "--no-peers"]) == 0
        captured = capsys.readouterr()
        assert "The tree alone" in captured.out
        assert "[2/2] facade" in captured.err
        document = json.loads(captured.out.splitlines()[-1])
        assert document.keys() == {"benchmark", "machine", "results"}
        assert document["benchmark"] == "tree"
        assert {"cpu", "cores", "python", "load_average", "commit"} == document["machine"].keys()
        for result in document["results"]:
            assert {"name", "ours", "peer", "ratio", "unit", "part", "block_size"} <= result.keys()
            assert result["peer"] is None and result["ratio"] is None

    def test_json_alone_is_one_line(self, capsys):
        """`--json` is for pipes."""
        assert (
            main(["bench", "tree", "--only", "memory", "--requests", "10", "--json", "--no-peers", "--repeat", "1"])
            == 0
        )
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert json.loads(lines[0])["results"][0]["unit"] == "bytes"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--block-sizes", "3"], "block-sizes"),
            (["--requests", "0"], "at least 1"),
            (["--only", "nothing"], "nothing"),
            (["--peer-path", "sglang"], "NAME=DIR"),
            (["--peer-path", "sglang=/no/such/place"], "not a directory"),
        ],
    )
    def test_bad_options_are_refused_before_anything_runs(self, arguments, said, capsys):
        """A typing mistake should not cost minutes."""
        assert main(["bench", "tree", *arguments]) == 2
        assert said in capsys.readouterr().err


class TestReport:
    def test_ratio_is_ours_over_the_peers(self):
        """Below one is faster."""
        assert Result("match", 2.0, "µs", 8.0, "other").ratio == 0.25
        assert Result("match", 2.0, "µs").ratio is None

    def test_tables_are_aligned_text_where_there_is_no_terminal(self, capsys):
        """For logs and pipes."""
        print_report("tree", [Table("Times", ("", "ours"), [("match", "1.5"), ("longer name", "20.0")])], [])
        out = capsys.readouterr().out
        assert "match         1.5\nlonger name  20.0" in out

    def test_the_machine_names_the_python_that_ran(self):
        """Numbers without their machine say nothing."""
        assert machine()["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_script_is_the_same_as_the_command():
    """`benchmarks/tree.py` only calls the package."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "tree.py"
    assert 'main(["bench", "tree"' in script.read_text(encoding="utf-8")
