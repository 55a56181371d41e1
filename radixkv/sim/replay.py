"""Replays a trace against the caches that the engine uses, through their public calls.

How one request drives the cache:

    allocate   path + one token that no request has, so that a path can be hit as a whole
    commit     the path
    free       and then what is over capacity leaves: evict(cached - num_blocks)

The pool is larger than the capacity by the longest path, so all of a path is inserted before anything leaves, and the
path itself takes part in the choice. Where a trace names hash blocks, the cache runs with one unit (a block's dense id)
per block; traces of tokens run with real tokens. A path is one `memcmp` an edge: no block is looked at in Python here.

With an output that is cached too, the request goes on from its full prompt units. A prompt's partial last unit has an
identity that is not the one which the output fills up, so from there on the path has two ends:

    full units ─┬─ partial unit      the prompt as it was asked, findable by an equal prompt
                └─ output units      what the next turn finds
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..arguments import at_least
from ..baselines import CacheManager, FlatHashCache
from ..cache import PrefixCache
from ..eviction import EvictionPolicy
from ..node import RadixNode
from ..tokens import MAX_TOKEN_ID, TokenKey, pack, pack_one
from ..traces.trace import Trace, TraceRequest
from .blocks import NO_UNITS, BlockView, describe_counted, first_counted, known_outputs, num_full_units
from .records import Replay

Policy = str | EvictionPolicy | Callable[[RadixNode], Any]
Visible = Literal["arrival", "prefill", "finish"]
Progress = Callable[[int, int], None]
"""Told how many requests of how many are done."""

# It is allocated and never committed, so it may even be equal to a real token.
_ONE_MORE = pack_one(MAX_TOKEN_ID)
_REPORT_EVERY = 256


@dataclass(frozen=True)
class ServiceTimes:
    """How long a request takes once it has arrived, without queueing: its prefill, then a step per output token.

    prefill_tokens_per_s   of the prompt tokens that were no hit
    tpot_s                 time per output token; 0.05 s as for memory over time
    """

    prefill_tokens_per_s: float = 10_000.0
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill_tokens_per_s is {self.prefill_tokens_per_s}; allowed: more than 0")
        if not self.tpot_s >= 0:
            raise ValueError(f"tpot_s is {self.tpot_s}; allowed: 0 and more")

    def prefill_end(self, request: TraceRequest, hit_tokens: int) -> float:
        """When the prompt's keys and values exist, in s from the start of the trace."""
        return request.arrival_s + (request.num_prompt_tokens - hit_tokens) / self.prefill_tokens_per_s

    def finish(self, request: TraceRequest, prefill_end: float) -> float:
        """When the last output token exists."""
        return prefill_end + request.num_output_tokens * self.tpot_s

    def describe(self) -> str:
        """The model in a few words."""
        return f"prefill at {self.prefill_tokens_per_s:g} tokens/s, {self.tpot_s:g} s per output token, no queueing"


