"""radixkv itself, driven like the peers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from radixkv.cache import PrefixCache
from radixkv.node import RadixNode
from radixkv.tokens import TOKEN_BYTES, TokenKey
from radixkv.tree import Match, RadixTree


class OurTree:
    """`RadixTree` without pool, block tables and statistics, as the peers' trees are measured."""

    def __init__(self, block_size: int, num_tokens: int, directory: Path | None, argument: str) -> None:
        self.tree: RadixTree = PrefixCache(num_tokens // block_size, block_size).tree
        self._block_size = block_size
        self._tick = 0

    def key(self, token_ids: Sequence[int]) -> TokenKey:
        """The tokens, packed."""
        return TokenKey(token_ids)

    def cut(self, key: TokenKey, num_tokens: int) -> TokenKey:
        """The first tokens of it; each request is a tick."""
        self._tick += 1
        return TokenKey.from_packed(key.data[: num_tokens * TOKEN_BYTES])

    def value(self, block_ids: Sequence[int]) -> array[int]:
        """The block ids."""
        return array("I", block_ids)

    def match(self, key: TokenKey) -> tuple[int, Match]:
        """See `Tree`."""
        match = self.tree.match(key)
        return len(match.blocks) * self._block_size, match

    def locations(self, match: Match) -> array[int]:
        """The blocks, which the match has collected on its way."""
        return match.blocks

    def lock(self, match: Match) -> RadixNode:
        """See `Tree`."""
        return self.tree.lock((), match)

    def insert(self, key: TokenKey, value: array[int], num_known: int) -> int:
        """See `Tree`; from the root, as the peers do it."""
        return self.tree.insert(key, value, self._tick).num_existing * self._block_size

    def unlock(self, lock: RadixNode) -> None:
        """See `Tree`."""
        self.tree.unlock_node(lock)

    def evict(self, num_tokens: int) -> array[int]:
        """See `Tree`."""
        return self.tree.evict(-(-num_tokens // self._block_size))

    def blocks_of(self, locations: array[int]) -> list[int]:
        """The same ids."""
        return locations.tolist()

    def num_nodes(self, match: Match) -> int:
        """See `Tree`."""
        count, node = 0, match.node
        while node is not None and node.parent is not None:
            count, node = count + 1, node.parent
        return count


class OurManager:
    """`PrefixCache`, which is tree, pool, block tables and statistics."""

    def __init__(self, block_size: int, num_tokens: int, directory: Path | None, argument: str) -> None:
        self.cache = PrefixCache(num_tokens // block_size, block_size)
        self._ids = count()

    def prepare(self, token_ids: list[int]) -> tuple[int, TokenKey]:
        """The tokens, packed, under a request id."""
        return next(self._ids), TokenKey(token_ids)

    def admit(self, request: tuple[int, TokenKey]) -> int:
        """See `PromptCache`."""
        return self.cache.allocate(*request).num_cached_tokens

    def release(self, request: tuple[int, TokenKey]) -> None:
        """See `PromptCache`."""
        request_id, key = request
        self.cache.commit(request_id, len(key))
        self.cache.free(request_id)
