"""The pictures of a whole manager and of a node: counts, tree, pool.

title                                          what a reader should know in one line
hit rate, requests, evicted
■ in use 40  ■ private 6  ■■■ evictable 120    the legend counts
the tree                                       `icicle`
the pool                                       `strip`
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from . import icicle, svg
from .strip import Owner, Strip
from .subjects import Cache, Decode, Manager, Node
from .svg import MARGIN

NARROWEST_PICTURE = 480
NODES_PER_ROW = 6  # a picture of 300 nodes has 50 rows: a screen
FEWEST_ROWS = 24


def draw_cache(
    cache: Cache,
    *,
    decode: Decode | None = None,
    request_id: str | int | None = None,
    changed: Collection[int] = (),
    max_nodes: int = 300,
    width: int = 960,
    title: str | None = None,
) -> str:
    """The cache as one SVG: its tree, and below it the pool.

    decode      turns token ids into the text on the nodes; without it `cache.decode`, and without that ids are shown
    request_id  a running request whose path and blocks stand out
    changed     serial numbers of nodes to outline as just changed
    max_nodes   nodes and requests to draw; the others are folded into counts
    width       pixels, 480 and more
    title       instead of what the cache is

    Each node is a `<g class="node" data-node="SERIAL">` with a `<title>`. Well-formed XML whatever namespaces, ids and
    decoded text contain; no script, no reference to anything outside. Read-only.
    Raises UnknownRequest; ValueError for max_nodes below 1 or a width below 480. O(nodes + blocks).
    """
    check_size(max_nodes, width)
    changed = frozenset(changed)
    decode = cache.decode if decode is None else decode
    highlighted = None if request_id is None else cache.table(request_id)
    tables = [cache.table(running) for running in cache.request_ids]
    roots = {namespace: cache.tree.root(namespace) for namespace in sorted(cache.tree.namespaces())}
    path: set[int] = set() if highlighted is None else {id(highlighted), *map(id, _way_to(highlighted.node))}
    boxes = icicle.boxes_of(list(roots.values()), tables, path, changed)
    icicle.select(boxes, max_nodes, max(FEWEST_ROWS, max_nodes // NODES_PER_ROW))
    nodes = [box.node for box in boxes if box.node is not None and box.node.parent is not None]
    shades = icicle.Shades.among(nodes)
    headings = {}
    for box in boxes[0].children:
        if box.is_drawn and box.node is not None:
            namespace = _namespace_of(box.node)
            stats = cache.namespace_stats(namespace)
            counts = f"{svg.count(box.sum_nodes, 'node')} · {svg.count(box.sum_tokens, 'token')}"
            if stats.token_hit_rate is not None:
                counts += f" · hit rate {svg.percent(stats.token_hit_rate)}"
            headings[id(box.node)] = (f"namespace {svg.name_of(namespace)}", counts)

    strip = Strip(cache.num_blocks)
    for node in nodes:
        rank = 0 if node.lock_ref else 2 + svg.EVICTABLE.index(shades.of(node))
        state = "protected" if node.lock_ref else "cached, evictable"
        strip.give(node.blocks, Owner(shades.of(node), f"{state}, node {node.serial}", rank))
    for place, table in enumerate(tables):
        strip.give(table.private_blocks(), _private(place, table.request_id))

    style = icicle.Style(shades, cache.block_size, decode, path, bool(path), changed, headings, width)
    head = title or f"PrefixCache: {svg.count(cache.num_blocks, 'block')} of {svg.count(cache.block_size, 'token')}"
    entries = _legend_entries(cache)
    if any(node.num_tokens < len(node.blocks) * cache.block_size for node in nodes):
        entries.append((svg.swatch(svg.EVICTABLE[1], fill_opacity="0.55", stroke=svg.INK, stroke_dasharray="3 2",
                                   stroke_width=0.8), "part of a block"))  # fmt: skip
    if highlighted is not None:
        mark = svg.rect(1, 1, 10, 10, "none", stroke=svg.PATH, stroke_width=2.2)
        entries.append((mark, f"path of request {svg.shorten(svg.quoted(highlighted.request_id), 24)}"))
    if any(node.serial in changed for node in nodes):
        entries.append((svg.rect(1, 1, 10, 10, "none", stroke=svg.CHANGED, stroke_width=2.2), "just changed"))
    parts, y = _head(head, _counts_line(cache), entries, width)
    if len(boxes) == 1:
        parts.append(svg.text(MARGIN, y + 22, "Nothing is cached, and no request runs.", 13, svg.QUIET))
        y += 36
    else:
        tree, height, scale = icicle.draw(boxes[0], style, y + 18)
        parts += [_ruler(scale, y + 4), *tree]
        y += height + 26
    outlined = () if highlighted is None else highlighted.block_ids
    strip_parts, y = _pool(strip, y, width, outlined)
    return svg.picture(width, y, f"{head}. {_counts_line(cache)}", parts + strip_parts)


def draw_pool(
    manager: Manager, cached: Iterable[tuple[int, bool, int]] = (), *, width: int = 960, title: str | None = None
) -> str:
    """The pool of a manager without a tree as one SVG. Else as `draw_cache`.

    cached: of each cached block its id, whether a running request holds it, and the tick of its last use.
    """
    check_size(1, width)
    strip = Strip(manager.num_blocks)
    blocks = list(cached)
    shades = icicle.Shades(tick for _, is_held, tick in blocks if not is_held)
    for place, request_id in enumerate(manager.request_ids):
        strip.give(manager.block_table(request_id), _private(place, request_id))
    for block_id, is_held, tick in blocks:
        if is_held:
            strip.give((block_id,), Owner(svg.PROTECTED, "protected", 0))
        else:
            level = shades.level(tick)
            words = f"cached, evictable, last used at tick {tick}"
            strip.give((block_id,), Owner(svg.EVICTABLE[level], words, 2 + level))
    kind = type(manager).__name__
    head = title or f"{kind}: {svg.count(manager.num_blocks, 'block')} of {svg.count(manager.block_size, 'token')}"
    parts, y = _head(head, _counts_line(manager), _legend_entries(manager), width)
    strip_parts, y = _pool(strip, y + 6, width, ())
    return svg.picture(width, y, f"{head}. {_counts_line(manager)}", parts + strip_parts)


def draw_node(node: Node, *, decode: Decode | None = None, max_nodes: int = 60, width: int = 960) -> str:
    """A node as one SVG: the way to it from its root, outlined, and what hangs below it. Else as `draw_cache`.

    Neither siblings nor requests are drawn: a node does not know the requests.
    """
    check_size(max_nodes, width)
    whole_way = _way_to(node)
    root = whole_way[-1]
    way = whole_way if len(whole_way) <= max_nodes else [*whole_way[: max(max_nodes // 2, 1)], root]
    skipped = whole_way[len(way) - 1 : -1]
    frame, *below = icicle.boxes_of([node], (), set(map(id, way)), ())
    boxes = [frame]
    for ancestor in reversed(way[1:]):
        box = icicle.Box(ancestor, None, boxes[-1], ancestor.num_tokens, is_held=ancestor.lock_ref > 0)
        box.start, box.is_on_path = boxes[-1].start + boxes[-1].num_tokens, True
        if ancestor is root:
            box.start = sum(each.num_tokens for each in skipped)
        box.sum_nodes = int(ancestor.parent is not None)
        boxes[-1].children = [box]
        boxes.append(box)
    below[0].parent = boxes[-1]
    boxes[-1].children = [below[0]]
    shift = boxes[-1].start + boxes[-1].num_tokens
    for box in below:
        box.start += shift
    boxes += below
    icicle.select(boxes, max_nodes, max(FEWEST_ROWS, max_nodes // NODES_PER_ROW))
    nodes = [box.node for box in boxes if box.node is not None and box.node.parent is not None]
    shades = icicle.Shades.among(nodes)
    block_size = max((-(-each.num_tokens // len(each.blocks)) for each in nodes), default=1)
    namespace = svg.name_of(_namespace_of(root))
    left_out = f"{svg.count(len(skipped), 'node')} of the way left out" if skipped else ""
    headings = {id(root): (f"namespace {namespace}", left_out)}
    style = icicle.Style(shades, block_size, decode, {id(node)}, False, (), headings, width)
    start = below[0].start
    if node.parent is None:
        head = f"Root of namespace {svg.shorten(namespace, 60)}: {svg.count(len(node.children), 'child')}"
        line = ""
    else:
        head = f"Node {node.serial}: tokens [{start:,}, {start + node.num_tokens:,}) of its sequence"
        line = (
            f"{svg.count(len(node.blocks), 'block')} {svg.blocks_text(node.blocks)} · {shades.words(node)} · "
            f"lock_ref {node.lock_ref} · tick {node.tick}"
        )
    line += f"{' · ' if line else ''}{svg.count(below[0].sum_nodes - int(node.parent is not None), 'node')} below"
    entries = [
        (svg.swatch(svg.PROTECTED), "on the path of a running request"),
        (_ramp(), "evictable, fresh to stale"),
        (svg.rect(1, 1, 10, 10, "none", stroke=svg.PATH, stroke_width=2.2), "this node"),
    ]
    parts, y = _head(head, line, entries, width)
    tree, height, scale = icicle.draw(frame, style, y + 18)
    parts += [_ruler(scale, y + 4), *tree]
    return svg.picture(width, y + height + 26, f"{head}. {line}", parts)


def _namespace_of(node: Node) -> tuple[str, ...]:
    """The namespace that a root names: only roots have one."""
    namespace: tuple[str, ...] = getattr(node, "namespace", ())
    return namespace


def check_size(max_nodes: int, width: int) -> None:
    """Raises ValueError for a picture without nodes or too narrow for its words."""
    if max_nodes < 1:
        raise ValueError(f"max_nodes is {max_nodes}; allowed: 1 and more")
    if width < NARROWEST_PICTURE:
        raise ValueError(f"width is {width} pixels; allowed: {NARROWEST_PICTURE} and more")


def _way_to(node: Node) -> list[Node]:
    """The node, its parent, and so on to the root."""
    way = [node]
    while way[-1].parent is not None:
        way.append(way[-1].parent)
    return way


def _private(place: int, request_id: str | int) -> Owner:
    """The owner of a running request's private blocks; `place`: among the running requests."""
    return Owner(svg.PRIVATE[place % len(svg.PRIVATE)], f"private to request {svg.shorten(str(request_id), 24)}", 1)


