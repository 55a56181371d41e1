"""The pool as a strip: a cell for each block, in the colour of its owner.

A large pool has more blocks than a picture has cells: there a column stands for a span of blocks, filled from below
with the shares of their owners.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from . import svg
from .svg import MARGIN

MOST_CELLS = 640
COLUMN = 4  # pixels of a column that stands for several blocks
COLUMN_HEIGHT = 40


class Owner(NamedTuple):
    """Who owns blocks: their colour, and what a pointer shows. rank: the lower, the further down in a column."""

    fill: str
    words: str
    rank: int


NOBODY = Owner(svg.FREE, "free", 9)


class Strip:
    """Who owns which block, as far as it was said; the others are free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owners = [NOBODY]
        self._cells = array("I", bytes(4 * num_blocks))

    def give(self, blocks: Iterable[int], owner: Owner) -> None:
        """Says who owns these blocks."""
        index = len(self._owners)
        self._owners.append(owner)
        for block_id in blocks:
            self._cells[block_id] = index

    def draw(self, top: float, width: float, outlined: Sequence[int] = ()) -> tuple[str, float]:
        """The strip as markup, and the height it takes. outlined: blocks to draw a line around. O(num_blocks)."""
        room = width - 2 * MARGIN
        if self.num_blocks <= MOST_CELLS:
            return self._cells_drawn(top, room, outlined)
        return self._columns_drawn(top, room)

    def _cells_drawn(self, top: float, room: float, outlined: Sequence[int]) -> tuple[str, float]:
        most = 130  # blocks for which large cells take two lines at most
        size = 14 if self.num_blocks <= most else 9
        per_line = int(room // size)
        wanted = set(outlined)
        parts: list[str] = []
        over: list[str] = []
        num_lines = -(-self.num_blocks // per_line)
        for line in range(num_lines):
            y = top + line * (size + 3)
            first, stop = line * per_line, min((line + 1) * per_line, self.num_blocks)
            for index, group in groupby(range(first, stop), self._cells.__getitem__):
                run = list(group)
                owner = self._owners[index]
                shown = str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
                parts.append(
                    svg.element(
                        "g",
                        svg.hover(f"{'block' if len(run) == 1 else 'blocks'} {shown}: {owner.words}")
                        + svg.rect(MARGIN + (run[0] - first) * size, y, len(run) * size - 1, size, owner.fill),
                    )
                )
            grid = "".join(f"M{MARGIN + k * size - 0.5:g} {y:g}v{size}" for k in range(1, stop - first))
            if grid:
                parts.append(svg.element("path", d=grid, stroke=svg.CARD, stroke_width=1, pointer_events="none"))
            frame = (stop - first) * size
            over.append(svg.rect(MARGIN - 0.5, y - 0.5, frame, size + 1, "none", stroke=svg.BORDER))
            for is_wanted, group in groupby(range(first, stop), wanted.__contains__):
                run = list(group)
                if is_wanted:
                    x = MARGIN + (run[0] - first) * size - 0.5
                    over.append(
                        svg.rect(x, y - 0.5, len(run) * size, size + 1, "none", stroke=svg.PATH, stroke_width=2)
                    )
        return "".join(parts + over), num_lines * (size + 3)

    def _columns_drawn(self, top: float, room: float) -> tuple[str, float]:
        num_columns = int(room // COLUMN)
        parts = []
        columns = []
        for column in range(num_columns):
            first = column * self.num_blocks // num_columns
            stop = (column + 1) * self.num_blocks // num_columns
            shares: dict[tuple[int, str], int] = {}
            for index, times in Counter(self._cells[first:stop]).items():
                owner = self._owners[index]
                shares[owner.rank, owner.fill] = shares.get((owner.rank, owner.fill), 0) + times
            columns.append(tuple((fill, times / (stop - first)) for (_, fill), times in sorted(shares.items())))
        for shares_of_column, group in groupby(range(num_columns), columns.__getitem__):
            alike = list(group)
            bottom = top + COLUMN_HEIGHT
            for fill, share in shares_of_column:
                height = share * COLUMN_HEIGHT
                bottom -= height
                parts.append(svg.rect(MARGIN + alike[0] * COLUMN, bottom, len(alike) * COLUMN, height, fill))
        frame = svg.rect(MARGIN - 0.5, top - 0.5, num_columns * COLUMN + 1, COLUMN_HEIGHT + 1, "none", stroke=svg.LINE)
        return "".join([*parts, frame]), COLUMN_HEIGHT + 3

    def words(self, width: float) -> str:
        """What the strip's parts are, for the line above it."""
        if self.num_blocks <= MOST_CELLS:
            return f"{svg.count(self.num_blocks, 'block')}, block 0 first; a cell is a block"
        num_columns = int((width - 2 * MARGIN) // COLUMN)
        span = f"{self.num_blocks / num_columns:,.0f}"
        return f"{svg.count(self.num_blocks, 'block')}, block 0 at the left; a column stands for {span}"
