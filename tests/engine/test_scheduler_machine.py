"""The engine's loop under random traffic, in pools that are too small for it.

Whatever arrives, ends, is aborted or fails in whatever order: each output is the one that the request gives alone, each
step keeps its limits, the counts add up, everybody ends once, and nothing is left. See `scheduler_models` for how a
wrong slot is found without a model.
"""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_models import (
    assert_idle,
    assert_solo,
    checked_step,
    make_beams,
    make_core,
    make_request,
    prompt_logprobs_of,
    solo_finish_reason,
    solo_output,
)

from engine.config import ORDERS, VICTIMS
from engine.request import RequestState

# Prompts begin like one of these and go on with a few tokens of their own, so that many share their first blocks.
STARTS = [[0, 1] * 24, [0, 1, 0, 0] * 12, [1] * 48]


@dataclass(frozen=True)
class Arrival:
    """A request that comes."""

    start: int
    cut: int
    rest: tuple[int, ...]
    max_tokens: int
    namespace: str | None
    ignore_eos: bool
    priority: int
    store: bool
    n: int
    prompt_logprobs: int | None

    @property
    def prompt_token_ids(self) -> list[int]:
        """Its prompt."""
        return [*STARTS[self.start][: self.cut], *self.rest]


@dataclass(frozen=True)
class Abort:
    """Someone ends a request, running or not, there or not."""

    index: int


@dataclass(frozen=True)
class Fail:
    """The next pass fails half-way. Whoever drives the loop ends all requests then, or tries again."""

    goes_on: bool


@dataclass(frozen=True)
class Steps:
    """Time passes."""

    number: int


ARRIVALS = st.builds(
    Arrival,
    start=st.sampled_from([0, 0, 0, 1, 2]),
    cut=st.sampled_from([0, 1, 3, 4, 5, 8, 15, 16, 17, 30]),
    rest=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
    max_tokens=st.sampled_from([33, 17, 5, 1]),
    namespace=st.sampled_from([None, None, None, "tenant"]),
    ignore_eos=st.sampled_from([True, True, False]),
    priority=st.sampled_from([0, 0, 0, 1, 2]),
    store=st.sampled_from([True, True, True, False]),
    n=st.sampled_from([1, 1, 2, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, None, 0]),
)
OTHERS = [*map(Steps, [1, 2, 5, 10, 20, 40]), *map(Abort, range(3)), Fail(goes_on=True), Fail(goes_on=False)]
EVENTS = st.lists(st.one_of(ARRIVALS, ARRIVALS, ARRIVALS, st.sampled_from(OTHERS)), min_size=8, max_size=24)
LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([64, 64, 64, 3, 1]),
        "max_num_batched_tokens": st.sampled_from([64, 64, 16, 7, 5, 1]),
        "order": st.sampled_from(ORDERS),
        "max_overtakes": st.sampled_from([1, 2, 32]),
        "victim": st.sampled_from(VICTIMS),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)
SWAPS = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "num_swap_blocks": 1000},
    "little-swap": {"preemption": "swap", "num_swap_blocks": 4},
    "no-swap": {"preemption": "swap", "num_swap_blocks": 0},
}


