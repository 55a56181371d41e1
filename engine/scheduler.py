"""Which requests run in a step. Imports no torch: a simulator can drive it with a time model.

First come, first served. A request is admitted when the pool can hold all that it and the running ones may still grow
to, so that a running request never lacks a block. That is stricter than need be, and replaceable: `EngineCore` knows
only `add`, `schedule`, `finish` and `has_requests`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from radixkv import PrefixCache

from .config import EngineConfig
from .request import Request


@dataclass(frozen=True)
class Scheduled:
    """What a request computes in this step: tokens [start, start + len(token_ids))."""

    request: Request
    start: int
    token_ids: list[int]


class Scheduler:
    """Continuous batching over one pool: every running request decodes, and waiting ones are prefilled beside them."""

    def __init__(self, config: EngineConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_requests(self) -> bool:
        """Something waits or runs."""
        return bool(self.waiting or self.running)

    def requests(self) -> Iterator[Request]:
        """All requests that have not finished, running ones first."""
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError at once if it can never fit the pool."""
        needed = self._max_blocks(request)
        if needed > self.cache.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} may need {needed} blocks of {self.cache.block_size} tokens for its "
                f"{len(request.prompt)} prompt tokens and up to {request.max_total_tokens - len(request.prompt)} "
                f"output tokens; the pool has {self.cache.num_blocks}"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """The work of one step: a token for each running request, then prompts of waiting ones while budget lasts.

        Slots for all of it are taken here. Empty only if nothing waits or runs.
        """
        scheduled = []
        for request in self.running:
            token_id = request.output_token_ids[-1]  # sampled in the last step: it has no KV yet
            self.cache.append_token(request.request_id, token_id)
            scheduled.append(Scheduled(request, request.num_computed_tokens, [token_id]))
        budget = self.config.max_num_batched_tokens - len(scheduled)
        while self.waiting and len(self.running) < self.config.max_num_seqs and self._has_room(self.waiting[0]):
            request = self.waiting[0]
            num_new = len(request.prompt) - min(
                self.cache.lookup_prefix(request.prompt).num_tokens, len(request.prompt) - 1
            )
            if num_new > budget and scheduled:
                break
            allocation = self.cache.allocate(request.request_id, request.prompt)
            self.waiting.popleft()
            request.start(allocation.num_cached_tokens)
            self.running.append(request)
            token_ids = request.prompt_token_ids[allocation.num_cached_tokens :]
            scheduled.append(Scheduled(request, allocation.num_cached_tokens, token_ids))
            budget -= len(token_ids)
        return scheduled

    def finish(self, request: Request) -> None:
        """Forgets a request, wherever it stands, and gives its blocks back.

        Looks for itself instead of trusting the request's state: an interrupt may have come between two lines.
        """
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.request_id in self.cache.request_ids:
            self.cache.free(request.request_id)

    def _max_blocks(self, request: Request) -> int:
        """Blocks that the request may grow to. The last token it samples never needs a slot."""
        return -(-(request.max_total_tokens - 1) // self.cache.block_size)

    def _has_room(self, request: Request) -> bool:
        """Whether the request can grow to its full length beside the running ones.

        What it hits is counted as needed and, if evictable, as room too, which cancels out. With nothing running all
        blocks are free or evictable, so a request that `add` took is always admitted in the end.
        """
        still_to_take = sum(
            self._max_blocks(other) - len(self.cache.block_table(other.request_id)) for other in self.running
        )
        room = self.cache.num_free_blocks + self.cache.num_evictable_blocks
        return self._max_blocks(request) + still_to_take <= room
