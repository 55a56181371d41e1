"""What happened to blocks, for whoever wants to follow the cache from outside: a router, a second tier, a test.

Blocks are named by chained digests (`radixkv.tokens.block_digest`), which are the same in every process, so that two
caches can compare what they hold. Replaying the events gives the set of resident full blocks at any time:
`BlocksStored` names a parent that is stored already, or none at the start of a namespace; each digest is removed once.
Partial leaves are not announced: nothing outside can use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from .tokens import Namespace, block_digest, root_digest


class BlocksStored(NamedTuple):
    """Consecutive blocks of one path joined the cache.

    parent   digest of the block before the first, None at the start of a namespace
    tokens   packed ids of all their tokens
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    namespace: Namespace
    tokens: bytes


class BlocksRemoved(NamedTuple):
    """Blocks left the cache."""

    digests: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """All blocks left the cache at once."""


Event: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared
Listener: TypeAlias = Callable[[Event], None]


class BlockLog:
    """Digests of the resident full blocks, and of the last ones that were evicted. Exists only if somebody asks for it.

    remember   evicted digests to keep, the oldest forgotten first
    """

    def __init__(self, remember: int = 0) -> None:
        self.listeners: list[Listener] = []
        self._remember = remember
        self._digests: dict[int, bytes] = {}
        self._evicted: dict[bytes, None] = {}  # in order of eviction

    def stored(
        self, namespace: Namespace, parent_block: int | None, tokens: bytes, blocks: Sequence[int], block_bytes: int
    ) -> None:
        """Full blocks joined the tree behind `parent_block`. One SHA-256 a block."""
        if not blocks:
            return
        parent = None if parent_block is None else self._digests[parent_block]
        digest = root_digest(namespace) if parent is None else parent
        digests = []
        for index, block_id in enumerate(blocks):
            digest = block_digest(digest, tokens[index * block_bytes : (index + 1) * block_bytes])
            digests.append(digest)
            self._digests[block_id] = digest
            self._evicted.pop(digest, None)
        self._tell(BlocksStored(tuple(digests), parent, namespace, tokens))

    def removed(self, blocks: Sequence[int]) -> None:
        """Blocks left the tree; those that were never full are passed over."""
        digests = tuple(self._digests.pop(block_id) for block_id in blocks if block_id in self._digests)
        if not digests:
            return
        for digest in digests:
            self._evicted[digest] = None
        while len(self._evicted) > self._remember:
            del self._evicted[next(iter(self._evicted))]
        self._tell(BlocksRemoved(digests))

    def cleared(self) -> None:
        """All blocks left the tree, on purpose: they do not count as evicted."""
        self._digests.clear()
        self._evicted.clear()
        self._tell(CacheCleared())

    def was_evicted(self, digest: bytes) -> bool:
        """The block is among the last ones that were evicted, and has not come back."""
        return digest in self._evicted

    def _tell(self, event: Event) -> None:
        for listener in list(self.listeners):
            listener(event)
