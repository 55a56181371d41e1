"""A node of the radix tree: an edge with its tokens, and the blocks that hold their keys and values.

A plain record; `RadixTree` keeps its invariants. Slots and lazily made children keep a leaf at a few hundred bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any, NamedTuple, Protocol

from sortedcontainers import SortedList

from .tokens import TOKEN_BYTES, Namespace

# From so many children on a node keeps its keys sorted; below, sorting them when asked (0.6 µs) is cheaper.
MANY_CHILDREN = 17


class Children(dict[bytes, "RadixNode"]):
    """The children of a node by their packed first block; in token order where a method says so.

    Nearly all nodes have one or two. A `SortedDict` for each takes 6 µs and 1.5 KB to make, which was a third of the
    time of an insertion; a dict takes 0.2 µs. The root of a busy namespace may have a million: those stand in an index.
    """

    __slots__ = ("_index",)

    def __init__(self) -> None:
        self._index: SortedList[bytes] | None = None

    def __setitem__(self, first_block: bytes, child: RadixNode) -> None:
        if self._index is not None and first_block not in self:
            self._index.add(first_block)
        super().__setitem__(first_block, child)
        if self._index is None and len(self) >= MANY_CHILDREN:
            self._index = SortedList(self)

    def __delitem__(self, first_block: bytes) -> None:
        super().__delitem__(first_block)
        if self._index is not None:
            self._index.remove(first_block)

    def in_order(self) -> list[RadixNode]:
        """The children in token order. O(n), or O(n log n) for few."""
        return [self[first_block] for first_block in (sorted(self) if self._index is None else self._index)]

    def around(self, head: bytes) -> tuple[bytes | None, bytes | None]:
        """The keys beside the place of `head` in token order: the last below it, the first not below it. O(log n)."""
        if self._index is None:
            keys: Any = sorted(self)
            place = bisect_left(keys, head)
        else:
            keys = self._index
            place = keys.bisect_left(head)
        return keys[place - 1] if place else None, keys[place] if place < len(keys) else None


# Shared by all leaves: most nodes are leaves, and an empty dict of its own would make each bigger by a quarter.
# Nobody writes to it; the first child replaces it (`RadixTree._attach`).
NO_CHILDREN = Children()


class Use(NamedTuple):
    """How a path is used: what `RadixNode` records of it, under the same names."""

    tick: int
    created: int
    uses: int = 1
    priority: int = 0
    expires: int | None = None
    age: float = 0.0

    def at(self, tick: int) -> Use:
        """The same use at another tick. A quarter of the time of `_replace`."""
        return Use(tick, *self[1:])


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

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The way to the node and what hangs below it as a picture, for notebooks."""
        from .render import draw_node, mime_bundle

        return mime_bundle(draw_node(self), repr(self))


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
