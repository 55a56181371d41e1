"""How a step's attention is divided into parts: worked out once for each kind of layer, then used by all of them.

    system prompt ───────────────┬─ conversation A ──┬─ row 0        levels   0        1        2
    (node, rows 0 to 4: part 1)  │  (node: part 2)   └─ row 1        row 0    part 1 + part 2 + tail
                                 ├─ row 2                            row 2    part 1 +          tail
                                 └─ rows 3, 4

A node that pays becomes a part: its keys are read once for the queries of all rows below it. One that does not pay
leaves its keys to the nodes below it, and at last to the rows. What is left to a row is its tail. Short tails are
attended side by side, padded to one length; long ones each by itself, and where a tail is scattered its long runs are
read as views and only the rest is gathered. Every key that a row sees is in exactly one of its parts, in whatever
order: the softmax does not care.

Parts of one row stand on different levels, and levels are merged by log-sum-exp.

A window or chunk hides early keys. A node then begins where all the queries of all its rows see it; what some of them
see before that belongs to their tails. So a node's part never needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import AttentionMetadata, Read, Span, TableSlots, bias_of

from .costs import CACHE_BYTES, costs_of

# Rows go side by side only if that is predicted to save this much: the model is a line through measurements.
_CLEARLY = 0.9


class Shape(NamedTuple):
    """What the plan of a layer depends on, besides its span."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of keys and values."""
    device: torch.device


@dataclass
class Part:
    """Queries that stand side by side, and keys that all of them attend to (but for the mask of a tail)."""

    tokens: slice
    read: Read
    level: int
    bias: Tensor | None = None


@dataclass
class PaddedPart:
    """The tails of B decode rows, side by side: (B * S,) slots of S keys each, of which the bias hides the padding."""

    tokens: slice | Tensor
    slots: Tensor
    num_rows: int
    bias: Tensor | None
    """(B, 1, 1, S), or None where all are of one length."""
    level: int


@dataclass
class Plan:
    """The parts of one kind of layer, and what they are expected to take."""

    parts: list[Part]
    padded: PaddedPart | None
    num_levels: int
    predicted_ns: float
    """For one layer, without what does not depend on the plan: the products."""
    shared_keys: int
    """Keys that rows did not have to read, because it was done for others too; summed over rows."""
    levels: Any = None
    """Where the parts' results are put; made by the first layer of the kind and used by the others too."""


def make_plan(metadata: AttentionMetadata, span: Span, shape: Shape) -> Plan | None:
    """The plan for layers of one kind; None where each row is better attended for itself.

    "tree" takes all nodes. "auto" compares three ways by their predicted time: each row for itself, all nodes, and only
    the nodes that pay by themselves. O(rows + nodes + runs).
    """
    if metadata.attention == "gather" or (metadata.attention == "auto" and shape.device.type != "cpu"):
        return None  # the constants are those of CPUs
    planner = _Planner(metadata, span, shape)
    division = planner.divide(takes_all=metadata.attention == "tree")
    if metadata.attention == "auto":
        if division.has_left_out:
            division = min(division, planner.divide(takes_all=True), key=lambda division: division.predicted_ns)
        if division.predicted_ns >= planner.by_row_ns():
            return None
    return planner.make(division)


def predicted_by_row_ns(metadata: AttentionMetadata, span: Span, shape: Shape) -> float:
    """What each row for itself is expected to take, for one layer and without the products."""
    return _Planner(metadata, span, shape).by_row_ns()


_Range = tuple[int, int]  # positions, half-open


class _SharedPart(NamedTuple):
    """A part, before its tensors are made: the keys of some positions of a row's table, for a range of rows."""

    first_row: int
    last_row: int
    ranges: list[_Range]
    level: int
    is_masked: bool = False


@dataclass
class _Division:
    """Which parts there are, and what they are expected to take."""

    parts: list[_SharedPart]
    tails: list[list[_Range]]
    together: list[int]
    """The rows whose tails go side by side."""
    padded_level: int
    num_levels: int
    predicted_ns: float
    shared_keys: int
    has_left_out: bool
    """A node does not pay by itself, and its keys are read by those below it."""


