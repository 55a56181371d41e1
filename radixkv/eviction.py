"""Policies that rank unlocked leaves: the lowest rank is evicted first, block by block from the end of the leaf.

A policy sees nodes and nothing else, and keeps no list of its own: the tree keeps the order. Among equal ranks the
deepest leaf goes first. `fields` names what a rank depends on; the tree keeps two pieces of a path apart only if they
differ in one of them, so a policy that looks at more makes a tree of more nodes. No policy pins anything for good.

    lru       least recently used
    mru       most recently used: best for one long cyclic scan, bad for everything else
    fifo      inserted by the earliest request
    lfu       fewest uses since insertion, then least recently used
    slru      used once before used again, each by recency (segmented LRU: Karedla, Love and Wherry, 1994)
    priority  lowest priority, then least recently used; a priority lasts until its time to live is over
    cost      cheapest to recompute per use, with ageing (GreedyDual-Size-Frequency: Cherkasova, 1998)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .node import RadixNode


class EvictionPolicy:
    """Base of all policies. Subclass it, name the `fields` that the rank depends on, and define `rank`."""

    fields: tuple[str, ...] = ("tick",)
    age: float = 0.0
    """Stamped on every node of a path when it is used (`RadixNode.age`)."""

    def rank(self, node: RadixNode) -> Any:
        """What to sort by; any comparable value. A function of the node's `fields`, `age` and `end` alone."""
        raise NotImplementedError

    def evicted(self, rank: Any) -> None:
        """Told the rank of each leaf that is evicted, in whole or in part. For policies that age."""


class LRU(EvictionPolicy):
    """Least recently used first."""

    def rank(self, node: RadixNode) -> Any:
        """The tick of the last use of a path through the node."""
        return node.tick


class MRU(EvictionPolicy):
    """Most recently used first."""

    def rank(self, node: RadixNode) -> Any:
        """The newest tick is the lowest rank."""
        return -node.tick


class FIFO(EvictionPolicy):
    """First in, first out, however often it was used."""

    fields = ("created",)

    def rank(self, node: RadixNode) -> Any:
        """When the request came that inserted the node's blocks."""
        return node.created


class LFU(EvictionPolicy):
    """Least frequently used first; the count is forgotten at eviction."""

    fields = ("uses", "tick")

    def rank(self, node: RadixNode) -> Any:
        """Requests that used the node, then recency."""
        return node.uses, node.tick


class SegmentedLRU(EvictionPolicy):
    """What was used by one request only goes before what was used again: a scan does not wash the cache out."""

    fields = ("uses", "tick")

    def rank(self, node: RadixNode) -> Any:
        """The segment, then recency."""
        return node.uses > 1, node.tick


class Priority(EvictionPolicy):
    """Soft retention: the lowest priority goes first, whatever its recency; 0 unless a request gave one."""

    fields = ("priority", "expires", "tick")

    def rank(self, node: RadixNode) -> Any:
        """The priority, then recency. The tree resets a priority to 0 when its time is over."""
        return node.priority, node.tick


class CostAware(EvictionPolicy):
    """Keeps what is dear to compute again: rank = age at last use + uses * cost of a token there.

    A token at position p costs a decoder 1 + p / parity units: the matrix products are the same for all, attention
    grows with the tokens before it, and is as dear as the products at position `parity` (about 6 hidden sizes for a
    plain transformer: 24 h² operations a layer in products, 4 p h in attention). GreedyDual-Size-Frequency (Cherkasova,
    HPL-98-69R1, 1998) with that cost and size 1: the age rises to the rank of each victim, so that what was dear once
    and is never used again leaves in the end.
    """

    fields = ("uses", "age")

    def __init__(self, block_size: int, parity: int = 24_576) -> None:
        if parity < 1:
            raise ValueError(f"parity is {parity}; allowed: 1 and more")
        self.blocks_at_parity = parity / block_size

    def rank(self, node: RadixNode) -> Any:
        """Age at the last use, plus uses times the cost of the node's deepest token."""
        return node.age + node.uses * (1 + node.end / self.blocks_at_parity)

    def evicted(self, rank: Any) -> None:
        """The age never falls."""
        self.age = max(self.age, rank)


class RankedBy(EvictionPolicy):
    """A policy from a user's function of a node. It may look at any field, so only what agrees in all is alike."""

    fields = ("tick", "created", "uses", "priority", "expires", "age")

    def __init__(self, function: Callable[[RadixNode], Any]) -> None:
        self.function = function

    def rank(self, node: RadixNode) -> Any:
        """What the function says."""
        return self.function(node)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda block_size: LRU(),
    "mru": lambda block_size: MRU(),
    "fifo": lambda block_size: FIFO(),
    "lfu": lambda block_size: LFU(),
    "slru": lambda block_size: SegmentedLRU(),
    "priority": lambda block_size: Priority(),
    "cost": CostAware,
}


def policy_of(policy: str | EvictionPolicy | Callable[[RadixNode], Any], block_size: int) -> EvictionPolicy:
    """The policy of that name, new; or the object given; or one that ranks by the function given.

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"unknown eviction policy {policy!r}; allowed: {', '.join(POLICIES)}, an object, a function"
            )
        return POLICIES[policy](block_size)
    if callable(policy):
        return RankedBy(policy)
    raise TypeError(f"policy must be a name, an EvictionPolicy or a function, not {policy!r}")
