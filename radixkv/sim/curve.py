"""The miss-ratio curve of LRU: the hits at every capacity, from one pass over the trace.

LRU keeps the C first blocks by (last use, descending; depth, ascending), so a block is hit at every capacity from its
place in that list on: its stack distance (Mattson, Gecsei, Slutz and Traiger, 1970). What an earlier request u used and
nobody used since is a suffix of u's path. Where a later request's path runs through it, the distances are consecutive:

    path of u     used again since │ last used by u         place in the list
    path of now   ─────────────────┼──────────────┐         S+1, S+2, ... S+n
                                   └── n blocks ──┘         S = blocks last used after u, a sum in a Fenwick tree

So the work is per segment and not per block: a run adds one to a range of distances, which is two entries of a list of
differences.

The sampled curve replays whole threads, chosen by a hash of their name, and scales distances by the rate (the idea of
SHARDS: Waldspurger, Park, Garthwaite and Ahmad, 2015; with threads for blocks, since the blocks of a conversation live
and die together).
"""

from __future__ import annotations

import hashlib
import time
from array import array
from dataclasses import replace
from itertools import accumulate

from ..tokens import common_prefix, pack
from ..traces.trace import Trace, TraceRequest
from .blocks import BlockView, describe_counted, first_counted
from .records import CurveError, MissRatioCurve
from .segments import SegmentTree


class _Fenwick:
    """Counts by place, and their sums over the first places, each in O(log n). (Fenwick, 1994.)"""

    def __init__(self, num_places: int) -> None:
        self._sums = [0] * (num_places + 1)

    def add(self, place: int, count: int) -> None:
        """Adds to the count at a place, from 0."""
        place += 1
        while place < len(self._sums):
            self._sums[place] += count
            place += place & -place

    def up_to(self, place: int) -> int:
        """The sum of the counts at the places 0 to `place`."""
        place += 1
        total = 0
        while place:
            total += self._sums[place]
            place &= place - 1
        return total


def exact_curve(
    trace: Trace, *, block_size: int | None = None, recompute_last: bool | None = None, warmup: float = 0.0
) -> MissRatioCurve:
    """LRU at every capacity at once; equals `replay(trace, num_blocks=C)` for each C.

    Options as in `replay`. O(segment uses * log requests + blocks), which does not depend on how long the paths are.
    Raises ValueError for a trace without prefix identity.
    """
    if not trace.has_prefixes:
        raise ValueError(f"{trace.name} has no prefix identity, so it has no miss-ratio curve")
    started = time.perf_counter()
    view = BlockView(trace, block_size, recompute_last)
    requests = trace.requests
    first = first_counted(trace, warmup)
    tree = SegmentTree(map(view.packed_blocks, requests), view.units_per_block)
    num_blocks = tree.num_blocks
    # Differences, by distance, of how many hits have it and how many tokens those weigh.
    more_hits = [0] * (num_blocks + 2)
    more_tokens = [0] * (num_blocks + 2)
    last_uses: list[int | None] = [None] * len(tree.lengths)
    last_used = _Fenwick(len(requests))  # blocks by the request that used them last
    num_seen = 0
    for index, request in enumerate(requests):
        limit = view.hit_limit(request) // view.units_per_block
        depth = 0
        path = tree.path(index)
        for segment in path:
            last_use = last_uses[segment]
            if last_use is None:  # so are all below
                num_seen += tree.ends[tree.leaves[index]] - depth
                break
            length = tree.lengths[segment]
            if index >= first and depth < limit:
                # Segments above with the same last use stand at no place now, so they count as used later: they are.
                before = num_seen - last_used.up_to(last_use)
                num_hits = min(length, limit - depth)
                more_hits[before + 1] += 1
                more_hits[before + num_hits + 1] -= 1
                _add_tokens(more_tokens, before + 1, view, request, depth, num_hits)
            last_used.add(last_use, -length)
            depth += length
        for segment in path:
            last_uses[segment] = index
        last_used.add(index, tree.ends[tree.leaves[index]])
    counted = requests[first:]
    return MissRatioCurve(
        trace=trace.name,
        definition=_definition(view, warmup),
        block_size=view.block_size,
        requests=len(counted),
        total_blocks=sum(map(view.num_blocks, counted)),
        total_tokens=sum(request.num_prompt_tokens for request in counted),
        hits=array("Q", accumulate(accumulate(more_hits[: num_blocks + 1]))),
        hit_tokens_at=array("Q", accumulate(accumulate(more_tokens[: num_blocks + 1]))),
        seconds=time.perf_counter() - started,
    )


