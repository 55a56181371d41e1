"""A node of the radix tree: an edge with its tokens, and the blocks that hold their keys and values.

A plain record; `RadixTree` keeps its invariants. Slots and lazily made children keep a leaf at a few hundred bytes.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Protocol, TypeAlias

from sortedcontainers import SortedDict

from .tokens import TOKEN_BYTES, Namespace

Children: TypeAlias = "SortedDict[bytes, RadixNode]"

# Shared by all leaves: most nodes are leaves, and an empty SortedDict of its own would double the size of each.
# Nobody writes to it; the first child replaces it (`RadixTree._attach`).
NO_CHILDREN: Children = SortedDict()


class Use(NamedTuple):
    """How a path is used: what `RadixNode` records of it, under the same names."""

    tick: int
    created: int
    uses: int = 1
    priority: int = 0
    expires: int | None = None
    age: float = 0.0


class Ranking(Protocol):
    """What the tree asks of an eviction policy (`radixkv.eviction.EvictionPolicy`)."""

    fields: tuple[str, ...]
    age: float

    def rank(self, node: RadixNode) -> Any:
        """What to sort unlocked leaves by; the lowest is evicted first."""

    def evicted(self, rank: Any) -> None:
        """A leaf of that rank was evicted, in whole or in part."""


class RadixNode:
    """One edge of the tree.

    label     packed tokens of the edge; as many as its run has slots, except in a partial leaf
    blocks    the run: ids of the blocks that hold those tokens, in token order
    end       blocks on the path from the root to the end of this node (its depth)
    children  by their packed first block, in token order (a partial leaf: by its whole label, which is shorter)
    lock_ref  requests whose path ends here, plus children with lock_ref > 0
    tick      of the last use of a path through this node; never older than a child's
    created   tick at which the request came that inserted the blocks
    uses      requests that used them since; counted where the policy asks for it
    priority, expires   soft retention: until tick `expires` (None: no end), for the priority policy
    age       of the policy at the last use, for policies that age
    serial    unique, ascending by creation: the last tie-break of the eviction order
    order_entry   this node's entry in the eviction order, or None when it is locked or has children
    """

    __slots__ = (
        "age", "blocks", "children", "created", "end", "expires", "label", "lock_ref", "order_entry", "parent",
        "priority", "serial", "tick", "uses",
    )  # fmt: skip

    def __init__(
        self, label: bytes, blocks: array[int], parent: RadixNode | None, end: int, use: Use, serial: int
    ) -> None:
        self.label = label
        self.blocks = blocks
        self.parent = parent
        self.children: Children = NO_CHILDREN
        self.end = end
        self.lock_ref = 0
        self.tick = use.tick
        self.created = use.created
        self.uses = use.uses
        self.priority = use.priority
        self.expires = use.expires
        self.age = use.age
        self.serial = serial
        self.order_entry: tuple[Any, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens on this edge."""
        return len(self.label) // TOKEN_BYTES

    @property
    def is_leaf(self) -> bool:
        """The node has no children."""
        return not self.children

    def __repr__(self) -> str:
        return (
            f"RadixNode({self.num_tokens} tokens, blocks {describe_blocks(self.blocks)}, end={self.end}, "
            f"lock_ref={self.lock_ref}, tick={self.tick}, {len(self.children)} children)"
        )


class RootNode(RadixNode):
    """The root of one namespace: no tokens, no blocks, no parent."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, serial: int) -> None:
        super().__init__(b"", array("I"), None, 0, Use(0, 0, 0), serial)
        self.namespace = namespace


def describe_blocks(blocks: array[int], most: int = 4) -> str:
    """Block ids as ranges, as in `0-15,40`; after `most` ranges an ellipsis."""
    ranges: list[list[int]] = []
    for block_id in blocks:
        if ranges and block_id == ranges[-1][1] + 1:
            ranges[-1][1] = block_id
        elif len(ranges) == most:
            return ",".join(_range(*pair) for pair in ranges) + ",…"
        else:
            ranges.append([block_id, block_id])
    return ",".join(_range(*pair) for pair in ranges)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
