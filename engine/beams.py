"""Beam search on forks: what `beam_search.py` decides, done with requests and block tables. Imports no torch.

    step n       a          b          c            three beams, computed and paused, with their candidates
                 │ ╲        │          ×
    step n + 1   a  a'      b                       a goes on twice: a' is a fork of it; c is dropped

All blocks before the fork are shared; the first of a and a' that writes to the block they are in gets its own copy.
A beam may be preempted like any request, even while it pauses: its candidates are kept, and the KV comes back by hit or
recomputation when it goes on.
"""

from __future__ import annotations

import itertools

from .beam_search import BeamSearch, BeamSearchParams, Hypothesis
from .core import EngineCore
from .request import Request, RequestMetrics


class Beams:
    """The beams of one prompt. Its owner calls `core.step()` and `advance()` in turn to the end, then `close`."""

    def __init__(self, core: EngineCore, prompt: Request, params: BeamSearchParams) -> None:
        self.core = core
        self.prompt = prompt
        self.params = params
        self._live = [prompt]
        self._undropped = {prompt}  # the live beams, and in the middle of `advance` their successors too
        self._search: BeamSearch | None = None
        self._ids = itertools.count(1)
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._first_token_s: float | None = None
        self._finished_s: float | None = None

    def start(self) -> None:
        """Queues the prompt. Raises ValueError if it can never run."""
        if self.params.beam_width > self.core.scheduler.config.max_running:
            raise ValueError(
                f"beam_width is {self.params.beam_width}; allowed: at most {self.core.scheduler.config.max_running}, "
                "which max_num_seqs and max_num_batched_tokens let run at once"
            )
        self.prompt.num_reserved = self.params.beam_width
        self.core.add_request(self.prompt)
        self._search = BeamSearch(
            self.params, len(self.prompt.prompt_token_ids), self.core.runner.end_token_ids, self.prompt.max_total_tokens
        )
        self.prompt.num_candidates = self._search.num_candidates

    @property
    def is_finished(self) -> bool:
        """The search is over."""
        return self._finished_s is not None

    def advance(self) -> int:
        """Takes the search on by a token once all beams are computed; 1 if that was the last, else 0."""
        assert self._search is not None, "start comes first"
        if self.is_finished or not all(beam.candidates for beam in self._live):
            return 0
        now_s = self.core.scheduler.clock()
        self._first_token_s = self._first_token_s or now_s
        extends = self._search.advance([beam.candidates for beam in self._live])
        # 1. Fork first, while the parents still end where their candidates begin.
        going_on: dict[int, int] = {}  # parent -> its own next token
        new_live = []
        for parent, token_id in extends:
            beam = self._live[parent]
            if parent in going_on:
                child = beam.sibling(f"{self.prompt.request_id}/{next(self._ids)}", [*beam.output_token_ids, token_id])
                self._undropped.add(child)
                self.core.fork(beam, child)
                new_live.append(child)
            else:
                going_on[parent] = token_id
                new_live.append(beam)
        # 2. Then let the parents go on, or go.
        for parent, beam in enumerate(self._live):
            if parent in going_on:
                self.core.continue_with(beam, going_on[parent])
            else:
                self._drop(beam)
        self._live = new_live
        if extends:
            return 0
        self._finished_s = now_s
        return 1

    def results(self) -> list[Hypothesis]:
        """The best continuations, best first."""
        assert self._search is not None, "start comes first"
        return self._search.results()

    def metrics(self) -> RequestMetrics:
        """The times of the whole search, and what preemptions of its beams cost."""
        arrival_s, scheduled_s = self.prompt.arrival_s, self.prompt.scheduled_s
        assert scheduled_s is not None and self._first_token_s is not None and self._finished_s is not None
        num_decoded = max(len(found.token_ids) for found in self.results()) - 1
        return RequestMetrics(
            queue_s=scheduled_s - arrival_s,
            ttft_s=self._first_token_s - arrival_s,
            tpot_s=(self._finished_s - self._first_token_s) / num_decoded if num_decoded else None,
            total_s=self._finished_s - arrival_s,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def close(self) -> None:
        """Ends all beams that are left: none, unless the search was interrupted."""
        for beam in list(self._undropped):
            self._drop(beam)

    def _drop(self, beam: Request) -> None:
        if self.core.holds(beam):
            self.core.abort(beam.request_id)
        self._undropped.discard(beam)
        self._num_preemptions += beam.num_preemptions
        self._num_recomputed_tokens += beam.num_recomputed_tokens
