"""Which tokens run in a step: continuous batching under one token budget. Imports no torch, drives any `CacheManager`.

A step takes, in this order and while `max_num_batched_tokens` lasts:

    1. a token for each request that decodes
    2. the next chunk of each prefill that is under way
    3. waiting requests, prefilled in chunks too

Room. A request is admitted when the pool has all blocks for its tokens so far, beside what it hits itself, and some to
spare for growth; so a prefill never lacks a block half-way. Only a decode can: then a victim (`preemption.py`) gives up
its blocks and waits again, in front of those that came later. What it had committed stays cached as long as there is
room. No ping-pong: nobody is admitted in a step that preempted, a request that was preempted k times returns only if
each running request can grow by 2**k blocks (or to its end), and who has been preempted a few times is spared then.
Alone, a request always has room: its length is limited to the pool's when it is added.

Order. "fcfs": by priority, then by arrival; whoever is first is not passed for want of room. "longest-prefix": who hits
most is admitted first, among the first `ADMISSION_WINDOW` waiting. Either way those who were preempted come before new
ones of their priority, and nobody starves: a request that `max_overtakes` later ones have passed goes first from then
on, and nobody passes it.

Sharing in flight. A request whose prompt shares at least a block more with a prefill under way than is cached yet lets
that finish first, and then hits it: identical prompts that arrive together are computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sortedcontainers import SortedKeyList

from radixkv import OutOfBlocks
from radixkv.baselines import CacheManager

from .config import EngineConfig
from .logprobs import Logprob, Sampled
from .metrics import EngineCounters
from .preemption import choose_victim
from .request import Request, RequestState

# Waiting requests looked at in one step. Each may cost a walk of the tree (10 to 30 µs), so that 128 of them stay small
# beside a forward pass.
ADMISSION_WINDOW = 128

# Tokens a step of a request that wants log-probabilities of its prompt. Their logits exist at once: 512 rows of 150,000
# float32 are 300 MB.
PROMPT_LOGPROBS_CHUNK = 512


@dataclass(frozen=True)
class Scheduled:
    """What a request computes in this step: its tokens [start, start + len(token_ids))."""

    request: Request
    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        """The number of its tokens whose KV exists after the step."""
        return self.start + len(self.token_ids)

    @property
    def is_last(self) -> bool:
        """All its tokens are computed then, so that the next one can be sampled."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True)
class Computed:
    """What a step gave for one scheduled request.

    sampled           a token for the request and for each of its forks; none if its tokens are not all computed yet
    candidates        instead of these, for a request that wants them: its most likely next tokens
    prompt_logprobs   of the prompt tokens whose logits were computed, those after the ones that the request has
    """

    sampled: Sequence[Sampled] = ()
    candidates: list[tuple[int, float]] = field(default_factory=list)
    prompt_logprobs: Sequence[dict[int, Logprob]] = ()


