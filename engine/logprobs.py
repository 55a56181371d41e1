"""What the model thought of a token. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's place among all that could have stood there, by the model's logits as they are.

    logprob        natural logarithm of its probability, 0 or less; penalties and temperature have no part in it
    rank           1 = most likely; equally likely tokens share the better rank
    decoded_token  its text; None until somebody with a tokenizer sets it
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class Sampled(NamedTuple):
    """A chosen token, and log-probabilities of it and of the most likely ones where its params ask for them."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None