class Traffic:
    """A loop with requests on their way, and what has to be true of them."""

    def __init__(self, core):
        self.core = core
        self.added = []  # with forks, in order of arrival
        self.sequences = {}  # all of them by id
        self.ends = Counter()
        self.solo = {}  # id -> output, finish reason
        self.num_overtaken = Counter()  # of those that wait
        self.num_steps = 0
        self.num_failed = 0
        self.most_computed = Counter()  # id -> tokens whose KV was there at some time
        self.num_recomputed = 0

    def arrive(self, arrival):
        core, token_ids = self.core, arrival.prompt_token_ids
        request = make_request(
            str(len(self.added)), token_ids, arrival.max_tokens, arrival.namespace, arrival.ignore_eos,
            priority=arrival.priority, store=arrival.store, n=arrival.n, prompt_logprobs=arrival.prompt_logprobs,
        )  # fmt: skip
        if arrival.n > core.scheduler.config.max_running:
            with pytest.raises(ValueError, match=rf"n = {arrival.n}; allowed: at most"):
                core.add_request(request)
            return
        sequences = list(request.sequences())
        core.add_request(request)
        self.added.append(request)
        slots = core.cache.num_blocks * core.cache.block_size
        for sequence in sequences:
            assert sequence.max_total_tokens == min(len(token_ids) + arrival.max_tokens, slots + 1)
            self.sequences[sequence.request_id] = sequence
            self.solo[sequence.request_id] = solo_output(sequence), solo_finish_reason(sequence)

    def abort(self, index):
        """Aborts a request as `LLM` does: with all its continuations, also those that have begun."""
        if not self.added:
            assert self.core.abort("nobody") is None
            return
        request_id = self.added[index % len(self.added)].request_id
        for sequence_id in [id_ for id_ in self.sequences if id_ == request_id or id_.startswith(f"{request_id}/")]:
            # The first one takes along those that have not begun.
            is_there = self.sequences[sequence_id].finish_reason is None
            assert (self.core.abort(sequence_id) is None) != is_there
            self.ends[sequence_id] += is_there or self.sequences[sequence_id].finish_reason == "abort"
            assert self.core.abort(sequence_id) is None
            self.ends[sequence_id] = min(1, self.ends[sequence_id])
        self.core.cache.check()

    def step(self):
        scheduler = self.core.scheduler
        was_running, was_waiting = set(scheduler.running), set(scheduler.waiting)
        num_preempted = scheduler.counters.preemptions.total()
        self.num_steps += 1
        try:
            for request in checked_step(self.core):
                self.ends[request.request_id] += 1
        finally:
            self._look_at_rows(was_running, was_waiting, num_preempted)
        for request_id, sequence in self.sequences.items():
            output = self.solo[request_id][0]
            assert sequence.output_token_ids == output[: len(sequence.output_token_ids)]

    def _look_at_rows(self, was_running, was_waiting, num_preempted):
        core = self.core
        started = {self.sequences[ran.request_id] for ran in core.runner.steps[-1]} - was_running
        self._look_at_order(started, was_waiting, num_preempted)
        for ran in core.runner.steps[-1]:
            most = self.most_computed[ran.request_id] = max(self.most_computed[ran.request_id], ran.start)
            self.num_recomputed += max(0, min(most, ran.end) - ran.start)
            self.most_computed[ran.request_id] = max(most, ran.end)
        for request in core.scheduler.running:  # a fork begins with what its parent had
            request_id = request.request_id
            self.most_computed[request_id] = max(self.most_computed[request_id], request.num_computed_tokens)

    def _look_at_order(self, started, was_waiting, num_preempted):
        scheduler = self.core.scheduler
        assert started <= was_waiting
        if scheduler.counters.preemptions.total() > num_preempted:
            assert not started, "nobody is admitted in a step that preempted"
        for request in scheduler.waiting:
            if request.state is RequestState.PREEMPTED and request not in was_waiting:
                self.num_overtaken[request] = 0
            self.num_overtaken[request] += sum(other.number > request.number for other in started)
            assert self.num_overtaken[request] == request.num_overtaken <= scheduler.config.max_overtakes

    def fail(self, goes_on):
        core = self.core
        core.runner.is_failing = True
        try:
            self.step()
        except RuntimeError:
            self.num_failed += 1
            core.cache.check()
        core.runner.is_failing = False
        if not goes_on:
            there = [sequence for sequence in self.sequences.values() if sequence.finish_reason is None]
            core.abort_all()
            for sequence in there:
                assert sequence.finish_reason == "abort"
                self.ends[sequence.request_id] += 1
            assert_idle(core)

    def look_at_the_end(self):
        """Everybody has ended, once, as if alone; the counts say so."""
        core, counters = self.core, self.core.scheduler.counters
        assert_idle(core)
        assert self.ends == Counter(self.sequences.keys())
        for request_id, sequence in self.sequences.items():
            assert sequence.state is RequestState.FINISHED
            if sequence.finish_reason != "abort":
                assert (sequence.output_token_ids, sequence.finish_reason) == self.solo[request_id]
                if sequence.params.prompt_logprobs is not None and sequence in self.added:
                    assert sequence.prompt_logprobs == prompt_logprobs_of(sequence)
        admitted = [request for request in self.added if request.scheduled_s is not None]
        stats = core.cache.stats
        assert stats.requests == len(admitted), "each admitted request is counted once"
        assert stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in admitted)
        assert stats.hit_tokens == sum(request.num_cached_tokens for request in admitted)
        assert counters.finished == Counter(sequence.finish_reason for sequence in self.sequences.values())
        assert counters.output_tokens == sum(len(sequence.output_token_ids) for sequence in self.sequences.values())
        assert counters.steps == len(core.runner.steps) - self.num_failed
        assert counters.preemptions.total() == sum(s.num_preemptions for s in self.sequences.values())
        assert counters.recomputed_tokens == sum(s.num_recomputed_tokens for s in self.sequences.values())
        if not self.num_failed:
            assert counters.prefill_tokens + counters.decode_tokens == core.runner.num_computed_tokens
            if "abort" not in counters.finished:
                assert counters.recomputed_tokens == self.num_recomputed

    def run(self, events):
        for event in events:
            match event:
                case Arrival():
                    self.arrive(event)
                case Abort():
                    self.abort(event.index)
                case Fail():
                    if self.core.has_requests:
                        self.fail(event.goes_on)
                case Steps():
                    for _ in range(event.number):
                        if self.core.has_requests:
                            self.step()
        # A step computes a token at least. What is computed again is bounded by the doubling of the room that a
        # preempted request waits for.
        most_preemptions = 2 + math.ceil(math.log2(self.core.cache.num_blocks + 1))
        most_steps = sum(sequence.max_total_tokens for sequence in self.sequences.values()) * most_preemptions
        while self.core.has_requests:
            self.step()
            assert self.num_steps <= most_steps + len(events) * 20, "it goes on for ever"
        self.look_at_the_end()


