"""How much memory a trace needs, and how many of its requests fit: slot, paged, hashed and radix allocation.

    memory_over_time   memory without a limit: what each kind of allocation holds while the requests run
    concurrency        one pool for all, driven through the real managers: who runs, who waits, what is wasted

Both let a request run for `tpot_s` seconds per output token from its start on; prefill takes no time here.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..arguments import at_least
from ..baselines import ALLOCATORS, CacheManager, SlotAllocator
from ..errors import OutOfBlocks
from ..tokens import MAX_TOKEN_ID, TOKEN_BYTES, TokenKey, pack, pack_one
from ..traces.trace import Trace, TraceRequest
from .blocks import BlockView
from .replay import Progress, report
from .segments import ROOT, SegmentTree

TPOT_S = 0.05
# Points kept of a course over time: as many as a plot has pixels. Peaks and means are exact all the same.
_MAX_POINTS = 1_000
# Stands in every place whose content the trace does not tell. It is never committed, so nobody hits it.
_UNKNOWN = pack_one(MAX_TOKEN_ID)


@dataclass(frozen=True)
class MemoryUse:
    """What one kind of allocation held over time.

    num_blocks     blocks of the pool; None: no limit
    peak, mean     over time, the mean from the first arrival to the last departure
    *_blocks       blocks held by running requests; of a slot as many as its tokens need
    *_tokens       token slots held; of a slot the longest request's prompt and output
    *_wasted       token slots held in which no token will ever be: internal fragmentation
    *_running      requests that run; *_waiting those that wait for room
    course         points (time in s, blocks held, running requests)
    num_refused    requests that the whole pool cannot hold
    None stands for what the trace cannot tell: without prefix identity nobody knows what would be shared.
    """

    trace: str
    definition: str
    allocator: str
    block_size: int
    num_blocks: int | None
    requests: int
    num_refused: int
    peak_blocks: int | None
    mean_blocks: float | None
    peak_tokens: int | None
    mean_tokens: float | None
    peak_wasted: int | None
    mean_wasted: float | None
    peak_running: int | None
    mean_running: float | None
    peak_waiting: int | None
    mean_wait_s: float | None
    longest_wait_s: float | None
    finish_s: float | None
    course: list[tuple[float, int, int]]
    seconds: float

    @property
    def fragmentation(self) -> float | None:
        """mean_wasted / mean_tokens."""
        return None if not self.mean_tokens or self.mean_wasted is None else self.mean_wasted / self.mean_tokens

    def as_dict(self, with_course: bool = False) -> dict[str, Any]:
        """The record for JSON."""
        names = [name for name in self.__dataclass_fields__ if name != "course" or with_course]
        return {**{name: getattr(self, name) for name in names}, "fragmentation": self.fragmentation}


class _Gauges:
    """Peak and mean over time of what is held: blocks, tokens, wasted tokens, running and waiting requests."""

    def __init__(self, start_s: float) -> None:
        self.start_s = self.now_s = start_s
        self.blocks = self.tokens = self.wasted = self.running = self.waiting = 0
        self.peaks = [0, 0, 0, 0, 0]
        self.sums = [0.0, 0.0, 0.0, 0.0, 0.0]
        self.course: list[tuple[float, int, int]] = []
        self._stride = self._num_events = 1

    def pass_time(self, now_s: float) -> None:
        """What is held was held until now."""
        elapsed_s = now_s - self.now_s
        if elapsed_s > 0:
            for place, value in enumerate(self._values()):
                self.sums[place] += value * elapsed_s
            self.now_s = now_s

    def see(self) -> None:
        """After an event: it may be a peak."""
        for place, value in enumerate(self._values()):
            if value > self.peaks[place]:
                self.peaks[place] = value
        self._num_events += 1
        if self._num_events % self._stride == 0:
            self.course.append((self.now_s, self.blocks, self.running))
            if len(self.course) >= 2 * _MAX_POINTS:
                self.course = self.course[::2]
                self._stride *= 2

    def mean(self, place: int) -> float | None:
        """The mean of one gauge; None if no time has passed."""
        elapsed_s = self.now_s - self.start_s
        return self.sums[place] / elapsed_s if elapsed_s > 0 else None

    def _values(self) -> tuple[int, int, int, int, int]:
        return self.blocks, self.tokens, self.wasted, self.running, self.waiting


def memory_over_time(
    trace: Trace,
    allocator: str,
    *,
    block_size: int | None = None,
    tpot_s: float = TPOT_S,
    progress: Progress | None = None,
) -> MemoryUse:
    """What running requests hold, with room for all of them at once: no queue, nothing evicted, nothing kept.

    A request is there from its arrival on for tpot_s · output_length seconds.
    slot    running requests · the longest prompt and output of the trace
    paged   Σ ceil((prompt + output) / B)
    hash, radix   the distinct full prompt blocks of the running requests, each once, and the others of each request

    block_size: tokens per block; None = the trace's own, 16 where it has none. Raises ValueError for what is not
    allowed. O(requests · (log requests + segments of a path)).
    """
    _require_allocator(allocator)
    started = time.perf_counter()
    size, view = _blocks_of(trace, block_size, tpot_s)
    definition = (
        f"each request holds its blocks for {tpot_s:g} s per output token from its arrival on; no queueing, no "
        f"eviction; blocks of {size} tokens; departures before arrivals at equal times, peak after each event, mean "
        "from first arrival to last departure"
    )
    is_sharing = allocator in ("hash", "radix")
    if (is_sharing and not trace.has_prefixes) or not trace.requests:
        return _unknown(trace, definition, allocator, size, None, started)
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace.requests)
    tree = SegmentTree((view.full_prompt(request) for request in trace.requests), view.units) if is_sharing else None
    num_users = array("I", bytes(4 * len(tree.lengths))) if tree is not None else array("I")
    gauges = _Gauges(trace.requests[0].arrival_s)
    leaving: list[tuple[float, int]] = []

    def change(index: int, sign: int) -> None:
        """The request comes (+1) or goes (-1)."""
        request = trace.requests[index]
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        num_blocks = -(-num_tokens // size)
        num_shared = 0
        if tree is not None:
            segment = tree.leaves[index]
            num_shared = tree.ends[segment]
            # Users of a segment use all above it: only where the first comes or the last goes does memory change.
            while segment != ROOT:
                num_users[segment] += sign
                if num_users[segment] == (1 if sign > 0 else 0):
                    gauges.blocks += sign * tree.lengths[segment]
                segment = tree.parents[segment]
        if allocator == "slot":
            gauges.blocks += sign * -(-longest // size)
            gauges.tokens += sign * longest
            gauges.wasted += sign * (longest - num_tokens)
        else:
            gauges.blocks += sign * (num_blocks - num_shared)
            gauges.tokens = gauges.blocks * size
            gauges.wasted += sign * (num_blocks * size - num_tokens)
        gauges.running += sign
        gauges.see()

    for index, request in enumerate(trace.requests):
        while leaving and leaving[0][0] <= request.arrival_s:
            _leave(leaving, gauges, change)
        gauges.pass_time(request.arrival_s)
        if request.num_output_tokens == 0:
            continue  # there for no time at all
        change(index, +1)
        heapq.heappush(leaving, (request.arrival_s + tpot_s * request.num_output_tokens, index))
        report(progress, index, len(trace.requests))
    while leaving:
        _leave(leaving, gauges, change)
    report(progress, len(trace.requests), len(trace.requests))
    return _record(trace, definition, allocator, size, None, 0, gauges, [0.0], started)


def _leave(leaving: list[tuple[float, int]], gauges: _Gauges, change: Any) -> None:
    departure_s, index = heapq.heappop(leaving)
    gauges.pass_time(departure_s)
    change(index, -1)


def concurrency(
    trace: Trace,
    allocator: str,
    num_blocks: int,
    *,
    block_size: int | None = None,
    tpot_s: float = TPOT_S,
    progress: Progress | None = None,
) -> MemoryUse:
    """How many requests run at once in one pool of `num_blocks`, by driving the real manager.

    First come, first served: a request starts as soon as the pool has room for all of its prompt and output beside what
    it shares, and runs for tpot_s · output_length seconds; whoever is first is not passed. "hash" and "radix" keep
    finished prompts as long as there is room. A request that the whole pool cannot hold is refused and counted.
    Raises ValueError for what is not allowed.
    """
    _require_allocator(allocator)
    at_least(1, num_blocks, "num_blocks")
    started = time.perf_counter()
    size, view = _blocks_of(trace, block_size, tpot_s)
    definition = (
        f"{num_blocks} blocks of {size} tokens, first come, first served; a request starts when prompt and output fit, "
        f"and runs for {tpot_s:g} s per output token"
    )
    if (allocator in ("hash", "radix") and not trace.has_prefixes) or not trace.requests:
        return _unknown(trace, definition, allocator, size, num_blocks, started)
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace.requests)
    manager = _manager(allocator, num_blocks, view.units, -(-longest // size))
    slot_tokens = longest if isinstance(manager, SlotAllocator) else None
    gauges = _Gauges(trace.requests[0].arrival_s)
    waiting: deque[int] = deque()
    leaving: list[tuple[float, int]] = []
    waits_s: list[float] = []
    num_refused = 0

    def count(index: int, sign: int) -> None:
        request = trace.requests[index]
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        gauges.running += sign
        if slot_tokens is not None:
            gauges.wasted += sign * (slot_tokens - num_tokens)
        else:
            gauges.wasted += sign * (-(-num_tokens // size) * size - num_tokens)
        gauges.blocks = manager.num_private_blocks + manager.num_protected_blocks
        gauges.tokens = gauges.running * slot_tokens if slot_tokens is not None else gauges.blocks * size

    def start_waiting(now_s: float) -> None:
        while waiting:
            index = waiting[0]
            request = trace.requests[index]
            try:
                manager.allocate(index, view.whole(request))
            except OutOfBlocks:
                break
            waiting.popleft()
            gauges.waiting -= 1
            manager.commit(index, view.num_full(request) * view.units)
            waits_s.append(now_s - request.arrival_s)
            heapq.heappush(leaving, (now_s + tpot_s * request.num_output_tokens, index))
            count(index, +1)
            gauges.see()

    def leave() -> None:
        departure_s, index = heapq.heappop(leaving)
        gauges.pass_time(departure_s)
        manager.free(index)
        count(index, -1)
        start_waiting(departure_s)
        gauges.see()

    for index, request in enumerate(trace.requests):
        while leaving and leaving[0][0] <= request.arrival_s:
            leave()
        gauges.pass_time(request.arrival_s)
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        if num_tokens == 0 or -(-num_tokens // size) > num_blocks:
            num_refused += num_tokens > 0
            continue
        waiting.append(index)
        gauges.waiting += 1
        start_waiting(request.arrival_s)
        gauges.see()
        report(progress, index, len(trace.requests))
    while leaving:
        leave()
    report(progress, len(trace.requests), len(trace.requests))
    return _record(trace, definition, allocator, size, num_blocks, num_refused, gauges, waits_s, started)


# ---------------------------------------------------------------- a trace in blocks


class _Blocks:
    """Requests as the managers take them: `units` packed ids a block."""

    def __init__(self, trace: Trace, view: BlockView | None, size: int) -> None:
        self._trace = trace
        self._view = view
        self._size = size
        self.units = 1 if view is None else view.units_per_block

    def num_full(self, request: TraceRequest) -> int:
        """Full prompt blocks whose identity is known."""
        if self._view is None or request.units is None:
            return 0
        return min(request.num_prompt_tokens // self._size, len(request.units) // self.units)

    def full_prompt(self, request: TraceRequest) -> bytes:
        """The full prompt blocks, packed."""
        assert request.units is not None
        return pack(request.units[: self.num_full(request) * self.units])

    def whole(self, request: TraceRequest) -> TokenKey:
        """As many units as prompt and output take, those after the full prompt blocks without an identity."""
        num_blocks = -(-(request.num_prompt_tokens + request.num_output_tokens) // self._size)
        known = b"" if request.units is None else self.full_prompt(request)
        return TokenKey.from_packed(known + _UNKNOWN * (num_blocks * self.units - len(known) // TOKEN_BYTES))


def _blocks_of(trace: Trace, block_size: int | None, tpot_s: float) -> tuple[int, _Blocks]:
    """Tokens per block, and the trace in such blocks. Raises ValueError for what does not go together."""
    if not tpot_s > 0:
        raise ValueError(f"tpot_s is {tpot_s}; allowed: more than 0")
    if trace.has_prefixes and trace.block_size is not None:
        if block_size is None and trace.block_size == 1:
            block_size = 16  # one token a block is no way to run
        view = BlockView(trace, block_size)
        assert view.block_size is not None
        return view.block_size, _Blocks(trace, view, view.block_size)
    if trace.has_prefixes:
        raise ValueError(f"{trace.name} has no blocks of one size, so its memory cannot be counted in blocks")
    size = 16 if block_size is None else at_least(1, block_size, "block_size")
    return size, _Blocks(trace, None, size)


def _manager(allocator: str, num_blocks: int, units: int, longest_blocks: int) -> CacheManager:
    if allocator == "slot":
        # A slot as long as the longest request, or the whole pool where that is refused anyway.
        return SlotAllocator(num_blocks, units, min(longest_blocks, num_blocks) * units)
    if allocator == "radix":
        return ALLOCATORS[allocator](num_blocks, units, keep_partial=False)
    return ALLOCATORS[allocator](num_blocks, units)


def _require_allocator(allocator: str) -> None:
    if allocator not in ALLOCATORS:
        raise ValueError(f"allocator is {allocator!r}; allowed: {', '.join(ALLOCATORS)}")


# ---------------------------------------------------------------- records


def _unknown(
    trace: Trace, definition: str, allocator: str, size: int, num_blocks: int | None, started: float
) -> MemoryUse:
    """The record of a trace that cannot tell."""
    known = dict.fromkeys(MemoryUse.__dataclass_fields__)
    fields: dict[str, Any] = {
        **known,
        "trace": trace.name,
        "definition": definition,
        "allocator": allocator,
        "block_size": size,
        "num_blocks": num_blocks,
        "requests": len(trace.requests),
        "num_refused": 0,
        "course": [],
        "seconds": time.perf_counter() - started,
    }
    return MemoryUse(**fields)


def _record(
    trace: Trace,
    definition: str,
    allocator: str,
    size: int,
    num_blocks: int | None,
    num_refused: int,
    gauges: _Gauges,
    waits_s: list[float],
    started: float,
) -> MemoryUse:
    peaks = gauges.peaks
    return MemoryUse(
        trace=trace.name,
        definition=definition,
        allocator=allocator,
        block_size=size,
        num_blocks=num_blocks,
        requests=len(trace.requests),
        num_refused=num_refused,
        peak_blocks=peaks[0],
        mean_blocks=gauges.mean(0),
        peak_tokens=peaks[1],
        mean_tokens=gauges.mean(1),
        peak_wasted=peaks[2],
        mean_wasted=gauges.mean(2),
        peak_running=peaks[3],
        mean_running=gauges.mean(3),
        peak_waiting=peaks[4],
        mean_wait_s=sum(waits_s) / len(waits_s) if waits_s else None,
        longest_wait_s=max(waits_s, default=None),
        finish_s=gauges.now_s,
        course=list(_thin(gauges.course)),
        seconds=time.perf_counter() - started,
    )


def _thin(course: list[tuple[float, int, int]]) -> Iterator[tuple[float, int, int]]:
    yield from course[:: max(1, len(course) // _MAX_POINTS)]
