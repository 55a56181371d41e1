"""Traces: every published format is read by the rules that its numbers are compared under, and bad rows are named."""

from __future__ import annotations

import gzip
import json
import pickle
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import RadixKVError
from radixkv.traces import FORMATS, Trace, TraceError, TraceRequest, detect, load, write

KINDS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def mooncake(num_tokens: Any, ids: Any, timestamp: Any = 0, output: Any = 1, **more: Any) -> dict[str, Any]:
    """A Mooncake row."""
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": output, "hash_ids": ids, **more}


def bailian(chat: Any, parent: Any, timestamp: float, turn: Any = 1, ids: Any = (1,)) -> dict[str, Any]:
    """A Bailian row of one block an id."""
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 16 * len(ids),
        "output_length": 3,
        "type": "text",
        "turn": turn,
        "hash_ids": list(ids),
    }


def agent_request(t: float, num_tokens: int, ids: list[int], out: int = 1) -> dict[str, Any]:
    """A request of an agent session."""
    return {"t": t, "type": "s", "in": num_tokens, "out": out, "hash_ids": ids}


def session(name: str, requests: list[Any], block_size: int = 64) -> dict[str, Any]:
    """An agent session."""
    return {"id": name, "block_size": block_size, "hash_id_scope": "local", "requests": requests}


def dynamo(received_ms: int, num_tokens: int, hashes: list[int], worker: int = 1, **request: Any) -> dict[str, Any]:
    """An event of a request that ended."""
    fields = {
        "request_received_ms": received_ms,
        "input_tokens": num_tokens,
        "output_tokens": 2,
        "cached_tokens": 0,
        "worker": {"prefill_worker_id": worker},
        "replay": {"trace_block_size": 16, "input_length": num_tokens, "input_sequence_hashes": hashes},
        **request,
    }
    return {
        "timestamp": 1,
        "event": {"event_type": "request_end", "agent_context": {"session_id": "s"}, "request": fields},
    }


def write_rows(path: Path, *rows: Any) -> Path:
    """A file with a row a line; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def ragpulse_folder(folder: Path, rows: list[dict[str, Any]], tokens: dict[str, dict[int, int]]) -> Path:
    """A folder of RAGPulse files; `tokens` has the lengths of ids by kind."""
    folder.mkdir()
    files = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
    keys = ("sys_prompt_id", "passage_id", "history_id", "user_input_id", "web_search_id")
    write_rows(folder / "0_trace.jsonl", *rows, "")
    for file, key in zip(files, keys, strict=True):
        lines = [{key: each, "token_length": weight} for each, weight in tokens.get(key, {}).items()]
        write_rows(folder / f"{file}.jsonl", *lines, "")
    return folder


def rag_row(timestamp: Any, length: int, by_kind: dict[str, list[int]], name: str = "s") -> dict[str, Any]:
    """A RAGPulse row; kinds that are not named are empty."""
    ids = {**by_kind, **{kind: [] for kind in KINDS if kind not in by_kind}}  # in the order that the test gives
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 1,
        "hash_ids": ids,
        "session_id": name,
    }


def units_of(trace: Trace) -> list[list[int] | None]:
    """The units of every request."""
    return [None if request.units is None else request.units.tolist() for request in trace.requests]


def prompt_text(request: TraceRequest) -> str:
    """The prompt of a text trace."""
    assert request.units is not None
    return bytes(request.units.tolist()).decode()


def output_text(request: TraceRequest) -> str:
    """The output of a text trace."""
    assert request.output_units is not None
    return bytes(request.output_units.tolist()).decode()


# Mooncake -----------------------------------------------------------------------------------------------------------


def test_mooncake_rows_give_times_lengths_and_dense_ids(tmp_path: Path) -> None:
    """Times are in ms, and ids are numbered as they appear, so that ids of any size fit 32 bits."""
    path = write_rows(
        tmp_path / "t.jsonl", mooncake(513, [2**70, -5]), mooncake(512, [2**70], timestamp=1500, output=7)
    )
    trace = load(path)
    assert (trace.format, trace.name, trace.block_size, trace.counts_partial) == ("mooncake", "t", 512, True)
    assert units_of(trace) == [[0, 1], [0]]
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.5]
    assert [request.num_output_tokens for request in trace.requests] == [1, 7]
    assert trace.has_prefixes and trace.num_units == 2 and trace.num_skipped == 0
    trace.check()


def test_b092_ids_must_be_one_a_block_and_the_error_names_the_line(tmp_path: Path) -> None:
    """B092: a trace whose ids are not one a block would count hits for tokens that a prompt does not have."""
    good = [mooncake(1024, [1, 2], 20), mooncake(1025, [1, 2, 3], 10), mooncake(0, [], 0)]
    trace = load(write_rows(tmp_path / "good.jsonl", *good))
    assert [request.num_prompt_tokens for request in trace.requests] == [0, 1025, 1024], "sorted by time"
    last = trace.requests[1]
    assert [trace.unit_tokens(last, j) for j in range(3)] == [512, 512, 1]
    for request in trace.requests:
        assert request.units is not None
        assert sum(trace.unit_tokens(request, j) for j in range(len(request.units))) == request.num_prompt_tokens
    path = write_rows(tmp_path / "bad.jsonl", good[0], mooncake(20, [1, 2]), good[1])
    with pytest.raises(TraceError, match=r"bad\.jsonl:2: has 2 hash ids, but 20 tokens are 1 blocks of 512") as caught:
        load(path)
    assert (caught.value.line, caught.value.path) == (2, str(path))
    assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    skipping = load(path, skip_bad=True)
    assert len(skipping.requests) == 2 and skipping.num_skipped == 1


MALFORMED = [
    ("no json", "{oops", "is not valid JSON"),
    ("cut off", '{"timestamp": 0, "input_length": 51', "is not valid JSON"),
    ("not an object", "[1, 2]", "expected an object, not a list"),
    ("a number", "17", "expected an object, not a number"),
    ("null", "null", "expected an object, not null"),
    ("no ids", {"timestamp": 0, "input_length": 1, "output_length": 1}, r"has no hash_ids \(nor hashIds"),
    ("ids are a text", mooncake(1, "1"), "hash_ids must be a list, not a text"),
    ("an id is a float", mooncake(1, [1.0]), "hash_ids must hold integers or texts, not float"),
    ("an id is a boolean", mooncake(1, [True]), "not bool"),
    ("an id is null", mooncake(1, [None]), "not NoneType"),
    ("an id is a list", mooncake(1, [[1]]), "not list"),
    ("no length", {"timestamp": 0, "output_length": 1, "hash_ids": [1]}, "has no input_length"),
    ("a length is a text", mooncake("1", [1]), "input_length must be an integer, not '1'"),
    ("a length is a boolean", mooncake(True, [1]), "input_length must be an integer, not True"),
    ("a length is a float", mooncake(1.5, [1]), "input_length must be an integer"),
    ("a length is negative", mooncake(-1, []), "input_length is -1; allowed: 0 to"),
    ("a length is beyond all bounds", mooncake(1, [1], output=2**80), "output_length is .*; allowed: 0 to"),
    ("no output", {"timestamp": 0, "input_length": 1, "hash_ids": [1]}, "has no output_length"),
    ("output is null", mooncake(1, [1], output=None), "output_length must be an integer, not None"),
    ("too many ids", mooncake(512, [1, 2]), "has 2 hash ids, but 512 tokens are 1 blocks of 512"),
    ("too few ids", mooncake(513, [1]), "has 1 hash ids, but 513 tokens are 2 blocks"),
    ("no tokens but ids", mooncake(0, [1]), "has 1 hash ids, but 0 tokens are 0 blocks"),
    ("no time", {"input_length": 1, "output_length": 1, "hash_ids": [1]}, "has no timestamp"),
    ("time is a text", mooncake(1, [1], "0"), "timestamp must be a number, not '0'"),
    ("time is not a number", mooncake(1, [1], float("nan")), "timestamp must be a finite number"),
    ("time is infinite", mooncake(1, [1], float("inf")), "timestamp must be a finite number"),
    ("time is beyond a float", mooncake(1, [1], 10**400), "timestamp must be a finite number"),
    ("session is a list", mooncake(1, [1], session_id=[1]), "session_id must be a text or an integer, not a list"),
]


@pytest.mark.parametrize(("row", "reason"), [pytest.param(*rest, id=name) for name, *rest in MALFORMED])
def test_a_malformed_row_is_an_error_with_its_line_or_a_counted_skip(tmp_path: Path, row: Any, reason: str) -> None:
    """One bad row in a million must be found by its line; and a skipped one must leave no trace, not even an id."""
    path = write_rows(tmp_path / "t.jsonl", mooncake(512, [7]), "", row, mooncake(512, [8], 1))
    with pytest.raises(TraceError, match=rf"t\.jsonl:3: .*{reason}"):
        load(path, "mooncake")
    trace = load(path, "mooncake", skip_bad=True)
    assert units_of(trace) == [[0], [1]]
    assert trace.num_skipped == 1


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path: Path) -> None:
    """A damaged line is named like any other bad row."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(mooncake(1, [1])).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:2: is not UTF-8 text"):
        load(path)
    assert load(path, skip_bad=True).num_skipped == 1


