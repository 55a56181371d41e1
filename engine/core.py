"""The engine's loop: schedule, run, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv import DuplicateRequest, PrefixCache

from .request import Request
from .scheduler import Scheduler

if TYPE_CHECKING:  # the loop itself needs no torch
    from .runner import ModelRunner


class EngineCore:
    """Takes requests in, one step of all of them at a time, and gives those that ended back.

    Knows token ids only, no text. Whatever way a request ends, its blocks and locks are gone with it.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, cache: PrefixCache) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.cache = cache
        self._requests: dict[str, Request] = {}

    @property
    def has_requests(self) -> bool:
        """Something waits or runs."""
        return self.scheduler.has_requests

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises DuplicateRequest for an id in use, ValueError if it can never fit the pool."""
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def step(self) -> list[Request]:
        """Computes one step; the requests that ended in it.

        Blocks are committed after the pass that wrote them, so a block is findable only when its KV exists. If the
        pass fails, nothing of it is committed; `abort` the requests then.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        token_ids = self.runner.run(scheduled, self.cache)
        finished = []
        for work, token_id in zip(scheduled, token_ids, strict=True):
            request = work.request
            request.num_computed_tokens = work.start + len(work.token_ids)
            if self.scheduler.config.enable_prefix_caching:
                self.cache.commit(request.request_id, request.num_computed_tokens)
            request.add_output(token_id, self.runner.decoder.eos_token_ids)
            if request.finish_reason is not None:
                self._forget(request)
                finished.append(request)
        return finished

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any point of its life; None, and no harm, if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.finish_reason is None:  # an interrupt may have come after its last token
            request.finish("abort")
        self._forget(request)
        return request

    def _forget(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self._requests[request.request_id]
