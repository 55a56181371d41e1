"""Logits → token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling_params import SamplingParams


def sample(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """A token id for each row. logits: (R, vocab) float32.

    A sampled row's randomness is a function of its seed and the position of the token in its output alone, so that
    neither neighbours in the batch nor an interruption change what it says.
    """
    greedy = logits.argmax(dim=-1).tolist()
    return [
        greedy[row] if params[row].is_greedy else _sample_row(logits[row], params[row], seeds[row], positions[row])
        for row in range(len(params))
    ]


def _sample_row(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """One token id by inverse transform: the first whose cumulated probability exceeds a uniform number."""
    # Measured from the highest, so that the lowest temperatures cannot send several scores to infinity.
    scaled = (logits.double() - logits.max()) / params.temperature  # (vocab,)
    scaled, token_ids = scaled.sort(descending=True, stable=True)
    if params.top_k:
        scaled = scaled[: params.top_k]
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1)
    # The smallest set whose probabilities reach top_p: at least one token, the one that crosses the border included.
    num_kept = min(int((cumulated < params.top_p).sum()) + 1, len(cumulated))
    total = cumulated[num_kept - 1].item()
    uniform = random.Random(f"{seed}/{position}").random() * total
    index = int(torch.searchsorted(cumulated[:num_kept], uniform, right=True))
    return int(token_ids[min(index, num_kept - 1)])