def _counts_line(manager: Manager) -> str:
    stats = manager.stats
    line = f"{svg.count(stats.requests, 'request')} so far, {len(manager.request_ids):,} running"
    if stats.token_hit_rate is not None:
        line = f"{stats.token_hit_rate:.0%} of {svg.count(stats.prompt_tokens, 'prompt token')} were hits · {line}"
    return f"{line} · {svg.count(stats.evicted_blocks, 'block')} evicted to make room"


def _ramp() -> str:
    """The shades of evictable blocks as one swatch."""
    width = 11 / len(svg.EVICTABLE)
    shades = [svg.rect(0.5 + place * width, 0.5, width, 11, fill) for place, fill in enumerate(svg.EVICTABLE)]
    return "".join(shades) + svg.rect(0.5, 0.5, 11, 11, "none", stroke=svg.LINE, stroke_width=0.5)


def _legend_entries(manager: Manager) -> list[tuple[str, str]]:
    return [
        (svg.swatch(svg.PROTECTED), f"{manager.num_protected_blocks:,} cached, in use by running requests"),
        (svg.swatch(svg.PRIVATE[0]), f"{manager.num_private_blocks:,} private to them"),
        (_ramp(), f"{manager.num_evictable_blocks:,} cached, evictable: fresh to stale"),
        (svg.swatch(svg.FREE), f"{manager.num_free_blocks:,} free"),
    ]