def replay(
    trace: Trace,
    *,
    allocator: Literal["radix", "hash"] = "radix",
    policy: Policy = "lru",
    num_blocks: int | None = None,
    block_size: int | None = None,
    token_exact: bool = False,
    recompute_last: bool | None = None,
    warmup: float = 0.0,
    cache_outputs: bool = False,
    visible: Visible = "finish",
    service: ServiceTimes | None = None,
    per_worker: bool = False,
    progress: Progress | None = None,
) -> Replay:
    """What of each prompt a cache would have had. Without options: requests in order, each complete before the next,
    prompt blocks only, an infinite cache.

    allocator       "radix" (`PrefixCache`) or "hash" (`FlatHashCache`, which knows LRU only)
    num_blocks      capacity in blocks, counted after each request (None: infinite)
    block_size      tokens per block, a multiple of the trace's (None: the trace's own)
    token_exact     a hit goes on into the block where the prompt leaves the cache, and partly filled last blocks stay
                    findable (radix only; to the trace's unit)
    recompute_last  hit tokens are at most length - 1 (None: for traces of tokens)
    warmup          share of the requests that are replayed but not counted: those with index < floor(N * warmup)
    cache_outputs   the output's blocks are cached too, where the trace tells them (`known_outputs`)
    visible, service   with service times, a request's blocks are found by those that come after its arrival, the end of
                    its prefill, or its last token, and what running requests hold cannot leave, whatever the capacity.
                    Without them no time passes: each request is complete before the next, so the three are the same
    per_worker      each worker that the trace names has a cache of its own, of `num_blocks`
    Raises ValueError for what is not allowed or does not go together. O(requests * nodes on a path + new blocks).
    """
    if visible not in ("arrival", "prefill", "finish"):
        raise ValueError(f"visible is {visible!r}; allowed: 'arrival', 'prefill', 'finish'")
    if num_blocks is not None:
        at_least(0, num_blocks, "num_blocks")
    view = BlockView(trace, block_size, recompute_last)
    definition = _definition(view, cache_outputs, visible, service, per_worker, token_exact, warmup)
    policy_name = policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)
    requests = trace.requests
    first = first_counted(trace, warmup)
    counted = requests[first:]
    total_tokens = sum(request.num_prompt_tokens for request in counted)
    outputs = known_outputs(trace) if cache_outputs else None
    make_cache = _cache_maker(allocator, policy, view, outputs, num_blocks, token_exact, service is not None)
    if not trace.has_prefixes:
        return without_prefixes(trace, definition, allocator, policy_name, num_blocks, first)
    started = time.perf_counter()
    caches: dict[str | None, _Driven] = {}
    hit_blocks, hit_tokens = array("Q"), array("Q")
    events: list[tuple[float, int, int, _Driven]] = []  # (time, step, index, cache): heap of what is to become visible
    for index, request in enumerate(requests):
        worker = request.worker if per_worker else None
        cache = caches.get(worker)
        if cache is None:
            cache = caches[worker] = _Driven(make_cache(), view, outputs, num_blocks, token_exact, service is not None)
        while events and events[0][0] <= request.arrival_s:
            _happen(events)
        num_hit_blocks, num_hit_tokens = cache.arrive(index)
        hit_blocks.append(num_hit_blocks)
        hit_tokens.append(num_hit_tokens)
        if service is None:
            cache.prefilled(index)
            cache.finished(index)
        else:
            prefill_end = service.prefill_end(request, num_hit_tokens)
            finish = service.finish(request, prefill_end)
            if visible == "arrival":
                cache.prefilled(index)
            else:
                heapq.heappush(events, (prefill_end if visible == "prefill" else finish, 0, index, cache))
            heapq.heappush(events, (finish, 1, index, cache))
        report(progress, index, len(requests))
    while events:
        _happen(events)
    report(progress, len(requests), len(requests))
    return Replay(
        trace=trace.name,
        definition=definition,
        allocator=allocator,
        policy=policy_name,
        num_blocks=num_blocks,
        block_size=view.block_size,
        first_counted=first,
        requests=len(counted),
        total_blocks=sum(map(view.num_blocks, counted)),
        hit_blocks=sum(hit_blocks[first:]),
        total_tokens=total_tokens,
        hit_tokens=sum(hit_tokens[first:]),
        evicted_blocks=sum(cache.manager.stats.evicted_blocks for cache in caches.values()),
        seconds=time.perf_counter() - started,
        per_request_hit_blocks=hit_blocks,
        per_request_hit_tokens=hit_tokens,
    )


def report(progress: Progress | None, num_done: int, num_requests: int) -> None:
    """Tells how far a run is, now and then and at the end."""
    if progress is not None and (num_done % _REPORT_EVERY == 0 or num_done == num_requests):
        progress(num_done, num_requests)


def without_prefixes(
    trace: Trace, definition: str, allocator: str, policy: str, num_blocks: int | None, first: int
) -> Replay:
    """The replay of a trace that has no prefix identity: its lengths, and None for all that nobody can know."""
    counted = trace.requests[first:]
    return Replay(
        trace=trace.name,
        definition=definition,
        allocator=allocator,
        policy=policy,
        num_blocks=num_blocks,
        block_size=trace.block_size,
        first_counted=first,
        requests=len(counted),
        total_blocks=None,
        hit_blocks=None,
        total_tokens=sum(request.num_prompt_tokens for request in counted),
        hit_tokens=None,
        evicted_blocks=None,
        seconds=0.0,
        per_request_hit_blocks=None,
        per_request_hit_tokens=None,
    )


def _happen(events: list[tuple[float, int, int, _Driven]]) -> None:
    """The next event: a prompt becomes visible, or a request ends."""
    _, step, index, cache = heapq.heappop(events)
    if step == 0:
        cache.prefilled(index)
    else:
        cache.finished(index)