@pytest.mark.parametrize("prompt", ["input_length", "input_tokens", "prompt_tokens"])
@pytest.mark.parametrize("output", ["output_length", "output_tokens", "completion_tokens"])
@pytest.mark.parametrize("ids", ["hash_ids", "hashIds", "block_hashes"])
@pytest.mark.parametrize("time", ["timestamp", "timestamp_ms", "arrival_ms"])
def test_fields_go_by_the_names_of_several_servers(
    tmp_path: Path, prompt: str, output: str, ids: str, time: str
) -> None:
    """The same trace under other names is the same trace, and is told apart without help."""
    path = write_rows(tmp_path / "t.jsonl", {time: 2000, prompt: 600, output: 4, ids: ["a", "b"]})
    (request,) = load(path).requests
    assert (request.arrival_s, request.num_prompt_tokens, request.num_output_tokens) == (2.0, 600, 4)
    assert request.units == array("I", [0, 1])


def test_unsorted_rows_are_sorted_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """Definitions take arrival order with file order on ties; another order gives other hits."""
    rows = [mooncake(length, [length], timestamp) for length, timestamp in [(1, 5), (2, 3), (3, 5), (4, 3), (5, 0)]]
    trace = load(write_rows(tmp_path / "t.jsonl", *rows))
    assert [request.num_prompt_tokens for request in trace.requests] == [5, 2, 4, 1, 3]
    trace.check()


def test_an_id_that_stands_twice_in_a_row_names_two_blocks(tmp_path: Path) -> None:
    """A block is the path up to it, so the row is kept as it is and its lengths still add up."""
    trace = load(write_rows(tmp_path / "t.jsonl", mooncake(1500, [3, 3, 4])))
    assert units_of(trace) == [[0, 0, 1]]
    assert [trace.unit_tokens(trace.requests[0], j) for j in range(3)] == [512, 512, 476]
    trace.check()


def test_sessions_and_tenants_are_taken_where_a_row_has_them(tmp_path: Path) -> None:
    """Turns are counted per session in arrival order; rows without one have no turn and continue nothing."""
    path = write_rows(
        tmp_path / "t.jsonl",
        mooncake(1, [1], 3, session_id="a", user_id=9),
        mooncake(1, [1], 1, session_id="a", tenant="x"),
        mooncake(1, [1], 2),
        mooncake(1, [1], 4, session_id=8),
        mooncake(1, [1], 5),
    )
    requests = load(path).requests
    assert [(r.thread, r.turn, r.parent, r.tenant) for r in requests] == [
        ("a", 1, None, "x"),
        (None, None, None, None),
        ("a", 2, 0, "9"),
        ("8", 1, None, None),
        (None, None, None, None),
    ]