class _Planner:
    def __init__(self, metadata: AttentionMetadata, span: Span, shape: Shape) -> None:
        self.rows = metadata.rows
        self.nodes = metadata.nodes
        self.span = span
        self.shape = shape
        self.costs = costs_of(shape.dtype)
        self.call_ns = self.costs.call + shape.num_kv_heads * self.costs.head
        # Of K and V for each key: KV heads times the widths of a key and a value.
        self.elements = shape.num_kv_heads * (shape.key_dim + shape.value_dim)
        # Somebody in the row sees the positions from here on, ...
        self.first_seen = [span.first_visible(row.start) for row in self.rows]
        # ... and all its queries those from here on, up to the first of them.
        self.seen_by_all = [span.first_visible(row.context_len - 1) for row in self.rows]

    # ------------------------------------------------------------ predictions, in nanoseconds

    def _read_ns(self, num_keys: int) -> float:
        return num_keys * self.elements * self.costs.read

    def _copy_ns(self, num_keys: int) -> float:
        return num_keys * self.elements * self.costs.copy

    def _padded_ns(self, num_rows: int, longest: int) -> float:
        num_elements = self.elements * num_rows * longest
        spill = self.costs.spill if num_elements * self.shape.dtype.itemsize > CACHE_BYTES else 0.0
        call_ns = self.costs.padded_call + num_rows * self.shape.num_kv_heads * self.costs.head
        return call_ns + num_elements * (self.costs.read + self.costs.copy + spill)

    def by_row_ns(self) -> float:
        """Each row by itself. What another row has read just before comes from the cache."""
        read_before = [0] * len(self.rows)  # up to which position
        waiting = list(self.nodes)
        while waiting:
            node = waiting.pop()
            for index in range(node.first_row + 1, node.last_row):
                read_before[index] = max(read_before[index], node.end)
            waiting += node.children
        total = 0.0
        for row, first, end in zip(self.rows, self.first_seen, read_before, strict=True):
            num_again = max(0, end - first)
            total += self.call_ns + self._read_ns(row.context_len - first)
            total -= num_again * self.elements * (self.costs.read - self.costs.reread)
            if not row.table.is_run(first, row.context_len):
                total += self._copy_ns(row.context_len - first)
        return total

    # ------------------------------------------------------------ which parts there are

    def divide(self, *, takes_all: bool) -> _Division:
        """All nodes as parts, or only those that pay by themselves; then the tails."""
        parts: list[_SharedPart] = []
        num_levels = [0] * len(self.rows)  # the parts of each row so far
        taken: list[list[_Range]] = [[] for _ in self.rows]  # the positions in them
        predicted_ns = 0.0
        shared_keys = 0
        has_left_out = False

        waiting = [(node, 0) for node in reversed(self.nodes)]  # with the position from where on keys are left to it
        while waiting:
            node, pending = waiting.pop()
            members = range(node.first_row, node.last_row)
            start = max(pending, *(self.seen_by_all[index] for index in members))
            if start < node.end:
                num_keys = node.end - start
                table = self.rows[node.first_row].table
                views, gathered = self._divided(table, [(start, node.end)])
                reads = _reads(views, gathered)
                num_copied = _length(gathered) if self._is_scattered(table, gathered) else 0
                once_ns = self._read_ns(num_keys) + self._copy_ns(num_copied)
                shared_ns = len(reads) * (self.call_ns + self.costs.level) + once_ns
                # By itself, each row would read these keys in a part that it has anyway, all but the first from cache.
                again_ns = num_keys * self.elements * self.costs.reread + self._copy_ns(num_copied)
                if takes_all or shared_ns < once_ns + (len(members) - 1) * again_ns:
                    level = max(num_levels[index] for index in members)
                    for ranges in reads:
                        parts.append(_SharedPart(node.first_row, node.last_row, ranges, level))
                        level += 1
                    for index in members:
                        num_levels[index] = level
                        taken[index].append((start, node.end))
                    predicted_ns += shared_ns
                    shared_keys += (len(members) - 1) * num_keys
                    pending = node.end
                else:
                    has_left_out = True
            waiting += [(child, pending) for child in reversed(node.children)]

        tails = [self._tail(index, taken[index]) for index in range(len(self.rows))]
        is_scattered = [self._is_scattered(row.table, tail) for row, tail in zip(self.rows, tails, strict=True)]
        together = self._together(tails, is_scattered)
        padded_level = max((num_levels[index] for index in together), default=0)
        if together:
            predicted_ns += self._padded_ns(len(together), max(_length(tails[index]) for index in together))
            predicted_ns += self.costs.level if padded_level else 0.0
        for index, tail in enumerate(tails):
            if index in together:
                num_levels[index] = padded_level + 1
                continue
            reads = self._tail_reads(index, tail) if is_scattered[index] else [tail]
            for ranges in reads:
                is_masked = ranges is reads[-1]
                parts.append(_SharedPart(index, index + 1, ranges, num_levels[index], is_masked))
                num_levels[index] += 1
                predicted_ns += self.call_ns + self._read_ns(_length(ranges))
                if self._is_scattered(self.rows[index].table, ranges):
                    predicted_ns += self._copy_ns(_length(ranges))
            if num_levels[index] > 1:
                predicted_ns += self.costs.level * len(reads)
        if max(num_levels) > 1:
            num_results = max(num_levels) * self.rows[-1].query_end * self.shape.num_heads * self.shape.value_dim
            predicted_ns += self.costs.merge + num_results * self.costs.merge_element
        return _Division(parts, tails, together, padded_level, max(num_levels), predicted_ns, shared_keys, has_left_out)

    def _divided(self, table: TableSlots, ranges: Sequence[_Range]) -> tuple[list[_Range], list[_Range]]:
        """Positions that need no mask: runs that are long enough to be parts of their own, and what is between them."""
        pieces = [piece for part in ranges for piece in table.pieces(*part)]
        worth_ns = self.call_ns + self.costs.level
        views: list[_Range] = []
        rest: list[_Range] = []
        for piece in pieces:
            if self._copy_ns(piece[1] - piece[0]) > worth_ns:
                views.append(piece)
            elif rest and rest[-1][1] == piece[0]:
                rest[-1] = rest[-1][0], piece[1]
            else:
                rest.append(piece)
        return views, rest

    @staticmethod
    def _is_scattered(table: TableSlots, ranges: Sequence[_Range]) -> bool:
        return len(ranges) > 1 or any(not table.is_run(*part) for part in ranges)

    def _tail(self, index: int, taken: Sequence[_Range]) -> list[_Range]:
        """What a row sees and no node of its has read."""
        tail = []
        first = self.first_seen[index]
        for start, end in taken:
            if first < start:
                tail.append((first, start))
            first = end
        return [*tail, (first, self.rows[index].context_len)]

    def _tail_reads(self, index: int, tail: list[_Range]) -> list[list[_Range]]:
        """A scattered tail as parts; the last of them has the row's new tokens, and the mask if there is one."""
        row = self.rows[index]
        end = row.context_len if row.num_queries == 1 else row.start
        unmasked = [(max(first, self.seen_by_all[index]), min(last, end)) for first, last in tail]
        views, _ = self._divided(row.table, [part for part in unmasked if part[0] < part[1]])
        return _reads(views, _without(tail, views))

    def _together(self, tails: Sequence[Sequence[_Range]], is_scattered: Sequence[bool]) -> list[int]:
        """The decode rows that are attended side by side: the shortest tails, as many as make it cheapest."""
        decoding = [(_length(tails[index]), index) for index, row in enumerate(self.rows) if row.num_queries == 1]
        decoding.sort()
        best_ns, best = 0.0, 0
        alone_ns = 0.0
        for number, (length, index) in enumerate(decoding, start=1):
            alone_ns += self.call_ns + self._read_ns(length)
            alone_ns += self._copy_ns(length) if is_scattered[index] else 0.0
            added_ns = self._padded_ns(number, length) - alone_ns * _CLEARLY
            if number > 1 and added_ns < best_ns:
                best_ns, best = added_ns, number
        return sorted(index for _, index in decoding[:best])

    # ------------------------------------------------------------ their tensors

    def make(self, division: _Division) -> Plan:
        """The plan of a division."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        parts = []
        for part in division.parts:
            row = self.rows[part.first_row]
            tokens = slice(row.query_start, self.rows[part.last_row - 1].query_end)
            if part.is_masked:
                read = row.read_ranges(part.ranges, self.span, self.shape.device)
            else:
                read = Read(row.table.join(part.ranges), is_causal=False, visible=None)
            bias = None if read.visible is None else bias_of(read.visible, self.shape.dtype, group)
            parts.append(Part(tokens, read, part.level, bias))
        padded = self._pad(division) if division.together else None
        return Plan(parts, padded, division.num_levels, division.predicted_ns, division.shared_keys)

    def _pad(self, division: _Division) -> PaddedPart:
        together, device = division.together, self.shape.device
        lengths = [_length(division.tails[index]) for index in together]
        longest = max(lengths)
        slots = torch.empty(len(together), longest, dtype=torch.int64, device=device)
        for place, index in enumerate(together):
            filled = 0
            for start, end in division.tails[index]:
                slots[place, filled : filled + end - start] = self.rows[index].table.tensor(start, end)
                filled += end - start
            # Padded with a slot that the row has written: whatever else stood there might not be a number.
            if filled < longest:
                slots[place, filled:] = slots[place, 0]
        bias = None
        if min(lengths) < longest:
            visible = torch.arange(longest) < torch.tensor(lengths)[:, None]
            bias = bias_of(visible.to(device), self.shape.dtype)[:, None, None]  # (B, 1, 1, S)
        tokens = [self.rows[index].query_start for index in together]
        is_slice = tokens[-1] - tokens[0] == len(tokens) - 1
        return PaddedPart(
            tokens=slice(tokens[0], tokens[-1] + 1) if is_slice else torch.tensor(tokens, device=device),
            slots=slots.flatten(),
            num_rows=len(together),
            bias=bias,
            level=division.padded_level,
        )


def _length(ranges: Sequence[_Range]) -> int:
    return sum(end - start for start, end in ranges)


def _reads(views: Sequence[_Range], rest: list[_Range]) -> list[list[_Range]]:
    """The positions of each part: every view by itself, and the rest together."""
    return [*([view] for view in views), *([rest] if rest else [])]


def _without(ranges: Sequence[_Range], holes: Sequence[_Range]) -> list[_Range]:
    """The ranges with the holes taken out; each hole lies in one range, and both ascend."""
    left = []
    for start, end in ranges:
        for hole_start, hole_end in holes:
            if start <= hole_start and hole_end <= end:
                if start < hole_start:
                    left.append((start, hole_start))
                start = hole_end
        if start < end:
            left.append((start, end))
    return left
