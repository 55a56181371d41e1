"""The offline optimum: what no policy can beat, since it knows when each block is used next.

After each request, while over capacity, the leaf block whose next use is farthest leaves (Belady, 1966); never counts
as farthest, among equals the deepest goes first, and the path that was just used takes part. A block is used whenever
those below it are, so its next use is never later than theirs: the farthest block of all is a leaf by itself.

All blocks of a segment have the same next use, so what is cached of a segment is a start of it, trimmed from its end.
"""

from __future__ import annotations

import heapq
import time
from array import array

from ..arguments import at_least
from ..traces.trace import Trace
from .blocks import BlockView, describe_counted, first_counted
from .records import Replay
from .replay import Progress, report, without_prefixes
from .segments import SegmentTree


def optimum(
    trace: Trace,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    recompute_last: bool | None = None,
    warmup: float = 0.0,
    progress: Progress | None = None,
) -> Replay:
    """What the best possible choice of victims would have hit, as a `Replay` with the policy "optimal".

    Options as in `replay`. O(segment uses * log segment uses), however many blocks a segment has.
    """
    if num_blocks is not None:
        at_least(0, num_blocks, "num_blocks")
    started = time.perf_counter()
    view = BlockView(trace, block_size, recompute_last)
    requests = trace.requests
    first = first_counted(trace, warmup)
    definition = _definition(view, warmup)
    if not trace.has_prefixes:
        return without_prefixes(trace, definition, "radix", "optimal", num_blocks, first)
    tree = SegmentTree(map(view.packed_blocks, requests), view.units_per_block)
    lengths, ends = tree.lengths, tree.ends
    next_uses = _next_uses(tree)
    capacity = tree.num_blocks if num_blocks is None else num_blocks
    num_kept = array("I", bytes(4 * len(lengths)))  # leading blocks of a segment that are cached
    # (-next use, -end of what is kept, segment): the first is the victim. An entry whose next use has come is out of
    # date, but nearer than all that are not, so it is never the first while anything is cached.
    farthest: list[tuple[int, int, int]] = []
    num_cached = num_evicted = 0
    hit_blocks, hit_tokens = array("Q"), array("Q")
    place = 0
    for index, request in enumerate(requests):
        # 1. The hit: whole segments, and the start of the one after them. Below that nothing is kept.
        path = tree.path(index)
        num_hits = min(sum(map(num_kept.__getitem__, path)), view.hit_limit(request) // view.units_per_block)
        hit_blocks.append(num_hits)
        hit_tokens.append(view.hit_tokens(request, num_hits * view.units_per_block))
        # 2. All of the path is cached.
        for segment in path:
            num_cached += lengths[segment] - num_kept[segment]
            num_kept[segment] = lengths[segment]
            heapq.heappush(farthest, (-next_uses[place], -ends[segment], segment))
            place += 1
        # 3. What is over capacity leaves. A segment is trimmed by all that is needed at once: those with the same next
        #    use are one path, whose deepest segment comes first, or are never used again, and then the order is of no
        #    consequence.
        while num_cached > capacity:
            next_use, _, segment = farthest[0]
            count = min(num_cached - capacity, num_kept[segment])
            num_kept[segment] -= count
            num_cached -= count
            num_evicted += count
            if num_kept[segment]:
                end = ends[segment] - lengths[segment] + num_kept[segment]
                heapq.heapreplace(farthest, (next_use, -end, segment))
            else:
                heapq.heappop(farthest)
        report(progress, index, len(requests))
    report(progress, len(requests), len(requests))
    counted = requests[first:]
    return Replay(
        trace=trace.name,
        definition=definition,
        allocator="radix",
        policy="optimal",
        num_blocks=num_blocks,
        block_size=view.block_size,
        first_counted=first,
        requests=len(counted),
        total_blocks=sum(map(view.num_blocks, counted)),
        hit_blocks=sum(hit_blocks[first:]),
        total_tokens=sum(request.num_prompt_tokens for request in counted),
        hit_tokens=sum(hit_tokens[first:]),
        evicted_blocks=num_evicted,
        seconds=time.perf_counter() - started,
        per_request_hit_blocks=hit_blocks,
        per_request_hit_tokens=hit_tokens,
    )


def _next_uses(tree: SegmentTree) -> array[int]:
    """For each segment use, request by request and from the first segment on: the request that uses it next.

    The number of requests stands for never. O(segment uses).
    """
    num_requests = len(tree.leaves)
    coming = [num_requests] * len(tree.lengths)
    reversed_uses = array("I")
    for index in range(num_requests - 1, -1, -1):
        for segment in reversed(tree.path(index)):
            reversed_uses.append(coming[segment])
            coming[segment] = index
    reversed_uses.reverse()
    return reversed_uses


def _definition(view: BlockView, warmup: float) -> str:
    """How the numbers of the optimum are taken, in a line."""
    return (
        "requests in arrival order; each complete before the next; prompt blocks only; one cache; hit = longest run of "
        f"leading cached blocks; {view.describe()}; while over capacity, the leaf block whose next use is farthest "
        f"leaves, never = infinity, deepest first, the current path included; {describe_counted(warmup)}"
    )