def _head(title: str, line: str, entries: list[tuple[str, str]], width: int) -> tuple[list[str], float]:
    """Title, line and legend; and where they end."""
    room = width - 2 * MARGIN
    heading = svg.text(0, 16, svg.fit(title, room, 15), 15, font_weight="600")
    words, height = svg.legend(MARGIN, 56, room, entries)
    return [svg.clipped(MARGIN, 8, room, 22, heading), svg.text(MARGIN, 45, svg.fit(line, room, 11.5), 12), words], (
        56 + height
    )


def _ruler(scale: float, y: float) -> str:
    """What length is how many tokens."""
    if not scale:
        return ""
    tokens = next(
        (digit * 10**power for power in range(9, -1, -1) for digit in (5, 2, 1) if digit * 10**power * scale <= 160), 1
    )
    length = tokens * scale
    x = MARGIN + 5
    line = svg.element(
        "path", d=f"M{x} {y + 2:g}v8m0 -4h{svg.number(length)}m0 -4v8", stroke=svg.QUIET, fill="none", stroke_width=1
    )
    return line + svg.text(x + length + 6, y + 10, f"{svg.count(tokens, 'token')} (width is by tokens)",
                           10.5, svg.QUIET)  # fmt: skip


def _pool(strip: Strip, y: float, width: int, outlined: Iterable[int]) -> tuple[list[str], float]:
    """The strip under its heading; and where it ends."""
    drawn, height = strip.draw(y + 12, width, tuple(outlined))
    heading = svg.text(MARGIN, y + 4, "pool", 12, font_weight="600")
    return [heading, svg.text(MARGIN + 36, y + 4, strip.words(width), 11, svg.QUIET), drawn], y + 12 + height + 10
