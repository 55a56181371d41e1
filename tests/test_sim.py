"""The simulator gives the numbers that the definitions give, block by block: replay, curve, optimum, on small random
traces against a slow oracle, and on the public ones against a faster one.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_oracle import numbered, replay_blocks, replay_many

from radixkv import sim
from radixkv.eviction import LRU, POLICIES
from radixkv.traces import load
from radixkv.traces.trace import Trace, TraceRequest

CAPACITIES = st.one_of(st.none(), st.integers(0, 8))


def trace_of(
    prompts: list[list[int]],
    *,
    block_size: int | None = 16,
    lengths: list[int] | None = None,
    outputs: list[list[int]] | None = None,
    num_output_tokens: list[int] | None = None,
    threads: list[str] | None = None,
    arrivals: list[float] | None = None,
    workers: list[str] | None = None,
    weights: list[int] | None = None,
) -> Trace:
    """A trace with these units, one request a second. Lengths: as many tokens as the units have, unless given."""
    requests = []
    turns: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        thread = threads[index] if threads else None
        if thread is not None:
            turns[thread] = turns.get(thread, 0) + 1
        output = outputs[index] if outputs is not None else None
        if lengths is not None:
            length = lengths[index]
        elif weights is not None:
            length = sum(weights[unit] for unit in prompt)
        else:
            length = len(prompt) * (block_size or 1)
        num_output = len(output) if output is not None else num_output_tokens[index] if num_output_tokens else 0
        requests.append(
            TraceRequest(
                arrivals[index] if arrivals else float(index),
                length,
                num_output,
                array("I", prompt),
                None if output is None else array("I", output),
                thread,
                turns[thread] if thread is not None else None,
                None,
                worker=workers[index] if workers else None,
            )
        )
    trace = Trace(
        "test", "test", requests, block_size, None if weights is None else array("I", weights), True, 0, "by hand"
    )
    trace.check()
    return trace


@st.composite
def prompts(draw: st.DrawFn, num_units: int = 2, most_requests: int = 14, most_units: int = 6) -> list[list[int]]:
    """Prompts over a tiny alphabet, most of which go on from the start of an earlier one; some are empty."""
    made: list[list[int]] = []
    unit = st.integers(0, num_units)
    for _ in range(draw(st.integers(1, most_requests))):
        start: list[int] = []
        if made and draw(st.booleans()):
            start = draw(st.sampled_from(made))
            start = start[: draw(st.integers(0, len(start)))]
        made.append((start + draw(st.lists(unit, max_size=4)))[:most_units])
    return made


def hits_of(replayed: sim.Replay) -> list[int]:
    """Hit blocks of each request."""
    assert replayed.per_request_hit_blocks is not None
    return replayed.per_request_hit_blocks.tolist()


def tokens_of(replayed: sim.Replay) -> list[int]:
    """Hit tokens of each request."""
    assert replayed.per_request_hit_tokens is not None
    return replayed.per_request_hit_tokens.tolist()


# ---------------------------------------------------------------- against the oracle, on small random traces


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(given_prompts=prompts(), capacity=CAPACITIES)
def test_each_policy_hits_and_evicts_what_single_blocks_would(
    policy: str, given_prompts: list[list[int]], capacity: int | None
) -> None:
    """Runs of blocks, splits, merges and trims are bookkeeping: the outcome is that of a dict of blocks."""
    hits, num_evicted = replay_blocks(given_prompts, policy, capacity)
    replayed = sim.replay(trace_of(given_prompts), policy=policy, num_blocks=capacity)
    assert hits_of(replayed)[: len(hits)] == hits
    if num_evicted is not None:
        assert replayed.evicted_blocks == num_evicted
        assert replayed.hit_blocks == sum(hits)


@given(given_prompts=prompts(most_requests=40, most_units=5), capacity=st.integers(1, 12))
@pytest.mark.parametrize("policy", ["fifo", "lfu", "lru", "slru"])
def test_long_traces_stay_on_the_oracle_s_track(policy: str, given_prompts: list[list[int]], capacity: int) -> None:
    """What a node remembers must survive many evictions and returns, not only the first few."""
    hits, num_evicted = replay_blocks(given_prompts, policy, capacity)
    replayed = sim.replay(trace_of(given_prompts), policy=policy, num_blocks=capacity)
    assert hits_of(replayed) == hits
    assert replayed.evicted_blocks == num_evicted


@given(given_prompts=prompts(), capacity=CAPACITIES, size=st.integers(1, 3))
def test_the_flat_hash_hits_what_the_tree_hits_under_lru(
    given_prompts: list[list[int]], capacity: int | None, size: int
) -> None:
    """Two structures, one order: the choice between them is one of cost, and the report may say so."""
    trace = trace_of(given_prompts)
    tree, flat = (
        sim.replay(trace, allocator=allocator, num_blocks=capacity, block_size=16 * size)
        for allocator in ("radix", "hash")
    )
    assert hits_of(tree) == hits_of(flat)
    assert tree.evicted_blocks == flat.evicted_blocks


@given(given_prompts=prompts(), capacity=CAPACITIES, size=st.integers(1, 3))
def test_the_optimum_is_the_oracle_s(given_prompts: list[list[int]], capacity: int | None, size: int) -> None:
    """Segments that are trimmed from their end equal leaf blocks dropped one by one."""
    hits, num_evicted = replay_blocks(given_prompts, "optimal", capacity, size=size)
    best = sim.optimum(trace_of(given_prompts), num_blocks=capacity, block_size=16 * size)
    assert hits_of(best) == hits
    assert best.evicted_blocks == num_evicted


@given(given_prompts=prompts(), capacity=st.integers(0, 8))
def test_no_policy_beats_the_optimum(given_prompts: list[list[int]], capacity: int) -> None:
    """Otherwise a regret would be negative, and the word optimum wrong."""
    trace = trace_of(given_prompts)
    best = sim.optimum(trace, num_blocks=capacity).hit_blocks
    assert best is not None
    for policy in POLICIES:
        reached = sim.replay(trace, policy=policy, num_blocks=capacity).hit_blocks
        assert reached is not None and reached <= best, policy


@given(given_prompts=prompts(), size=st.integers(1, 3), warmup=st.sampled_from([0.0, 0.5, 1.0]))
def test_the_curve_is_a_replay_at_every_capacity(given_prompts: list[list[int]], size: int, warmup: float) -> None:
    """One pass instead of one replay for each capacity, and not one hit or token less or more."""
    trace = trace_of(given_prompts)
    curve = sim.exact_curve(trace, block_size=16 * size, warmup=warmup)
    for capacity in [None, *range(curve.num_blocks + 2)]:
        replayed = sim.replay(trace, num_blocks=capacity, block_size=16 * size, warmup=warmup)
        assert curve.hit_blocks(capacity) == replayed.hit_blocks
        assert curve.hit_tokens(capacity) == replayed.hit_tokens
        assert curve.block_hit_rate(capacity) == replayed.block_hit_rate
        assert curve.token_hit_rate(capacity) == replayed.token_hit_rate
    assert list(curve.hits) == sorted(curve.hits)


@given(given_prompts=prompts(num_units=1), size=st.sampled_from([1, 2, 4]), capacity=CAPACITIES)
def test_a_trace_of_tokens_hits_full_blocks_of_all_but_the_last_token(
    given_prompts: list[list[int]], size: int, capacity: int | None
) -> None:
    """An engine computes the last prompt token always; a block that holds it is computed with it."""
    trace = trace_of(given_prompts, block_size=1)
    limits = [max(len(prompt) - 1, 0) for prompt in given_prompts]
    hits, num_evicted = replay_blocks(given_prompts, "lru", capacity, size=size, limits=limits)
    replayed = sim.replay(trace, block_size=size, num_blocks=capacity)
    assert hits_of(replayed) == hits
    assert tokens_of(replayed) == [num_hits * size for num_hits in hits]
    assert replayed.evicted_blocks == num_evicted
    assert replayed.total_blocks == sum(-(-len(prompt) // size) for prompt in given_prompts)
    curve = sim.exact_curve(trace, block_size=size)
    assert (curve.hit_blocks(capacity), curve.hit_tokens(capacity)) == (replayed.hit_blocks, replayed.hit_tokens)
    best, _ = replay_blocks(given_prompts, "optimal", capacity, size=size, limits=limits)
    assert hits_of(sim.optimum(trace, block_size=size, num_blocks=capacity)) == best


@given(given_prompts=prompts(num_units=1), size=st.sampled_from([1, 2, 4]))
def test_token_exact_hits_reach_the_longest_common_start(given_prompts: list[list[int]], size: int) -> None:
    """With partial blocks kept and copied, the block size costs no hit: every common token counts."""
    replayed = sim.replay(trace_of(given_prompts, block_size=1), block_size=size, token_exact=True)
    expected = []
    for index, prompt in enumerate(given_prompts):
        longest = 0
        for earlier in given_prompts[:index]:
            common = 0
            while common < min(len(earlier), len(prompt)) and earlier[common] == prompt[common]:
                common += 1
            longest = max(longest, common)
        expected.append(max(min(longest, len(prompt) - 1), 0))
    assert tokens_of(replayed) == expected


# ---------------------------------------------------------------- outputs


def outputs_of(lists: list[list[int]]) -> st.SearchStrategy[list[list[int]]]:
    """An output for each prompt."""
    return st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=len(lists), max_size=len(lists))


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "slru", "mru"])
@given(data=st.data(), capacity=CAPACITIES, size=st.sampled_from([1, 2]))
def test_outputs_of_a_trace_of_tokens_are_cached_behind_their_prompts(
    policy: str, data: st.DataObject, capacity: int | None, size: int
) -> None:
    """The next turn begins with what was asked and what was answered."""
    given_prompts = data.draw(prompts(num_units=1))
    outputs = data.draw(outputs_of(given_prompts))
    expected, _ = replay_blocks(
        given_prompts,
        policy,
        capacity,
        size=size,
        limits=[max(len(prompt) - 1, 0) for prompt in given_prompts],
        outputs=[(len(prompt), output) for prompt, output in zip(given_prompts, outputs, strict=True)],
    )
    trace = trace_of(given_prompts, block_size=1, outputs=outputs)
    replayed = sim.replay(trace, policy=policy, block_size=size, num_blocks=capacity, cache_outputs=True)
    assert hits_of(replayed) == expected


@st.composite
def hashed_chats(draw: st.DrawFn) -> tuple[Trace, list[tuple[int, list[int]]]]:
    """A trace of 4-token hash blocks whose last blocks are mostly partial, and what its outputs are in hindsight.

    Some turns go on from prompt and output of the turn before, some do not, some ask the same again. A partial block's
    unit names all of its tokens, so it is another one than the full block's that takes its place.
    """
    chats: dict[str, list[list[int]]] = {}  # units of the full blocks, by turn
    lists, lengths, num_outputs, threads = [], [], [], []
    fresh = iter(range(100, 10_000))
    for _ in range(draw(st.integers(1, 9))):
        thread = draw(st.sampled_from("ab"))
        earlier = chats.setdefault(thread, [])
        repeats = bool(lists) and draw(st.integers(0, 3)) == 0
        if repeats:
            which = draw(st.integers(0, len(lists) - 1))
            units, length = lists[which], lengths[which]
        else:
            full = draw(st.sampled_from(earlier)) if earlier and draw(st.booleans()) else []
            full = full + draw(st.lists(st.integers(0, 1), max_size=3))
            tail = draw(st.integers(0, 3))
            units = full + ([next(fresh)] if tail else [])
            length = 4 * len(full) + tail
        lists.append(units)
        lengths.append(length)
        num_outputs.append(draw(st.integers(0, 12)))
        threads.append(thread)
        earlier.append(units[: length // 4])
    outputs: list[tuple[int, list[int]]] = []
    for index, units in enumerate(lists):
        num_full = lengths[index] // 4
        later = next((other for other in range(index + 1, len(lists)) if threads[other] == threads[index]), None)
        output: list[int] = []
        if later is not None and lists[later][: lengths[later] // 4][:num_full] == units[:num_full]:
            output = lists[later][: lengths[later] // 4][num_full : (lengths[index] + num_outputs[index]) // 4]
        outputs.append((num_full, output))
    return trace_of(lists, block_size=4, lengths=lengths, num_output_tokens=num_outputs, threads=threads), outputs


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "slru"])
@given(chats=hashed_chats(), capacity=CAPACITIES)
def test_outputs_of_a_trace_of_hashes_are_what_the_next_turn_adds(
    policy: str, chats: tuple[Trace, list[tuple[int, list[int]]]], capacity: int | None
) -> None:
    """Two ends of one path: the partial block as it was asked, and the full one that the output made of it."""
    trace, outputs = chats
    lists = [list(request.units or ()) for request in trace.requests]
    expected, num_evicted = replay_blocks(lists, policy, capacity, outputs=outputs)
    replayed = sim.replay(trace, policy=policy, num_blocks=capacity, cache_outputs=True)
    assert hits_of(replayed) == expected
    assert replayed.evicted_blocks == num_evicted
    if policy == "lru":
        flat = sim.replay(trace, allocator="hash", num_blocks=capacity, cache_outputs=True)
        assert hits_of(flat) == expected


@given(chats=hashed_chats(), size=st.sampled_from([4, 8]))
def test_caching_outputs_too_never_costs_a_hit_where_there_is_room(
    chats: tuple[Trace, list[tuple[int, list[int]]]], size: int
) -> None:
    """An infinite cache only gains by what else is in it."""
    trace, _ = chats
    without = sim.replay(trace, block_size=size)
    with_outputs = sim.replay(trace, block_size=size, cache_outputs=True)
    assert all(a <= b for a, b in zip(hits_of(without), hits_of(with_outputs), strict=True))


def test_an_output_in_hindsight_ends_where_prompt_and_output_do() -> None:
    """Six tokens and seven of output fill three blocks of four; what follows is the next question's."""
    trace = trace_of(
        [[0, 9], [0, 1, 2, 3, 8]],
        block_size=4,
        lengths=[6, 18],
        num_output_tokens=[7, 0],
        threads=["a", "a"],
    )
    assert [list(output) for output in sim.known_outputs(trace)] == [[1, 2], []]
    assert hits_of(sim.replay(trace)) == [0, 1]
    assert hits_of(sim.replay(trace, cache_outputs=True)) == [0, 3]


