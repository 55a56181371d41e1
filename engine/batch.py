"""Scheduled rows → the tensors of one forward pass, with what attention needs to read the KV pool.

All rows of a step are laid end to end on one axis, whatever they do: a prefill row brings many tokens, a decode row
one. Nothing is padded. Knows block tables and positions; knows neither models nor the scheduler.

Shapes: T = new tokens of all rows, R = rows. `[a, b)` ranges are half-open.

        row 0 (prefill)   row 1 (decode)   row 2 (chunk behind a cached prefix)
        t t t t t t t     t                t t t t t
        positions 0..6    position 33      positions 16..20

Rows whose tables start alike stand side by side, so that a tree node's queries are one slice of the axis; the logits
come in the order in which the rows were given. `BatchBuilder` keeps what it knows of a request's table from one step to
the next; `build_batch` is for a batch that stands alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import ATTENTIONS

# A mask repeated for the query heads of a group lets them read K and V once (1.7 times faster for bfloat16 and 32 heads
# on 8, the same for float32), but takes memory, and time in each step: 2**22 numbers are 16 MiB in float32.
MAX_REPEATED_MASK = 2**22

_ID_BYTES = array("I").itemsize
_SERIALS = count()  # names, not state: two tables never have the same one


@dataclass(frozen=True)
class Row:
    """What one request computes in this step."""

    token_ids: Sequence[int]
    """The new tokens, at least one."""
    start: int
    """The position of the first of them: the number of tokens whose KV is in the pool already."""
    block_ids: Sequence[int]
    """The request's block table, in logical order; covers `start + len(token_ids)` tokens."""
    num_logits: int = 1
    """After how many of the new tokens, counted from the last, logits are wanted; at least one."""
    key: Hashable | None = None
    """The request, by which a `BatchBuilder` finds its table again in the next step; None: it is not looked for."""


