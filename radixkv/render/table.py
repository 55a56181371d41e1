"""A request's block table: logical blocks over physical ids, and what each of them is.

hit ███████████▒▒▒▒▒▒░░  computed, to be computed, empty slots: the tokens in order

logical     0   1   2     3   4 …        cells touch where the physical ids ascend by one: a contiguous run
physical   12  13  14    40  41          colours: the tree's, private, shared with forks, copied before writing
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..tokens import TOKEN_BYTES
from . import svg
from .overview import check_size
from .subjects import Cache, Decode, Table
from .svg import MARGIN

LINE_PIXELS = 50
GAP = 8  # between two runs
MOST_CELLS = 160
KEPT = 2  # cells drawn at each end of a long run; those between are folded
LONG_RUN = 8

TREE, OWN, FORK, COPY = range(4)
KINDS = (
    (svg.PROTECTED, "in the tree, under this request's lock"),
    (svg.PRIVATE[0], "private"),
    (svg.PRIVATE[1], "private, shared with a fork: copied before one of them writes"),
    (svg.COPIED, "copied before writing: the tree has the other"),
)


@dataclass(slots=True)
class _Cell:
    """Blocks [first, first + length) of the table, all of one kind and with ids that ascend by one."""

    first: int
    length: int
    block_id: int
    kind: int
    tokens_filled: int


def draw_table(cache: Cache, request_id: str | int, *, decode: Decode | None = None, width: int = 960) -> str:
    """The block table of a running request as one SVG.

    decode: for the text that a pointer on a block shows; without it `cache.decode`.
    Raises UnknownRequest; ValueError for a width below 480. Otherwise as `draw_cache`. O(blocks of its forks).
    """
    return draw_block_table(cache.table(request_id), decode=cache.decode if decode is None else decode, width=width)


def draw_block_table(table: Table, *, decode: Decode | None = None, width: int = 960) -> str:
    """`draw_table` for the table itself."""
    check_size(1, width)
    num_slots = len(table.block_ids) * table.block_size
    room = width - 2 * MARGIN
    head = f"Block table of request {svg.quoted(table.request_id)}"
    line = (
        f"{svg.count(table.num_tokens, 'token')} in {svg.count(len(table.block_ids), 'block')} of "
        f"{svg.count(table.block_size, 'slot')} · namespace {svg.shorten(svg.name_of(table.namespace), 60)}"
    )
    parts = [
        svg.clipped(MARGIN, 8, room, 22, svg.text(0, 16, svg.fit(head, room, 15), 15, font_weight="600")),
        svg.text(MARGIN, 45, svg.fit(line, room, 11.5), 12),
    ]
    spans, y = _token_bar(table, num_slots, room)
    parts += spans
    cells = _cells(table)
    present = {cell.kind for cell in cells}
    entries = []
    for kind, (fill, words) in enumerate(KINDS):
        if kind in present:
            num_blocks = sum(cell.length for cell in cells if cell.kind == kind)
            entries.append((svg.swatch(fill), f"{num_blocks:,} {words}"))
    if cells and cells[-1].tokens_filled < table.block_size:
        tail = svg.rect(0.5, 0.5, 11, 11, svg.FOLD, stroke=svg.LINE, stroke_dasharray="2 2")
        entries.append((tail, f"tail: {table.block_size - cells[-1].tokens_filled:,} empty"))
    words, height = svg.legend(MARGIN, y, room, entries)
    parts.append(words)
    drawn, y = _draw_cells(table, _folded(cells), decode, y + height + 12, width)
    return svg.picture(width, y, f"{head}. {line}", parts + drawn)


def _token_bar(table: Table, num_slots: int, room: float) -> tuple[list[str], float]:
    """All slots of the table as one bar: hits, computed, waiting to be computed, empty."""
    hits = min(table.num_cached_tokens, table.num_tokens)
    spans = (
        (hits, "hit: not computed", svg.EVICTABLE[0]),
        (max(table.num_computed - hits, 0), "computed", svg.EVICTABLE[2]),
        (table.num_tokens - max(table.num_computed, hits), "to be computed", svg.CARD),
        (num_slots - table.num_tokens, "empty", svg.FOLD),
    )
    parts = []
    x: float = MARGIN
    entries = []
    for num_tokens, words, fill in spans:
        if not num_tokens:
            continue
        width = room * num_tokens / num_slots
        share = f"{num_tokens:,} {words}"
        inside = svg.hover(f"{svg.count(num_tokens, 'slot' if words == 'empty' else 'token')}: {words}")
        inside += svg.rect(x, 58, width, 16, fill, stroke=svg.LINE, stroke_width=0.6)
        label = svg.fit(share, width - 8)
        if label == share:
            inside += svg.text(x + 5, 70, label, 11, svg.ink_on(fill))
        else:
            entries.append((svg.swatch(fill), share))
        parts.append(svg.element("g", inside))
        x += width
    if not entries:
        return parts, 88
    words_of_narrow, height = svg.legend(MARGIN, 80, room, entries)
    return [*parts, words_of_narrow], 86 + height


def _cells(table: Table) -> list[_Cell]:
    """A cell for each block. Of the private ones, those that another fork names too are shared."""
    of_forks: set[int] = set()
    for fork in table.forks:
        if fork is not table:
            of_forks.update(fork.block_ids)
    cells = []
    for index, block_id in enumerate(table.block_ids):
        if index in table.detached:
            kind = COPY
        elif index < table.num_shared:
            kind = TREE
        else:
            kind = FORK if block_id in of_forks else OWN
        cells.append(_Cell(index, 1, block_id, kind, table.tokens_filled(index)))
    return cells


def _folded(cells: list[_Cell]) -> list[_Cell]:
    """The cells, the middles of long runs and of long tables made one cell each. Only where there are too many."""
    if len(cells) <= MOST_CELLS // 2:
        return cells
    folded: list[_Cell] = []
    for _, group in groupby(cells, lambda cell: (cell.kind, cell.block_id - cell.first)):
        run = list(group)
        if len(run) < LONG_RUN:
            folded += run
            continue
        middle = _Cell(run[KEPT].first, len(run) - 2 * KEPT, run[KEPT].block_id, run[0].kind, run[0].tokens_filled)
        folded += [*run[:KEPT], middle, *run[-KEPT:]]
    if len(folded) <= MOST_CELLS:
        return folded
    first, last = folded[: MOST_CELLS // 2], folded[-MOST_CELLS // 4 :]
    start = first[-1].first + first[-1].length
    return [*first, _Cell(start, last[0].first - start, -1, TREE, 0), *last]


def _draw_cells(
    table: Table, cells: list[_Cell], decode: Decode | None, top: float, width: int
) -> tuple[list[str], float]:
    """The cells in lines; and where they end."""
    digits = max((len(str(cell.block_id + cell.length)) for cell in cells), default=1)
    size = max(26.0, digits * 7.2 + 8)
    left = MARGIN + 54
    parts: list[str] = []
    x, y = float(left), top
    parts += _line_names(y)
    previous: _Cell | None = None
    for cell in cells:
        needed = size if cell.length == 1 else 2.2 * size + 24
        is_next = previous is not None and 0 <= previous.block_id == cell.block_id - previous.length
        x += 0 if previous is None or is_next else GAP
        if x + needed > width - MARGIN:
            x, y = left, y + LINE_PIXELS
            parts += _line_names(y)
        parts.append(_draw_cell(table, cell, decode, x, y, needed))
        x += needed
        previous = cell
    return parts, y + LINE_PIXELS + 2


def _line_names(y: float) -> list[str]:
    return [svg.text(MARGIN, y + 9, "logical", 10.5, svg.QUIET), svg.text(MARGIN, y + 28, "physical", 10.5, svg.QUIET)]


def _draw_cell(table: Table, cell: _Cell, decode: Decode | None, x: float, y: float, width: float) -> str:
    fill, words = KINDS[cell.kind]
    middle: dict[str, Any] = {"text_anchor": "middle", "font_family": svg.MONO}
    last = cell.first + cell.length - 1
    if cell.length > 1:
        ids = "" if cell.block_id < 0 else f", ids {cell.block_id}-{cell.block_id + cell.length - 1}: {words}"
        shown_fill = svg.FOLD if cell.block_id < 0 else fill
        inside = [
            svg.hover(f"blocks {cell.first}-{last} of the table, folded{ids}"),
            svg.rect(x, y + 14, width - 1, 21, shown_fill, stroke=svg.LINE, stroke_dasharray="2 2"),
            svg.text(x + width / 2, y + 9, f"{cell.first}…{last}", 9.5, svg.QUIET, **middle),
            svg.text(x + width / 2, y + 28.5, f"… {cell.length:,} …", 11, svg.ink_on(shown_fill), **middle),
        ]
        return svg.element("g", "".join(inside), class_="fold")
    start = cell.first * table.block_size
    packed = table.tokens[start * TOKEN_BYTES : (start + cell.tokens_filled) * TOKEN_BYTES]
    title = (
        f"block {cell.first} of the table is block {cell.block_id} of the pool: {words}\n"
        f"tokens [{start}, {start + cell.tokens_filled})\n{svg.token_text(packed, decode, 16)}"
    )
    inside = [svg.hover(title)]
    filled = width - 1
    if cell.tokens_filled < table.block_size:
        filled *= cell.tokens_filled / table.block_size
        inside.append(svg.rect(x, y + 14, width - 1, 21, svg.FOLD, stroke=svg.LINE, stroke_dasharray="2 2"))
    inside.append(svg.rect(x, y + 14, filled, 21, fill))
    ink = svg.ink_on(fill) if cell.tokens_filled == table.block_size else svg.INK
    inside.append(svg.text(x + width / 2, y + 9, str(cell.first), 9.5, svg.QUIET, **middle))
    inside.append(svg.text(x + width / 2 - 0.5, y + 28.5, str(cell.block_id), 11, ink, **middle))
    return svg.element("g", "".join(inside), class_="block", data_block=str(cell.block_id))