class SwapSpace(Protocol):
    """Where preempted requests keep their KV (`engine.swap.HostSwap`). Room is counted by the scheduler."""

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copies these blocks out, in this order."""

    def restore(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        """Copies what was saved from place `first` on back, to these blocks."""

    def drop(self, request_id: str) -> None:
        """Forgets what was saved."""


class Scheduler:
    """Admits, schedules, preempts. Its callers compute what `schedule` says and report it with `computed`."""

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheManager,
        swap: SwapSpace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.cache = cache
        self.swap = swap
        self.clock = clock
        self.counters = EngineCounters()
        self.running: list[Request] = []  # in order of admission
        self.waiting: SortedKeyList[Request, tuple[int, int]] = SortedKeyList(key=lambda r: (-r.priority, r.number))
        self._aged: list[Request] = []  # the waiting ones that nobody may pass any more
        self._swapped: dict[str, int] = {}  # request id -> tokens saved
        self._num_swapped_blocks = 0
        self._num_added = 0

    @property
    def has_requests(self) -> bool:
        """Something waits or runs."""
        return bool(self.waiting or self.running)

    def requests(self) -> Iterator[Request]:
        """All requests that have not finished, running ones first."""
        yield from self.running
        yield from self.waiting

    # ---------------------------------------------------------------- coming and going

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError at once if it can never run.

        A request whose prompt fits is taken; if it could outgrow the pool, it ends by "length" where the pool does: the
        last token it samples needs no slot.
        """
        needed = self._blocks_for(len(request.prompt))
        if needed > self.cache.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} needs {needed} blocks of {self.cache.block_size} tokens for its "
                f"{len(request.prompt)} prompt tokens; the pool has {self.cache.num_blocks}"
            )
        if request.num_seqs > self.config.max_running:
            raise ValueError(
                f"request {request.request_id!r} has n = {request.num_seqs}; allowed: at most "
                f"{self.config.max_running}, which max_num_seqs and max_num_batched_tokens let run at once"
            )
        for sequence in request.sequences():
            sequence.max_total_tokens = min(
                sequence.max_total_tokens, self.cache.num_blocks * self.cache.block_size + 1
            )
        self._num_added += 1
        request.number = self._num_added
        self.waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """A new request that continues from one whose tokens are computed, and shares all its blocks.

        If the parent was preempted since, the child waits for room, and then hits what is still cached.
        """
        child.number, child.scheduled_s = parent.number, parent.scheduled_s
        child.num_cached_tokens = parent.num_cached_tokens
        child.prompt_logprobs = parent.prompt_logprobs
        parent.num_reserved = max(1, parent.num_reserved - 1)
        if parent.state is RequestState.RUNNING:
            self.cache.fork(parent.request_id, child.request_id)
            child.start(parent.num_computed_tokens, self.clock())
            self.running.insert(self.running.index(parent) + 1, child)
        else:
            self.waiting.add(child)

    def resume(self, request: Request) -> None:
        """A paused request got a token. If it was preempted meanwhile, it waits for room again."""
        if request.state is RequestState.PREEMPTED and request not in self.waiting:
            self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """Forgets a request, wherever it stands, and gives its blocks back.

        Looks for itself instead of trusting the request's state: an interrupt may have come between two lines.
        """
        if request in self.running:
            self.running.remove(request)
        self.waiting.discard(request)
        if request in self._aged:
            self._aged.remove(request)
        self._drop_swapped(request)
        if request.request_id in self.cache.request_ids:
            self.cache.free(request.request_id)

    # ---------------------------------------------------------------- a step

    def schedule(self) -> list[Scheduled]:
        """The work of one step. Slots for all of it are taken here.

        Empty if nothing is to be computed: nobody waits, and whoever runs is paused. Raises OutOfBlocks if nobody runs
        and yet there is no room for the first in line: someone else holds blocks of this pool.
        """
        step: dict[Request, Scheduled] = {}
        has_preempted = False
        # 1. Decodes. Every slot is taken before the next one is asked for, so victims need not be guessed in advance.
        #    Beams may be more than may run at once, where those dropped made room for others: the last ones wait.
        decoding = [request for request in self.running if request.num_pending_tokens == 1]
        for request in decoding:
            if len(step) == self.config.max_running:
                break
            while request.state is RequestState.RUNNING and not self._take_slot(request):
                victim = choose_victim(self.config.victim, self.running)
                self._preempt(victim)
                step.pop(victim, None)
                has_preempted = True
            if request.state is RequestState.RUNNING:
                step[request] = self._chunk(request, 1)
        budget = self.config.max_num_batched_tokens - len(step)
        # 2. Prefills under way.
        for request in self.running:
            if request.num_pending_tokens > 1 and budget > 0 and len(step) < self.config.max_running:
                step[request] = self._chunk(request, budget)
                budget -= len(step[request].token_ids)
        # 3. Waiting requests.
        if not has_preempted:
            self._admit(step, budget)
            while not step and self.waiting:  # all who run are paused, and hold the room of those whom they wait for
                self._preempt(choose_victim(self.config.victim, self.running))
                self._admit(step, budget)
        return list(step.values())

    def computed(self, work: Scheduled) -> None:
        """The KV of a request's scheduled tokens is written: from now on others can hit it."""
        request = work.request
        request.num_computed_tokens = work.end
        if self.config.enable_prefix_caching and request.store:
            self.cache.commit(request.request_id, work.end)

    def _chunk(self, request: Request, budget: int) -> Scheduled:
        """The request's next tokens, as many as the budget has."""
        if request.max_cached_tokens is not None:
            budget = min(budget, PROMPT_LOGPROBS_CHUNK)
        start = request.num_computed_tokens
        return Scheduled(request, start, request.token_ids(start, min(request.num_tokens, start + budget)))

    def _take_slot(self, request: Request) -> bool:
        """Makes sure that the request's last token has a slot; False if the pool has no block for it."""
        if self.cache.num_tokens(request.request_id) < request.num_tokens:
            try:
                self.cache.append_token(request.request_id, request.output_token_ids[-1])
            except OutOfBlocks:
                return False
        return True

    # ---------------------------------------------------------------- admission

    def _admit(self, step: dict[Request, Scheduled], budget: int) -> None:
        """Starts waiting requests, in the order of the policy, while budget, sequences and room last."""
        free_seqs = self.config.max_running - sum(request.num_seqs for request in self.running)
        for request in self._candidates() if budget > 0 and free_seqs > 0 else ():
            if budget < 1 or request.num_seqs > free_seqs:
                break
            if any(aged.number < request.number for aged in self._aged):  # it may have aged in this very loop
                break
            if self._waits_for_prefill(request):
                if request in self._aged:
                    break
                continue
            if not self._start(request):
                break
            step[request] = self._chunk(request, budget)
            budget -= len(step[request].token_ids)
            free_seqs -= request.num_seqs
        if not self.running and self.waiting:
            self._raise_stuck()

    def _candidates(self) -> list[Request]:
        """The next waiting requests, best first."""
        window = list(self.waiting[:ADMISSION_WINDOW])
        if self.config.order == "longest-prefix":
            hits = {request: self.cache.lookup_prefix(request.key).num_tokens for request in window}
            window.sort(key=lambda r: (r.scheduled_s is None, -r.priority, -hits[r], r.number))
        if self._aged:
            # The eldest first, or one that may not be passed would be passed by another.
            aged = sorted(self._aged, key=lambda r: r.number)
            window = aged + [request for request in window if request not in self._aged]
        return window

    def _waits_for_prefill(self, request: Request) -> bool:
        """A prefill under way will soon have cached a block or more of this prompt that is not cached yet."""
        if not self.config.enable_prefix_caching or request.max_cached_tokens is not None:
            return False
        most = len(request.key) - 1  # one token is computed in any case
        for other in self.running:
            if other.num_pending_tokens <= 1 or not other.store:
                continue
            shared = min(request.key.common_prefix(other.key), most) // self.cache.block_size * self.cache.block_size
            if shared > other.num_computed_tokens and shared > self.cache.lookup_prefix(request.key).num_tokens:
                return True
        return False

    def _start(self, request: Request) -> bool:
        """Takes the blocks of a waiting request and lets it run; False, with nothing changed, if there is no room."""
        try:
            allocation = self.cache.allocate(
                request.request_id,
                request.key,
                priority=request.priority,
                max_cached_tokens=request.max_cached_tokens,
                spare_blocks=self._growth(request) if self.running else 0,
                is_resumed=request.scheduled_s is not None,
            )
        except OutOfBlocks:
            return False
        self.waiting.remove(request)
        if request in self._aged:
            self._aged.remove(request)
        for other in self.waiting:
            if other.number < request.number:
                other.num_overtaken += 1
                if other.num_overtaken == self.config.max_overtakes:
                    self._aged.append(other)
        num_lost = request.num_recomputed_tokens
        request.start(self._restore(request, allocation.num_cached_tokens), self.clock())
        self.counters.recomputed_tokens += request.num_recomputed_tokens - num_lost
        self.running.append(request)
        return True

    def _growth(self, request: Request) -> int:
        """Blocks that must be left over for growth if this request is admitted: some for each that runs then."""
        most = 2**request.num_preemptions
        return sum(min(most * r.num_seqs, self._blocks_to_grow(r)) for r in (request, *self.running))

    def _blocks_to_grow(self, request: Request) -> int:
        """Blocks that a request and its forks may still take. The last token it samples never needs a slot."""
        at_end = self._blocks_for(request.max_total_tokens - 1)
        return request.num_seqs * (at_end - self._blocks_for(request.num_tokens)) + len(request.forks)

    def _raise_stuck(self) -> None:
        """With nothing running, the first in line has room unless blocks are held by others than this scheduler."""
        first = self._candidates()[0]
        needed = self._blocks_for(first.num_tokens)
        raise OutOfBlocks(needed, self.cache.num_free_blocks, self.cache.num_evictable_blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    # ---------------------------------------------------------------- preemption

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks, after copying its KV out if that is wanted and there is room for it."""
        num_blocks = self._blocks_for(request.num_computed_tokens)
        is_saved = self.swap is not None and self._num_swapped_blocks + num_blocks <= self.config.num_swap_blocks
        if is_saved and num_blocks:
            assert self.swap is not None
            self.swap.save(request.request_id, self.cache.block_table(request.request_id)[:num_blocks])
            self._swapped[request.request_id] = request.num_computed_tokens
            self._num_swapped_blocks += num_blocks
            self.counters.swapped_out_blocks += num_blocks
        self.running.remove(request)
        self.cache.free(request.request_id)
        self.counters.preemptions["swap" if request.request_id in self._swapped else "recompute"] += 1
        is_paused = request.num_pending_tokens == 0
        request.preempt()
        request.num_overtaken = 0
        if not is_paused:
            self.waiting.add(request)

    def _restore(self, request: Request, num_cached_tokens: int) -> int:
        """Copies back what the cache has lost of a request's saved KV; the number of tokens whose KV is in place."""
        num_saved = self._swapped.get(request.request_id, 0)
        if num_saved > num_cached_tokens:
            assert self.swap is not None
            # The block in which the hit ends is the request's own, like all behind it: it can be written as a whole.
            first = num_cached_tokens // self.cache.block_size
            block_ids = self.cache.block_table(request.request_id)[first : self._blocks_for(num_saved)]
            self.swap.restore(request.request_id, first, block_ids)
            self.counters.swapped_in_blocks += len(block_ids)
            if self.config.enable_prefix_caching and request.store:
                self.cache.commit(request.request_id, num_saved)
        self._drop_swapped(request)
        return max(num_saved, num_cached_tokens)

    def _drop_swapped(self, request: Request) -> None:
        num_saved = self._swapped.pop(request.request_id, None)
        if num_saved is not None:
            assert self.swap is not None
            self._num_swapped_blocks -= self._blocks_for(num_saved)
            self.swap.drop(request.request_id)
