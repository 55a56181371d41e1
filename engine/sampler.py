"""Logits → token ids and their log-probabilities. Keeps nothing between calls, and never changes logits in place.

A draw's logits go through these steps, in this order (a greedy draw leaves out 4 and 5 and takes the most likely):
1. repetition penalty, over the tokens of prompt and output (Keskar et al. 2019, "CTRL", section 4.1)
2. presence and frequency penalties, over the tokens of the output (as the OpenAI API defines them)
3. before min_tokens, tokens that end the request are out of reach
4. temperature
5. top k, then top p

Shapes: R rows of logits, Q positions of a prompt.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .logprobs import Logprob, Sampled
from .sampling_params import SamplingParams

# Log-probabilities of a long prompt are taken from so many rows at once: a copy in float64 of 64 rows of the largest
# vocabularies (256,000 ids) is 131 MB.
_NUM_ROWS_AT_ONCE = 64


class Draw(NamedTuple):
    """One token to be chosen.

    row               row of the logits it is chosen from; several draws may share one
    params            how
    seed              source of its randomness, together with its position in the output
    prompt_token_ids  what the request began with
    output_token_ids  what has been chosen so far; as many as there are tokens before this one in the output
    end_token_ids     tokens that would end the request, out of reach before `params.min_tokens`
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    end_token_ids: frozenset[int]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """A token for each draw. logits: (R, vocab) float32.

    A draw's randomness is a function of its seed and the position of the token in its output alone, so that neither
    neighbours in the batch nor an interruption change what it says.

    The token's own log-probability comes first, then those of the most likely tokens, most likely first; a token that
    is among them is not repeated. They are those of the logits as given, before any penalty, mask or temperature.
    """
    greedy = _argmax_of_rows(logits, {draw.row for draw in draws if _is_argmax(draw)})
    token_ids = [
        greedy[draw.row] if _is_argmax(draw) else _choose(processed_logits(logits[draw.row], draw), draw)
        for draw in draws
    ]
    asked = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
    logprobs: dict[int, dict[int, Logprob]] = {}
    if asked:
        described = _describe(
            logits[[draws[i].row for i in asked]],
            [token_ids[i] for i in asked],
            [draws[i].params.logprobs or 0 for i in asked],
        )
        logprobs = dict(zip(asked, described, strict=True))
    return [Sampled(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def processed_logits(logits: Tensor, draw: Draw) -> Tensor:
    """The draw's logits after steps 1 to 3, a copy. logits: (vocab,); result: (vocab,) float64.

    Where no other token is left in step 3, those that end the request stay, and do not end it yet. O(vocab + tokens).
    """
    params = draw.params
    scores = logits.to(torch.float64, copy=True)  # (vocab,)
    # 1. Once per token, however often it stands there.
    if params.repetition_penalty != 1:
        seen = _indices({*draw.prompt_token_ids, *draw.output_token_ids}, scores)
        before = scores[seen]
        after = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
        # The wildest penalties would send scores to infinity, and all of them to minus infinity leaves nothing.
        largest = torch.finfo(scores.dtype).max
        scores[seen] = torch.where(before.isfinite(), after.clamp(-largest, largest), before)
    # 2. Once per token, and once per occurrence.
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(draw.output_token_ids)
        times = torch.tensor(list(counts.values()), dtype=scores.dtype, device=scores.device)
        scores[_indices(counts, scores)] -= params.presence_penalty + params.frequency_penalty * times
    # 3. Ends are out of reach.
    if _hides_ends(draw):
        masked = scores.index_fill(0, _indices(draw.end_token_ids, scores), -math.inf)
        if masked.max() > -math.inf:
            scores = masked
    return scores


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], num_top: int) -> list[dict[int, Logprob]]:
    """For each row, log-probabilities of the token that follows and of the `num_top` most likely ones, in this order.

    logits: (Q, vocab) float32, as they are; entry i describes `next_token_ids[i]` under row i. No more than the
    vocabulary has.
    """
    assert len(logits) == len(next_token_ids), f"{len(logits)} rows for {len(next_token_ids)} tokens"
    described: list[dict[int, Logprob]] = []
    for start in range(0, len(logits), _NUM_ROWS_AT_ONCE):
        token_ids = next_token_ids[start : start + _NUM_ROWS_AT_ONCE]
        described += _describe(logits[start : start + _NUM_ROWS_AT_ONCE], token_ids, [num_top] * len(token_ids))
    return described


def candidates(logits: Tensor, num: int) -> list[tuple[int, float]]:
    """The `num` most likely ids with their log-probabilities, most likely first, equals by id. logits: (vocab,).

    All ids where the vocabulary has no more than `num`.
    """
    logprobs = logits.log_softmax(dim=-1).tolist()  # (vocab,), rounded as transformers rounds the scores of its beams
    return [(token_id, logprobs[token_id]) for token_id, _ in _most_likely(logits[None], num)[0]]