def _cache_maker(
    allocator: str,
    policy: Policy,
    view: BlockView,
    outputs: list[array[int]] | None,
    num_blocks: int | None,
    token_exact: bool,
    is_timed: bool,
) -> Callable[[], CacheManager]:
    """What makes an empty cache in a pool that never runs out: capacity is enforced after each request, not by it."""
    totals = [
        view.num_blocks(request) + 2 + (len(outputs[index]) // view.units_per_block + 2 if outputs else 0)
        for index, request in enumerate(view.trace.requests)
    ]
    total, longest = sum(totals), max(totals, default=1)
    # Twice the capacity, so that free blocks lie in long runs and are found and taken at once.
    pool_blocks = total + longest
    if num_blocks is not None and not is_timed:
        pool_blocks = min(pool_blocks, 2 * num_blocks + 2 * longest)
    pool_blocks = max(pool_blocks, 1)
    if allocator == "radix":
        min_copy_tokens = 1 if token_exact else view.units_per_block
        return lambda: PrefixCache(
            pool_blocks, view.units_per_block, policy, keep_partial=token_exact, min_copy_tokens=min_copy_tokens
        )
    if allocator != "hash":
        raise ValueError(f"allocator is {allocator!r}; allowed: 'radix', 'hash'")
    if policy != "lru":
        raise ValueError(f"policy is {policy!r}; the allocator 'hash' knows 'lru' only")
    if token_exact:
        raise ValueError("token_exact needs the allocator 'radix'; 'hash' finds whole blocks only")
    return lambda: FlatHashCache(pool_blocks, view.units_per_block)


class _Driven:
    """One cache, and the steps of a request's life in it. Each step is a tick, so of two ends the output is younger."""

    def __init__(
        self,
        manager: CacheManager,
        view: BlockView,
        outputs: list[array[int]] | None,
        num_blocks: int | None,
        token_exact: bool,
        is_timed: bool,
    ) -> None:
        self.manager = manager
        self.view = view
        self.requests = view.trace.requests
        self.outputs = outputs
        self.num_blocks = num_blocks
        self.token_exact = token_exact
        self.is_timed = is_timed
        self._tick = 0

    def arrive(self, index: int) -> tuple[int, int]:
        """Takes blocks for the request; how many blocks and tokens of its prompt were there."""
        view, request = self.view, self.requests[index]
        units, output, num_common = self._path(index)
        limit = view.hit_limit(request)
        self._tick += 1
        if num_common < len(units):
            found = self.manager.lookup_prefix(TokenKey.from_packed(pack(units[:limit])))
            num_units = found.num_tokens if self.token_exact else len(found.run) * view.units_per_block
            self.manager.allocate(index, units[:num_common] or units, tick=self._tick)
            if not num_common:  # two paths, both inserted by this request
                self.manager.allocate(_continued(index), output, tick=self._tick)
            return len(found.run), view.hit_tokens(request, num_units)
        key = TokenKey.from_packed(pack(units) + pack(output) + _ONE_MORE)
        allocation = self.manager.allocate(index, key, tick=self._tick, max_cached_tokens=limit)
        return allocation.num_shared_blocks, view.hit_tokens(request, allocation.num_cached_tokens)

    def prefilled(self, index: int) -> None:
        """The prompt's blocks can be found from now on."""
        units, _, num_common = self._path(index)
        self._tick += 1
        if num_common == len(units):
            self.manager.commit(index, len(units), tick=self._tick)
        else:
            # Two ends: the request itself ends with the prompt's partial unit, a fork goes on with the output.
            if num_common:
                self.manager.commit(index, num_common, tick=self._tick)
                self.manager.fork(index, _continued(index))
                for unit in units[num_common:]:
                    self.manager.append_token(index, unit)
            self.manager.commit(index, len(units), tick=self._tick)
            self.manager.free(index, tick=self._tick)
        if self.is_timed:
            self._fit()

    def finished(self, index: int) -> None:
        """The output's blocks can be found too, and nothing of the request is held any longer."""
        units, output, num_common = self._path(index)
        self._tick += 1
        if num_common == len(units):
            if output:
                self.manager.commit(index, len(units) + len(output), tick=self._tick)
            self.manager.free(index, tick=self._tick)
        else:
            continued = _continued(index)
            if num_common:
                for unit in output:
                    self.manager.append_token(continued, unit)
            self.manager.commit(continued, num_common + len(output), tick=self._tick)
            self.manager.free(continued, tick=self._tick)
        self._fit()

    def _path(self, index: int) -> tuple[array[int], array[int], int]:
        """The prompt's units, the output's, and how many of the prompt's units the output goes on from.

        All of them, or the full ones only: then the path has two ends.
        """
        request = self.requests[index]
        units = self.view.units(request)
        output = NO_UNITS if self.outputs is None else self.outputs[index]
        unit_tokens = self.view.trace.block_size
        if not output or unit_tokens is None:
            return units, output, len(units)
        return units, output, num_full_units(request, unit_tokens)

    def _fit(self) -> None:
        """What is over capacity leaves, as far as no running request holds it."""
        if self.num_blocks is not None:
            over = self.manager.num_cached_blocks - self.num_blocks
            if over > 0:
                self.manager.evict(over)


def _continued(index: int) -> str:
    """The id of the fork with which a request goes on into its output."""
    return f"{index} continued"


def _definition(
    view: BlockView,
    cache_outputs: bool,
    visible: Visible,
    service: ServiceTimes | None,
    per_worker: bool,
    token_exact: bool,
    warmup: float,
) -> str:
    """How the numbers of a replay are taken, in a line."""
    parts = ["requests in arrival order"]
    if service is None:
        parts.append("each complete before the next")
    else:
        point = {"arrival": "its arrival", "prefill": "the end of its prefill", "finish": "its last token"}[visible]
        parts.append(f"blocks found from {point} on ({service.describe()})")
    parts.append("prompt and output blocks cached" if cache_outputs else "prompt blocks only")
    parts.append("a cache per worker" if per_worker else "one cache")
    parts.append("hits exact to the unit" if token_exact else "hit = longest run of leading cached blocks")
    parts.append(view.describe())
    parts.append("after each request those over capacity leave, leaf blocks in the policy's order, deepest first")
    parts.append(describe_counted(warmup))
    return "; ".join(parts)
