"""How a request's tokens are chosen, and when it ends. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Checked when made: TypeError or ValueError says what was given and what is allowed.

    n                           continuations of the one prompt, 1 or more
    max_tokens                  output tokens at most, 1 or more
    min_tokens                  output tokens at least, 0 to max_tokens: before, neither end-of-sequence tokens nor
                                `stop_token_ids` can be sampled, and stop strings are not looked for
    temperature                 0 = greedy; otherwise logits are divided by it
    top_k                       sample among the k most likely tokens only; 0 = all
    top_p                       sample among the most likely tokens whose probabilities reach p; 1 = all
    repetition_penalty          above 0: of each token in prompt or output, however often it stands there, a positive
                                logit is divided by it, a negative one multiplied; 1 = off, below 1 favours repetition
    presence_penalty            -2 to 2: taken from a token's logit once if it stands in the output; 0 = off
    frequency_penalty           -2 to 2: taken from a token's logit as often as it stands in the output; 0 = off
    seed                        the same seed and prompt give the same tokens, whatever runs beside; continuation i of
                                n has the seed `seed + i`, so that each can be had alone; None = a fresh one per
                                request
    stop                        a string or several, none of them empty: the text ends before the first that appears
                                in it; kept as a tuple
    stop_token_ids              tokens that end the output as an end-of-sequence token does, also with `ignore_eos`;
                                kept as a tuple
    include_stop_str_in_output  the text ends after the stop string, not before it
    ignore_eos                  go on after an end-of-sequence token
    logprobs                    for each output token, log-probabilities of it and of this many most likely ones, as
                                many as the vocabulary has at most; 0 = of it alone, None = none
    prompt_logprobs             the same for each prompt token but the first, which nothing foretells

    Penalties come first, in the order given, then temperature, top k and top p; greedy requests have penalties too.
    Log-probabilities are the model's own, before any of this.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        optional = tuple(name for name in ("seed", "logprobs", "prompt_logprobs") if getattr(self, name) is not None)
        for name in ("n", "max_tokens", "min_tokens", "top_k", *optional):
            if not _is_integer(value := getattr(self, name)):
                raise TypeError(f"{name} must be an integer, not {value!r}")
        for name in ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not (_is_integer(value := getattr(self, name)) or isinstance(value, float)):
                raise TypeError(f"{name} must be a number, not {value!r}")
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        # Frozen: this is the one way to put the tuples in place, and nobody has seen the object yet.
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_token_ids(self.stop_token_ids))

        if self.n < 1:
            raise ValueError(f"n is {self.n}; allowed: 1 and more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed: 1 and more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; allowed: 0 to max_tokens, which is {self.max_tokens}")
        if not (self.temperature >= 0 and _is_finite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 (greedy) and more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; allowed: 0 (all tokens) and more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: 0 < top_p <= 1")
        if not (self.repetition_penalty > 0 and _is_finite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; allowed: above 0 (1 = none)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise ValueError(f"{name} is {value}; allowed: -2 to 2")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} is {value}; allowed: 0 (the token's own) and more, or None (none)")

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken each time."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """The tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Neither infinite nor NaN, nor an integer too large for a float, which `math.isfinite` would raise for."""
    return abs(value) <= sys.float_info.max


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    # Bytes would be a sequence of integers, sets have no order to be shown in.
    if not isinstance(stop, Sequence) or not all(isinstance(string, str) for string in stop):
        raise TypeError(f"stop must be a string, a sequence of strings or None, not {stop!r}")
    if "" in stop:
        raise ValueError(f"stop is {stop!r}; allowed: strings of one character and more")
    return tuple(stop)


def _checked_stop_token_ids(token_ids: Any) -> tuple[int, ...]:
    # Text and bytes are sequences as well, and the integers in bytes are no token ids.
    if (
        isinstance(token_ids, (str, bytes, bytearray))
        or not isinstance(token_ids, Sequence)
        or not all(_is_integer(token_id) for token_id in token_ids)
    ):
        raise TypeError(f"stop_token_ids must be a sequence of integers, not {token_ids!r}")
    for token_id in token_ids:
        if token_id < 0:
            raise ValueError(f"stop_token_ids has {token_id}; allowed: 0 and more")
    return tuple(token_ids)
