"""The static radix tree of a whole trace: since all requests are known, each edge is split wherever any two part.

    requests            tree

    A B C D             A B ─┬─ C ─── D
    A B C               1    │  2     3     one letter = one block, one number = one segment
    A B X               0    └─ X
                        root    4

Whoever uses a block of a segment uses the whole segment, so what is asked offline (when is it used next, who used it
last) has one answer a segment, and a request of a thousand blocks is a path of a few segments.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ..tokens import TOKEN_BYTES, common_prefix

ROOT = 0


class SegmentTree:
    """Segments by number; 0 is the root, which is empty.

    parents   the segment before
    lengths   blocks of the segment
    ends      blocks from the root to its end
    leaves    by request: the segment with which its path ends (the root: it has no blocks)

    Made from each request's blocks, packed; a block is `units_per_block` packed units. O(requests * depth in segments)
    and a memcmp of all blocks.
    """

    def __init__(self, paths: Iterable[bytes], units_per_block: int = 1) -> None:
        self.parents = array("I", (ROOT,))
        self.lengths = array("I", (0,))
        self.ends = array("I", (0,))
        self.leaves = array("I")
        self._block_bytes = units_per_block * TOKEN_BYTES
        # Needed only while the tree grows.
        self._labels = [b""]
        self._children: list[dict[bytes, int]] = [{}]
        for path in paths:
            self.leaves.append(self._insert(path))
        del self._labels, self._children

    @property
    def num_blocks(self) -> int:
        """Distinct blocks of the trace."""
        return sum(self.lengths)

    def path(self, request: int) -> list[int]:
        """The segments of a request, from the first on."""
        parents = self.parents
        segment = self.leaves[request]
        segments = []
        while segment != ROOT:
            segments.append(segment)
            segment = parents[segment]
        segments.reverse()
        return segments

    def _insert(self, path: bytes) -> int:
        """The segment at which the path ends, after it was added."""
        segment, start, stop = ROOT, 0, len(path)
        while start < stop:
            first_block = path[start : start + self._block_bytes]
            child = self._children[segment].get(first_block)
            if child is None:
                child = self._add(segment, path[start:])
                self._children[segment][first_block] = child
                return child
            label = self._labels[child]
            if not path.startswith(label, start):
                num_shared = common_prefix(label, path, start, stop) * TOKEN_BYTES // self._block_bytes
                child = self._split(child, num_shared, first_block)
            start += self.lengths[child] * self._block_bytes
            segment = child
        return segment

    def _add(self, parent: int, label: bytes) -> int:
        length = len(label) // self._block_bytes
        self.parents.append(parent)
        self.lengths.append(length)
        self.ends.append(self.ends[parent] + length)
        self._labels.append(label)
        self._children.append({})
        return len(self.parents) - 1

    def _split(self, segment: int, num_upper: int, first_block: bytes) -> int:
        """A new segment for the first `num_upper` blocks. The rest keeps the number: paths end there."""
        parent, label = self.parents[segment], self._labels[segment]
        cut = num_upper * self._block_bytes
        upper = self._add(parent, label[:cut])
        self._children[parent][first_block] = upper
        self._children[upper][label[cut : cut + self._block_bytes]] = segment
        self._labels[segment] = label[cut:]
        self.lengths[segment] -= num_upper
        self.parents[segment] = upper
        return upper