def test_another_block_size_can_be_given_where_the_format_leaves_it_open(tmp_path: Path) -> None:
    """Servers write Mooncake rows with their own block size, which stands nowhere in the file."""
    path = write_rows(tmp_path / "t.jsonl", mooncake(33, [1, 2, 3]))
    trace = load(path, block_size=16)
    assert trace.block_size == 16 and trace.unit_tokens(trace.requests[0], 2) == 1
    csv = write_rows(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,1,1")
    with pytest.raises(ValueError, match="block_size=16 is given, but a azure trace"):
        load(csv, block_size=16)


# Bailian ------------------------------------------------------------------------------------------------------------


def test_bailian_threads_follow_the_parents(tmp_path: Path) -> None:
    """A chat names the one it continues; a root is marked -1, and a parent before the trace began is none."""
    path = write_rows(
        tmp_path / "t.jsonl",
        bailian(12, 11, 3.0, 3, ids=(1, 2, 4)),
        bailian(10, -1, 1.0, 1, ids=(1,)),
        bailian(11, 10, 2.0, 2, ids=(1, 2)),
        bailian(13, 99, 2.5, 7),
        bailian(14, 13, 4.0, 8),
        bailian(15, 10, 5.0, 2),
    )
    trace = load(path)
    assert (trace.format, trace.block_size, trace.counts_partial) == ("bailian", 16, True)
    assert [(r.arrival_s, r.thread, r.turn, r.parent) for r in trace.requests] == [
        (1.0, "10", 1, None),
        (2.0, "10", 2, 0),
        (2.5, "99", 7, None),
        (3.0, "10", 3, 1),
        (4.0, "99", 8, 2),
        (5.0, "10", 2, 0),
    ]
    trace.check()


def test_bailian_rows_without_a_turn_are_counted_and_bad_ones_named(tmp_path: Path) -> None:
    """A missing turn follows from the thread; turn 0 contradicts the format."""
    rows = [bailian(1, -1, 0.0, None), bailian(2, 1, 1.0, None)]
    assert [r.turn for r in load(write_rows(tmp_path / "t.jsonl", *rows)).requests] == [1, 2]
    path = write_rows(tmp_path / "bad.jsonl", bailian(1, -1, 0.0, 0))
    with pytest.raises(TraceError, match=r"bad\.jsonl:1: turn is 0; allowed: 1 and more"):
        load(path)
    row = bailian(1, -1, 0.0)
    with pytest.raises(TraceError, match=r":1: has no chat_id"):
        load(write_rows(tmp_path / "bad.jsonl", {**row, "chat_id": None}))
    with pytest.raises(TraceError, match=r":1: has 1 hash ids, but 17 tokens are 2 blocks of 16"):
        load(write_rows(tmp_path / "bad.jsonl", {**row, "input_length": 17}))


# Agent sessions -----------------------------------------------------------------------------------------------------


def test_agent_sessions_start_a_minute_apart_and_sub_agents_are_threads(tmp_path: Path) -> None:
    """Session k starts at 60·k s, a sub-agent's times count from its start, and ids are the session's own."""
    helper = {"type": "subagent", "t": 50.0, "agent_id": "x", "requests": [agent_request(20.0, 128, [1, 2])]}
    path = write_rows(
        tmp_path / "t.jsonl",
        session("a", [agent_request(0.0, 130, [1, 2]), helper, agent_request(70.0, 64, [1]), helper]),
        session("b", [agent_request(10.0, 63, []), agent_request(5.0, 64, [1])]),
    )
    trace = load(path)
    assert (trace.format, trace.block_size, trace.counts_partial) == ("claude-code", 64, False)
    assert [(r.arrival_s, r.thread, r.turn, r.parent) for r in trace.requests] == [
        (0.0, "a", 1, None),
        (65.0, "b", 1, None),
        (70.0, "a/x", 1, None),  # a tie: by line, then by order of listing, the sub-agent where it stands
        (70.0, "a", 2, 0),
        (70.0, "a/x#2", 1, None),
        (70.0, "b", 2, 1),
    ]
    # The same id 1 of session b is another block than that of session a.
    assert units_of(trace) == [[0, 1], [2], [0, 1], [0], [0, 1], []]
    trace.check()


def test_agent_times_are_added_from_the_left(tmp_path: Path) -> None:
    """60·k + subagent.t + request.t is a sum of floats, and ties are told by its last bit."""
    helper = {"type": "subagent", "t": 0.1, "requests": [agent_request(0.2, 0, [])]}
    path = write_rows(tmp_path / "t.jsonl", *(session(str(k), [helper]) for k in range(40)))
    expected = [60 * k + 0.1 + 0.2 for k in range(40)]
    assert [request.arrival_s for request in load(path).requests] == expected
    assert expected != [60 * k + (0.1 + 0.2) for k in range(40)]


def test_agent_faults_are_named_by_session_line_and_request(tmp_path: Path) -> None:
    """A bad request leaves the rest of its session, and a bad session still takes its minute."""
    rows = [
        session("a", [agent_request(0.0, 128, [1]), agent_request(1.0, 64, [5])]),
        "broken",
        session("c", [{"type": "subagent", "t": 2.0, "requests": [7, agent_request(0.0, 64, [5])]}]),
        session("d", [agent_request(0.0, 16, [1])], block_size=16),
        {**session("e", []), "hash_id_scope": "global"},
        {**session("f", []), "requests": {}},
    ]
    path = write_rows(tmp_path / "t.jsonl", *rows)
    with pytest.raises(TraceError, match=r":1: request 0: has 1 hash ids, but 128 tokens are 2 full blocks of 64"):
        load(path)
    trace = load(path, skip_bad=True)
    assert [(r.thread, r.arrival_s) for r in trace.requests] == [("a", 1.0), ("c/0", 122.0)]
    assert trace.num_skipped == 6 and units_of(trace) == [[0], [1]]
    for line, reason in [
        (3, "request 0, request 0: expected an object, not a number"),
        (4, "block_size is 16; the trace's is 64"),
        (5, "hash_id_scope is 'global'"),
        (6, "has no list of requests"),
    ]:
        good = session("ok", [agent_request(0.0, 64, [1])])
        with pytest.raises(TraceError, match=rf":2: {reason}"):
            load(write_rows(tmp_path / "one.jsonl", good, rows[line - 1]))


def test_a_folder_of_sessions_is_read_in_name_order(tmp_path: Path) -> None:
    """One file a session is the published layout; it gives what the same sessions one a line give."""
    sessions = [session(name, [agent_request(0.5, 64, [1])]) for name in "abc"]
    lines = write_rows(tmp_path / "t.jsonl", *sessions)
    folder = tmp_path / "files"
    folder.mkdir()
    for each in reversed(sessions):
        (folder / f"trace_{each['id']}.json").write_text(json.dumps(each, indent=1), "utf-8")
    assert detect(folder) == "claude-code"
    assert load(folder).requests == load(lines).requests


# RAGPulse -----------------------------------------------------------------------------------------------------------


def test_ragpulse_prompts_are_segments_in_order_with_weights(tmp_path: Path) -> None:
    """The order of segments decides what is shared, and each weighs the tokens that its own file gives."""
    tokens = {
        "sys_prompt_id": {10: 100},
        "passage_id": {20: 7, 21: 8},
        "history_id": {30: 3},
        "web_search_id": {40: 5},
        "user_input_id": {50: 2},
    }
    by_kind = {
        "user_input": [50],
        "web_search": [40],
        "history": [30],
        "passages_ids": [21, 20, 21],
        "sys_prompt": [10],
    }
    folder = ragpulse_folder(
        tmp_path / "rag",
        [rag_row("90.5", 140, by_kind), rag_row("82", 100, {"sys_prompt": [10]}), rag_row("100", 9, {}, "z")],
        tokens,
    )
    assert detect(folder) == detect(folder / "0_trace.jsonl") == "ragpulse"
    trace = load(folder)
    assert [request.arrival_s for request in trace.requests] == [82.0, 90.5, 100.0]
    last = trace.requests[1]
    assert [trace.unit_tokens(last, j) for j in range(7)] == [100, 8, 7, 8, 3, 5, 2]
    assert units_of(trace) == [[0], [0, 1, 2, 1, 3, 4, 5], []]
    assert [(r.thread, r.turn, r.parent) for r in trace.requests] == [("s", 1, None), ("s", 2, 0), ("z", 1, None)]
    assert (trace.block_size, trace.num_units) == (None, 6)
    trace.check()
    assert load(folder / "0_trace.jsonl").requests == trace.requests


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (rag_row("x", 10, {}), "timestamp must be a number, not 'x'"),
        (rag_row("inf", 10, {}), "timestamp must be a finite number"),
        (rag_row("1", 99, {"sys_prompt": [10]}), "input_length is 99, but the segments have 100 tokens"),
        (rag_row("1", 99, {"history": [11]}), "the segment 11 has no token_length"),
        (rag_row("1", 99, {"history": [[11]]}), "history must hold integers or texts, not list"),
        (
            {**rag_row("1", 99, {}), "hash_ids": {"history": []}},
            "hash_ids must have the kinds sys_prompt, .*not history",
        ),
        ({**rag_row("1", 99, {}), "hash_ids": [1]}, "expected an object, not a list"),
    ],
)
def test_ragpulse_faults_are_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """Segments without a length, or longer than their prompt, would give hits of unknown size."""
    folder = ragpulse_folder(tmp_path / "rag", [rag_row("0", 100, {}), row], {"sys_prompt_id": {10: 100}})
    with pytest.raises(TraceError, match=rf"0_trace\.jsonl:2: .*{reason}"):
        load(folder)
    assert load(folder, skip_bad=True).num_skipped == 1


def test_ragpulse_needs_all_its_files_to_agree(tmp_path: Path) -> None:
    """A missing file is named, and so is a second length for the same id."""
    folder = ragpulse_folder(
        tmp_path / "rag", [rag_row("0", 100, {})], {"sys_prompt_id": {10: 5}, "history_id": {10: 6}}
    )
    with pytest.raises(TraceError, match=r"3_history\.jsonl:1: history_id 10 has 6 tokens here and 5 above"):
        load(folder)
    (folder / "3_history.jsonl").unlink()
    with pytest.raises(TraceError, match=r"rag: a RAGPulse trace needs the file 3_history\.jsonl"):
        load(folder)


