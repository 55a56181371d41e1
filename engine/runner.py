"""The model and its KV pool: one step's work → the next token of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from radixkv import PrefixCache
from radixkv.storage import KVStorage

from .batch import Row, build_batch
from .sampler import sample
from .scheduler import Scheduled

if TYPE_CHECKING:
    from .models.huggingface import HuggingFaceDecoder


class ModelRunner:
    """Owns the decoder and the tensors; reads block tables, never changes them."""

    def __init__(self, decoder: HuggingFaceDecoder, storage: KVStorage) -> None:
        self.decoder = decoder
        self.storage = storage

    @torch.inference_mode()
    def run(self, scheduled: Sequence[Scheduled], cache: PrefixCache) -> list[int]:
        """Computes K and V of the scheduled tokens, and samples one token id for each request."""
        rows = [Row(work.token_ids, work.start, cache.block_table(work.request.request_id)) for work in scheduled]
        batch = build_batch(rows, cache.block_size, self.storage.device)
        logits = self.decoder.forward(batch, self.storage)  # (R, vocab)
        requests = [work.request for work in scheduled]
        return sample(
            logits,
            [request.params for request in requests],
            [request.seed for request in requests],
            [len(request.output_token_ids) for request in requests],
        )
