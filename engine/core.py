"""The engine's loop: schedule, run, commit, take the sampled tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from radixkv import DuplicateRequest
from radixkv.baselines import CacheManager

from .metrics import EngineMetrics, ProgressLog
from .request import Request, RequestState
from .scheduler import Computed, Scheduled, Scheduler


class Runner(Protocol):
    """What computes a step: `engine.runner.ModelRunner`, or a model of time and tokens."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a request."""

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block, over all layers."""

    def run(self, scheduled: list[Scheduled], cache: CacheManager) -> list[Computed]:
        """Computes K and V of the scheduled tokens; one result for each request, in their order."""


class EngineCore:
    """Takes requests in, one step of all of them at a time, and gives those that ended back.

    Knows token ids only, no text. Whatever way a request ends, its blocks and locks are gone with it.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, cache: CacheManager, log_interval_s: float = 0.0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.cache = cache
        self._requests: dict[str, Request] = {}
        self._parents: dict[str, Request] = {}  # of forks that have not begun
        self._is_stepping = False
        self._leaving: list[Request] = []  # aborted in the middle of a step
        self._log = ProgressLog(log_interval_s)

    @property
    def has_requests(self) -> bool:
        """Something is to be computed: a request waits or runs."""
        return self.scheduler.has_requests

    @property
    def num_requests(self) -> int:
        """Sequences that have not finished, forks that have not begun included."""
        return len(self._requests)

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises DuplicateRequest for an id in use, ValueError if it can never fit the pool."""
        for sequence in request.sequences():
            if sequence.request_id in self._requests:
                raise DuplicateRequest(sequence.request_id)
        self.scheduler.add(request)
        self._requests.update((sequence.request_id, sequence) for sequence in request.sequences())
        self._parents.update((fork.request_id, request) for fork in request.forks)

    def step(self) -> list[Request]:
        """Computes one step; the requests that ended in it.

        Blocks are committed after the pass that wrote them, so a block is findable only when its KV exists. If the
        pass fails, nothing of it is committed; `abort` the requests then, or step again. If an interrupt comes while
        results are taken, those requests whose results are lost end with it.
        """
        self._is_stepping = True
        try:
            finished = self._step()
        finally:
            self._is_stepping = False
            while self._leaving:
                self.abort(self._leaving.pop().request_id)
        if not self.has_requests:
            self._log.rest(self.scheduler.counters)
        return finished

    def _step(self) -> list[Request]:
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        computed = self.runner.run(scheduled, self.cache)
        now_s = self.scheduler.clock()
        finished: list[Request] = []
        num_taken = 0
        try:
            for work, result in zip(scheduled, computed, strict=True):
                finished += self._take(work, result, now_s)
                num_taken += 1
        finally:
            self._leaving += [sequence for work in scheduled[num_taken:] for sequence in work.request.sequences()]
        self.scheduler.counters.steps += 1
        if self._log.is_due(now_s):
            self._log.write(now_s, self.metrics())
        return finished

    def _take(self, work: Scheduled, result: Computed, now_s: float) -> list[Request]:
        """Enters what a step gave for one request; what ended with it, forks included."""
        request, counters = work.request, self.scheduler.counters
        is_last = work.is_last
        if is_last and request.output_token_ids and len(work.token_ids) == 1:
            counters.decode_tokens += 1
        else:
            counters.prefill_tokens += len(work.token_ids)
        self.scheduler.computed(work)
        request.prompt_logprobs += result.prompt_logprobs
        if not is_last:
            return []
        if request.num_candidates:
            request.candidates = result.candidates
            return []
        sequences = [request, *request.forks]
        for child in request.forks:
            self._parents.pop(child.request_id, None)
            self.scheduler.fork(request, child)
        request.forks = []
        finished = []
        for sequence, sampled in zip(sequences, result.sampled, strict=True):
            if sampled.logprobs is not None:
                sequence.logprobs.append(sampled.logprobs)
            sequence.add_output(sampled.token_id, self.runner.end_token_ids, now_s)
            counters.output_tokens += 1
            if sequence.finish_reason is not None:
                self._forget(sequence)
                finished.append(sequence)
        return finished

    # ---------------------------------------------------------------- from outside a step

    def holds(self, request: Request) -> bool:
        """Whether the request has been added and has not ended."""
        return self._requests.get(request.request_id) is request

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any point of its life; None, and no harm, if there is no such request (any more).

        Its forks that have not begun end with it; those that have begun are requests of their own. In the middle of a
        step, as when a collection closes a stream, it ends with the step.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self._is_stepping:
            self._leaving.append(request)
            return request
        for sequence in list(request.sequences()):
            if sequence.finish_reason is None:  # an interrupt may have come after its last token
                sequence.finish("abort", self.scheduler.clock())
            self._forget(sequence)
        return request

    def abort_all(self) -> list[Request]:
        """Ends all requests, running and waiting ones; those that ended by this."""
        return [request for request_id in list(self._requests) if (request := self.abort(request_id)) is not None]

    def continue_with(self, request: Request, token_id: int) -> None:
        """Gives a paused request its next token: it is computed in the next step that has room for it."""
        assert request.num_pending_tokens == 0 or request.state is RequestState.PREEMPTED, f"{request!r} is not paused"
        request.output_token_ids.append(token_id)
        request.candidates = []
        self.scheduler.resume(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Starts a request whose tokens are the paused parent's and one more; it shares the parent's blocks."""
        if child.request_id in self._requests:
            raise DuplicateRequest(child.request_id)
        self._requests[child.request_id] = child  # known first, so that an interrupt leaves nothing that nobody ends
        self.scheduler.fork(parent, child)

    def metrics(self) -> EngineMetrics:
        """The engine as it stands now, with totals since it was made."""
        cache, counters = self.cache, self.scheduler.counters
        evictable = cache.num_evictable_blocks
        return EngineMetrics(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            block_use=1 - (cache.num_free_blocks + evictable) / cache.num_blocks,
            cached=evictable / cache.num_blocks,
            token_hit_rate=cache.stats.token_hit_rate,
            counters=replace(counters, finished=counters.finished.copy(), preemptions=counters.preemptions.copy()),
            swapped_out_bytes=counters.swapped_out_blocks * self.runner.bytes_per_block,
            swapped_in_bytes=counters.swapped_in_blocks * self.runner.bytes_per_block,
        )

    def _forget(self, request: Request) -> None:
        self.scheduler.finish(request)
        parent = self._parents.pop(request.request_id, None)
        if parent is not None:
            parent.forks.remove(request)
        # An interrupted step may end a fork twice, alone and with its parent; it counts once.
        is_known = self._requests.pop(request.request_id, None) is not None
        if is_known and not request.num_candidates:  # beams come and go within one request
            self.scheduler.counters.finished[str(request.finish_reason)] += 1
