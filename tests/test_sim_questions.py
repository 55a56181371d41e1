"""Memory over time, concurrency, sweeps and costs against small obvious models, written block by block."""

import math
import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.baselines import ALLOCATORS
from radixkv.sim import replay
from radixkv.sim.costs import CostModel, ttft_estimate
from radixkv.sim.memory import concurrency, memory_over_time
from radixkv.sim.sweep import block_size_sweep, capacities_of, capacity_sweep, hit_sources
from radixkv.traces import Trace, TraceRequest, load


def request(arrival_s, num_prompt, num_output, units=None, thread=None, tenant=None):
    """A request of a trace; units: block ids."""
    units = None if units is None else array("I", units)
    return TraceRequest(arrival_s, num_prompt, num_output, units, None, thread, None, tenant)


def trace_of(requests, block_size=4, **fields):
    """A trace of hash blocks, partial last ones included."""
    return Trace("made up", "mooncake", list(requests), block_size, None, True, 0, "made up", **fields)


@st.composite
def traces(draw, block_size=4):
    """Prompts over two block ids, so that starts are often shared; arrivals in quarter seconds, often at once."""
    requests = []
    now = 0
    for number in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 0, 1, 2, 7]))
        length = draw(st.integers(1, 18))
        units = draw(st.lists(st.integers(0, 1), min_size=math.ceil(length / block_size), max_size=5))
        # Ids are chained in such traces: one id has one predecessor. The path itself as a number keeps to that.
        units = [int("1" + "".join(map(str, units[: end + 1])), 2) for end in range(math.ceil(length / block_size))]
        requests.append(request(now / 4, length, draw(st.integers(0, 9)), units, str(number % 3)))
    return trace_of(requests, block_size)