class Span(NamedTuple):
    """Which keys a token sees besides being causal: none left out (both None), a window, or its own chunk."""

    window: int | None = None
    """Position p sees (p - window, p]."""
    chunk: int | None = None
    """Position p sees its chunk only: [p // chunk * chunk, p]."""

    def first_visible(self, position: int) -> int:
        """The lowest position that the token at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0


class TableSlots:
    """The slots behind one block table, by position; grows with the table, and is not made anew for it.

    runs   [first index in the table, first block id, number of blocks] of each contiguous run, in order
    serial changes whenever a block that was known is another one now, and never comes again
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.known = b""
        self.runs: list[list[int]] = []
        self.max_block_id = -1
        self.serial = next(_SERIALS)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._num_slots = 0  # of `_slots`, those that are right

    def update(self, table: array[int]) -> None:
        """Takes the table as it is now. O(1) comparisons of bytes, plus the blocks that are new or re-pointed."""
        data = table.tobytes()
        if data.startswith(self.known):
            if len(data) == len(self.known):
                return
            num_same = len(self.known) // _ID_BYTES
        else:
            num_same = common_blocks(self.known, data)
            self._forget_after(num_same)
        runs = self.runs
        for index in range(num_same, len(table)):
            block_id = table[index]
            if runs and block_id == runs[-1][1] + runs[-1][2]:
                runs[-1][2] += 1
            else:
                runs.append([index, block_id, 1])
            if block_id > self.max_block_id:
                self.max_block_id = block_id
        self.known = data

    def _forget_after(self, num_blocks: int) -> None:
        self.serial = next(_SERIALS)
        while self.runs and self.runs[-1][0] >= num_blocks:
            self.runs.pop()
        if self.runs:
            self.runs[-1][2] = num_blocks - self.runs[-1][0]
        self.max_block_id = max((block_id + size - 1 for _, block_id, size in self.runs), default=-1)
        self._num_slots = min(self._num_slots, num_blocks * self.block_size)

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions [start, end), cut where the slots do not ascend by one."""
        size = self.block_size
        for place in range(self._place_of(start // size), len(self.runs)):
            index, _, num_blocks = self.runs[place]
            if index * size >= end:
                return
            yield max(start, index * size), min(end, (index + num_blocks) * size)

    def is_run(self, start: int, end: int) -> bool:
        """The slots of the positions [start, end) ascend by one."""
        index, _, num_blocks = self.runs[self._place_of(start // self.block_size)]
        return end <= (index + num_blocks) * self.block_size

    def slots(self, start: int, end: int) -> slice | Tensor:
        """The slots of the positions [start, end): a slice where they ascend by one, else (end - start,) int64."""
        size = self.block_size
        index, block_id, num_blocks = self.runs[self._place_of(start // size)]
        if end <= (index + num_blocks) * size:
            base = (block_id - index) * size
            return slice(base + start, base + end)
        return self._all_slots()[start:end]

    def tensor(self, start: int, end: int) -> Tensor:
        """The slots of the positions [start, end), (end - start,) int64."""
        slots = self.slots(start, end)
        return torch.arange(slots.start, slots.stop, device=self.device) if isinstance(slots, slice) else slots

    def join(self, ranges: Sequence[tuple[int, int]]) -> slice | Tensor:
        """The slots of several ranges of positions, one range after the other; a slice only where there is but one."""
        if len(ranges) == 1:
            return self.slots(*ranges[0])
        return torch.cat([self.tensor(*part) for part in ranges])

    def slot_ranges(self, start: int, end: int) -> Iterator[range]:
        """The slots of the positions [start, end), as ranges."""
        for first, last in self.pieces(start, end):
            slots = self.slots(first, last)
            assert isinstance(slots, slice), "a piece is what ascends by one"
            yield range(slots.start, slots.stop)

    def _place_of(self, index: int) -> int:
        """Which run has the block at `index` of the table. O(log runs)."""
        low, high = 0, len(self.runs)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.runs[middle][0] <= index else (low, middle)
        return low

    def _all_slots(self) -> Tensor:
        size = self.block_size
        num_known = len(self.known) // _ID_BYTES * size
        if self._num_slots < num_known:
            first = self._num_slots // size
            ids = torch.frombuffer(bytearray(self.known[first * _ID_BYTES :]), dtype=torch.int32).long()
            # A normal tensor even where a step runs in inference mode: it must take later steps' slots, whatever mode.
            with torch.inference_mode(False):
                new = (ids[:, None] * size + torch.arange(size)).flatten().to(self.device)
                if num_known > len(self._slots):
                    grown = torch.empty(2 * num_known, dtype=torch.int64, device=self.device)
                    grown[: self._num_slots] = self._slots[: self._num_slots]
                    self._slots = grown
                self._slots[self._num_slots : num_known] = new
            self._num_slots = num_known
        return self._slots


def common_blocks(first: bytes, second: bytes) -> int:
    """How many leading block ids two packed tables share. O(log) comparisons of bytes."""
    low, high = 0, min(len(first), len(second)) // _ID_BYTES
    if first[: high * _ID_BYTES] == second[: high * _ID_BYTES]:
        return high
    while high - low > 1:  # [0, low) is common, [0, high) is not
        middle = (low + high) // 2
        part = slice(low * _ID_BYTES, middle * _ID_BYTES)
        low, high = (middle, high) if first[part] == second[part] else (low, middle)
    return low


class Read(NamedTuple):
    """How one row attends in one kind of layer, or to one part of what it sees."""

    slots: slice | Tensor
    """The KV slots to read, in order of position: a slice where they ascend by one, else (S,) int64."""
    is_causal: bool
    """Queries and keys start at one position and nothing else is hidden: no mask is needed, only causality."""
    visible: Tensor | None
    """(Q, S) bool where a mask is needed, else None."""


@dataclass
class RowMetadata:
    """One row's place in the flattened batch and in the pool."""

    query_start: int
    query_end: int
    start: int
    """Position of the first query."""
    table: TableSlots
    _reads: dict[Span, Read] = field(default_factory=dict, repr=False)
    _bias: dict[tuple[Span, torch.dtype, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_queries(self) -> int:
        """The new tokens of this row."""
        return self.query_end - self.query_start

    @property
    def context_len(self) -> int:
        """Tokens in the pool once this step's are written: `start` plus the new ones."""
        return self.start + self.num_queries

    @property
    def slots(self) -> slice | Tensor:
        """The KV slots of positions [0, context_len): a slice (read as a view, no copy), or (context_len,) int64."""
        return self.table.slots(0, self.context_len)

    def read(self, span: Span, device: torch.device) -> Read:
        """What to read under `span`; worked out by the step's first layer of that kind and kept for the others."""
        found = self._reads.get(span)
        if found is None:
            # Keys before the first query's span are seen by no query of the row: they are not even read.
            whole = [(span.first_visible(self.start), self.context_len)]
            found = self._reads[span] = self.read_ranges(whole, span, device)
        return found

    def bias(self, span: Span, dtype: torch.dtype, device: torch.device, group: int = 1) -> Tensor | None:
        """What to add to the scores, 0 or -inf, as `bias_of` makes it, or None where `read` has no mask. Kept too."""
        visible = self.read(span, device).visible
        if visible is None:
            return None
        found = self._bias.get((span, dtype, group))
        if found is None:
            found = self._bias[span, dtype, group] = bias_of(visible, dtype, group)
        return found

    def read_ranges(self, ranges: Sequence[tuple[int, int]], span: Span, device: torch.device) -> Read:
        """How to read the positions of some ascending ranges, which may leave out keys that are read elsewhere."""
        first = ranges[0][0]
        slots = self.table.join(ranges)
        if self.num_queries == 1:
            return Read(slots, is_causal=False, visible=None)  # the one query sees all that is read
        last_visible = span.first_visible(self.context_len - 1)
        if first == self.start and last_visible <= first:
            return Read(slots, is_causal=True, visible=None)
        query = torch.arange(self.start, self.context_len, device=device)[:, None]  # (Q, 1)
        key = torch.cat([torch.arange(*part, device=device) for part in ranges])[None, :]  # (1, S)
        visible = key <= query
        if span.window is not None:
            visible &= key > query - span.window
        if span.chunk is not None:
            visible &= key >= query // span.chunk * span.chunk
        return Read(slots, is_causal=False, visible=visible)


def bias_of(visible: Tensor, dtype: torch.dtype, group: int = 1) -> Tensor:
    """(Q * group, S) with each row repeated for its group, unless that would be large: (Q, S) then.

    Added rather than boolean, because scaled-dot-product attention would convert a boolean one in every layer.
    """
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return bias.repeat_interleave(group, 0) if group > 1 and bias.numel() * group <= MAX_REPEATED_MASK else bias


@dataclass
class Node:
    """Blocks that several rows of a batch share, at the same positions, before any of their queries.

    Its rows, [first_row, last_row), stand side by side in the batch. Below a node may hang others, with fewer rows.
    """

    first_row: int
    last_row: int
    start: int
    """The first of its positions, a multiple of the block size; where the node above it ends."""
    end: int
    children: list[Node] = field(default_factory=list)


@dataclass
class AttentionMetadata:
    """What attention needs to know of one step; built once, read by every layer. Good until its builder's next batch.

    rows are in the order in which they stand in the batch.
    """

    slot_mapping: Tensor
    """(T,) int64: the slot that each new token's K and V go to."""
    rows: list[RowMetadata]
    block_size: int
    min_num_blocks: int
    """The pool must have at least this many blocks: one more than the highest id in any table."""
    attention: str = "gather"
    """Whether shared nodes are attended once for all rows below: never ("gather"), wherever possible, or if it pays."""
    nodes: list[Node] = field(default_factory=list)
    """What rows share: the roots of the batch's trees. Empty where `attention` is "gather"."""
    workspace: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    """Room that gathers use again and again: the pages of a fresh tensor cost more than the copy."""
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What attention works out in the first layer of a kind, for the others."""


@dataclass(frozen=True)
class Batch:
    """The tensors of one forward pass."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64."""
    logits_indices: Tensor
    """(N,) int64: where in T logits are computed, in the order of the rows as given: at each one's last `num_logits`
    tokens. N = R if each wants one."""
    metadata: AttentionMetadata


class BatchBuilder:
    """Makes the batch of each step, and keeps the requests' tables in between.

    attention: "gather" reads each row's keys for itself, "tree" reads what rows share once for all of them, "auto" does
    so where it pays (see `engine.attention.costs`).

    Between steps it keeps, for each row that has a key, what it knows of the block table: the runs and the slots. A row
    whose table has only grown costs one comparison of bytes and its new blocks. What is no longer in the batch is
    forgotten. Raises `ValueError` for an unknown `attention` and a block size below one.
    """

    def __init__(self, block_size: int, device: torch.device | str = "cpu", *, attention: str = "auto") -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: a positive number is needed")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention={attention!r}: one of {', '.join(map(repr, ATTENTIONS))} is needed")
        self.block_size = block_size
        self.device = torch.device(device)
        self.attention = attention
        self._tables: dict[Hashable, TableSlots] = {}
        self._workspace: dict[Any, Tensor] = {}
        self._forest = _Forest([], [], [], [], True)

    def build(self, rows: Sequence[Row]) -> Batch:
        """The batch of these rows; the one before it must not be used any more.

        Raises `ValueError`, with nothing changed, for no rows, a row without tokens, a negative start or block id, a
        table too short for the row's tokens, and a key that comes twice. Costs O(new tokens + new blocks + rows), one
        copy of each table, and the grouping where a table has changed otherwise than by growing.
        """
        block_size = self.block_size
        arrays = [self._checked(index, row) for index, row in enumerate(rows)]
        if not rows:
            raise ValueError("rows is empty: a batch has at least one row")
        keys = [row.key for row in rows if row.key is not None]
        if len(set(keys)) != len(keys):
            raise ValueError(f"a key comes twice in {keys}: one row for each request is allowed")

        before, self._tables = self._tables, {}
        tables = []
        for row, ids in zip(rows, arrays, strict=True):
            table = before.get(row.key) if row.key is not None else None
            if table is None:
                table = TableSlots(block_size, self.device)
            if row.key is not None:
                self._tables[row.key] = table
            table.update(ids)
            tables.append(table)

        if self.attention != "gather":
            starts = [row.start for row in rows]
            if not self._forest.still_holds(tables, starts):
                self._forest = _grow_forest(tables, starts, block_size)
            order, nodes = self._forest.order, self._forest.nodes
        else:
            order, nodes = list(range(len(rows))), []

        input_ids: list[int] = []
        position_ids: list[int] = []
        slot_mapping: list[int] = []
        logits: list[range] = [range(0)] * len(rows)
        row_metadata: list[RowMetadata] = []
        for index in order:
            row, table = rows[index], tables[index]
            query_start, query_end = len(input_ids), len(input_ids) + len(row.token_ids)
            start, end = row.start, row.start + len(row.token_ids)
            input_ids += row.token_ids
            position_ids += range(start, end)
            for slots in table.slot_ranges(start, end):
                slot_mapping += slots
            logits[index] = range(query_end - row.num_logits, query_end)
            row_metadata.append(RowMetadata(query_start, query_end, start, table))

        def tensor(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)

        return Batch(
            input_ids=tensor(input_ids)[None],
            position_ids=tensor(position_ids)[None],
            logits_indices=tensor([index for part in logits for index in part]),
            metadata=AttentionMetadata(
                tensor(slot_mapping),
                row_metadata,
                block_size,
                min_num_blocks=max(table.max_block_id for table in tables) + 1,
                attention=self.attention,
                nodes=nodes,
                workspace=self._workspace,
            ),
        )

    def _checked(self, index: int, row: Row) -> array[int]:
        """The row's table as far as its tokens need it, packed."""
        if not len(row.token_ids):
            raise ValueError(f"row {index} has no tokens: at least one token is computed in every row")
        if row.start < 0:
            raise ValueError(f"row {index} starts at {row.start}: a position >= 0 is needed")
        needed = -(-(row.start + len(row.token_ids)) // self.block_size)
        if len(row.block_ids) < needed:
            raise ValueError(
                f"row {index} has {len(row.block_ids)} blocks of {self.block_size}: "
                f"{row.start} + {len(row.token_ids)} tokens need {needed}"
            )
        if not 1 <= row.num_logits <= len(row.token_ids):
            raise ValueError(f"row {index} has num_logits={row.num_logits}; allowed: 1 to {len(row.token_ids)}")
        # Blocks past the last token are room for later steps.
        block_ids = row.block_ids[:needed] if len(row.block_ids) > needed else row.block_ids
        try:
            return block_ids if isinstance(block_ids, array) and block_ids.typecode == "I" else array("I", block_ids)
        except OverflowError:
            raise ValueError(f"row {index} names block {min(block_ids)}: block ids are >= 0") from None


def build_batch(
    rows: Sequence[Row], block_size: int, device: torch.device | str = "cpu", *, attention: str = "gather"
) -> Batch:
    """The batch of these rows, on its own: see `BatchBuilder`, whose errors it raises. O(new tokens + blocks)."""
    return BatchBuilder(block_size, device, attention=attention).build(rows)


# ---------------------------------------------------------------- what rows share


class _Forest(NamedTuple):
    """How the rows of a batch share the starts of their tables."""

    serials: list[int]
    starts: list[int]
    order: list[int]
    """The rows as given, in the order in which they stand in the batch."""
    nodes: list[Node]
    is_bounded: bool
    """Somewhere only a row's start kept two rows from sharing more: with later starts they might."""

    def still_holds(self, tables: Sequence[TableSlots], starts: Sequence[int]) -> bool:
        """The tables have only grown since, and in ways that cannot change what they share."""
        return (
            not self.is_bounded
            and self.serials == [table.serial for table in tables]
            and all(now >= before for now, before in zip(starts, self.starts, strict=True))
        )


def _grow_forest(tables: Sequence[TableSlots], starts: Sequence[int], block_size: int) -> _Forest:
    """Groups rows by the starts of their tables.

    Sorted as bytes, tables that share a start are neighbours, and what a range of them shares is the least that two
    neighbours in it do. Only whole blocks before a row's first query count: all its queries see all of those.

        1 2 3 4 | 7        rows 0, 1, 2 share [1 2]; rows 0 and 1 share [3 4] below it
        1 2 3 4 | 9
        1 2 5
    """
    shareable = [table.known[: start // block_size * _ID_BYTES] for table, start in zip(tables, starts, strict=True)]
    ranked = sorted(range(len(tables)), key=lambda index: (shareable[index], index))
    common = [0]  # blocks that each row shares with the one before it
    is_bounded = False
    for before, after in pairwise(ranked):
        shared = common_blocks(shareable[before], shareable[after])
        is_bounded |= shared * _ID_BYTES == min(len(shareable[before]), len(shareable[after]))
        common.append(shared)

    order: list[int] = []
    nodes: list[Node] = []
    waiting = [(0, len(ranked), 0, nodes)]  # ranges of `ranked`, the blocks that all before them share, their siblings
    while waiting:
        low, high, depth, siblings = waiting.pop()
        if high - low == 1:
            order.append(ranked[low])
            continue
        shared = min(common[low + 1 : high])
        if shared > depth:
            first_row = len(order)
            node = Node(first_row, first_row + high - low, depth * block_size, shared * block_size)
            siblings.append(node)
            siblings = node.children
        cuts = [low, *(place for place in range(low + 1, high) if common[place] == shared), high]
        groups = [(a, b, shared, siblings) for a, b in pairwise(cuts)]
        # Rows keep the order in which they were given as far as sharing allows.
        waiting += sorted(groups, key=lambda group: min(ranked[group[0] : group[1]]), reverse=True)
    return _Forest([table.serial for table in tables], list(starts), order, nodes, is_bounded)
