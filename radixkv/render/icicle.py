"""The tree as an icicle that lies on its side, so that it reads as a prompt does, from left to right.

    namespace tenant-a                          x      position in the sequence: a box is as wide as it has tokens
    ┌──────────────┬──────────┬──────┐          rows   one for each leaf, running request or fold; a box is as high
    │              │ turn 1   │ turn2│                 as the rows below it
    │ system       ├──────────┼──────┘
    │ prompt       │ turn 1   │▒▒▒ request 7
    │              ├┄┄┄┄┄┄┄┄┄┄┤
    │              ┊ + 37 nodes, 1,234 tokens
    └──────────────┴┄┄┄┄┄┄┄┄┄┄┘

A large tree is not drawn in full. Boxes are taken into the picture best first (on the path asked for, just changed,
held by a running request, then the most tokens below them), a parent always before its children, until nodes or rows
run out; what is left below each box is counted in one fold. O(nodes), and O(drawn + their children) for the picture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from . import svg
from .subjects import Decode, Node, Table
from .svg import MARGIN

HEADING = 22  # pixels above the rows of a namespace
BESIDE = 170  # pixels at the right for labels that stand beside their boxes
NARROWEST = 2.5  # pixels of a box with few tokens
ROW_HEIGHTS = ((8, 30), (16, 24), (32, 19))  # up to so many rows, pixels each; beyond, 14
LINE_HEIGHT = 13.5
HOVERED = 160  # characters of text that a pointer shows: 300 nodes of `&` stay below 500 KB


@dataclass(slots=True)
class Box:
    """A rectangle to be: a namespace's root, a node, or a running request's private tokens.

    node or table   what it stands for; both are None for the frame around the namespaces
    sums            cached tokens, nodes and requests of the box and all below it
    reach           tokens of the longest way down from its left edge
    is_on_path, is_changed, is_held   it or something below it is on the path, just changed, held by a request
    num_hidden      children that are not drawn
    """

    node: Node | None
    table: Table | None
    parent: Box | None
    num_tokens: int = 0
    start: int = 0
    children: list[Box] = field(default_factory=list)
    sum_tokens: int = 0
    sum_nodes: int = 0
    sum_requests: int = 0
    reach: int = 0
    is_on_path: bool = False
    is_changed: bool = False
    is_held: bool = False
    is_drawn: bool = False
    num_hidden: int = 0
    num_rows: int = 0

    @property
    def is_root(self) -> bool:
        """A namespace's root: a heading and no rectangle."""
        return self.node is not None and self.node.parent is None


