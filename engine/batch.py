"""Scheduled rows → the tensors of one forward pass, with what attention needs to read the KV pool.

All rows of a step are laid end to end on one axis, whatever they do: a prefill row brings many tokens, a decode row
one. Nothing is padded. Knows block tables and positions; knows neither models nor the scheduler.

Shapes: T = new tokens of all rows, R = rows. `[a, b)` ranges are half-open.

        row 0 (prefill)   row 1 (decode)   row 2 (chunk behind a cached prefix)
        t t t t t t t     t                t t t t t
        positions 0..6    position 33      positions 16..20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


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


class Read(NamedTuple):
    """How one row attends in one kind of layer."""

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
    slots: slice | Tensor
    """The KV slots of positions [0, context_len): a slice (read as a view, no copy), or (context_len,) int64."""
    _reads: dict[Span, Read] = field(default_factory=dict, repr=False)
    _bias: dict[tuple[Span, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_queries(self) -> int:
        """The new tokens of this row."""
        return self.query_end - self.query_start

    @property
    def context_len(self) -> int:
        """Tokens in the pool once this step's are written: `start` plus the new ones."""
        return self.start + self.num_queries

    def read(self, span: Span, device: torch.device) -> Read:
        """What to read under `span`; worked out by the step's first layer of that kind and kept for the others."""
        found = self._reads.get(span)
        if found is None:
            found = self._reads[span] = self._plan(span, device)
        return found

    def bias(self, span: Span, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """(Q, S) to add to the scores, 0 or -inf, or None where `read` has no mask. Kept like `read`.

        Added rather than boolean, because scaled-dot-product attention would convert a boolean one in every layer.
        """
        visible = self.read(span, device).visible
        if visible is None:
            return None
        found = self._bias.get((span, dtype))
        if found is None:
            found = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
            self._bias[span, dtype] = found
        return found

    def _plan(self, span: Span, device: torch.device) -> Read:
        # Keys before the first query's span are seen by no query of the row: they are not even read.
        first = span.first_visible(self.start)
        if isinstance(self.slots, slice):
            slots: slice | Tensor = slice(self.slots.start + first, self.slots.stop)
        else:
            slots = self.slots[first:]
        if self.num_queries == 1:
            return Read(slots, is_causal=False, visible=None)  # the one query sees all that is read
        if first == self.start and span.first_visible(self.context_len - 1) == first:
            return Read(slots, is_causal=True, visible=None)
        query = torch.arange(self.start, self.context_len, device=device)[:, None]  # (Q, 1)
        key = torch.arange(first, self.context_len, device=device)[None, :]  # (1, S)
        visible = key <= query
        if span.window is not None:
            visible &= key > query - span.window
        if span.chunk is not None:
            visible &= key >= query // span.chunk * span.chunk
        return Read(slots, is_causal=False, visible=visible)


@dataclass
class AttentionMetadata:
    """What attention needs to know of one step; built once, read by every layer."""

    slot_mapping: Tensor
    """(T,) int64: the slot that each new token's K and V go to."""
    rows: list[RowMetadata]
    block_size: int
    min_num_blocks: int
    """The pool must have at least this many blocks: one more than the highest id in any table."""


@dataclass(frozen=True)
class Batch:
    """The tensors of one forward pass."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64."""
    logits_indices: Tensor
    """(N,) int64: where in T logits are computed: at each row's last `num_logits` tokens. N = R if each wants one."""
    metadata: AttentionMetadata


def build_batch(rows: Sequence[Row], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """The batch of these rows, in their order.

    Raises `ValueError`, before anything is built, for no rows, a row without tokens, a negative start or block id, and
    a table too short for the row's tokens. Costs O(new tokens + blocks).
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: a positive number is needed")
    if not rows:
        raise ValueError("rows is empty: a batch has at least one row")
    for index, row in enumerate(rows):
        if not len(row.token_ids):
            raise ValueError(f"row {index} has no tokens: at least one token is computed in every row")
        if row.start < 0:
            raise ValueError(f"row {index} starts at {row.start}: a position >= 0 is needed")
        needed = -(-(row.start + len(row.token_ids)) // block_size)
        if len(row.block_ids) < needed:
            raise ValueError(
                f"row {index} has {len(row.block_ids)} blocks of {block_size}: "
                f"{row.start} + {len(row.token_ids)} tokens need {needed}"
            )
        if not 1 <= row.num_logits <= len(row.token_ids):
            raise ValueError(f"row {index} has num_logits={row.num_logits}; allowed: 1 to {len(row.token_ids)}")
        if min(row.block_ids) < 0:
            raise ValueError(f"row {index} names block {min(row.block_ids)}: block ids are >= 0")

    device = torch.device(device)
    input_ids: list[int] = []
    position_ids: list[int] = []
    slot_mapping: list[int] = []
    logits_indices: list[int] = []
    row_metadata: list[RowMetadata] = []
    min_num_blocks = 0
    for row in rows:
        query_start, query_end = len(input_ids), len(input_ids) + len(row.token_ids)
        start, end = row.start, row.start + len(row.token_ids)
        # Blocks past the last token are room for later steps.
        block_ids = list(row.block_ids[: -(-end // block_size)])
        input_ids += row.token_ids
        position_ids += range(start, end)
        for index in range(start // block_size, len(block_ids)):
            offset = index * block_size
            base = block_ids[index] * block_size - offset
            slot_mapping += range(base + max(start, offset), base + min(end, offset + block_size))
        logits_indices += range(query_end - row.num_logits, query_end)
        row_metadata.append(RowMetadata(query_start, query_end, start, _slots(block_ids, end, block_size, device)))
        min_num_blocks = max(min_num_blocks, max(block_ids) + 1)

    def tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return Batch(
        input_ids=tensor(input_ids)[None],
        position_ids=tensor(position_ids)[None],
        logits_indices=tensor(logits_indices),
        metadata=AttentionMetadata(tensor(slot_mapping), row_metadata, block_size, min_num_blocks),
    )


def _slots(block_ids: list[int], context_len: int, block_size: int, device: torch.device) -> slice | Tensor:
    first = block_ids[0]
    if block_ids == list(range(first, first + len(block_ids))):
        return slice(first * block_size, first * block_size + context_len)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    slots = blocks[:, None] * block_size + torch.arange(block_size)  # (blocks, block_size)
    return slots.flatten()[:context_len].to(device)