def _hides_ends(draw: Draw) -> bool:
    return len(draw.output_token_ids) < draw.params.min_tokens and bool(draw.end_token_ids)


def _is_argmax(draw: Draw) -> bool:
    """Nothing but the row matters."""
    return draw.params.is_greedy and not draw.params.has_penalties and not _hides_ends(draw)


def _argmax_of_rows(logits: Tensor, rows: set[int]) -> dict[int, int]:
    """Row → its most likely id, the lowest of equals. One kernel, and one wait for it, whatever the batch."""
    if not rows:
        return {}
    order = sorted(rows)
    picked = logits if len(order) == len(logits) else logits[order]  # (rows, vocab)
    # numpy's is 24 times faster than torch's on a CPU: 35 instead of 850 us for 8 rows of 49,152, 2 % of a decode step.
    ids = picked.numpy().argmax(axis=-1) if picked.device.type == "cpu" else picked.argmax(dim=-1)  # (rows,)
    return dict(zip(order, ids.tolist(), strict=True))


def _choose(scores: Tensor, draw: Draw) -> int:
    """One token id by inverse transform: the first whose cumulated probability exceeds a uniform number.

    scores: (vocab,) float64.
    """
    params = draw.params
    if params.is_greedy:
        return int(scores.argmax())
    # Measured from the highest, so that the lowest temperatures cannot send several scores to infinity.
    scaled = (scores - scores.max()) / params.temperature  # (vocab,)
    scaled, token_ids = scaled.sort(descending=True, stable=True)
    if params.top_k:
        scaled = scaled[: params.top_k]
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1)
    # The smallest set whose probabilities reach top_p: at least one token, the one that crosses the border included.
    num_kept = min(int((cumulated < params.top_p).sum()) + 1, len(cumulated))
    total = cumulated[num_kept - 1].item()
    uniform = random.Random(f"{draw.seed}/{len(draw.output_token_ids)}").random() * total
    index = int(torch.searchsorted(cumulated[:num_kept], uniform, right=True))
    return int(token_ids[min(index, num_kept - 1)])


def _indices(token_ids: Iterable[int], scores: Tensor) -> Tensor:
    """The ids as an index into the scores, less those past their end: a stop id need not be in the vocabulary."""
    vocab_size = len(scores)
    known = [token_id for token_id in token_ids if token_id < vocab_size]
    return torch.tensor(known, dtype=torch.int64, device=scores.device)


def _describe(logits: Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row its token's log-probability, then those of the row's most likely tokens. logits: (Q, vocab)."""
    own = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]  # (Q, 1)
    own_logits = logits.gather(-1, own)  # (Q, 1)
    own_ranks = (logits > own_logits).sum(dim=-1) + 1  # (Q,)
    # In float64: in float32 the rounded sum may lie below a likely token's logit, which then had a probability over 1.
    totals = logits.double().logsumexp(dim=-1)  # (Q,)
    most_likely = _most_likely(logits, max(nums_top))
    own_values = zip(token_ids, own_logits[:, 0].tolist(), own_ranks.tolist(), strict=True)
    rows = zip(own_values, totals.tolist(), most_likely, nums_top, strict=True)
    described = []
    for (own_id, own_logit, own_rank), total, tops, num_top in rows:
        entries = {own_id: Logprob(own_logit - total, own_rank)}
        rank, last = 0, math.nan
        for place, (token_id, logit) in enumerate(tops[:num_top], start=1):
            rank, last = rank if logit == last else place, logit
            entries.setdefault(token_id, Logprob(logit - total, rank))
        described.append(entries)
    return described


def _most_likely(logits: Tensor, num: int) -> list[list[tuple[int, float]]]:
    """For each row its `num` most likely ids with their logits, most likely first, equals by id. logits: (Q, vocab).

    `topk` alone takes any of several equals, and equals are common: logits of a 16-bit model have few bits. Sorting
    whole rows would take many times as long.
    """
    num = min(num, logits.shape[-1])
    found: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
    if num == 0:
        return found
    # `num` of each row, and more where several share the last place; rows in turn, ids rising within each.
    is_wanted = logits >= logits.topk(num, dim=-1).values[:, -1:]  # (Q, vocab)
    for (row, token_id), logit in zip(is_wanted.nonzero().tolist(), logits[is_wanted].tolist(), strict=True):
        found[row].append((token_id, logit))
    return [sorted(pairs, key=lambda pair: -pair[1])[:num] for pairs in found]