# ---------------------------------------------------------------- when blocks become visible


def timed(visible: str, arrivals: list[float], **options: Any) -> list[int]:
    """Hits of equal prompts of two full blocks of ten tokens and one output block, at 10 tokens/s and 1 s a token."""
    trace = trace_of([[0, 1]] * len(arrivals), block_size=10, num_output_tokens=[3] * len(arrivals), arrivals=arrivals)
    service = sim.ServiceTimes(prefill_tokens_per_s=10, tpot_s=1)
    return hits_of(sim.replay(trace, visible=visible, service=service, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("allocator", ["radix", "hash"])
def test_blocks_are_found_from_arrival_prefill_or_finish_on(allocator: str) -> None:
    """The prefill of 20 tokens takes 2 s, the output 3 s more; at the very end counts as after it."""
    arrivals = [0.0, 1.9, 2.0, 4.9, 5.0]
    assert timed("arrival", arrivals, allocator=allocator) == [0, 2, 2, 2, 2]
    assert timed("prefill", arrivals, allocator=allocator) == [0, 0, 2, 2, 2]
    assert timed("finish", arrivals, allocator=allocator) == [0, 0, 0, 0, 2]


def test_a_hit_shortens_the_prefill() -> None:
    """The second request hits one of its two blocks, so the other one is there a second after it came, not two."""
    trace = trace_of([[0], [0, 1], [0, 1]], block_size=10, arrivals=[0.0, 5.0, 6.0])
    service = sim.ServiceTimes(prefill_tokens_per_s=10, tpot_s=0)
    assert hits_of(sim.replay(trace, visible="prefill", service=service)) == [0, 1, 2]


def test_what_running_requests_hold_cannot_leave() -> None:
    """With room for one block, the running request's two stay until it ends; then the path's start remains."""
    arrivals = [0.0, 1.0, 3.9, 6.8, 100.0]
    assert timed("arrival", arrivals, num_blocks=1) == [0, 2, 2, 2, 1]


@given(chats=hashed_chats(), capacity=CAPACITIES, cache_outputs=st.booleans())
@pytest.mark.parametrize("allocator", ["radix", "hash"])
def test_with_instant_service_all_is_as_without_times(
    allocator: Any, chats: tuple[Trace, list[tuple[int, list[int]]]], capacity: int | None, cache_outputs: bool
) -> None:
    """The default order is the limit of the timed ones."""
    trace, _ = chats
    service = sim.ServiceTimes(prefill_tokens_per_s=1e12, tpot_s=0)
    options: dict[str, Any] = {"allocator": allocator, "num_blocks": capacity, "cache_outputs": cache_outputs}
    plain = sim.replay(trace, **options)
    for visible in ("prefill", "finish"):
        assert hits_of(sim.replay(trace, visible=visible, service=service, **options)) == hits_of(plain)


@given(chats=hashed_chats(), tpot=st.sampled_from([0.01, 0.3, 2.0]), cache_outputs=st.booleans())
def test_later_visibility_never_hits_more_in_an_infinite_cache(
    chats: tuple[Trace, list[tuple[int, list[int]]]], tpot: float, cache_outputs: bool
) -> None:
    """Arrival, prefill and finish are an order, whatever the times are."""
    trace, _ = chats
    service = sim.ServiceTimes(prefill_tokens_per_s=8, tpot_s=tpot)
    at_arrival, at_prefill, at_finish = (
        sim.replay(trace, visible=visible, service=service, cache_outputs=cache_outputs)
        for visible in ("arrival", "prefill", "finish")
    )
    assert (at_arrival.hit_blocks or 0) >= (at_prefill.hit_blocks or 0) >= (at_finish.hit_blocks or 0)


# ---------------------------------------------------------------- what is counted


def test_a_partial_last_block_weighs_its_tokens() -> None:
    """B092: 1025 tokens are three blocks of 512, the third weighs one; the same prompt again is hit as a whole."""
    trace = trace_of([[0, 1, 2], [0, 1, 2], [0, 1, 3]], block_size=512, lengths=[1025, 1025, 1100])
    replayed = sim.replay(trace)
    assert hits_of(replayed) == [0, 3, 2]
    assert tokens_of(replayed) == [0, 1025, 1024]
    assert (replayed.total_blocks, replayed.total_tokens) == (9, 3150)
    assert replayed.block_hit_rate == 5 / 9
    assert replayed.token_hit_rate == 2049 / 3150
    assert tokens_of(sim.replay(trace, recompute_last=True)) == [0, 1024, 1024]
    for capacity in range(5):
        for recompute_last in (False, True):
            curve = sim.exact_curve(trace, recompute_last=recompute_last)
            assert (
                curve.hit_tokens(capacity)
                == sim.replay(trace, num_blocks=capacity, recompute_last=recompute_last).hit_tokens
            )


def test_an_empty_prompt_is_a_request_without_blocks() -> None:
    """It counts as a request, hits nothing, and divides nothing by zero."""
    trace = trace_of([[], [0], [], [0]])
    for replayed in (sim.replay(trace), sim.replay(trace, allocator="hash"), sim.optimum(trace)):
        assert (replayed.requests, replayed.total_blocks, replayed.hit_blocks) == (4, 2, 1)
    empty = trace_of([[]])
    assert sim.replay(empty).token_hit_rate is None
    assert sim.exact_curve(empty).miss_ratio(3) is None


def test_units_that_are_not_chained_are_blocks_by_their_path() -> None:
    """The same passage behind another question is another block; its tokens are its own, not a block size's."""
    trace = trace_of([[0, 2], [1, 2], [0, 2, 1]], block_size=None, weights=[100, 30, 7])
    replayed = sim.replay(trace)
    assert hits_of(replayed) == [0, 0, 2]
    assert tokens_of(replayed) == [0, 0, 107]
    for capacity in range(7):
        assert sim.exact_curve(trace).hit_tokens(capacity) == sim.replay(trace, num_blocks=capacity).hit_tokens
    with pytest.raises(ValueError, match="block_size is 16; test has no blocks of one size"):
        sim.replay(trace, block_size=16)


def test_warm_counts_from_the_floor_of_half_on() -> None:
    """Five requests: two are replayed and not counted, so what they leave in the cache helps the other three."""
    trace = trace_of([[0]] * 5)
    for replayed in (sim.replay(trace, warmup=0.5), sim.optimum(trace, warmup=0.5)):
        assert (replayed.first_counted, replayed.requests, replayed.total_blocks) == (2, 3, 3)
        assert replayed.hit_blocks == 3
        assert hits_of(replayed) == [0, 1, 1, 1, 1]
        assert "0.5" in replayed.definition
    assert sim.exact_curve(trace, warmup=0.5).hit_blocks(1) == 3


def test_hits_by_turn_follow_the_thread() -> None:
    """The second turn of each thread begins with its first; the other thread's first turn shares a start as well."""
    trace = trace_of([[0, 1], [0, 2], [0, 1, 3, 4], [0, 2, 5]], threads=["a", "b", "a", "b"])
    first, second = sim.hits_by_turn(trace.requests, sim.replay(trace))
    assert first.as_dict() == {
        "turn": 1, "requests": 2, "total_tokens": 64, "hit_tokens": 16, "token_hit_rate": 0.25,
    }  # fmt: skip
    assert (second.value, second.hit_tokens, second.total_tokens) == (2, 64, 112)
    (warm,) = sim.hits_by_turn(trace.requests, sim.replay(trace, warmup=0.5))
    assert (warm.value, warm.requests) == (2, 2)
    assert sim.hits_by("tenant", lambda request: request.tenant, trace.requests, sim.replay(trace)) == []


def test_each_worker_may_have_a_cache_of_its_own() -> None:
    """A router that sends a prompt elsewhere loses what is cached here."""
    trace = trace_of([[0, 1], [0, 1], [0, 1], [0, 1]], workers=["a", "b", "a", "b"])
    assert hits_of(sim.replay(trace)) == [0, 2, 2, 2]
    assert hits_of(sim.replay(trace, per_worker=True)) == [0, 0, 2, 2]
    assert hits_of(sim.replay(trace, per_worker=True, num_blocks=1)) == [0, 0, 1, 1]


def test_without_prefix_identity_no_rate_is_given() -> None:
    """A trace of lengths says nothing about hits: not available, which is not 0."""
    request = TraceRequest(0.0, 100, 5, None, None, None, None, None)
    trace = Trace("lengths", "azure", [request] * 4, None, None, False, 0, "lengths only")
    for replayed in (sim.replay(trace, num_blocks=5, warmup=0.5), sim.optimum(trace, num_blocks=5, warmup=0.5)):
        assert (replayed.requests, replayed.total_tokens) == (2, 200)
        for unknown in ("total_blocks", "hit_blocks", "block_hit_rate", "hit_tokens", "token_hit_rate"):
            assert replayed.as_dict()[unknown] is None
        assert replayed.as_dict(per_request=True)["per_request_hit_blocks"] is None
    with pytest.raises(ValueError, match="lengths has no prefix identity"):
        sim.exact_curve(trace)


def test_records_are_json_and_say_how_they_are_defined() -> None:
    """A number without its definition cannot be compared with anybody's."""
    trace = trace_of([[0, 1], [0, 1]])
    replayed = sim.replay(trace, num_blocks=1, policy="fifo")
    record = json.loads(json.dumps(replayed.as_dict(per_request=True)))
    assert record["per_request_hit_blocks"] == [0, 1]
    assert (record["allocator"], record["policy"], record["num_blocks"]) == ("radix", "fifo", 1)
    assert "complete before the next" in record["definition"] and "prompt blocks only" in record["definition"]
    curve = json.loads(json.dumps(sim.exact_curve(trace).as_dict()))
    assert [point["miss_ratio"] for point in curve["points"]] == [1.0, 0.75, 0.5]
    assert sim.replay(trace, policy=LRU()).policy == "LRU"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocator": "paged"}, "allocator is 'paged'; allowed: 'radix', 'hash'"),
        ({"allocator": "hash", "policy": "lfu"}, "policy is 'lfu'; the allocator 'hash' knows 'lru' only"),
        ({"allocator": "hash", "token_exact": True}, "token_exact needs the allocator 'radix'"),
        ({"policy": "lur"}, "unknown eviction policy 'lur'"),
        ({"num_blocks": -1}, "num_blocks is -1; allowed: 0 and more"),
        ({"block_size": 24}, "block_size is 24; allowed: multiples of 16"),
        ({"warmup": 1.5}, "warmup is 1.5; allowed: 0 to 1"),
        ({"visible": "soon"}, "visible is 'soon'; allowed: 'arrival'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    """An option that is quietly ignored gives a number for another question."""
    with pytest.raises(ValueError, match=message):
        sim.replay(trace_of([[0]]), **options)


@pytest.mark.parametrize(
    ("times", "message"), [((0, 1), "prefill_tokens_per_s is 0"), ((5, -1), "tpot_s is -1; allowed: 0 and more")]
)
def test_service_times_are_checked(times: tuple[float, float], message: str) -> None:
    """Time does not run backwards."""
    with pytest.raises(ValueError, match=message):
        sim.ServiceTimes(*times)


def test_progress_ends_with_all_requests() -> None:
    """A bar that stops short looks like a crash."""
    for run in (sim.replay, sim.optimum):
        told: list[tuple[int, int]] = []
        run(trace_of([[0]] * 300), progress=lambda done, total, told=told: told.append((done, total)))
        assert told == [(0, 300), (256, 300), (300, 300)]


# ---------------------------------------------------------------- the sampled curve


def test_a_sample_of_all_threads_is_the_exact_curve(shared_data: Path) -> None:
    """At rate 1 nothing is estimated."""
    trace = public(shared_data, "mooncake/toolagent_trace_first1000.jsonl.gz")
    exact, sampled = sim.exact_curve(trace), sim.sampled_curve(trace, 1.0)
    assert sampled.hits == exact.hits
    assert sim.curve_error(sampled, exact).largest == 0


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.01])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    """0 would be a curve of nothing."""
    with pytest.raises(ValueError, match="allowed: more than 0, at most 1"):
        sim.sampled_curve(trace_of([[0]]), rate)


def test_a_sample_takes_threads_whole_and_the_same_ones_each_time() -> None:
    """Half a conversation would hit less than the conversation, and a curve that changes by itself explains nothing."""
    threads = [f"chat {index % 40}" for index in range(200)]
    turns = [[index % 40, *range(100, 101 + index // 40)] for index in range(200)]
    trace = trace_of(turns, threads=threads)
    sampled = sim.sampled_curve(trace, 0.4)
    assert 0 < sampled.requests < 200 and sampled.requests % 5 == 0
    assert sampled.block_hit_rate(None) == sim.exact_curve(trace).block_hit_rate(None)
    assert sim.sampled_curve(trace, 0.4).hits == sampled.hits
    no_threads = [replace(request, thread=None) for request in trace.requests]
    assert sim.sampled_curve(replace(trace, requests=no_threads), 0.4).requests % 5 == 0


# ---------------------------------------------------------------- the public traces


@cache
def public(directory: Path, name: str, limit: int | None = None) -> Trace:
    """A trace of the public ones, read once."""
    return load(directory / name, limit=limit)


@cache
def infinite(directory: Path, name: str, limit: int | None = None) -> sim.Replay:
    """Its default replay in an infinite cache."""
    return sim.replay(public(directory, name, limit))


CONVERSATION = "mooncake/conversation_trace.jsonl.gz"
# With a capacity that is small against the trace, and how many requests are read.
PUBLIC = [
    (CONVERSATION, 10_000, None),
    ("mooncake/synthetic_trace.jsonl.gz", 5_000, None),
    ("mooncake/toolagent_trace_first1000.jsonl.gz", 2_000, None),
    ("ragpulse", 1_000, None),
    ("dynamo/pi_request_trace.jsonl.gz", 300, None),
    ("derived/claude_code_27.bailian.jsonl.gz", 5_000, 120),
    ("claude_code/sessions_228.jsonl.gz", 3_000, 300),
]


def test_the_published_rates_of_the_conversation_and_the_synthetic_trace_come_out(shared_data: Path) -> None:
    """37.4 % of the tokens cold, 39.8 % in the warm second half, 65 % on the synthetic one."""
    assert infinite(shared_data, CONVERSATION).token_hit_rate == pytest.approx(0.374, abs=0.0005)
    warm = sim.replay(public(shared_data, CONVERSATION), warmup=0.5)
    assert warm.token_hit_rate == pytest.approx(0.398, abs=0.0005)
    synthetic = infinite(shared_data, "mooncake/synthetic_trace.jsonl.gz")
    assert synthetic.token_hit_rate == pytest.approx(0.65, abs=0.005)


@pytest.mark.parametrize(("name", "capacity", "limit"), PUBLIC)
def test_public_traces_replay_as_single_blocks_do(
    shared_data: Path, name: str, capacity: int, limit: int | None
) -> None:
    """Every request's hit blocks, under every policy of the definitions and the optimum; and the curve."""
    trace = public(shared_data, name, limit)
    paths = list(numbered(request.units or () for request in trace.requests))
    unbounded = infinite(shared_data, name, limit)
    assert hits_of(unbounded) == replay_many(paths, "lru", None)
    bounded = sim.replay(trace, num_blocks=capacity)
    assert hits_of(bounded) == replay_many(paths, "lru", capacity)
    for policy in ("fifo", "lfu"):
        assert hits_of(sim.replay(trace, policy=policy, num_blocks=capacity)) == replay_many(paths, policy, capacity)
    assert hits_of(sim.optimum(trace, num_blocks=capacity)) == replay_many(paths, "optimal", capacity)
    curve = sim.exact_curve(trace)
    assert curve.num_blocks == 1 + max(max(path, default=-1) for path in paths)
    for replayed in (unbounded, bounded):
        assert curve.hit_blocks(replayed.num_blocks) == replayed.hit_blocks
        assert curve.hit_tokens(replayed.num_blocks) == replayed.hit_tokens
    expected = sum(
        trace.unit_tokens(request, unit)
        for request, num_hits in zip(trace.requests, hits_of(unbounded), strict=True)
        for unit in range(num_hits)
    )
    assert unbounded.hit_tokens == expected


def test_outputs_bring_predictions_closer_to_what_a_server_measured(shared_data: Path) -> None:
    """The run was recorded with its cached tokens; a prediction from prompts alone misses what was just generated."""
    trace = public(shared_data, "dynamo/pi_request_trace.jsonl.gz")
    measured = [request.cached_tokens or 0 for request in trace.requests]
    for per_worker in (False, True):
        prompts_only = tokens_of(sim.replay(trace, per_worker=per_worker))
        with_outputs = tokens_of(sim.replay(trace, per_worker=per_worker, cache_outputs=True))
        assert all(a <= b for a, b in zip(prompts_only, with_outputs, strict=True))
        error, smaller = (
            sum(abs(a - b) for a, b in zip(predicted, measured, strict=True))
            for predicted in (prompts_only, with_outputs)
        )
        assert smaller < error


def test_a_fifth_of_the_families_gives_the_curve_within_a_few_percent(shared_data: Path) -> None:
    """The exact curve stands beside it, so the estimate's error is known."""
    trace = public(shared_data, CONVERSATION)
    error = sim.curve_error(sim.sampled_curve(trace, 0.2), sim.exact_curve(trace))
    assert error.num_points > 40
    assert error.mean < 0.01
    assert error.largest < 0.05
    json.dumps(error.as_dict())