def _add_tokens(
    more_tokens: list[int], distance: int, view: BlockView, request: TraceRequest, depth: int, num_hits: int
) -> None:
    """Adds what blocks [depth, depth + num_hits) of the prompt weigh at the distances from `distance` on."""
    step = view.units_per_block
    first = view.hit_tokens(request, depth * step)
    # All blocks but the last of a prompt weigh the same where blocks have a size: a range. Others one by one.
    if view.block_size is not None:
        num_alike = num_hits
        if view.hit_tokens(request, (depth + num_hits) * step) - first != num_hits * view.block_size:
            num_alike -= 1
        last = first + num_alike * view.block_size
        if view.hit_tokens(request, (depth + num_alike) * step) == last:
            more_tokens[distance] += view.block_size
            more_tokens[distance + num_alike] -= view.block_size
            first, depth, distance, num_hits = last, depth + num_alike, distance + num_alike, num_hits - num_alike
    for end in range(depth + 1, depth + num_hits + 1):
        last = view.hit_tokens(request, end * step)
        more_tokens[distance] += last - first
        more_tokens[distance + 1] -= last - first
        first, distance = last, distance + 1


def sampled_curve(
    trace: Trace,
    sampling_rate: float,
    *,
    block_size: int | None = None,
    recompute_last: bool | None = None,
    warmup: float = 0.0,
) -> MissRatioCurve:
    """An estimate of `exact_curve` from a share of the threads, for traces that are too long for it.

    A thread is in the sample if the hash of its name says so, hence the same ones in each run. Requests without a
    thread are taken by the first unit that not all requests begin with: those that can share something there are taken
    together. Its hits are those of the sample; capacities are those of the whole trace.
    Raises ValueError for a rate outside (0, 1], or so low that no request is left.
    """
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate is {sampling_rate}; allowed: more than 0, at most 1")
    started = time.perf_counter()
    threshold = sampling_rate * 2.0**64
    num_common = _num_common_units(trace.requests)
    is_sampled: dict[str, bool] = {}
    sample = []
    for request in trace.requests:
        name = _thread_name(request, num_common)
        if name not in is_sampled:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
            is_sampled[name] = int.from_bytes(digest[:8], "big") < threshold
        if is_sampled[name]:
            sample.append(request)
    if not sample:
        raise ValueError(f"sampling_rate is {sampling_rate}, and no request of {trace.name} is in the sample")
    curve = exact_curve(
        replace(trace, requests=sample), block_size=block_size, recompute_last=recompute_last, warmup=warmup
    )
    num_threads = sum(is_sampled.values())
    return replace(
        curve,
        definition=f"{curve.definition}; a sample of {num_threads} of {len(is_sampled)} threads, distances scaled up",
        sampling_rate=sampling_rate,
        seconds=time.perf_counter() - started,
    )


def _thread_name(request: TraceRequest, num_common: int) -> str:
    """What is sampled as one."""
    if request.thread is not None:
        return f"thread {request.thread}"
    if request.units is None or len(request.units) <= num_common:
        return "nothing of its own"
    return f"unit {request.units[num_common]}"


def _num_common_units(requests: list[TraceRequest]) -> int:
    """Leading units that all requests share: as many as the first and the last of them in sorted order do."""
    packed = [pack(request.units) for request in requests if request.units]
    if not packed:
        return 0
    last = max(packed)
    return common_prefix(min(packed), last, 0, len(last))


def curve_error(sampled: MissRatioCurve, exact: MissRatioCurve, most: int = 50) -> CurveError:
    """How far a sampled curve is from the exact one of the same trace, at up to `most` capacities.

    Raises ValueError where one of them counts no blocks.
    """
    errors = []
    for num_blocks in exact.capacities(most):
        estimate, truth = sampled.miss_ratio(num_blocks), exact.miss_ratio(num_blocks)
        if estimate is None or truth is None:
            raise ValueError(f"a curve of {exact.trace} counts no blocks, so it has no miss ratio to compare")
        errors.append((abs(estimate - truth), num_blocks))
    largest, largest_at = max(errors)
    return CurveError(
        definition=f"difference in miss ratio at {len(errors)} capacities in equal ratios; {sampled.definition}",
        sampling_rate=sampled.sampling_rate,
        num_points=len(errors),
        mean=sum(error for error, _ in errors) / len(errors),
        largest=largest,
        largest_at=largest_at,
    )


def _definition(view: BlockView, warmup: float) -> str:
    """How the numbers of a curve are taken, in a line."""
    return (
        "1 - block hit rate of LRU at each capacity; requests in arrival order; each complete before the next; "
        f"prompt blocks only; one cache; {view.describe()}; {describe_counted(warmup)}"
    )