def memory_by_events(trace, allocator, tpot_s):
    """(peak, mean) of what is held, by the text of the definition: sort all events, look at who is present."""
    size = trace.block_size
    events = []
    for index, r in enumerate(trace.requests):
        end = r.arrival_s + tpot_s * r.num_output_tokens
        if end > r.arrival_s:
            events += [(r.arrival_s, 1, index), (end, 0, index)]
    slot = max(r.num_prompt_tokens + r.num_output_tokens for r in trace.requests)
    present, peak, area, last = set(), 0, 0.0, trace.requests[0].arrival_s
    held = 0
    for time, is_arrival, index in sorted(events):
        area += held * (time - last)
        last = time
        (present.add if is_arrival else present.discard)(index)
        rows = [trace.requests[i] for i in present]
        totals = [math.ceil((r.num_prompt_tokens + r.num_output_tokens) / size) for r in rows]
        if allocator == "slot":
            held = len(present) * slot
        elif allocator == "paged":
            held = sum(totals)
        else:
            full = [r.num_prompt_tokens // size for r in rows]
            # Ids are chained in these traces, so an id is a path.
            distinct = {unit for r, n in zip(rows, full, strict=True) for unit in r.units[:n]}
            held = len(distinct) + sum(totals) - sum(full)
        peak = max(peak, held)
    start = trace.requests[0].arrival_s
    end = max(r.arrival_s + tpot_s * r.num_output_tokens for r in trace.requests)
    return peak, area / (end - start) if end > start else None


class TestMemoryOverTime:
    @pytest.mark.parametrize("allocator", ALLOCATORS)
    @given(trace=traces())
    def test_it_is_what_the_definition_says(self, allocator, trace):
        """Peaks to the block, means over the whole time, departures before arrivals."""
        use = memory_over_time(trace, allocator, tpot_s=0.25)
        peak, mean = memory_by_events(trace, allocator, 0.25)
        if allocator == "slot":
            assert use.peak_tokens == peak
            assert use.mean_tokens == pytest.approx(mean)
        else:
            assert (use.peak_blocks, use.peak_tokens) == (peak, peak * 4)
            assert use.mean_blocks == pytest.approx(mean)

    def test_a_trace_without_prefixes_has_slots_and_pages_but_no_sharing(self):
        """Azure's traces: "not available" is not the same as nothing shared."""
        trace = Trace("lengths", "azure", [request(0.0, 100, 20), request(0.5, 30, 10)], None, None, False, 0, "")
        assert memory_over_time(trace, "slot").peak_tokens == 240
        assert memory_over_time(trace, "paged", block_size=16).peak_blocks == 8 + 3
        for allocator in ("hash", "radix"):
            assert memory_over_time(trace, allocator).peak_blocks is None
            assert concurrency(trace, allocator, 100).mean_running is None

    def test_waste_is_what_no_token_will_fill(self):
        """A slot wastes what the longest request has more, a block table what its last block has more."""
        trace = trace_of([request(0.0, 5, 4, [0, 1]), request(0.0, 2, 1, [2])])
        slot, paged = (memory_over_time(trace, allocator) for allocator in ("slot", "paged"))
        assert slot.peak_wasted == 0 + (9 - 3)
        assert paged.peak_wasted == (12 - 9) + (4 - 3)
        assert paged.fragmentation == pytest.approx(paged.mean_wasted / paged.mean_tokens)

    @pytest.mark.parametrize("arguments", [{"allocator": "buddy"}, {"allocator": "slot", "tpot_s": 0}])
    def test_what_is_not_allowed_is_refused(self, arguments):
        """The message says what is."""
        with pytest.raises(ValueError, match="allowed"):
            memory_over_time(trace_of([request(0.0, 5, 4, [0, 1])]), **arguments)

    def test_on_public_traces_it_is_what_the_definition_says(self, shared_data):
        """The same oracle on the first hundred real requests, where it is still affordable."""
        for name in ("mooncake/conversation_trace.jsonl.gz", "derived/claude_code_27.bailian.jsonl.gz"):
            trace = load(shared_data / name, limit=100)
            for allocator in ("slot", "paged", "radix"):
                use = memory_over_time(trace, allocator)
                peak, mean = memory_by_events(trace, allocator, 0.05)
                assert (use.peak_tokens if allocator == "slot" else use.peak_blocks) == peak
                assert (use.mean_tokens if allocator == "slot" else use.mean_blocks) == pytest.approx(mean)


class TestConcurrency:
    @pytest.mark.parametrize("allocator", ALLOCATORS)
    @given(trace=traces(), num_blocks=st.integers(3, 12))
    def test_all_run_that_can_and_never_more_than_fit(self, allocator, trace, num_blocks):
        """Every request runs or is refused; the pool is never exceeded, whatever is kept for later."""
        use = concurrency(trace, allocator, num_blocks, tpot_s=0.25)
        totals = [math.ceil((r.num_prompt_tokens + r.num_output_tokens) / 4) for r in trace.requests]
        assert use.num_refused == sum(total > num_blocks for total in totals)
        assert use.peak_blocks <= num_blocks
        assert use.peak_running <= len(trace.requests)

    def test_sharing_lets_more_run_at_once(self):
        """Ten requests with one long start: its blocks are there once."""
        start = list(range(8))
        trace = trace_of([request(0.0, 34, 20, [*start, 100 + n]) for n in range(10)])
        running = {name: concurrency(trace, name, 32).peak_running for name in ALLOCATORS}
        # 14 blocks each; with the start shared, 6 beside its 8.
        assert running == {"slot": 2, "paged": 2, "hash": 4, "radix": 4}

    def test_who_comes_first_is_not_passed(self):
        """The large one waits for room, and the small one behind it waits too."""
        trace = trace_of(
            [request(0.0, 20, 20, range(5)), request(0.1, 24, 20, range(10, 16)), request(0.2, 2, 2, [99])]
        )
        use = concurrency(trace, "paged", 12, tpot_s=1.0)
        assert use.peak_waiting == 2
        assert use.longest_wait_s == pytest.approx(20 - 0.1)
        assert use.mean_wait_s == pytest.approx((0 + 19.9 + 19.8) / 3)


class TestSweeps:
    @given(trace=traces())
    def test_no_policy_beats_the_optimum_and_capacity_never_hurts_it(self, trace):
        """Regret is what a better choice could gain; it is never negative."""
        points = capacity_sweep(trace, [1, 2, 5], ["lru", "fifo", "lfu", "mru"])
        assert all(point.regret >= 0 and point.capacity_gap >= 0 for point in points)
        best = [point.replay.hit_blocks for point in points if point.replay.policy == "optimal"]
        assert best == sorted(best)

    def test_progress_counts_the_replays(self):
        """A bar over a sweep shows the sweep."""
        seen = []
        capacity_sweep(
            trace_of([request(0.0, 8, 1, [0, 1])]),
            [1, 2],
            ["lru"],
            progress=lambda done, total: seen.append((done, total)),
        )
        assert seen == [(number, 5) for number in range(1, 6)]

    def test_default_capacities_grow_by_a_factor_up_to_all_blocks(self):
        """A plot with a logarithmic axis needs no more to be told."""
        trace = trace_of([request(0.0, 4000, 1, range(1000))])
        capacities = capacities_of(trace)
        assert (capacities[0], capacities[-1], len(capacities)) == (10, 1000, 6)

    def test_small_blocks_waste_less_and_long_tables_cost_more(self):
        """Tokens 0 to 20 of a prompt are shared: whole blocks hit what is full of them, exact hits all."""
        draw = random.Random(1)
        start = [draw.randrange(1000) for _ in range(21)]
        rows = [
            replace(request(float(n), 30, 7, [*start, *(draw.randrange(1000) for _ in range(9))]), output_units=None)
            for n in range(5)
        ]
        trace = replace(trace_of(rows, 1), format="radixkv")
        points = {point.block_size: point for point in block_size_sweep(trace, [1, 4, 16])}
        assert [points[size].table_entries for size in (1, 4, 16)] == [37, 10, 3]
        assert [points[size].fragmentation for size in (1, 4, 16)] == pytest.approx([0, 3 / 40, 11 / 48])
        # Four of five requests hit.
        assert [points[size].token_hit_rate for size in (1, 4, 16)] == pytest.approx(
            [4 * 21 / 150, 4 * 20 / 150, 4 * 16 / 150]
        )
        assert [points[size].exact_hit_rate for size in (1, 4, 16)] == pytest.approx([4 * 21 / 150] * 3)

    @given(trace=traces())
    def test_hits_are_within_a_thread_or_across(self, trace):
        """Against sets of blocks, one for each thread."""
        mine, anyone, within, across = {}, set(), 0, 0
        for r in trace.requests:
            paths = [tuple(r.units[: j + 1]) for j in range(len(r.units))]
            tokens = [trace.unit_tokens(r, j) for j in range(len(r.units))]
            own = mine.setdefault(r.thread, set())
            for path, num in zip(paths, tokens, strict=True):
                within += num * (path in own)
                across += num * (path in anyone and path not in own)
            own.update(paths)
            anyone.update(paths)
        sources = hit_sources(trace)
        assert (sources.within_tokens, sources.across_tokens) == (within, across)

    def test_without_threads_nobody_knows_whose_hits_they_are(self):
        """Mooncake's files name no sessions."""
        sources = hit_sources(trace_of([request(0.0, 8, 1, [0, 1]), request(1.0, 8, 1, [0, 1])]))
        assert sources.within_tokens is None and sources.as_dict()["within_rate"] is None


class TestCosts:
    MODEL = CostModel(
        prefill_tokens_per_s=100, kv_bytes_per_token=10**6, links={"fast": 1.0, "slow": 0.05}, link_latency_s=0.1
    )

    def test_seconds_of_both_ways(self):
        """1,000 tokens: 10 s to compute; 1 GB over the links."""
        assert self.MODEL.recompute_s(1000) == 10
        assert self.MODEL.restore_s(1000, "fast") == pytest.approx(1.1)
        assert self.MODEL.restore_s(0, "fast") == 0
        assert self.MODEL.break_even_tokens("fast") == pytest.approx(0.1 / (0.01 - 0.001))
        assert self.MODEL.break_even_tokens("slow") is None, "20 ms a token there, 10 ms to compute it"

    def test_each_hit_takes_the_faster_way(self):
        """A short hit is computed again, a long one restored; on a slow link all are computed."""
        trace = trace_of([request(0.0, 400, 1, range(100)), request(1.0, 400, 1, range(100)), request(2.0, 4, 1, [0])])
        points = {point.place: point for point in ttft_estimate(trace, replay(trace), self.MODEL)}
        assert points["nowhere"].total_s == pytest.approx(4 + 4 + 0.04)
        assert points["device"].total_s == pytest.approx(4)
        assert points["fast"].total_s == pytest.approx(4 + 0.5 + 0.04)
        assert points["fast"].restored_requests == 1
        assert points["slow"].total_s == points["nowhere"].total_s
        assert points["nowhere"].median_ttft_s == 4

    def test_a_trace_without_prefixes_has_no_estimate(self):
        """No hit rate, no saving: an empty list, not zeros."""
        trace = Trace("lengths", "azure", [request(0.0, 100, 20)], None, None, False, 0, "")
        assert ttft_estimate(trace, replay(trace)) == []

    @pytest.mark.parametrize(
        "arguments",
        [{"prefill_tokens_per_s": 0}, {"kv_bytes_per_token": -1}, {"links": {"x": 0}}, {"link_latency_s": -1}],
    )
    def test_impossible_rates_are_refused(self, arguments):
        """A rate of zero would divide."""
        with pytest.raises(ValueError, match="allowed"):
            CostModel(**arguments)
