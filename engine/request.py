"""A request on its way through the engine, and what comes out of it. Imports no torch.

WAITING ──admitted──> RUNNING ──last token──> FINISHED
   │                  │     ↑                     ↑
   │             preempted  admitted again        │
   │                  ↓     │                     │
   │                 PREEMPTED                    │
   └────────────────────┴─────────abort───────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from radixkv import TokenKey

from .logprobs import Logprob
from .sampling_params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class OutputText(Protocol):
    """What a request asks of the owner of its text (`engine.detokenizer.Detokenizer`)."""

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Takes a token; the stop string that is complete with it, if any."""

    def finish(self) -> None:
        """No more tokens come."""

    def take(self) -> str:
        """What has become settled since the last call: it may be shown."""

    @property
    def text(self) -> str:
        """All that is settled; in the end, all there is."""


@dataclass(eq=False)
class Request:
    """One prompt and one continuation of it.

    max_total_tokens     prompt and output together at most, from max_tokens, the model's context and the pool
    priority             higher goes first, is preempted last, and what it leaves in the cache stays longer
    store                its blocks are kept for others
    text                 its output as text, where stop strings or a stream need it while it runs
    num_candidates       above 0: instead of sampling, it brings its most likely next tokens in `candidates` and pauses,
                         until someone gives it a token (beam search)
    num_reserved         sequences that it may become by forks which nobody knows yet, itself included (beam search)
    forks                further continuations, which begin when the prompt is computed (n > 1)
    num_computed_tokens  leading tokens whose KV is in the pool
    num_lost_tokens      tokens whose KV it had when it was preempted
    num_overtaken        later requests that were admitted while it waited
    """

    request_id: str
    prompt: TokenKey
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    priority: int = 0
    store: bool = True
    text: OutputText | None = None
    num_candidates: int = 0
    num_reserved: int = 1
    forks: list[Request] = field(default_factory=list)
    arrival_s: float = field(default_factory=time.perf_counter)

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    candidates: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    number: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        self._key = self.prompt

    # ---------------------------------------------------------------- tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is not computed yet. A decoding request has one, the last sampled; a paused one has none."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def key(self) -> TokenKey:
        """Prompt and output so far, packed. O(1) until a token is added."""
        if len(self._key) != self.num_tokens:
            self._key = TokenKey([*self.prompt_token_ids, *self.output_token_ids], self.prompt.namespace)
        return self._key

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output. O(end - start)."""
        num_prompt = len(self.prompt_token_ids)
        head = self.prompt_token_ids[start:end] if start < num_prompt else []
        return head + self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]

    @property
    def max_cached_tokens(self) -> int | None:
        """How much of the cache it may use; None = all. Log-probabilities of prompt tokens need these computed."""
        if self.params.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.prompt_token_ids):
            return None
        return len(self.prompt_logprobs) - 1

    @property
    def num_seqs(self) -> int:
        """Sequences that will run: itself and its forks."""
        return self.num_reserved + len(self.forks)

    # ---------------------------------------------------------------- moves

    def start(self, num_computed_tokens: int, now_s: float) -> None:
        """WAITING or PREEMPTED -> RUNNING, with the KV of its first tokens in place."""
        assert self.state in (RequestState.WAITING, RequestState.PREEMPTED), f"{self!r} is {self.state.value}"
        if self.scheduled_s is None:
            self.num_cached_tokens = num_computed_tokens
            self.scheduled_s = now_s
        self.state = RequestState.RUNNING
        self.num_computed_tokens = num_computed_tokens
        self.num_recomputed_tokens += max(0, self.num_lost_tokens - num_computed_tokens)
        self.num_lost_tokens = 0

    def preempt(self) -> None:
        """RUNNING -> PREEMPTED: none of its KV counts as computed any more."""
        assert self.state is RequestState.RUNNING, f"{self!r} is {self.state.value}"
        self.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        self.num_lost_tokens, self.num_computed_tokens = self.num_computed_tokens, 0

    def add_output(self, token_id: int, end_token_ids: frozenset[int], now_s: float) -> None:
        """Takes its next token, and ends if that was the last. end_token_ids: of the model."""
        assert self.state is not RequestState.FINISHED, f"{self!r} is {self.state.value}"
        self.output_token_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
        num_missing = self.params.min_tokens - len(self.output_token_ids)
        is_end = num_missing < 0 and token_id in self.end_token_ids(end_token_ids)
        stop = self.text.append(token_id, num_missing <= 0 and not is_end) if self.text is not None else None
        if is_end or stop is not None:
            self.stop_reason = stop if stop is not None else token_id
            self.finish("stop", now_s)
        elif self.num_tokens >= self.max_total_tokens:
            self.finish("length", now_s)

    def end_token_ids(self, of_model: frozenset[int]) -> frozenset[int]:
        """Ids that end it: the model's, unless it ignores these, and its own."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else of_model)

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """Any state but FINISHED -> FINISHED."""
        assert self.state is not RequestState.FINISHED, f"{self!r} has finished already"
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.finished_s = now_s
        if self.text is not None:
            self.text.finish()

    def sibling(self, request_id: str, output_token_ids: Sequence[int] = ()) -> Request:
        """Another request for the same prompt, which has not begun."""
        return Request(
            request_id=request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            seed=self.seed,
            max_total_tokens=self.max_total_tokens,
            priority=self.priority,
            store=self.store,
            num_candidates=self.num_candidates,
            arrival_s=self.arrival_s,
            output_token_ids=list(output_token_ids),
        )

    def sequences(self) -> Iterator[Request]:
        """Itself and its forks."""
        yield self
        yield from self.forks

    def __repr__(self) -> str:
        return (
            f"<request {self.request_id!r}, {self.state.value}: {len(self.prompt_token_ids)} prompt and "
            f"{len(self.output_token_ids)} output tokens, {self.num_computed_tokens} computed>"
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds (None where there is none yet), and what its preemptions cost.

    queue_s   from arrival to its first step
    ttft_s    from arrival to its first token
    tpot_s    per output token after the first; None for a reply of one token
    total_s   from arrival to the end
    num_preemptions        how often it gave its blocks up
    num_recomputed_tokens  tokens whose KV was computed again for that
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float | None
    num_preemptions: int
    num_recomputed_tokens: int

    @classmethod
    def of(cls, sequences: Sequence[Request]) -> RequestMetrics:
        """The times of a request as it stands, over all its continuations: the first token of any, the last of all."""
        first = sequences[0]

        def since(start_s: float | None, end_s: float | None) -> float | None:
            return None if start_s is None or end_s is None else end_s - start_s

        first_token_s = min((r.first_token_s for r in sequences if r.first_token_s is not None), default=None)
        ends_s = [r.finished_s for r in sequences if r.finished_s is not None]
        finished_s = max(ends_s) if len(ends_s) == len(sequences) else None
        decode_s = since(first_token_s, finished_s)
        num_decoded = max(len(r.output_token_ids) for r in sequences) - 1
        return cls(
            queue_s=since(first.arrival_s, first.scheduled_s),
            ttft_s=since(first.arrival_s, first_token_s),
            tpot_s=decode_s / num_decoded if decode_s is not None and num_decoded > 0 else None,
            total_s=since(first.arrival_s, finished_s),
            num_preemptions=sum(r.num_preemptions for r in sequences),
            num_recomputed_tokens=sum(r.num_recomputed_tokens for r in sequences),
        )


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    `token_ids` includes the end-of-sequence token that ended it; `text` shows no special tokens, and ends before the
    stop string unless `include_stop_str_in_output` was set.

    stop_reason         the stop string, or the id of the token, that ended it; None if it ended otherwise
    logprobs            for each output token a dict token id → `Logprob`, if asked for
    cumulative_logprob  of the sampled tokens: their sum, if log-probabilities were asked for, or the score's sum in a
                        beam search
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What a request gave. `num_cached_tokens` prompt tokens were found in the cache and not computed.

    prompt_logprobs   for each prompt token a dict token id → `Logprob`, None for the first; if asked for
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
