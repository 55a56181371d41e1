"""A request on its way through the engine, and what comes out of it. Imports no torch.

WAITING ──admitted──> RUNNING ──last token──> FINISHED
   └────────────────────┴──────abort──────────────┘
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from radixkv import TokenKey

from .sampling_params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and what has been generated for it.

    max_total_tokens     prompt and output together at most, from max_tokens and the model's context
    num_computed_tokens  leading tokens whose KV is in the pool
    """

    request_id: str
    prompt: TokenKey
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    arrival_s: float = field(default_factory=time.perf_counter)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def start(self, num_cached_tokens: int) -> None:
        """WAITING -> RUNNING, with the start of the prompt in place."""
        assert self.state is RequestState.WAITING, f"request {self.request_id!r} is {self.state.value}"
        self.state = RequestState.RUNNING
        self.num_cached_tokens = self.num_computed_tokens = num_cached_tokens
        self.scheduled_s = time.perf_counter()

    def add_output(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Takes a sampled token, and ends the request if it was the last."""
        assert self.state is RequestState.RUNNING, f"request {self.request_id!r} is {self.state.value}"
        self.output_token_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        if token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
        elif self.num_tokens >= self.max_total_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Any state but FINISHED -> FINISHED."""
        assert self.state is not RequestState.FINISHED, f"request {self.request_id!r} has finished already"
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.finished_s = time.perf_counter()


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds; None where there is none yet.

    queue_s   from arrival to its first step
    ttft_s    from arrival to its first token
    tpot_s    per output token after the first; None for a reply of one token
    total_s   from arrival to the end
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float | None

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """The times of a request as it stands."""

        def since(start_s: float | None, end_s: float | None) -> float | None:
            return None if start_s is None or end_s is None else end_s - start_s

        decode_s = since(request.first_token_s, request.finished_s)
        num_decoded = len(request.output_token_ids) - 1
        return cls(
            queue_s=since(request.arrival_s, request.scheduled_s),
            ttft_s=since(request.arrival_s, request.first_token_s),
            tpot_s=decode_s / num_decoded if decode_s is not None and num_decoded > 0 else None,
            total_s=since(request.arrival_s, request.finished_s),
        )


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    `token_ids` includes the end-of-sequence token that ended it; `text` shows no special tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """What a request gave. `num_cached_tokens` prompt tokens were found in the cache and not computed."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