# Dynamo -------------------------------------------------------------------------------------------------------------


def test_dynamo_requests_are_sorted_by_when_they_were_received(tmp_path: Path) -> None:
    """Events come in order of finishing, from several workers, with hashes beyond a signed 64-bit number."""
    tool = {"timestamp": 1, "event": {"event_type": "tool_start", "tool": {}}}
    path = write_rows(
        tmp_path / "t.jsonl",
        tool,
        dynamo(5250, 17, [2**64 - 1, 2**63], worker=2**63 + 1, cached_tokens=16),
        dynamo(5000, 15, [2**64 - 2], worker=7),
    )
    trace = load(path)
    assert (trace.format, trace.block_size, trace.counts_partial, trace.num_skipped) == ("dynamo", 16, True, 0)
    assert [(r.arrival_s, r.worker, r.cached_tokens, r.thread, r.turn, r.parent) for r in trace.requests] == [
        (0.0, "7", 0, "s", 1, None),
        (0.25, str(2**63 + 1), 16, "s", 2, 0),
    ]
    assert units_of(trace) == [[2], [0, 1]]
    trace.check()


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"timestamp": 1}, "has no event"),
        (dynamo(2, 17, [1]), "has 1 hash ids, but 17 tokens are 2 blocks of 16"),
        (dynamo(2, 1, [1], replay=None), "expected an object, not null"),
        (dynamo(2, 1, [1], cached_tokens=2), "cached_tokens is 2, but the prompt has 1 tokens"),
        (dynamo(2, 1, [1], request_received_ms=None), "request_received_ms must be an integer"),
        (
            dynamo(2, 1, [1], replay={"trace_block_size": 32, "input_length": 1, "input_sequence_hashes": [1]}),
            "trace_block_size is 32; the trace's is 16",
        ),
    ],
)
def test_dynamo_faults_are_named(tmp_path: Path, event: dict[str, Any], reason: str) -> None:
    """A request that cannot be replayed is a bad row, unlike an event that is no request."""
    path = write_rows(tmp_path / "t.jsonl", dynamo(1, 1, [1]), event)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {reason}"):
        load(path)
    assert load(path, skip_bad=True).num_skipped == 1


# CSV ----------------------------------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_times_count_from_the_first_row_to_the_last_digit(tmp_path: Path) -> None:
    """Seven digits are finer than a float of the absolute time; CRLF and a missing last line feed are as published."""
    path = tmp_path / "t.csv"
    rows = [AZURE, "2023-11-16 18:17:04.0000001,374,44", "2023-11-16 18:17:03.9999999,10,0"]
    path.write_bytes("\r\n".join(rows).encode())
    trace = load(path)
    assert trace.format == "azure"
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests] == [
        (0.0, 10, 0),
        (0.0000002, 374, 44),
    ]
    assert not trace.has_prefixes and trace.num_units == 0 and units_of(trace) == [None, None]
    with pytest.raises(ValueError, match="'azure' has no units"):
        trace.unit_tokens(trace.requests[0], 0)
    trace.check()


def test_azure_times_may_have_a_time_zone(tmp_path: Path) -> None:
    """Later versions of the trace write one, and midnight is no border."""
    path = write_rows(tmp_path / "t.csv", AZURE, "2024-05-10 00:00:01.5+00:00,1,1", "2024-05-09 23:59:59.25Z,2,2")
    assert [request.arrival_s for request in load(path).requests] == [0.0, 2.25]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("yesterday,1,1", "the time must be like 2023-11-16"),
        ("2023-02-30 00:00:00,1,1", "the time must be like 2023-11-16"),
        ("2023-11-16 18:17:03,1", "has 2 cells, but the header has 3 columns"),
        ("2023-11-16 18:17:03,1,1,1", "has 4 cells"),
        ("2023-11-16 18:17:03,,1", "contexttokens must be a number of tokens, not ''"),
        ("2023-11-16 18:17:03,-1,1", "contexttokens must be a number of tokens, not '-1'"),
        ("2023-11-16 18:17:03,1,1.5", "generatedtokens must be a number of tokens, not '1.5'"),
        ("2023-11-16 18:17:03,1,99999999999999999999", "generatedtokens must be a number of tokens"),
    ],
)
def test_bad_rows_of_csv_are_named(tmp_path: Path, row: str, reason: str) -> None:
    """A row too short or with a length that is none is found by its line, blank lines counted."""
    path = write_rows(tmp_path / "t.csv", AZURE, "2023-11-16 18:17:03,5,5", "", row)
    with pytest.raises(TraceError, match=rf"t\.csv:4: {reason}"):
        load(path)
    trace = load(path, skip_bad=True)
    assert len(trace.requests) == 1 and trace.num_skipped == 1


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5,ChatGPT,472,18,490,Conversation log", "3.5,GPT-4,1087,0,1087,API log"],
        ),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5,s1,0.5,ChatGPT,472,18,490,Conversation log", '3.5,,,"GPT-4",1087,0,1087,"API log"'],
        ),
    ],
)
def test_burstgpt_columns_are_found_by_name(tmp_path: Path, header: str, rows: list[str]) -> None:
    """Versions differ in their columns; a failed request, with an output of 0, is a request."""
    trace = load(write_rows(tmp_path / "t.csv", header, *rows))
    assert trace.format == "burstgpt" and not trace.has_prefixes
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests] == [
        (3.5, 1087, 0),
        (5.0, 472, 18),
    ]
    assert [r.thread for r in trace.requests] == [None, "s1" if "Session" in header else None]
    with pytest.raises(TraceError, match=r":4: the time must be a number of seconds, not 'nan'"):
        load(write_rows(tmp_path / "bad.csv", header, *rows, rows[0].replace("5", "nan", 1)))


def test_a_header_without_the_columns_is_an_error(tmp_path: Path) -> None:
    """A forced format does not read some other CSV by position."""
    path = write_rows(tmp_path / "t.csv", "TIMESTAMP,ContextTokens", "2023-11-16 18:17:03,1")
    with pytest.raises(TraceError, match=r"t\.csv:1: the header has no column 'generatedtokens'"):
        load(path, "azure")


# Texts --------------------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "é?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}],
    },
    {"role": "tool", "content": "none", "name": "find"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "###STOP###"},
]
FIRST_PROMPT = "<|system|>\nBe brief.\n<|user|>\né?\n<|assistant|>\n"
FIRST_OUTPUT = '\n[["find", "{\\"q\\": \\"é\\"}"]]\n'
SECOND_PROMPT = f"{FIRST_PROMPT}{FIRST_OUTPUT}<|tool|>\nnone\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("format", "value", "thread"),
    [
        ("openai", CHAT, "1"),
        ("openai", {"messages": CHAT}, "1"),
        ("openai", {"id": "c7", "messages": CHAT}, "c7"),
        ("tau-bench", {"task_id": 3, "trial": 1, "traj": CHAT}, "task-3-trial-1"),
        ("swe-agent", {"history": CHAT}, "chat"),
    ],
)
@pytest.mark.parametrize("layout", ["line", "indented", "list"])
def test_each_assistant_message_is_a_request_over_bytes(
    tmp_path: Path, format: str, value: Any, thread: str, layout: str
) -> None:
    """The framing is fixed to the byte, so that hits can be compared without a tokenizer."""
    path = tmp_path / "chat.json"
    text = {"line": json.dumps(value), "indented": json.dumps(value, indent=2), "list": json.dumps([value], indent=1)}
    path.write_text(text[layout], "utf-8")
    assert detect(path) == format
    trace = load(path)
    first, second = trace.requests
    assert (prompt_text(first), output_text(first)) == (FIRST_PROMPT, FIRST_OUTPUT)
    assert (prompt_text(second), output_text(second)) == (SECOND_PROMPT, "No.\n")
    assert first.num_prompt_tokens == len(FIRST_PROMPT.encode()), "bytes, not characters"
    assert [(r.arrival_s, r.thread, r.turn, r.parent) for r in trace.requests] == [
        (0.0, thread, 1, None),
        (0.0, thread, 2, 0),
    ]
    assert (trace.block_size, trace.unit_tokens(first, 5)) == (1, 1)
    trace.check()