def num_blocks_for(events, share, block_size):
    """A pool with a share of the blocks that all would take at once; each prompt fits into it alone."""
    arrivals = [event for event in events if isinstance(event, Arrival)]
    needed = sum(
        -(-(len(a.prompt_token_ids) + a.n * a.max_tokens) // block_size) + a.n - 1 for a in arrivals
    )  # fmt: skip
    largest = max((-(-len(a.prompt_token_ids) // block_size) for a in arrivals), default=1)
    return max(1, largest, math.ceil(share * needed))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("swap", SWAPS)
@given(events=EVENTS, limits=LIMITS, share=st.sampled_from([0.25, 0.5, 0.1, 1, 0]))
def test_everyone_says_what_they_say_alone_and_leaves_nothing_behind(block_size, swap, events, limits, share):
    """The scheduler may order, chunk, share, preempt and copy as it likes: nobody may notice but by the time."""
    core = make_core(num_blocks_for(events, share, block_size), block_size, **limits, **SWAPS[swap])
    Traffic(core).run(events)


@given(
    searches=st.lists(
        st.tuples(
            st.sampled_from([2, 4, 5, 9]), st.integers(0, 1), st.sampled_from([1, 2, 3]), st.sampled_from([2, 5, 9])
        ),
        min_size=1,
        max_size=3,
    ),
    num_others=st.integers(0, 3),
    block_size=st.sampled_from([1, 2, 4, 16]),
    share=st.sampled_from([1, 0.5, 0.25, 0]),
    max_num_seqs=st.sampled_from([64, 64, 4, 3]),
    swap=st.sampled_from([{}, {"preemption": "swap", "num_swap_blocks": 5}]),
    victim=st.sampled_from(VICTIMS),
)
def test_beams_find_what_they_find_alone_in_any_pool(
    searches, num_others, block_size, share, max_num_seqs, swap, victim
):
    """They fork, pause, are dropped and preempted, also while they pause; others run beside them."""
    needed = [-(-(length + max_tokens) // block_size) for length, _, _, max_tokens in searches]
    widths = [width for _, _, width, _ in searches]
    num_blocks = max(*needed, int(share * sum(n * w for n, w in zip(needed, widths, strict=True))), 12 // block_size)
    core = make_core(num_blocks, block_size, max_num_seqs=max_num_seqs, victim=victim, **swap)
    arguments = [
        (f"beams {n}", [token] * length, width, max_tokens)
        for n, (length, token, width, max_tokens) in enumerate(searches)
    ]
    others = [make_request(f"other {n}", [n % 2, 1], 9) for n in range(num_others)]
    groups = [make_beams(core, *each) for each in arguments]
    for other in others:
        core.add_request(other)
    for _ in range(3_000):
        if not core.has_requests and all(group.is_finished for group in groups):
            break
        checked_step(core)
        for group in groups:
            group.advance()
    for group, each in zip(groups, arguments, strict=True):
        alone = make_beams(make_core(1_000, 4), *each)
        while not alone.is_finished:
            alone.core.step()
            alone.advance()
        assert group.results() == alone.results()
        group.close()
    assert_solo(*others)
    assert core.cache.stats.requests == len(groups) + len(others), "a beam is no request"
    assert_idle(core)
