"""What the pictures ask of what they draw.

The drawing code stands below the cache, so that a node or a table can draw itself; it knows them by these protocols.
All is read, nothing changed. What each attribute means stands in the class that a protocol names.
"""

# ruff: noqa: D102 - for that reason

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]


class NodeChildren(Protocol):
    """`radixkv.node.Children`."""

    def in_order(self) -> Sequence[Node]:
        """The children in token order."""

    def __len__(self) -> int: ...


class Node(Protocol):
    """`radixkv.node.RadixNode`."""

    @property
    def label(self) -> bytes: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def parent(self) -> Node | None: ...
    @property
    def children(self) -> NodeChildren: ...
    @property
    def lock_ref(self) -> int: ...
    @property
    def tick(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


class Table(Protocol):
    """`radixkv.block_table.BlockTable`."""

    @property
    def request_id(self) -> str | int: ...
    @property
    def namespace(self) -> tuple[str, ...]: ...
    @property
    def node(self) -> Node: ...
    @property
    def tokens(self) -> bytearray: ...
    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_shared(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def detached(self) -> set[int]: ...
    @property
    def forks(self) -> Iterable[Table]: ...
    def private_blocks(self) -> list[int]:
        """Ids of the blocks that tables own and the tree does not."""

    def tokens_filled(self, index: int) -> int:
        """Tokens that have a slot in the block at this place."""


class Tree(Protocol):
    """`radixkv.tree.RadixTree`."""

    @property
    def num_nodes(self) -> int: ...
    def namespaces(self) -> list[tuple[str, ...]]:
        """Namespaces that hold blocks or are locked."""

    def root(self, namespace: tuple[str, ...]) -> Node:
        """The root of one of them."""


class Stats(Protocol):
    """`radixkv.stats.CacheStats`."""

    @property
    def requests(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def evicted_blocks(self) -> int: ...
    @property
    def token_hit_rate(self) -> float | None: ...


class Manager(Protocol):
    """What all managers of blocks have in common (`radixkv.baselines.CacheManager`)."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_private_blocks(self) -> int: ...
    @property
    def num_evictable_blocks(self) -> int: ...
    @property
    def num_protected_blocks(self) -> int: ...
    @property
    def request_ids(self) -> tuple[str | int, ...]: ...
    @property
    def stats(self) -> Stats: ...
    def block_table(self, request_id: str | int) -> tuple[int, ...]:
        """Physical block ids of a running request, in logical order."""


class Cache(Manager, Protocol):
    """`radixkv.cache.PrefixCache`."""

    @property
    def tree(self) -> Tree: ...
    @property
    def decode(self) -> Decode | None: ...
    def table(self, request_id: str | int) -> Table:
        """The block table of a running request."""

    def namespace_stats(self, namespace: tuple[str, ...]) -> Stats:
        """The requests of one namespace, counted apart."""


class Turns(Protocol):
    """One turn over all conversations of a replay (`engine.replay.WaveSummary`)."""

    @property
    def turn(self) -> int: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def median_ttft_s(self) -> float: ...
    @property
    def median_ttft_cold_s(self) -> float | None: ...
    @property
    def token_hit_rate(self) -> float: ...