def test_parts_of_text_are_joined_and_lone_surrogates_are_kept_apart(tmp_path: Path) -> None:
    """JSON can hold half a surrogate pair, and two different halves are two different prompts."""
    chats = [[{"role": "user", "content": [{"type": "text", "text": text}, "b"]}] for text in ("a", "\ud800", "\ud801")]
    trace = load(write_rows(tmp_path / "t.jsonl", *chats))
    prompts = [bytes(list(request.units or ())) for request in trace.requests]
    assert prompts[0] == b"<|user|>\nab\n<|assistant|>\n"
    assert len(set(prompts)) == 3


def test_a_chat_without_a_reply_is_a_request_of_unknown_output(tmp_path: Path) -> None:
    """Recorded request bodies end with the user's message; they still show what prompts share."""
    (request,) = load(write_rows(tmp_path / "t.jsonl", {"messages": CHAT[:2]})).requests
    assert prompt_text(request) == FIRST_PROMPT
    assert (request.num_output_tokens, request.output_units) == (0, None)


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([], "has no messages"),
        ([{"content": "x"}], "message 1: has no role"),
        ([*CHAT[:2], {"role": 3, "content": "x"}], "message 3: role must be a text, not a number"),
        ([{"role": "user", "content": 3}], "message 1: content must be a text, null or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1: content may only have parts of text"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "message 1: each tool call needs a function"),
        ([{"role": "assistant", "tool_calls": {}}], "message 1: tool_calls must be a list, not an object"),
    ],
)
def test_a_bad_message_spoils_its_whole_chat(tmp_path: Path, chat: list[Any], reason: str) -> None:
    """Later prompts hold the earlier messages, so no request of the chat can be told."""
    path = write_rows(tmp_path / "t.jsonl", {"messages": CHAT}, {"messages": chat})
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {reason}"):
        load(path)
    trace = load(path, skip_bad=True)
    assert len(trace.requests) == 2 and trace.num_skipped == 1


def test_a_list_of_chats_is_read_element_by_element(tmp_path: Path) -> None:
    """A list needs no line of its own for each chat, and an error in it names the line that is meant."""
    chats = [{"task_id": task, "traj": CHAT} for task in (0, 1, 1)]
    path = tmp_path / "t.json"
    path.write_text("\n" + json.dumps(chats, indent=1), "utf-8")
    threads = [request.thread for request in load(path).requests]
    assert threads == ["task-0-trial-0"] * 2 + ["task-1-trial-0"] * 2 + ["task-1-trial-0#2"] * 2
    text = path.read_text("utf-8")
    bad = tmp_path / "bad.json"
    bad.write_text(text.replace('"task_id": 1', '"task_id": [1]', 1), "utf-8")
    line = text[: text.index('"task_id": 1')].count("\n")  # the element opens a line before its first key
    with pytest.raises(TraceError, match=rf"bad\.json:{line}: task_id must be a text"):
        load(bad)
    assert len(load(bad, skip_bad=True).requests) == 4
    for broken, line in [(text[:-1], text.count("\n") + 1), (text + "x", text.count("\n") + 1)]:
        bad.write_text(broken, "utf-8")
        with pytest.raises(TraceError, match=rf"bad\.json:{line}: "):
            load(bad, skip_bad=True)


def test_a_long_list_is_read_in_pieces(tmp_path: Path) -> None:
    """Elements that cross the pieces in which a file is read, and one longer than a piece, come out whole."""
    chats = [[{"role": "user", "content": "é" * size}] for size in (0, 1, 100_000, 299_999, 3, 140_000)]
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(chats, ensure_ascii=False).encode()))
    assert [r.num_prompt_tokens - 24 for r in load(path).requests] == [2 * len(chat[0]["content"]) for chat in chats]


def test_oasst_paths_to_assistant_messages_are_requests_in_file_order(tmp_path: Path) -> None:
    """Siblings share the prompt that they answer; the thread is the tree, and a request continues its ancestor."""

    def node(role: str, text: str, *replies: Any) -> dict[str, Any]:
        return {"role": role, "text": text, "replies": list(replies)}

    tree = node(
        "prompter",
        "q",
        node("assistant", "a", node("prompter", "r", node("assistant", "c"), node("assistant", "d"))),
        node("assistant", "b"),
    )
    path = write_rows(tmp_path / "t.jsonl", {"message_tree_id": "m", "prompt": tree})
    trace = load(path)
    assert trace.format == "oasst"
    asked = "<|prompter|>\nq\n<|assistant|>\n"
    again = f"{asked}a\n<|prompter|>\nr\n<|assistant|>\n"
    assert [(prompt_text(r), output_text(r), r.thread, r.turn, r.parent) for r in trace.requests] == [
        (asked, "a\n", "m", 1, None),
        (again, "c\n", "m", 2, 0),
        (again, "d\n", "m", 3, 0),
        (asked, "b\n", "m", 4, None),
    ]
    with pytest.raises(TraceError, match=r"bad\.jsonl:1: the tree has no assistant message"):
        load(write_rows(tmp_path / "bad.jsonl", {"prompt": node("prompter", "q")}))


def test_mt_bench_answers_find_their_questions(tmp_path: Path) -> None:
    """Answers alone hold half a chat; the questions stand beside them or one folder up."""
    question = {"question_id": 81, "category": "x", "turns": ["q1", "q2"]}
    answer = {"question_id": 81, "choices": [{"index": 0, "turns": ["a1", "a2"]}]}
    questions = write_rows(tmp_path / "question.jsonl", question, {**question, "question_id": 82})
    (tmp_path / "reference_answer").mkdir()
    answers = write_rows(tmp_path / "reference_answer" / "gpt-4.jsonl", answer)
    trace = load(answers)
    assert trace.format == "mt-bench"
    assert [(prompt_text(r), output_text(r), r.thread) for r in trace.requests] == [
        ("<|user|>\nq1\n<|assistant|>\n", "a1\n", "81"),
        ("<|user|>\nq1\n<|assistant|>\na1\n<|user|>\nq2\n<|assistant|>\n", "a2\n", "81"),
    ]
    alone = load(questions).requests
    assert [(prompt_text(r), r.num_output_tokens, r.output_units, r.thread, r.turn) for r in alone[:2]] == [
        ("<|user|>\nq1\n<|assistant|>\n", 0, None, "81", 1),
        ("<|user|>\nq1\n<|user|>\nq2\n<|assistant|>\n", 0, None, "81", 2),
    ]
    for bad, reason in [
        ({**answer, "question_id": 5}, "question 5 is not in the file of questions"),
        ({**answer, "choices": [{"turns": ["a1"]}]}, "has 1 turns, but question 81 has 2"),
        ({**answer, "choices": []}, "has no choices"),
        ({**answer, "choices": [{"turns": "a1"}]}, "turns must be a list"),
    ]:
        write_rows(answers, answer, bad)
        with pytest.raises(TraceError, match=rf"gpt-4\.jsonl:2: {reason}"):
            load(answers)
    questions.unlink()
    with pytest.raises(TraceError, match="the answers need their questions"):
        load(answers, skip_bad=True)


