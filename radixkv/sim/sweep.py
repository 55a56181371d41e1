"""Questions that take many replays: is it the policy or the capacity, which block size, whose hits are they?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..eviction import POLICIES
from ..traces.trace import Trace
from .blocks import BlockView
from .optimum import optimum
from .records import Replay, rate
from .replay import Progress, replay
from .segments import SegmentTree


@dataclass(frozen=True)
class PolicyPoint:
    """One policy at one capacity, beside what no policy can beat.

    regret   the optimum's block hit rate less the policy's: what a better choice of victims could still gain. What
             lies above the optimum, up to the hit rate of an infinite cache, only more capacity can gain.
    """

    replay: Replay
    optimum: Replay
    infinite: Replay

    @property
    def regret(self) -> float | None:
        """Share of blocks that the optimum hits and the policy does not."""
        best, mine = self.optimum.block_hit_rate, self.replay.block_hit_rate
        return None if best is None or mine is None else best - mine

    @property
    def capacity_gap(self) -> float | None:
        """Share of blocks that an infinite cache hits and the optimum at this capacity does not."""
        best, most = self.optimum.block_hit_rate, self.infinite.block_hit_rate
        return None if best is None or most is None else most - best

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON: the replay's, with `regret` and `capacity_gap`."""
        return {**self.replay.as_dict(), "regret": self.regret, "capacity_gap": self.capacity_gap}


def capacities_of(trace: Trace, num_points: int = 6, block_size: int | None = None) -> list[int]:
    """Capacities worth a look: from about a hundredth of the trace's distinct blocks to all, by equal factors."""
    view = BlockView(trace, block_size)
    distinct = SegmentTree(map(view.packed_blocks, trace.requests), view.units_per_block).num_blocks
    steps = [distinct * 100 ** (step / (num_points - 1) - 1) for step in range(num_points)] if num_points > 1 else []
    return sorted({max(1, round(step)) for step in steps} or {max(1, distinct)})


def capacity_sweep(
    trace: Trace,
    capacities: Sequence[int] | None = None,
    policies: Iterable[str] = tuple(POLICIES),
    *,
    block_size: int | None = None,
    recompute_last: bool | None = None,
    warmup: float = 0.0,
    progress: Progress | None = None,
) -> list[PolicyPoint]:
    """Each policy at each capacity, with its regret to the offline optimum ("optimal", which stands in the list too).

    capacities: in blocks; None = `capacities_of(trace)`. Options as in `replay`. A progress call counts replays.
    """
    capacities = capacities_of(trace, block_size=block_size) if capacities is None else list(capacities)
    policies = list(policies)
    options: dict[str, Any] = {"block_size": block_size, "recompute_last": recompute_last, "warmup": warmup}
    total, done = 1 + len(capacities) * (1 + len(policies)), 0

    def one_more(result: Replay) -> Replay:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)
        return result

    infinite = one_more(replay(trace, **options))
    points = []
    for num_blocks in capacities:
        best = one_more(optimum(trace, num_blocks=num_blocks, **options))
        for policy in policies:
            result = one_more(replay(trace, policy=policy, num_blocks=num_blocks, **options))
            points.append(PolicyPoint(result, best, infinite))
        points.append(PolicyPoint(best, best, infinite))
    return points


@dataclass(frozen=True)
class BlockSizePoint:
    """One block size: what is wasted in last blocks, how long tables are, what is hit.

    fragmentation    token slots of the requests' blocks in which no token is, prompt and output together
    table_entries    mean entries of a block table; 4 bytes each
    token_hit_rate   whole blocks only; None where the trace cannot tell
    exact_hit_rate   with hits that go on into a block, as `PrefixCache` gives them
    """

    definition: str
    block_size: int
    num_blocks: int | None
    fragmentation: float | None
    table_entries: float | None
    token_hit_rate: float | None
    exact_hit_rate: float | None

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def block_size_sweep(
    trace: Trace,
    block_sizes: Iterable[int],
    *,
    num_tokens: int | None = None,
    policy: str = "lru",
    cache_outputs: bool = False,
    progress: Progress | None = None,
) -> list[BlockSizePoint]:
    """Each block size in a cache of `num_tokens` token slots (None: infinite).

    Raises ValueError for a size that is no multiple of the trace's own block. Where the trace names blocks of several
    tokens, a hit can be exact to such a block only.
    """
    block_sizes = list(block_sizes)
    points = []
    for index, size in enumerate(block_sizes):
        num_blocks = None if num_tokens is None else num_tokens // size
        totals = [request.num_prompt_tokens + request.num_output_tokens for request in trace.requests]
        num_used = sum(totals)
        num_entries = sum(-(-total // size) for total in totals)
        hit_rates: list[float | None] = [None, None]
        definition = f"fragmentation and tables of prompt and output in blocks of {size} tokens"
        if trace.has_prefixes:
            whole, exact = (
                replay(
                    trace,
                    policy=policy,
                    num_blocks=num_blocks,
                    block_size=size,
                    token_exact=token_exact,
                    cache_outputs=cache_outputs,
                )
                for token_exact in (False, True)
            )
            hit_rates = [whole.token_hit_rate, exact.token_hit_rate]
            definition = f"{definition}; {whole.definition}"
        points.append(
            BlockSizePoint(
                definition=definition,
                block_size=size,
                num_blocks=num_blocks,
                fragmentation=rate(num_entries * size - num_used, num_entries * size),
                table_entries=rate(num_entries, len(totals)),
                token_hit_rate=hit_rates[0],
                exact_hit_rate=hit_rates[1],
            )
        )
        if progress is not None:
            progress(index + 1, len(block_sizes))
    return points


@dataclass(frozen=True)
class HitSources:
    """Where the hits of an infinite cache come from.

    within_tokens   a request of the same thread had used the block before
    across_tokens   only requests of other threads had
    """

    definition: str
    requests: int
    total_tokens: int
    within_tokens: int | None
    across_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        within, across = (rate(part, self.total_tokens) for part in (self.within_tokens, self.across_tokens))
        return {**fields, "within_rate": within, "across_rate": across}


def hit_sources(trace: Trace, *, block_size: int | None = None, warmup: float = 0.0) -> HitSources:
    """Hits within a conversation against hits across conversations: what a cache per user would keep, and what not.

    None in the sums where the trace has no threads or no prefix identity. A request without a thread, in a trace that
    has threads, counts as alone in one.
    """
    result = replay(trace, block_size=block_size, warmup=warmup)
    definition = f"{result.definition}; within: used before by the same thread"
    has_threads = any(request.thread is not None for request in trace.requests)
    if not trace.has_prefixes or not has_threads or result.per_request_hit_tokens is None:
        return HitSources(definition, result.requests, result.total_tokens, None, None)
    view = BlockView(trace, block_size)
    tree = SegmentTree(map(view.packed_blocks, trace.requests), view.units_per_block)
    used: set[tuple[str, int]] = set()
    within = 0
    for index, request in enumerate(trace.requests):
        if request.thread is None:
            continue
        num_blocks = 0
        is_known = True
        for segment in tree.path(index):
            is_known = is_known and (request.thread, segment) in used
            num_blocks += tree.lengths[segment] if is_known else 0
            used.add((request.thread, segment))
        if index >= result.first_counted:
            num_units = min(num_blocks * view.units_per_block, view.hit_limit(request))
            num_units -= num_units % view.units_per_block
            within += view.hit_tokens(request, num_units)
    hit_tokens = sum(result.per_request_hit_tokens[result.first_counted :])
    return HitSources(definition, result.requests, result.total_tokens, within, hit_tokens - within)
