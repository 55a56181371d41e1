"""How a request's tokens are chosen, and when it ends. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Checked when made: TypeError or ValueError says what was given and what is allowed.

    max_tokens    output tokens at most, 1 or more
    temperature   0 = greedy; otherwise logits are divided by it
    top_k         sample among the k most likely tokens only; 0 = all
    top_p         sample among the most likely tokens whose probabilities reach p; 1 = all
    seed          the same seed and prompt give the same tokens, whatever runs beside; None = a fresh one per request
    ignore_eos    go on after an end-of-sequence token
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k") + (("seed",) if self.seed is not None else ()):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {value!r}")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed: 1 and more")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 (greedy) and more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; allowed: 0 (all tokens) and more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: 0 < top_p <= 1")

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken each time."""
        return self.temperature == 0