def test_round_robin_takes_the_threads_in_turn(tmp_path: Path) -> None:
    """The other usual order of chats: their first requests, then their second ones; parents move along."""
    chats = [{"id": name, "messages": CHAT[: 5 if name != "b" else 3]} for name in "abc"]
    trace = load(write_rows(tmp_path / "t.jsonl", *chats))
    assert [(r.thread, r.turn) for r in trace.requests] == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("c", 2)]
    turned = trace.round_robin()
    turned.check()
    assert [(r.thread, r.turn, r.parent) for r in turned.requests] == [
        ("a", 1, None),
        ("b", 1, None),
        ("c", 1, None),
        ("a", 2, 0),
        ("c", 2, 2),
    ]
    with pytest.raises(ValueError, match="has no threads to take in turn"):
        load(write_rows(tmp_path / "m.jsonl", mooncake(1, [1]))).round_robin()
    timed = load(write_rows(tmp_path / "m.jsonl", *(mooncake(1, [1], time, session_id="s") for time in (0, 1))))
    with pytest.raises(ValueError, match="has arrival times, which give the order"):
        timed.round_robin()


# Files, detection and options ---------------------------------------------------------------------------------------


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    """Packed and plain files give the same trace, whatever their names say."""
    plain = write_rows(tmp_path / "t.jsonl", mooncake(512, [1]), mooncake(513, [1, 2], 1))
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    misnamed = tmp_path / "u.jsonl"
    misnamed.write_bytes(packed.read_bytes())
    assert load(packed) == load(plain)
    assert load(misnamed).requests == load(plain).requests
    for damaged in (packed.read_bytes()[:-9], packed.read_bytes()[:20]):
        misnamed.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"u\.jsonl: cannot be decompressed"):
            load(misnamed, "mooncake", skip_bad=True)


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    """Editors on some systems leave both."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + json.dumps(mooncake(1, [1])).encode() + b"\r\n \r\n{}\r\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:4: has no hash_ids"):
        load(path)
    assert len(load(path, skip_bad=True).requests) == 1
    path.write_bytes(b"\xef\xbb\xbf" + f"{AZURE}\r\n2023-11-16 18:17:03,1,1".encode())
    assert load(path).format == "azure"


def test_the_format_is_told_past_rows_that_are_broken(tmp_path: Path) -> None:
    """A trace does not become unknown because its first row is cut off."""
    path = write_rows(tmp_path / "t.jsonl", '{"timestamp": 0, "input_le', {"unknown": 1}, mooncake(1, [1]))
    assert detect(path) == "mooncake"
    assert load(path, skip_bad=True).num_skipped == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"is in no trace format that is known here; keys of the first row: none"),
        ('{"a": 1, "b": 2}\n', r":1: is in no trace format .* row: 'a', 'b'"),
        ("a,b\n1,2\n", "is in no trace format"),
        ("[1, 2]", "is in no trace format"),
        ('{"sys_prompt_id": 8302, "token_length": 512}\n', "is in no trace format"),
        ('{\n "a": 1,\n}', r":3: is not valid JSON"),
        ("\x00\x01\x02", "is in no trace format"),
    ],
)
def test_an_unknown_format_says_what_was_found(tmp_path: Path, text: str, reason: str) -> None:
    """The keys that the file has are the quickest way to see what it is."""
    path = tmp_path / "t.dat"
    path.write_text(text, "utf-8")
    with pytest.raises(TraceError, match=reason):
        load(path)


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"auto", "swe-agent"}))
def test_a_trace_without_requests_is_an_error_in_every_format(tmp_path: Path, format: str) -> None:
    """No report should be made of nothing; the error counts the rows that were skipped."""
    path = write_rows(tmp_path / "0_trace.jsonl", "")
    if format == "ragpulse":
        path = ragpulse_folder(tmp_path / "rag", [], {})
    with pytest.raises(TraceError, match=r"holds no request|the header has no column|is empty"):
        load(path, format)
    write_rows(tmp_path / "bad.jsonl", "oops", "{}")
    if format == "mooncake":
        with pytest.raises(TraceError, match=r"holds no request \(2 bad rows were skipped\)"):
            load(tmp_path / "bad.jsonl", format, skip_bad=True)


def test_files_that_cannot_be_read_are_trace_errors(tmp_path: Path) -> None:
    """Whoever loads a trace has one error to expect."""
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load(tmp_path, "mooncake")
    with pytest.raises(TraceError, match=r"the folder has no file that ends in \.json or \.jsonl"):
        load(tmp_path)
    write_rows(tmp_path / "a.jsonl", mooncake(1, [1]))
    with pytest.raises(TraceError, match=r"is a folder, and the format 'mooncake' of a\.jsonl has one file a trace"):
        load(tmp_path)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    """An error names the value and what is allowed."""
    path = write_rows(tmp_path / "t.jsonl", mooncake(1, [1]))
    with pytest.raises(ValueError, match=r"format 'moon' is not one of auto, mooncake, bailian"):
        load(path, "moon")
    for name in ("limit", "block_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; allowed: 1 and more"):
            load(path, **{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            load(path, **{name: 1.5})


def test_a_limit_reads_the_first_requests_of_the_file_and_no_further(tmp_path: Path) -> None:
    """A look at a huge file should not meet what is wrong at its end."""
    path = write_rows(tmp_path / "t.jsonl", mooncake(1, [1], 5), mooncake(2, [2], 3), mooncake(3, [3], 0), "broken")
    assert [request.num_prompt_tokens for request in load(path, limit=2).requests] == [2, 1]
    assert load(path, limit=3).num_skipped == 0
    with pytest.raises(TraceError, match=":4: is not valid JSON"):
        load(path, limit=4)


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    """A progress bar counts bytes on disk, which are known beforehand, packed or not."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(mooncake(1, [1])).encode()))
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, size: seen.append((done, size)))
    assert seen == sorted(seen) and seen[-1] == (path.stat().st_size,) * 2


