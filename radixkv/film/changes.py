"""What a call changed in the tree, told by the tree before and after it. Asks the tree nothing while it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..tree import RadixTree


class Place(NamedTuple):
    """Where a node stands and how large it is: its blocks are [first, end) of its path."""

    first: int
    end: int
    num_tokens: int
    is_locked: bool


@dataclass(frozen=True)
class Shape:
    """All nodes of a tree but the roots, by serial, and the serial of each one's parent."""

    places: Mapping[int, Place]
    parents: Mapping[int, int]

    @classmethod
    def of(cls, tree: RadixTree) -> Shape:
        """The shape that the tree has now. O(nodes)."""
        places, parents = {}, {}
        for node in tree.nodes():
            if node.parent is not None:
                first = node.end - len(node.blocks)
                places[node.serial] = Place(first, node.end, node.num_tokens, node.lock_ref > 0)
                parents[node.serial] = node.parent.serial
        return cls(places, parents)


@dataclass(frozen=True)
class Changes:
    """Serials of the nodes that differ between two shapes of one tree.

    split    new upper halves of nodes that were there
    added    other new nodes
    grown, trimmed   at their end
    merged   upper halves that a child took in again
    gone     other nodes that are no longer there
    changed  all that are there now and were not, or not so: other tokens, or another lock
    """

    split: frozenset[int]
    added: frozenset[int]
    grown: frozenset[int]
    trimmed: frozenset[int]
    merged: frozenset[int]
    gone: frozenset[int]
    changed: frozenset[int]

    @classmethod
    def between(cls, before: Shape, after: Shape) -> Changes:
        """What has to be said of the way from one shape to the other. O(nodes)."""
        old, new = before.places, after.places
        # The lower half of a split keeps its serial, and began where the upper half begins now; a merge is the reverse.
        uppers = {
            parent
            for serial, parent in after.parents.items()
            if parent in new and parent not in old and serial in old and old[serial].first == new[parent].first
        }
        taken_in = {
            parent
            for serial, parent in before.parents.items()
            if parent in old and parent not in new and serial in new and new[serial].first == old[parent].first
        }
        kept = old.keys() & new.keys()
        return cls(
            split=frozenset(uppers),
            added=frozenset(new.keys() - old.keys() - uppers),
            grown=frozenset(serial for serial in kept if new[serial].end > old[serial].end),
            trimmed=frozenset(serial for serial in kept if new[serial].end < old[serial].end),
            merged=frozenset(taken_in),
            gone=frozenset(old.keys() - new.keys() - taken_in),
            changed=frozenset(serial for serial, place in new.items() if old.get(serial) != place),
        )
