"""vLLM's `KVCacheManager`: a flat map from the chained hash of each block to the block. Tried with vLLM 0.32."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any


class VLLMManager:
    """The manager alone, driven through the calls that vLLM's scheduler makes."""

    def __init__(self, block_size: int, num_tokens: int, directory: Path | None, argument: str) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if directory is not None:
            sys.path.insert(0, str(directory))
        import torch
        from vllm import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        torch.set_num_threads(1)
        digest = get_hash_fn_by_name("sha256")  # its default
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(block_size, digest)
        self._request = Request
        self._params = SamplingParams(max_tokens=1)
        self._ids = count()
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_tokens // block_size + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
        )

    def prepare(self, token_ids: list[int]) -> Any:
        """A `Request`, which hashes its full blocks when made."""
        return self._request(
            request_id=str(next(self._ids)),
            prompt_token_ids=token_ids,
            sampling_params=self._params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def admit(self, request: Any) -> int:
        """See `PromptCache`."""
        blocks, num_hit, *_ = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is None:
            raise RuntimeError(f"vLLM has no room for {request.num_tokens} tokens")
        return int(num_hit)

    def release(self, request: Any) -> None:
        """See `PromptCache`; `allocate_slots` has already made the blocks findable."""
        request.num_computed_tokens = request.num_tokens
        self._manager.free(request)
