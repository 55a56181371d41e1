"""The model and its KV pool: one step's work → the next token of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radixkv.baselines import CacheManager
from radixkv.storage import KVStorage

from .batch import BatchBuilder, Row
from .logprobs import Logprob
from .sampler import Draw, candidates, prompt_logprobs, sample
from .scheduler import Computed, Scheduled

if TYPE_CHECKING:
    from .models.decoder import Decoder


class ModelRunner:
    """Owns the decoder and the tensors; reads block tables, never changes them."""

    def __init__(self, decoder: Decoder, storage: KVStorage, attention: str = "auto") -> None:
        self.decoder = decoder
        self.storage = storage
        self._builder = BatchBuilder(storage.block_size, storage.device, attention=attention)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's end-of-sequence tokens."""
        return self.decoder.eos_token_ids

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block, over all layers."""
        return self.storage.bytes_per_block

    @torch.inference_mode()
    def run(self, scheduled: Sequence[Scheduled], cache: CacheManager) -> list[Computed]:
        """Computes K and V of the scheduled tokens; for each request whose tokens are all computed then, samples."""
        rows = []
        for work in scheduled:
            request_id = work.request.request_id
            block_ids = cache.block_table(request_id)
            rows.append(Row(work.token_ids, work.start, block_ids, _num_logits(work), key=request_id))
        batch = self._builder.build(rows)
        logits = self.decoder.forward(batch, self.storage)  # (N, vocab)

        draws: list[Draw] = []
        last_logits: list[int] = []  # where in N each row's last token stands
        num_logits = 0
        for row, work in zip(rows, scheduled, strict=True):
            num_logits += row.num_logits
            last_logits.append(num_logits - 1)
            request = work.request
            if work.is_last and not request.num_candidates:
                draws += [
                    Draw(
                        row=num_logits - 1,
                        params=sequence.params,
                        seed=sequence.seed,
                        prompt_token_ids=sequence.prompt_token_ids,
                        output_token_ids=sequence.output_token_ids,
                        end_token_ids=sequence.end_token_ids(self.end_token_ids),
                    )
                    for sequence in request.sequences()
                ]
        sampled = iter(sample(logits, draws))

        computed = []
        for work, row, last in zip(scheduled, rows, last_logits, strict=True):
            request = work.request
            of_prompt = _prompt_logprobs(work, logits[last + 1 - row.num_logits : last + 1])
            if not work.is_last:
                computed.append(Computed(prompt_logprobs=of_prompt))
            elif request.num_candidates:
                computed.append(Computed(candidates=candidates(logits[last], request.num_candidates)))
            else:
                computed.append(Computed([next(sampled) for _ in request.sequences()], prompt_logprobs=of_prompt))
        return computed


def _num_logits(work: Scheduled) -> int:
    """Logits are wanted after the last token, and after every token of a chunk whose prompt is to be judged."""
    return 1 if work.request.max_cached_tokens is None else len(work.token_ids)


def _prompt_logprobs(work: Scheduled, logits: Tensor) -> list[dict[int, Logprob]]:
    """Log-probabilities of the prompt tokens that this chunk foretells and the request does not have yet.

    logits: (num_logits, vocab); row i stands after the token at position `work.start + i`.
    """
    request = work.request
    num_top = request.params.prompt_logprobs
    if num_top is None or request.max_cached_tokens is None:
        return []
    # The logits after position p judge the token at p + 1. After a preemption, some may have been judged before.
    first = len(request.prompt_logprobs)
    end = min(work.end + 1, len(request.prompt_token_ids))
    rows = logits[first - 1 - work.start : end - 1 - work.start]
    return prompt_logprobs(rows, request.prompt_token_ids[first:end], num_top)
