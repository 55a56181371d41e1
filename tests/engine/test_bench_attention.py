"""The benchmark of attention, small: its ways agree, its numbers mean what they say, its options are checked."""

import argparse
import json

import pytest

torch = pytest.importorskip("torch", reason="attention needs torch")

from engine.bench import attention  # noqa: E402
from engine.bench import attention_cases as bench  # noqa: E402

TINY = bench.Settings(
    heads=(bench.Heads(4, 2, 8),), prompt=128, rounds=1, num_layers=2, churn_steps=120, stream_bytes=2**16
)


def test_every_case_is_measured_in_both_dtypes_with_ways_that_agree():
    """A way that is fast because it is wrong must not get into the table: each is compared before it is timed."""
    tables, results = bench.run(TINY, ["cases"], _quiet)
    names = [f"{case.name}, {'scattered' if case.is_scattered else 'contiguous'}" for case in bench.cases(TINY)]
    assert [result.name for result in results] == names * 2
    assert [result.more["dtype"] for result in results] == ["float32"] * len(names) + ["bfloat16"] * len(names)
    for result in results:
        assert min(result.ours, result.peer, *(result.more[name] for name in ("by_row", "tree", "floor", "plan"))) > 0
    assert len(tables) == 3


def test_ways_that_disagree_are_refused(monkeypatch):
    """For instance a tree that leaves out the last of the shared keys."""
    setup = bench.Setup(next(bench.cases(TINY)), TINY.heads[0], torch.float32, 1)
    attend = bench.attend
    monkeypatch.setattr(bench, "attend", lambda *arguments: attend(*arguments) + 0.1)
    with pytest.raises(AssertionError, match="not close"):
        bench.measure_case(setup, TINY)


def test_the_floor_counts_shared_keys_once_and_all_pairs():
    """Eight rows over a prompt of 128: its keys are read once, but each row's query meets all of them."""
    case = next(case for case in bench.cases(TINY) if case.name == "128 shared by 8")
    setup = bench.Setup(case, TINY.heads[0], torch.float32, 1)
    tails = [17 + row for row in range(8)]
    assert setup.num_kv_tokens == 128 + sum(tails)
    assert setup.num_pairs == sum(128 + tail for tail in tails)
    chunk = next(case for case in bench.cases(TINY) if case.num_new[0] > 1)
    setup = bench.Setup(chunk, TINY.heads[0], torch.float32, 1)
    lengths = [sum(length for _, length in path) for path in chunk.paths]
    expected = sum(
        position + 1
        for length, new in zip(lengths, chunk.num_new, strict=True)
        for position in range(length - new, length)
    )
    assert setup.num_pairs == expected


def test_room_between_runs_keeps_tables_contiguous():
    """The figure behind the pool's default; the same requests both times."""
    without, with_room = (bench.churn(4_000, 8, 200, most_room) for most_room in (0, bench.ROOM))
    assert without.pairs < 0.75 < 0.95 < with_room.pairs
    assert with_room.runs < 2.5 < without.runs


def test_constants_are_measured_under_the_names_in_use():
    """So that whoever runs it elsewhere can compare, and change them."""
    _, results = bench.run(TINY, ["constants"], _quiet)
    names = [result.name for result in results]
    assert names[:3] == ["4/2x8 float32: call", "4/2x8 float32: padded_call", "4/2x8 float32: head"]
    assert all(result.peer > 0 for result in results)


def test_the_number_of_threads_is_put_back():
    """Whatever runs after it in the same process."""
    before = torch.get_num_threads()
    bench.run(TINY, [], _quiet)
    assert torch.get_num_threads() == before


def test_the_last_line_is_one_json_object(capsys):
    """Scripts keep it."""
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    arguments = ["--only", "constants", "--heads", "2/1x8", "--dtypes", "float32", "--rounds", "1"]
    attention.run_from_arguments(parser.parse_args(arguments))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["benchmark"] == "attention"
    assert {"name", "ours", "peer", "ratio", "unit"} <= document["results"][0].keys()


def _quiet(line):
    pass


@pytest.mark.parametrize("text", ["9", "9/3", "9/0x64", "9/4x64", "a/bxc", "9/3x-1"])
def test_impossible_heads_are_refused(text, capsys):
    """With the rule, before anything is measured."""
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--heads", text])
    assert repr(text) in capsys.readouterr().err