class Shades:
    """The colour of each node: held by a running request, or by the place of its last use among the others'."""

    def __init__(self, evictable_ticks: Iterable[int]) -> None:
        ticks = sorted(set(evictable_ticks), reverse=True)
        self._level = {tick: place * len(svg.EVICTABLE) // len(ticks) for place, tick in enumerate(ticks)}

    @classmethod
    def among(cls, nodes: Iterable[Node]) -> Shades:
        """The shades of these nodes."""
        return cls(node.tick for node in nodes if not node.lock_ref)

    def level(self, tick: int) -> int:
        """The fifth of the ticks that this one is in; 0: the freshest."""
        return self._level[tick]

    def of(self, node: Node) -> str:
        """Its colour."""
        return svg.PROTECTED if node.lock_ref else svg.EVICTABLE[self._level[node.tick]]

    def words(self, node: Node) -> str:
        """Its state in words."""
        if node.lock_ref:
            return "protected: a running request is on it"
        level = self._level[node.tick]
        return f"evictable, {('freshest', 'fresh', 'middling', 'old', 'oldest')[level]} fifth by last use"


def boxes_of(roots: Sequence[Node], tables: Iterable[Table], path: set[int], changed: Collection[int]) -> list[Box]:
    """Boxes for all that hangs below the roots, parents first, behind one that frames them all.

    path: `id` of the nodes and of the table whose path is asked for. changed: serial numbers of nodes. O(nodes).
    """
    waiting: dict[int, list[Table]] = {}
    for table in tables:
        waiting.setdefault(id(table.node), []).append(table)
    frame = Box(None, None, None)
    boxes = [frame]
    stack: list[tuple[Node, Box]] = [(root, frame) for root in reversed(roots)]
    while stack:
        node, parent = stack.pop()
        box = Box(node, None, parent, node.num_tokens, parent.start + parent.num_tokens)
        box.is_on_path, box.is_changed, box.is_held = id(node) in path, node.serial in changed, node.lock_ref > 0
        box.sum_nodes = int(node.parent is not None)
        parent.children.append(box)
        boxes.append(box)
        if len(node.children):
            stack.extend((child, box) for child in reversed(node.children.in_order()))
    for box in boxes[1:]:
        for table in waiting.get(id(box.node), ()):
            tail = Box(None, table, box, table.num_tokens - table.num_shared * table.block_size)
            tail.is_on_path, tail.is_held, tail.sum_requests = id(table) in path, True, 1
            box.children.append(tail)
            boxes.append(tail)
    return boxes


def select(boxes: list[Box], most_nodes: int, most_rows: int) -> None:
    """Sums up, and marks the boxes to draw: at most `most_nodes`, in about `most_rows` rows. The rest is folded.

    Drawing a child costs a row as long as others of its parent stay hidden, since their fold has a row of its own: the
    last one takes the fold's place. A namespace costs two more, for its heading.
    """
    for box in reversed(boxes):
        box.sum_tokens += box.num_tokens if box.table is None else 0
        box.reach += box.num_tokens
        box.num_hidden = len(box.children)
        parent = box.parent
        if parent is not None:
            parent.sum_tokens += box.sum_tokens
            parent.sum_nodes += box.sum_nodes
            parent.sum_requests += box.sum_requests
            parent.reach = max(parent.reach, box.reach)
            parent.is_on_path |= box.is_on_path
            parent.is_changed |= box.is_changed
            parent.is_held |= box.is_held
    heap: list[tuple[bool, bool, bool, int, int, Box]] = []
    num_pushed = num_nodes = 0
    num_rows = 1
    drawn: Box | None = boxes[0]
    while drawn is not None:
        drawn.is_drawn = True
        if drawn.parent is not None:
            num_rows += (drawn.parent.num_hidden > 1) + 2 * drawn.is_root
            drawn.parent.num_hidden -= 1
            num_nodes += not drawn.is_root
        for child in drawn.children:
            order = (not child.is_on_path, not child.is_changed, not child.is_held, -child.sum_tokens)
            heappush(heap, (*order, num_pushed, child))
            num_pushed += 1
        drawn = _next(heap, num_rows, most_rows) if num_nodes < most_nodes else None


def _next(heap: list[tuple[bool, bool, bool, int, int, Box]], num_rows: int, most_rows: int) -> Box | None:
    """The best box for which there is a row."""
    while heap:
        box = heappop(heap)[-1]
        assert box.parent is not None
        if num_rows + (box.parent.num_hidden > 1) + 2 * box.is_root <= most_rows:
            return box
    return None


@dataclass(slots=True)
class Style:
    """How to draw the boxes.

    path      `id` of the nodes and tables to outline; is_dimming: the boxes beside them are pale
    changed   serial numbers of nodes to outline as just changed
    headings  by `id` of a root: the namespace's name and its counts
    """

    shades: Shades
    block_size: int
    decode: Decode | None
    path: set[int]
    is_dimming: bool
    changed: Collection[int]
    headings: dict[int, tuple[str, str]]
    width: float


def draw(frame: Box, style: Style, top: float) -> tuple[list[str], float, float]:
    """The drawn boxes as markup; the height they take; pixels per token. frame: the first of `boxes_of`."""
    drawn = _in_order(frame)
    for box in reversed(drawn):
        rows = sum(child.num_rows for child in box.children if child.is_drawn) + (box.num_hidden > 0)
        box.num_rows = max(rows, 1)
    num_rows = frame.num_rows
    row_height = next((pixels for most, pixels in ROW_HEIGHTS if num_rows <= most), 14)
    left, room = MARGIN + 5, style.width - 2 * MARGIN - 5 - BESIDE
    narrowest, scale = _scale(drawn, room)
    parts: list[str] = []
    over: list[str] = []
    x_of: dict[int, float] = {id(frame): left}
    next_row: dict[int, float] = {id(frame): top}
    for box in drawn[1:]:
        parent = box.parent
        assert parent is not None
        x, y = x_of[id(parent)], next_row[id(parent)]
        height = box.num_rows * row_height
        if box.is_root:
            parts.append(_heading(box, style, y))
            y += HEADING
            parts.append(svg.rect(left - 5, y, 3.5, height - 1, svg.LINE))
            next_row[id(parent)] = y + height + 4
            x_of[id(box)] = left
        else:
            width = max(box.num_tokens * scale, narrowest)
            next_row[id(parent)] = y + height
            x_of[id(box)] = x + width
            parts.append(_box(box, style, x, y, width, height))
            if id(box.node) in style.path or id(box.table) in style.path:
                over.append(_outline(x, y, width, height, svg.PATH))
            if box.node is not None and box.node.serial in style.changed:
                over.append(_outline(x, y, width, height, svg.CHANGED))
        next_row[id(box)] = y
    for box in drawn:
        if box.num_hidden:
            fold_width = max((child.reach for child in box.children if not child.is_drawn), default=0) * scale
            parts.append(_fold(box, style, x_of[id(box)], next_row[id(box)], fold_width, row_height))
    bottom = next_row[id(frame)] + (row_height if frame.num_hidden else 0)
    return [*parts, *over], bottom - top, scale


def _in_order(frame: Box) -> list[Box]:
    """The drawn boxes, parents first, in the order of the rows."""
    drawn: list[Box] = []
    stack = [frame]
    while stack:
        box = stack.pop()
        drawn.append(box)
        stack.extend(child for child in reversed(box.children) if child.is_drawn)
    return drawn


def _scale(drawn: list[Box], room: float) -> tuple[float, float]:
    """Pixels of the narrowest box, and pixels per token, with which the longest drawn way fits into `room`."""
    depth: dict[int, int] = {}
    for box in drawn:
        depth[id(box)] = 0 if box.parent is None else depth[id(box.parent)] + 1
    narrowest = min(NARROWEST, room / 2 / max(depth.values(), default=1))

    def longest(scale: float) -> float:
        """Pixels of the longest way, the folds at its end included."""
        ends: dict[int, float] = {}
        best = 0.0
        for box in drawn:
            start = ends.get(id(box.parent), 0.0)
            is_wide = box.parent is not None and not box.is_root
            end = start + (max(box.num_tokens * scale, narrowest) if is_wide else 0.0)
            ends[id(box)] = end
            hidden = max((child.reach for child in box.children if not child.is_drawn), default=0)
            best = max(best, end + hidden * scale)
        return best

    low, high = 0.0, 40.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if longest(middle) <= room else (low, middle)
    return narrowest, low


def _heading(box: Box, style: Style, y: float) -> str:
    assert box.node is not None
    name, counts = style.headings[id(box.node)]
    room = style.width - 2 * MARGIN
    counts_width = len(counts) * 11 * 0.56
    line = svg.text(0, 12, svg.fit(name, room - counts_width - 20, 12), 12, font_weight="600")
    parts = [
        svg.hover(svg.shorten(name, HOVERED)),
        svg.clipped(MARGIN, y + 2, room - counts_width - 10, 18, line),
        svg.text(style.width - MARGIN, y + 14, counts, 11, svg.QUIET, text_anchor="end"),
    ]
    return svg.element("g", "".join(parts), class_="namespace")


def _box(box: Box, style: Style, x: float, y: float, width: float, height: float) -> str:
    """A node, or a request's private tokens, with what a pointer shows."""
    is_dimmed = style.is_dimming and not box.is_on_path
    opacity = "0.5" if is_dimmed else None
    if box.table is not None:
        words = f"request {svg.quoted(box.table.request_id)}"
        more = f"+{box.num_tokens:,}" if box.num_tokens else ""
        parts = [
            svg.hover(_table_words(box.table)),
            svg.rect(x, y + 0.5, width - 1, height - 2, svg.PRIVATE[0]),
            _beside(x + width, y, height, f"{words}  {more}", style.width, weight="600"),
        ]
        return svg.element("g", "".join(parts), class_="request", opacity=opacity)
    node = box.node
    assert node is not None
    fill = style.shades.of(node)
    shown = svg.token_text(node.label, style.decode)
    is_partial = node.num_tokens < len(node.blocks) * style.block_size
    inside = svg.rect(
        x, y + 0.5, width - 1, height - 1.5, fill, stroke_dasharray="3 2" if is_partial else None,
        stroke=svg.INK if is_partial else None, stroke_width=0.8 if is_partial else None,
        fill_opacity="0.55" if is_partial else None,
    )  # fmt: skip
    ink = svg.INK if is_partial else svg.ink_on(fill)
    parts = [svg.hover(node_words(node, box.start, style.shades, shown)), inside]
    parts.append(_label(shown, box.num_tokens, x, y, width - 1, height - 1, ink))
    return svg.element("g", "".join(parts), class_="node", data_node=str(node.serial), opacity=opacity)


def _label(shown: str, num_tokens: int, x: float, y: float, width: float, height: float, ink: str) -> str:
    """The tokens inside the box as far as they fit, and their number in the last line if there are two."""
    most_lines = min(int((height + 1) / LINE_HEIGHT), 9)
    lines = svg.wrap(shown, width - 8, most_lines - 1 if most_lines > 1 else 1)
    if most_lines < 1 or not lines:
        return ""
    counted = svg.count(num_tokens, "token")
    counts = svg.fit(counted, width - 8) if most_lines > 1 else ""
    top = (height - LINE_HEIGHT * (len(lines) + bool(counts))) / 2
    parts = [
        svg.text(4, top + LINE_HEIGHT * (place + 0.78), line, 11, ink, font_family=svg.MONO)
        for place, line in enumerate(lines)
    ]
    parts.append(svg.text(4, top + LINE_HEIGHT * (len(lines) + 0.78), counts, 10.5, ink, font_weight="600"))
    return svg.clipped(x, y, width, height, "".join(parts))


def _fold(box: Box, style: Style, x: float, y: float, width: float, height: float) -> str:
    """One box for all the children that are not drawn, with their counts beside it."""
    hidden = [child for child in box.children if not child.is_drawn]
    num_nodes, num_requests = sum(child.sum_nodes for child in hidden), sum(child.sum_requests for child in hidden)
    counts = []
    if box.parent is None:
        counts.append(svg.count(len(hidden), "namespace"))
    if num_nodes:
        counts.append(svg.count(num_nodes, "node"))
    if num_requests:
        counts.append(svg.count(num_requests, "running request"))
    counts.append(svg.count(sum(child.sum_tokens for child in hidden), "token"))
    words = "+ " + ", ".join(counts)
    is_held, is_path = any(child.is_held for child in hidden), any(child.is_on_path for child in hidden)
    stroke = svg.PATH if style.is_dimming and is_path else svg.PROTECTED if is_held else svg.LINE
    width = max(width, 8.0)
    parts = [
        svg.hover(f"{words}\nfolded: no room for each" + ("\nrunning requests are on some" if is_held else "")),
        svg.rect(x, y + 1, width - 1, height - 2.5, svg.FOLD, stroke=stroke, stroke_dasharray="2 2"),
    ]
    needed = len(words) * 11 * svg.EM_PER_COLUMN
    if width > needed + 8:
        size = min(height - 4, 11)
        parts.append(svg.text(x + 5, y + height / 2 + 0.33 * size, words, size, svg.QUIET))
    else:
        parts.append(_beside(x + width, y, height, words, style.width))
    opacity = "0.5" if style.is_dimming and not is_path else None
    return svg.element("g", "".join(parts), class_="fold", opacity=opacity)


def _beside(x: float, y: float, height: float, words: str, width: float, weight: str | None = None) -> str:
    """A label at the right of its box, where nothing else stands."""
    room = width - MARGIN - x - 4
    line = svg.text(0, height / 2 + 4, svg.fit(words, room), 11, svg.QUIET, font_weight=weight)
    return svg.clipped(x + 4, y, room, height, line) if line else ""


def _outline(x: float, y: float, width: float, height: float, stroke: str) -> str:
    """A line around a box; of a narrow one only above and below, or a chain of them would be black."""
    if width < 7:
        lines = f"M{x:.1f} {y + 0.5:.1f}h{width:.1f}m0 {height - 1.5:.1f}h-{width:.1f}"
        return svg.element("path", d=lines, stroke=stroke, stroke_width=2.2, fill="none")
    return svg.rect(x, y + 0.5, width - 1, height - 1.5, "none", stroke=stroke, stroke_width=2.2)


def node_words(node: Node, start: int, shades: Shades, shown: str) -> str:
    """What a pointer on the node shows. start: position of its first token in the sequence."""
    ids = svg.token_text(node.label, None, 4)
    last = svg.token_text(node.label[-4:], None, 1)
    lines = [
        f"node {node.serial}: {shades.words(node)}",
        f"tokens [{start}, {start + node.num_tokens}), {svg.count(node.num_tokens, 'token')}: {ids} … {last}",
        f"{svg.count(len(node.blocks), 'block')}: {svg.blocks_text(node.blocks)}",
        f"lock_ref {node.lock_ref}, tick {node.tick}, {len(node.children)} children",
    ]
    if shown[:20] != ids[:20]:
        lines.append(svg.shorten(shown, HOVERED))
    return "\n".join(lines)


def _table_words(table: Table) -> str:
    private = table.private_blocks()
    return (
        f"request {svg.quoted(table.request_id)}: {svg.count(table.num_tokens, 'token')}, "
        f"{table.num_cached_tokens:,} of them hits\n"
        f"private: {svg.count(len(private), 'block')} {svg.blocks_text(private)}"
    )