# Our own format -----------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@st.composite
def token_traces(draw: st.DrawFn) -> Trace:
    """Traces of tokens, with prompts that start alike, threads and outputs that may be known."""
    requests: list[TraceRequest] = []
    turns: dict[str, int] = {}
    last: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 8))):
        thread = draw(st.sampled_from(["a", "b\ud800", "é"]))
        parent = last.get(thread)
        if requests and draw(st.booleans()):  # a chat may also branch, or lead on from another one
            parent = draw(st.sampled_from([None, *range(len(requests))]))
        said = array("I")
        if parent is not None and draw(st.booleans()):
            before = requests[parent]
            assert before.units is not None
            said = before.units + (before.output_units or array("I"))
        prompt = said + array("I", draw(TOKENS))
        output = array("I", draw(TOKENS)) if draw(st.booleans()) else None
        turns[thread] = turns.get(thread, 0) + 1
        last[thread] = len(requests)
        requests.append(
            TraceRequest(
                arrival_s=(requests[-1].arrival_s if requests else 0.0) + draw(st.sampled_from([0.0, 0.1, 1e-9])),
                num_prompt_tokens=len(prompt),
                num_output_tokens=draw(st.integers(0, 9)) if output is None else len(output),
                units=prompt,
                output_units=output,
                thread=thread,
                turn=turns[thread],
                tenant=draw(st.sampled_from([None, "t"])),
                parent=parent,
                cached_tokens=draw(st.sampled_from([None, 3])),
                worker=draw(st.sampled_from([None, "w"])),
            )
        )
    return Trace("n", "radixkv", requests, 1, None, True, 0, "d")


@given(trace=token_traces(), packed=st.booleans())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, trace: Trace, packed: bool) -> None:
    """A generated trace on disk is the generated trace."""
    trace.check()
    path = tmp_path_factory.mktemp("written") / ("t.jsonl.gz" if packed else "t.jsonl")
    write(trace, path)
    assert load(path) == trace
    if packed:
        assert path.read_bytes()[4:8] == bytes(4), "no time in the file, so that it has the same bytes each time"


def test_shared_starts_are_written_once(tmp_path: Path) -> None:
    """Chats repeat their whole past in every prompt; a file of them grows with what is new only."""
    shared = array("I", range(10_000))
    requests = [TraceRequest(float(k), 10_001, 0, shared + array("I", [k]), None, str(k), 1, None) for k in range(100)]
    path = tmp_path / "t.jsonl"
    write(Trace("n", "radixkv", requests, 1, None, True, 0, "d"), path)
    assert path.stat().st_size < 80_000
    assert load(path).requests == requests


def test_any_trace_can_be_written(tmp_path: Path) -> None:
    """Weights, hash units and traces without units go through our own format as well."""
    tokens = {"sys_prompt_id": {10: 100}, "user_input_id": {50: 2}}
    rows = [rag_row("1", 105, {"sys_prompt": [10], "user_input": [50]}), rag_row("2", 0, {})]
    sources = [
        ragpulse_folder(tmp_path / "rag", rows, tokens),
        write_rows(tmp_path / "a.csv", AZURE, "2023-11-16 18:17:03,5,5"),
        write_rows(tmp_path / "m.jsonl", mooncake(513, [1, 2]), mooncake(514, [1, 3])),
        write_rows(tmp_path / "s.jsonl", session("a", [agent_request(0.0, 70, [1])])),
    ]
    for source in sources:
        trace = load(source)
        write(trace, tmp_path / "t.jsonl")
        again = load(tmp_path / "t.jsonl")
        assert again.format == "radixkv"
        assert (again.name, again.requests, again.block_size, again.weights, again.counts_partial) == (
            trace.name,
            trace.requests,
            trace.block_size,
            trace.weights,
            trace.counts_partial,
        )


HEADER = {"format": "radixkv", "version": 1, "name": "n", "block_size": 1}
OWN = {"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 1, "units": [1, 2]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**OWN, "units": [1]}, "has 1 hash ids, but 2 tokens are 2 blocks of 1"),
        ({**OWN, "units": [1, 2**32]}, "units must be at least 0 and less than 2"),
        ({**OWN, "units": [1, -1]}, "units must be at least 0"),
        ({**OWN, "units": [1, True]}, "units must hold integers only"),
        ({**OWN, "output": [1, 2]}, "output has 2 tokens, but output_tokens is 1"),
        ({**OWN, "after": 9, "keep": 1}, "after is 9; there is no earlier request"),
        ({**OWN, "after": 2, "keep": 3}, "keep is 3, but line 2 has 2 units"),
        ({**OWN, "after": 2}, "has no keep"),
    ],
)
def test_faults_in_our_own_format_are_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """People write such files too, and a row that leans on another must find it there."""
    path = write_rows(tmp_path / "t.jsonl", HEADER, OWN, row)
    with pytest.raises(TraceError, match=rf"t\.jsonl:3: {reason}"):
        load(path)
    assert load(path, skip_bad=True).num_skipped == 1
    for header, what in [({**HEADER, "version": 2}, "version 1"), ({**HEADER, "block_size": 0}, "block_size is 0")]:
        with pytest.raises(TraceError, match=rf"t\.jsonl:1: .*{what}"):
            load(write_rows(path, header, OWN), skip_bad=True)


# The published traces -----------------------------------------------------------------------------------------------

# Requests, units, distinct units, prompt tokens, output tokens: counted from the files by a script that shares no code
# with the package, and for requests, ids and means as their README has them.
PUBLISHED = [
    ("mooncake/conversation_trace.jsonl.gz", "mooncake", 12_031, 288_500, 182_790, 144_793_823, 4_122_048),
    ("mooncake/synthetic_trace.jsonl.gz", "mooncake", 3_993, 121_877, 43_924, 61_194_628, 595_432),
    ("mooncake/toolagent_trace_first1000.jsonl.gz", "mooncake", 1_000, 19_686, 12_207, 9_792_030, 199_084),
    ("claude_code/sessions_228.jsonl.gz", "claude-code", 9_032, 9_330_360, 397_353, 597_429_879, 3_826_385),
    ("ragpulse", "ragpulse", 7_106, 71_583, 21_857, 20_917_099, 2_012_676),
    ("dynamo/pi_request_trace.jsonl.gz", "dynamo", 17, 4_163, 1_183, 66_520, 8_094),
    ("azure/AzureLLMInferenceTrace_conv.csv.gz", "azure", 19_366, 0, 0, 22_361_870, 4_088_665),
    ("azure/AzureLLMInferenceTrace_code.csv.gz", "azure", 8_819, 0, 0, 18_059_974, 245_896),
    ("derived/claude_code_27.bailian.jsonl.gz", "bailian", 411, 748_732, 64_460, 11_976_721, 197_390),
]


@cache
def published(path: Path) -> Trace:
    """A trace that several tests look at, read once."""
    return load(path)


@pytest.mark.parametrize(("name", "format", "requests", "units", "distinct", "prompt", "output"), PUBLISHED)
def test_published_traces_have_their_published_counts(
    shared_data: Path, name: str, format: str, requests: int, units: int, distinct: int, prompt: int, output: int
) -> None:
    """Every row of every public trace is read, by its format's way of counting, and told apart without help."""
    trace = published(shared_data / name)
    trace.check()
    assert (trace.format, len(trace.requests), trace.num_skipped) == (format, requests, 0)
    assert sum(len(request.units or ()) for request in trace.requests) == units
    assert trace.num_units == distinct
    assert sum(request.num_prompt_tokens for request in trace.requests) == prompt
    assert sum(request.num_output_tokens for request in trace.requests) == output


