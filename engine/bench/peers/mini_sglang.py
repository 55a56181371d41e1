"""mini-sglang's prefix tree, after the calls that its scheduler makes.

The package is not on PyPI and compiles its key comparison on first use: install a checkout into an environment and
name it with `--peer-path mini-sglang=DIR`. Each match is checked against what was stored, so a change of its interface
fails the run instead of falsifying it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


class MiniSGLangTree:
    """`minisgl.kvcache.radix_cache.RadixPrefixCache`.

    directory   holds the package `minisgl/`; None for an installed one
    """

    def __init__(self, block_size: int, num_tokens: int, directory: Path | None, argument: str) -> None:
        if directory is not None:
            sys.path.insert(0, str(directory))
        import torch

        torch.set_num_threads(1)
        core = import_module("minisgl.core")
        core.set_global_ctx(core.Context(page_size=block_size))
        self._torch = torch
        self._block_size = block_size
        self.tree = import_module("minisgl.kvcache.radix_cache").RadixPrefixCache(torch.device("cpu"))

    def key(self, token_ids: Sequence[int]) -> Any:
        """The tokens, int32: (num_tokens,)"""
        return self._torch.tensor(token_ids, dtype=self._torch.int32)

    def cut(self, key: Any, num_tokens: int) -> Any:
        """The first tokens of it."""
        return key[:num_tokens]

    def value(self, block_ids: Sequence[int]) -> Any:
        """The slots of all tokens, int64: (num_tokens,)"""
        blocks = self._torch.tensor(block_ids, dtype=self._torch.int64)
        return (blocks[:, None] * self._block_size + self._torch.arange(self._block_size)).reshape(-1)

    def match(self, key: Any) -> tuple[int, Any]:
        """See `Tree`."""
        handle = self.tree.match_prefix(key).cuda_handle
        return handle.cached_len, handle

    def locations(self, match: Any) -> Any:
        """The slots of the matched tokens, collected along the path."""
        return match.get_matched_indices() if match.cached_len else self.value([])

    def lock(self, match: Any) -> Any:
        """See `Tree`."""
        self.tree.lock_handle(match)
        return match

    def insert(self, key: Any, value: Any, num_known: int) -> int:
        """See `Tree`."""
        return int(self.tree.insert_prefix(key, value).cached_len)

    def unlock(self, lock: Any) -> None:
        """See `Tree`."""
        self.tree.lock_handle(lock, unlock=True)

    def evict(self, num_tokens: int) -> Any:
        """See `Tree`; whole leaves go."""
        return self.tree.evict(num_tokens)

    def blocks_of(self, locations: Any) -> list[int]:
        """The blocks of these slots, which must be whole blocks."""
        slots = locations.to(self._torch.int64)
        blocks = slots[:: self._block_size] // self._block_size
        assert self._torch.equal(self.value(blocks.tolist()), slots), "slots that are no whole blocks"
        return [int(block) for block in blocks]

    def num_nodes(self, match: Any) -> None:
        """The handles do not tell."""