@pytest.mark.parametrize(
    ("name", "format", "requests", "threads"),
    [
        ("chat/oasst_en_100_tree.jsonl.gz", "oasst", 687, 100),
        ("chat/mt_bench_question.jsonl", "mt-bench", 160, 80),
        ("chat/mt_bench_reference_gpt-4.jsonl", "mt-bench", 60, 30),
        ("agent/tau_bench_gpt-4o-airline.json.gz", "tau-bench", 2_454, 200),
        ("agent/swe_agent", "swe-agent", 47, 4),
        ("agent/swe_agent/pydicom-1458__default.traj.gz", "swe-agent", 12, 1),
        ("claude_code/files", "claude-code", 91, 10),
    ],
)
def test_published_texts_have_a_request_for_each_assistant_message(
    shared_data: Path, name: str, format: str, requests: int, threads: int
) -> None:
    """Conversations keep apart, and none of their replies is lost."""
    trace = load(shared_data / name)
    trace.check()
    assert (trace.format, len(trace.requests)) == (format, requests)
    assert len({request.thread for request in trace.requests}) == threads


def hit_rate(trace: Trace, skip: int = 0) -> float:
    """The token hit rate of an infinite cache after some requests. The ids must be chained: then a set is enough."""
    seen: set[int] = set()
    hit = total = 0
    for index, request in enumerate(trace.requests):
        assert request.units is not None
        num_hits = 0
        while num_hits < len(request.units) and request.units[num_hits] in seen:
            num_hits += 1
        seen.update(request.units)
        if index >= skip:
            hit += sum(trace.unit_tokens(request, j) for j in range(num_hits))
            total += request.num_prompt_tokens
    return hit / total


def test_mooncake_traces_give_the_published_hit_rates(shared_data: Path) -> None:
    """37.4 % of the conversation's tokens, 39.8 % in its second half, 65 % of the synthetic one's: to their digits."""
    conversation = published(shared_data / "mooncake" / "conversation_trace.jsonl.gz")
    assert hit_rate(conversation) == pytest.approx(0.374, abs=0.0005)
    assert hit_rate(conversation, skip=len(conversation.requests) // 2) == pytest.approx(0.398, abs=0.0005)
    assert hit_rate(published(shared_data / "mooncake" / "synthetic_trace.jsonl.gz")) == pytest.approx(0.65, abs=0.005)


def read_lines(path: Path) -> Iterator[Any]:
    """The JSON lines of a packed file, read the plain way."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def test_agent_sessions_lie_on_their_time_line(shared_data: Path) -> None:
    """Order, threads and identity of every request, against the definition written out again."""
    path = shared_data / "claude_code" / "sessions_228.jsonl.gz"
    expected = []
    for line, each in enumerate(read_lines(path)):
        listing = 0
        for place, request in enumerate(each["requests"]):
            nested = request["requests"] if request["type"] == "subagent" else [request]
            start = 60 * line + request["t"] if request["type"] == "subagent" else 60 * line
            for inner in nested:
                thread = (line, place) if request["type"] == "subagent" else (line, None)
                expected.append(
                    (start + inner["t"], line, listing, inner["in"], inner["out"], thread, inner["hash_ids"])
                )
                listing += 1
    expected.sort(key=lambda request: request[:3])
    trace = published(path)
    dense: dict[tuple[int, int], int] = {}
    threads: dict[Any, str | None] = {}
    turns: dict[Any, int] = {}
    for request, (time, line, _, num_in, num_out, thread, ids) in zip(trace.requests, expected, strict=True):
        assert (request.arrival_s, request.num_prompt_tokens, request.num_output_tokens) == (time, num_in, num_out)
        assert request.units is not None
        # One name for each identity, and no name for two: checked for the ends, which is enough for chained ids.
        for each_id, unit in zip([*ids[:1], *ids[-1:]], [*request.units[:1], *request.units[-1:]], strict=True):
            assert dense.setdefault((line, each_id), unit) == unit
        assert threads.setdefault(thread, request.thread) == request.thread
        turns[thread] = turns.get(thread, 0) + 1
        assert request.turn == turns[thread]
    assert len(set(dense.values())) == len(dense)
    assert len(set(threads.values())) == len(threads) == 237


def test_ragpulse_is_sorted_and_weighed_as_defined(shared_data: Path) -> None:
    """One row is out of order, and prompts exceed their segments by the template's 6 to 12 tokens."""
    folder = shared_data / "ragpulse"
    rows = sorted(read_lines(folder / "0_trace.jsonl.gz"), key=lambda row: float(row["timestamp"]))
    trace = load(folder)
    dense: dict[int, int] = {}
    for request, row in zip(trace.requests, rows, strict=True):
        ids = [each for kind in KINDS if kind != "user_input" for each in row["hash_ids"][kind]]
        ids += row["hash_ids"]["user_input"]
        assert (request.arrival_s, request.thread) == (float(row["timestamp"]), row["session_id"])
        assert request.units is not None
        assert [dense.setdefault(each, unit) for each, unit in zip(ids, request.units, strict=True)] == list(
            request.units
        )
        num_tokens = sum(trace.unit_tokens(request, j) for j in range(len(ids)))
        assert 6 <= request.num_prompt_tokens - num_tokens <= 12
    assert len(set(dense.values())) == len(dense)
    assert len({request.thread for request in trace.requests}) == 3_990


def test_the_derived_trace_counts_turns_along_the_parents(shared_data: Path) -> None:
    """The file's own turn is the request's ordinal in its thread, and the parent is the turn before."""
    trace = load(shared_data / "derived" / "claude_code_27.bailian.jsonl.gz")
    assert len({request.thread for request in trace.requests}) == 27
    ordinals: dict[str | None, int] = {}
    for request in trace.requests:
        ordinals[request.thread] = ordinals.get(request.thread, 0) + 1
        assert request.turn == ordinals[request.thread]
        if request.turn == 1:
            assert request.parent is None
        else:
            assert request.parent is not None
            before = trace.requests[request.parent]
            assert (before.thread, before.turn) == (request.thread, request.turn - 1)


def test_the_dynamo_trace_keeps_what_the_server_measured(shared_data: Path) -> None:
    """17 requests on two workers, 50,256 tokens of them cached, in order of arrival and not of finishing."""
    trace = load(shared_data / "dynamo" / "pi_request_trace.jsonl.gz")
    assert sum(request.cached_tokens or 0 for request in trace.requests) == 50_256
    assert {request.worker for request in trace.requests} == {"7587894923333011484", "7587894923333011487"}
    assert [request.num_prompt_tokens for request in trace.requests[:6]] == [15, 4736, 5688, 1629, 1627, 2006]
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[-1].arrival_s == (1779163210962 - 1779163048815) / 1000
    assert len({request.thread for request in trace.requests}) == 5


def test_trajectories_are_framed_to_the_byte(shared_data: Path) -> None:
    """Prompts and outputs of all 200 trajectories, against the definition written out again."""
    path = shared_data / "agent" / "tau_bench_gpt-4o-airline.json.gz"
    expected = []
    for trajectory in json.loads(gzip.decompress(path.read_bytes())):
        said = ""
        for message in trajectory["traj"]:
            body = message["content"] or ""
            if message.get("tool_calls"):
                functions = [call["function"] for call in message["tool_calls"]]
                calls = [[function["name"], function["arguments"]] for function in functions]
                body += "\n" + json.dumps(calls, ensure_ascii=False)
            if message["role"] == "assistant":
                expected.append((f"{said}<|assistant|>\n".encode(), f"{body}\n".encode()))
            said += f"<|{message['role']}|>\n{body}\n"
    trace = load(path)
    for request, (prompt, output) in zip(trace.requests, expected, strict=True):
        assert request.units is not None and request.output_units is not None
        assert (bytes(request.units.tolist()), bytes(request.output_units.tolist())) == (prompt, output)
