"""The pictures: true to the cache, small, well-formed, and harmless whatever their texts contain."""

import random
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import PrefixCache, UnknownRequest
from radixkv.baselines import FlatHashCache, PagedAllocator, SlotAllocator
from radixkv.render import draw_block_table, draw_cache, draw_node, draw_table, draw_turns, svg

SVG = "{http://www.w3.org/2000/svg}"
TAGS = {f"{SVG}{name}" for name in ("svg", "g", "rect", "text", "title", "path")}
ATTRIBUTE = re.compile(
    "aria-label|class|d|data-(block|node)|fill(-opacity)?|font-(family|size|weight)|height|opacity|pointer-events|role"
    "|rx|stroke(-dasharray|-width)?|style|text-anchor|transform|viewBox|width|x|y"
)
ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></text></svg><script>alert(1)</script>",
    "' onload='alert(1)",
    "]]><!-- & &lt; <![CDATA[",
    "\x00\x1b[31m\ud800\uffff\u202e",
    "{{7*7}}${7*7}`",
]
texts = st.one_of(st.sampled_from(ATTACKS), st.text(st.characters(exclude_categories=()), max_size=40))


def parsed(picture):
    """The picture as a tree of elements, once it has shown that it is harmless XML."""
    root = ET.fromstring(picture.encode())  # a lone surrogate would fail here, a control character in the parser
    for each in root.iter():
        assert each.tag in TAGS, f"{each.tag} in a picture"
        assert all(map(ATTRIBUTE.fullmatch, each.attrib)), f"{set(each.attrib)} in a picture"
        assert not any("url(" in value or "javascript:" in value for value in each.attrib.values() if "(" in value)
        for key in ("x", "y", "width", "height"):
            if key in each.attrib:
                assert float(each.get(key)) == float(each.get(key)) and (key in "xy" or float(each.get(key)) >= 0)
    return root


def of_class(root, name):
    """The groups of a class."""
    return [each for each in root.iter(f"{SVG}g") if each.get("class") == name]


def title(group):
    """What a pointer on the group shows."""
    return group.find(f"{SVG}title").text


def frame(group):
    """x, y, width, height of the group's first rectangle."""
    first = group.find(f"{SVG}rect")
    return tuple(float(first.get(key)) for key in ("x", "y", "width", "height"))


def fill(group):
    """The colour of the group's first rectangle."""
    return group.find(f"{SVG}rect").get("fill")


def drawn_nodes(root):
    """The groups of the drawn nodes, by serial number."""
    groups = of_class(root, "node")
    by_serial = {int(group.get("data-node")): group for group in groups}
    assert len(by_serial) == len(groups), "a node is drawn twice"
    return by_serial


def nodes_of(cache):
    """The cache's nodes without the roots, by serial number."""
    return {node.serial: node for node in cache.tree.nodes() if node.parent is not None}


def words_of(root):
    """All text of the picture, labels and hover."""
    return "\n".join(each.text or "" for each in root.iter())


def ended(cache, token_ids, namespace=None):
    """Plays a request to its end."""
    cache.allocate("tmp", token_ids, namespace)
    cache.commit("tmp", len(token_ids))
    cache.free("tmp")


def small_cache(num_blocks=64):
    """Two chats behind a shared start of four blocks, one still running; another namespace; a part of a block."""
    cache = PrefixCache(num_blocks, 4)
    ended(cache, [*range(16), *range(100, 108)])
    ended(cache, [5, 6, 7, 8, 9], "tenant")
    cache.allocate("run", [*range(16), *range(200, 214)])
    cache.commit("run", 30)
    return cache


def random_cache(seed, num_requests=40, num_blocks=400, block_size=4):
    """Chats that grow and branch, some of them running, in three namespaces."""
    draw = random.Random(seed)
    cache = PrefixCache(num_blocks, block_size)
    said = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(4)]
    for number in range(num_requests):
        start = draw.choice(said)
        prompt = start + [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        said.append(prompt)
        namespace = draw.choice([None, "a", ("b", "c")])
        if not cache.can_allocate(len(prompt)):
            continue
        num_cached = cache.allocate(number, prompt, namespace).num_cached_tokens
        cache.commit(number, draw.randrange(num_cached, len(prompt) + 1) if draw.random() < 0.3 else len(prompt))
        if draw.random() < 0.75:
            cache.free(number)
        elif draw.random() < 0.3 and cache.can_allocate(1):
            cache.fork(number, f"fork {number}")
            cache.append_token(f"fork {number}", 1)
    cache.check()
    return cache


# Harmless ---------------------------------------------------------------------------------------------------------


@given(texts, texts, texts, texts, st.sampled_from(["text", "raises", "number"]))
@settings(max_examples=100)
def test_no_text_of_a_user_becomes_markup_in_any_picture(namespace, name, decoded, heading, kind):
    """Namespaces, request ids, token text and titles come from strangers; the notebook that shows them is trusted."""

    def decode(ids):
        if kind == "raises":
            raise ValueError(decoded)
        return decoded if kind == "text" else 7

    cache = PrefixCache(16, 2)
    cache.decode = decode
    ended(cache, [1, 2, 3, 4, 5], namespace)
    cache.allocate(name, [1, 2, 3, 4, 6, 7], (namespace, "x"))
    cache.commit(name, 5)
    pictures = [
        draw_cache(cache, request_id=name, changed=range(9), title=heading),
        draw_cache(cache, decode=decode, max_nodes=1),
        draw_table(cache, name),
        *(draw_node(node, decode=decode) for node in cache.tree.nodes()),
        draw_turns([], title=heading, remark=heading),
    ]
    for picture in pictures:
        parsed(picture)
    for drawn in (cache, cache.table(name)):
        bundle = drawn._repr_mimebundle_()
        parsed(bundle["image/svg+xml"])
        bundle["text/plain"].encode()
        assert "\x00" not in bundle["text/plain"] and "\x1b" not in bundle["text/plain"]


class Tags(HTMLParser):
    """Collects what a browser would make of a page: its tags and their attributes."""

    def __init__(self):
        super().__init__()
        self.tags, self.names = set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names.update(name for name, _ in attrs)

    handle_startendtag = handle_starttag


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_html_parser_finds_no_element_but_the_pictures(attack):
    """Inside a page the picture is read by the rules of HTML, which forgive more than XML does."""
    cache = PrefixCache(16, 2)
    cache.decode = lambda ids: attack
    cache.allocate(attack, [1, 2, 3], attack)
    cache.commit(attack, 2)
    page = Tags()
    page.feed(cache._repr_mimebundle_()["text/html"] + cache.table(attack)._repr_mimebundle_()["text/html"])
    assert page.tags == {"div", *(tag.removeprefix(SVG) for tag in TAGS)}
    assert not {name for name in page.names if name.startswith("on") or name in {"href", "src"}}


def test_texts_arrive_as_they_were_written():
    """Escaped once and not twice, or a reader would see `&amp;lt;` for every `<`."""
    cache = PrefixCache(16, 2)
    cache.decode = lambda ids: 'if a < b & c: "d"'
    cache.allocate("r<1>", [1, 2, 3], "R&D <team>")
    cache.commit("r<1>", 2)
    root = parsed(draw_cache(cache))
    assert title(of_class(root, "namespace")[0]) == "namespace R&D <team>"
    assert 'if a < b & c: "d"' in title(of_class(root, "node")[0])
    assert title(of_class(root, "request")[0]).startswith("request r<1>:")


def test_a_decoder_that_fails_costs_its_text_and_not_the_picture():
    """A tokenizer may not know an id that another model wrote; the tree is then shown by its ids."""
    cache = small_cache()

    def fails(ids):
        raise KeyError(ids[0])

    assert draw_cache(cache, decode=fails) == draw_cache(cache)
    cache.decode = fails
    assert "203" in cache._repr_mimebundle_()["text/plain"]


# True to the cache ------------------------------------------------------------------------------------------------


def test_every_node_of_a_small_tree_is_drawn_with_what_a_pointer_tells():
    """A page opens a node by its `data-node`, and a reader checks ids, blocks, lock and tick against `show`."""
    cache = small_cache()
    root = parsed(draw_cache(cache, decode=lambda ids: f"text of {ids[0]}"))
    nodes = nodes_of(cache)
    groups = drawn_nodes(root)
    assert set(groups) == set(nodes) and not of_class(root, "fold")
    for serial, node in nodes.items():
        said = title(groups[serial])
        first = (node.end - len(node.blocks)) * 4
        assert f"tokens [{first}, {first + node.num_tokens})" in said
        assert f"lock_ref {node.lock_ref}, tick {node.tick}" in said
        assert svg.blocks_text(node.blocks) in said
        assert ("protected" in said) == (node.lock_ref > 0)
        assert f"text of {svg.unpack(node.label)[0]}" in said
    assert [title(group) for group in of_class(root, "namespace")] == ["namespace (default)", "namespace tenant"]


@pytest.mark.parametrize("seed", range(6))
def test_width_is_by_tokens_and_children_stand_beside_their_parent_without_overlap(seed):
    """The picture is read by lengths and neighbourhoods; either being wrong would tell of another tree."""
    cache = random_cache(seed)
    root = parsed(draw_cache(cache, max_nodes=1000))
    groups = drawn_nodes(root)
    nodes = nodes_of(cache)
    assert set(groups) <= set(nodes)
    frames = {serial: frame(group) for serial, group in groups.items()}
    widest = max(frames, key=lambda serial: frames[serial][2])
    scale = (frames[widest][2] + 1) / nodes[widest].num_tokens
    for serial, (x, y, width, height) in frames.items():
        assert width + 1 == pytest.approx(max(nodes[serial].num_tokens * scale, 2.5), abs=0.2)
        parent = frames.get(nodes[serial].parent.serial)
        if parent is not None:
            assert x == pytest.approx(parent[0] + parent[2] + 1, abs=0.2)
            assert parent[1] - 0.2 <= y and y + height <= parent[1] + parent[3] + 0.2
    boxes = list(frames.values()) + [frame(group) for name in ("request", "fold") for group in of_class(root, name)]
    for place, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[:place]:
            beside = x + width <= other_x + 0.2 or other_x + other_width <= x + 0.2
            assert beside or y + height <= other_y + 0.2 or other_y + other_height <= y + 0.2, "two boxes overlap"
    picture_width, picture_height = (float(root.get(key)) for key in ("width", "height"))
    assert all(x + width <= picture_width and y + height <= picture_height for x, y, width, height in boxes)


def test_protected_nodes_have_one_colour_and_the_others_pale_with_age():
    """Which blocks would go next is the question that the colours answer."""
    cache = PrefixCache(64, 2)
    for number in range(5):
        ended(cache, [number, 1, 2, 3])
    cache.allocate("run", [9, 9, 9])
    cache.commit("run", 2)
    groups = drawn_nodes(parsed(draw_cache(cache)))
    nodes = nodes_of(cache)
    by_age = sorted((node for node in nodes.values() if not node.lock_ref), key=lambda node: -node.tick)
    assert list(dict.fromkeys(fill(groups[node.serial]) for node in by_age)) == list(svg.EVICTABLE)
    assert {fill(groups[node.serial]) for node in nodes.values() if node.lock_ref} == {svg.PROTECTED}
    lightness = [sum(bytes.fromhex(shade[1:])) for shade in svg.EVICTABLE]
    assert lightness == sorted(lightness)


def test_running_requests_stand_at_the_end_of_their_paths():
    """What a request has beyond the tree is part of the pool too, and a fork shares it until it writes."""
    cache = small_cache()
    cache.fork("run", "twin")
    root = parsed(draw_cache(cache))
    end = frame(drawn_nodes(root)[cache.table("run").node.serial])
    requests = of_class(root, "request")
    assert [title(group).split(":")[0] for group in requests] == ["request run", "request twin"]
    for group in requests:
        assert frame(group)[0] == pytest.approx(end[0] + end[2] + 1, abs=0.2)
        assert "30 tokens, 16 of them hits" in title(group)


def outlined(root, stroke):
    """Frames of the outlines in a colour, legend and pool left out."""
    rects = [each for each in root.iter(f"{SVG}rect") if each.get("stroke") == stroke and each.get("height") != "10"]
    return [tuple(float(each.get(key)) for key in ("x", "y", "width", "height")) for each in rects]


def test_the_path_of_a_request_and_its_blocks_are_outlined_and_the_rest_is_pale():
    """Whose blocks are these? is asked of one request among many."""
    cache = small_cache()
    root = parsed(draw_cache(cache, request_id="run"))
    groups = drawn_nodes(root)
    node, path = cache.table("run").node, set()
    while node.parent is not None:
        path.add(node.serial)
        node = node.parent
    for serial, group in groups.items():
        assert (group.get("opacity") is None) == (serial in path)
    marks = outlined(root, svg.PATH)
    assert {frame(groups[serial]) for serial in path} <= set(marks)
    assert frame(of_class(root, "request")[0])[:2] in {mark[:2] for mark in marks}
    in_pool = [width for x, y, width, height in marks if height == 15]
    assert sum(in_pool) == 14 * len(cache.block_table("run"))


def test_just_changed_nodes_are_outlined_in_their_own_colour():
    """A film of the cache shows step by step what the last step did; nodes that are gone are no error."""
    cache = small_cache()
    serial = max(nodes_of(cache))
    root = parsed(draw_cache(cache, changed={serial, 10_000}))
    assert outlined(root, svg.CHANGED) == [frame(drawn_nodes(root)[serial])]
    assert not outlined(parsed(draw_cache(cache)), svg.CHANGED)


def pool_blocks(root, size):
    """Blocks of each colour in the strip of cells."""
    counts = {}
    for group in root.iter(f"{SVG}g"):
        shown = group.find(f"{SVG}title")
        if shown is not None and re.match(r"blocks? \d+(-\d+)?: ", shown.text):
            width = frame(group)[2]
            counts[fill(group)] = counts.get(fill(group), 0) + round((width + 1) / size)
    return counts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_blocks", "size"), [(120, 14), (600, 9)])
def test_the_strip_has_as_many_cells_of_each_colour_as_the_pool_has_blocks(seed, num_blocks, size):
    """The strip and the counters are two views of one pool."""
    cache = random_cache(seed, num_blocks=num_blocks)
    counts = pool_blocks(parsed(draw_cache(cache)), size)
    assert counts.get(svg.FREE, 0) == cache.num_free_blocks
    assert counts.get(svg.PROTECTED, 0) == cache.num_protected_blocks
    assert sum(counts.get(shade, 0) for shade in svg.EVICTABLE) == cache.num_evictable_blocks
    assert sum(counts.get(shade, 0) for shade in svg.PRIVATE) == cache.num_private_blocks


def test_a_large_pool_is_columns_whose_areas_are_its_shares():
    """A million blocks have no cells of their own, yet a full pool must look full."""
    cache = PrefixCache(100_000, 4)
    for number in range(50):
        ended(cache, [number] * 2000)
    cache.allocate("run", [0] * 2000 + [7] * 20_000)
    root = parsed(draw_cache(cache))
    strip_top = next(float(each.get("y")) for each in root.iter(f"{SVG}text") if each.text == "pool")
    areas = {}
    for each in root.iter(f"{SVG}rect"):
        if float(each.get("y")) > strip_top and each.get("fill") != "none":
            shade = each.get("fill")
            areas[shade] = areas.get(shade, 0) + float(each.get("width")) * float(each.get("height"))
    total = sum(areas.values())
    assert areas[svg.PRIVATE[0]] / total == pytest.approx(cache.num_private_blocks / 100_000, abs=0.005)
    cached = sum(areas.get(shade, 0) for shade in svg.EVICTABLE)
    assert cached / total == pytest.approx(cache.num_evictable_blocks / 100_000, abs=0.01)


def test_drawing_changes_nothing_and_gives_the_same_picture_twice():
    """A picture in the middle of a run must not touch recency, or looking would change what is evicted."""
    cache = random_cache(3)
    before = cache.show(), cache.stats.as_dict(), [node.tick for node in cache.tree.nodes()]
    running = cache.request_ids[0]
    assert draw_cache(cache, request_id=running) == draw_cache(cache, request_id=running)
    assert draw_table(cache, running) == draw_table(cache, running)
    cache._repr_mimebundle_()
    assert (cache.show(), cache.stats.as_dict(), [node.tick for node in cache.tree.nodes()]) == before
    cache.check()


# Size -------------------------------------------------------------------------------------------------------------


def folded(root):
    """Namespaces, nodes, running requests and tokens that the folds count."""
    sums = dict.fromkeys(("namespace", "node", "running request", "token"), 0)
    for group in of_class(root, "fold"):
        first_line = title(group).splitlines()[0].removeprefix("+ ")
        for number, noun in re.findall(r"([\d,]+) (namespace|node|running request|token)s?", first_line):
            sums[noun] += int(number.replace(",", ""))
    return sums


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_drawn_is_counted(seed, max_nodes):
    """A fold that forgets nodes would make a full cache look small."""
    cache = random_cache(seed, num_requests=120, num_blocks=2000)
    root = parsed(draw_cache(cache, max_nodes=max_nodes))
    groups = drawn_nodes(root)
    nodes = nodes_of(cache)
    sums = folded(root)
    requests = of_class(root, "request")
    assert 1 <= len(groups) + len(requests) <= max_nodes
    assert len(groups) + sums["node"] == len(nodes)
    assert len(requests) + sums["running request"] == len(cache.request_ids)
    drawn_tokens = sum(nodes[serial].num_tokens for serial in groups)
    assert drawn_tokens + sums["token"] == sum(node.num_tokens for node in nodes.values())
    assert len(of_class(root, "namespace")) + sums["namespace"] == len(cache.tree.namespaces())


@pytest.fixture(scope="module")
def ten_thousand_nodes():
    """10,000 nodes: 100 starts of 99 continuations each."""
    cache = PrefixCache(100_000, 4)
    for start in range(100):
        for end in range(99):
            ended(cache, [start] * 8 + [1000 + end] * 8)
    assert cache.tree.num_nodes == 10_000
    return cache


def test_ten_thousand_nodes_are_folded_into_a_small_picture_even_if_every_character_must_be_escaped(
    ten_thousand_nodes,
):
    """A notebook keeps its pictures: a few megabytes each would make it useless."""
    cache = ten_thousand_nodes
    cache.allocate("run", [50] * 8 + [1050] * 8 + [1, 2, 3])
    for decode in (None, lambda ids: "&" * 5000, lambda ids: "\U0001f600" * 5000):
        picture = draw_cache(cache, decode=decode, request_id="run")
        assert len(picture.encode()) < 500_000
        root = parsed(picture)
        assert len(drawn_nodes(root)) + len(of_class(root, "request")) <= 300
        assert cache.table("run").node.serial in drawn_nodes(root), "the path asked for was folded away"
        assert sum(1 for _ in root.iter()) < 3000
    assert float(root.get("height")) < 1200
    cache.free("run")


def test_decoders_see_only_the_nodes_that_are_drawn(ten_thousand_nodes):
    """Decoding is the dear part: 10,000 calls of a tokenizer would take longer than the picture."""
    calls = []
    draw_cache(ten_thousand_nodes, decode=lambda ids: calls.append(len(ids)) or "text")
    assert len(calls) <= 300 and max(calls) <= 64


def test_a_chain_of_thousands_of_nodes_is_drawn_without_recursion():
    """A long conversation makes one long path; Python's stack must not limit it."""
    cache = PrefixCache(5000, 1)
    tokens = list(range(3000))
    ended(cache, tokens)
    for cut in range(2990, 1, -1):
        ended(cache, [*tokens[:cut], 9999])
        cache.evict(0)
    cache.allocate("run", tokens)
    root = parsed(draw_cache(cache, request_id="run"))
    assert len(drawn_nodes(root)) + folded(root)["node"] == cache.tree.num_nodes > 4000
    deepest = cache.table("run").node
    alone = drawn_nodes(parsed(draw_node(deepest)))
    assert deepest.serial in alone, "the node itself was left out"
    assert f"tokens [{deepest.end - len(deepest.blocks)}, {deepest.end})" in title(alone[deepest.serial])
    marked = [width for x, y, width, height in outlined(root, svg.PATH)]
    assert not marked or min(marked) > 5, "outlines of narrow boxes would hide them"
    assert len(draw_cache(cache, request_id="run", decode=lambda ids: "&" * 5000)) < 500_000


def test_thousands_of_namespaces_are_folded_too():
    """One namespace a user is common; a heading for each would be a list and no picture."""
    cache = PrefixCache(5000, 4)
    for user in range(2000):
        ended(cache, [1, 2, 3, 4, 5], f"user-{user}")
    root = parsed(draw_cache(cache))
    shown = len(of_class(root, "namespace"))
    assert 3 <= shown <= 50
    assert folded(root)["namespace"] == 2000 - shown
    assert float(root.get("height")) < 1200


# Reading ----------------------------------------------------------------------------------------------------------


def test_no_label_is_longer_than_its_box():
    """Text over the neighbour's box is worse than none; what remains too long for its font is cut by its frame."""
    cache = random_cache(1, num_requests=100, num_blocks=2000)
    for decode in (None, lambda ids: "word " * 30, lambda ids: "漢字かな" * 20):
        labels = 0
        for group in of_class(parsed(draw_cache(cache, decode=decode)), "node"):
            inner = group.find(f"{SVG}svg")
            if inner is None:
                continue
            labels += 1
            x, _, width, _ = frame(group)
            assert x - 0.2 <= float(inner.get("x")) and float(inner.get("width")) <= width + 0.2
            for line in inner.iter(f"{SVG}text"):
                needed = float(line.get("x")) + svg.columns(line.text) * float(line.get("font-size")) * 0.6
                assert needed <= float(inner.get("width")) + 0.2
                assert 0 < float(line.get("y")) <= float(inner.get("height"))
        assert labels > 3


def test_a_long_label_is_wrapped_between_words_and_ends_in_an_ellipsis():
    """A system prompt is recognised by its first sentence."""
    lines = svg.wrap("You are a helpful assistant who answers briefly.", 100, 3)
    assert lines == ["You are a", "helpful", "assistant who…"] or all(len(line) <= 14 for line in lines)
    assert lines[-1].endswith("…") and not any(line.startswith(" ") for line in lines)
    assert svg.wrap("a\nb\tc", 100, 1) == ["a⏎b⇥c"]
    assert svg.fit("abc", 10) == ""


def test_colours_keep_their_contrast_with_the_text_on_them():
    """WCAG asks 4.5 to 1 for small text."""

    def luminance(shade):
        linear = [
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
            for part in (value / 255 for value in bytes.fromhex(shade[1:]))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [(svg.ink_on(shade), shade) for shade in (svg.PROTECTED, svg.COPIED, *svg.PRIVATE, *svg.EVICTABLE)]
    pairs += [(svg.INK, svg.CARD), (svg.QUIET, svg.CARD), (svg.QUIET, svg.FOLD)]
    for ink, ground in pairs:
        dark, light = sorted((luminance(ink), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{ink} on {ground}"


def test_every_picture_brings_its_own_light_ground():
    """An SVG shown as an image knows nothing of a dark theme around it: dark text needs a light card."""
    cache = small_cache()
    node = next(iter(nodes_of(cache).values()))
    for picture in (draw_cache(cache), draw_table(cache, "run"), draw_node(node), draw_turns([])):
        card = parsed(picture).find(f"{SVG}rect")
        assert card.get("fill") == svg.CARD
        assert float(card.get("width")) >= float(parsed(picture).get("width")) - 1


def test_an_empty_cache_says_so():
    """The first cell of a notebook draws a cache in which nothing is."""
    root = parsed(draw_cache(PrefixCache(8, 4)))
    assert "Nothing is cached" in words_of(root)
    assert pool_blocks(root, 14) == {svg.FREE: 8}


def test_blocks_of_one_token_and_huge_names_are_drawn():
    """Block size 1 hides unit mistakes elsewhere; here widths and partial leaves could show them."""
    cache = PrefixCache(8, 1)
    cache.allocate("n" * 100_000, [1, 2, 3], "x" * 100_000)
    cache.commit("n" * 100_000, 3)
    picture = draw_cache(cache)
    assert len(picture) < 10_000
    parsed(picture)
    assert len(draw_table(cache, "n" * 100_000)) < 10_000


def test_arguments_out_of_range_are_refused_with_the_rule():
    """A mistake is told before anything is drawn."""
    cache = small_cache()
    with pytest.raises(UnknownRequest):
        draw_cache(cache, request_id="nobody")
    with pytest.raises(UnknownRequest):
        draw_table(cache, "nobody")
    with pytest.raises(ValueError, match="max_nodes is 0; allowed: 1 and more"):
        draw_cache(cache, max_nodes=0)
    with pytest.raises(ValueError, match="width is 100 pixels; allowed: 480 and more"):
        draw_cache(cache, width=100)


# A node -----------------------------------------------------------------------------------------------------------


def test_a_node_is_drawn_with_its_way_and_what_hangs_below_but_without_its_siblings():
    """Opened from the picture of the tree, a node shows where it hangs."""
    cache = small_cache()
    nodes = nodes_of(cache)
    shared = max(nodes.values(), key=lambda node: len(node.children))
    child = shared.children.in_order()[0]
    assert set(drawn_nodes(parsed(draw_node(shared)))) == {
        shared.serial,
        *(below.serial for below in shared.children.in_order()),
    }
    root = parsed(child._repr_mimebundle_()["image/svg+xml"])
    assert set(drawn_nodes(root)) == {shared.serial, child.serial}
    assert outlined(root, svg.PATH) == [frame(drawn_nodes(root)[child.serial])]
    first = (child.end - len(child.blocks)) * 4
    assert f"tokens [{first}, {first + child.num_tokens})" in title(drawn_nodes(root)[child.serial])


# A block table ----------------------------------------------------------------------------------------------------


def cells(root):
    """Physical id and colour of each block drawn; the colour of a partly filled one is its second rectangle's."""
    return [
        (int(group.get("data-block")), group.findall(f"{SVG}rect")[-1].get("fill")) for group in of_class(root, "block")
    ]


def test_a_block_table_shows_its_ids_in_order_and_whose_each_block_is():
    """The question of a block table: which of my blocks may I write, and which would be copied first?"""
    cache = small_cache()
    cache.fork("run", "twin")
    ids = cache.block_table("run")
    tree, fork = (svg.PROTECTED,) * 7, (svg.PRIVATE[1],)
    assert cells(parsed(draw_table(cache, "run"))) == list(zip(ids, tree + fork, strict=True))
    cache.append_token("twin", 1)  # copies the tail first
    copied = cache.write("twin", 2)
    shown = dict(cells(parsed(draw_table(cache, "twin"))))
    assert tuple(shown) == cache.block_table("twin")
    assert shown[copied] == svg.COPIED
    assert shown[cache.block_table("twin")[-1]] == svg.PRIVATE[0]


def test_the_bar_of_a_block_table_divides_its_slots_into_hits_computed_waiting_and_empty():
    """How much of this request was saved is the first thing to see."""
    cache = small_cache()
    cache.append_token("run", 1)
    words = words_of(parsed(draw_table(cache, "run")))
    for line in ("16 tokens: hit: not computed", "14 tokens: computed", "1 token: to be computed", "1 slot: empty"):
        assert line in words
    assert "31 tokens in 8 blocks of 4 slots" in words


@pytest.mark.parametrize("scattered", [False, True])
def test_a_long_block_table_is_folded_and_no_block_is_lost(scattered):
    """A prompt of 128k tokens has 8,000 blocks."""
    cache = PrefixCache(9000, 4)
    if scattered:  # every other block stays taken
        for number in range(4000):
            cache.allocate(number, [number])
            cache.allocate(-number - 1, [number])
        for number in range(4000):
            cache.free(number)
        cache.allocate("rest", [1] * 4000)
    cache.allocate("run", [1] * 15_000)
    root = parsed(draw_table(cache, "run"))
    assert len(draw_table(cache, "run")) < 200_000
    hidden = sum(
        int(last) - int(first) + 1
        for group in of_class(root, "fold")
        for first, last in re.findall(r"^blocks (\d+)-(\d+) of", title(group))
    )
    assert len(of_class(root, "block")) + hidden == 3750
    assert float(root.get("height")) < 900


def test_a_table_draws_itself():
    """`cache.table(request_id)` as the last line of a cell shows the request's blocks."""
    cache = small_cache()
    bundle = cache.table("run")._repr_mimebundle_()
    assert bundle["text/plain"] == cache.table("run").show()
    assert bundle["image/svg+xml"] == draw_block_table(cache.table("run")) == draw_table(cache, "run")


# Notebooks --------------------------------------------------------------------------------------------------------


def test_a_cache_gives_notebooks_a_picture_and_terminals_text():
    """HTML keeps the hover text where a front end would show an SVG as an image; text remains for the others."""
    cache = small_cache()
    cache.decode = lambda ids: " ".join(f"w{number}" for number in ids)
    bundle = cache._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    assert bundle["text/plain"] == cache.show(cache.decode)
    assert bundle["image/svg+xml"] == draw_cache(cache)
    assert bundle["image/svg+xml"] in bundle["text/html"]
    assert "w200 w201" in bundle["image/svg+xml"]


@pytest.mark.parametrize("manager", [FlatHashCache(60, 4), PagedAllocator(60, 4), SlotAllocator(60, 4, max_len=40)])
def test_the_other_managers_draw_their_pools(manager):
    """Side by side with the cache's, the strips show what sharing saves."""
    for number in range(3):
        manager.allocate(number, [*range(16), number, 1])
        manager.commit(number, 18)
    manager.free(0)
    bundle = manager._repr_mimebundle_()
    assert bundle["text/plain"] == manager.show()
    counts = pool_blocks(parsed(bundle["image/svg+xml"]), 14)
    assert counts.get(svg.FREE, 0) == manager.num_free_blocks
    assert counts.get(svg.PROTECTED, 0) == manager.num_protected_blocks
    assert sum(counts.get(shade, 0) for shade in svg.EVICTABLE) == manager.num_evictable_blocks
    assert sum(counts.get(shade, 0) for shade in svg.PRIVATE) == manager.num_private_blocks


# A replay ---------------------------------------------------------------------------------------------------------


class Wave:
    """One turn of a replay, as the report sums it up."""

    def __init__(self, turn, ttft_s, cold_s=None, hit_rate=0.5):
        self.turn, self.num_turns, self.token_hit_rate = turn, 3, hit_rate
        self.median_ttft_s, self.median_ttft_cold_s = ttft_s, cold_s


def test_bars_are_as_high_as_times_and_rates():
    """A chart that exaggerates is worse than a table."""
    root = parsed(draw_turns([Wave(1, 0.04, 0.04, 0.0), Wave(2, 0.03, 0.06, 0.9)]))
    heights = [[float(bar.get("height")) for bar in group.findall(f"{SVG}rect")] for group in of_class(root, "turn")]
    (rate_1,), (rate_2,), (cold_1, warm_1), (cold_2, warm_2) = heights
    assert (rate_1, rate_2) == (0, pytest.approx(63))
    assert cold_1 == warm_1 == pytest.approx(2 * cold_2 / 3, abs=0.2)
    assert warm_2 == pytest.approx(cold_2 / 2, abs=0.2)
    assert "Turn 2: 90% of the prompt cached, first token 2.0 times sooner (30.0 ms instead of 60.0)" in words_of(root)


def test_a_replay_without_comparison_or_with_hundreds_of_turns_is_drawn():
    """Without `compare` there is no second bar; long replays are means of neighbours and say so."""
    root = parsed(draw_turns([Wave(turn, 0.0) for turn in range(1, 4)]))
    assert [len(group.findall(f"{SVG}rect")) for group in of_class(root, "turn")] == [1] * 6
    assert "without the cache" not in words_of(root)
    root = parsed(draw_turns([Wave(turn, 0.01 * turn, 0.02 * turn) for turn in range(1, 501)]))
    bars = of_class(root, "turn")
    assert len(bars) <= 64
    assert title(bars[-1]).startswith("turn 497-500, 12 prompts")
    assert "No turn was played." in words_of(parsed(draw_turns([])))


def test_a_replay_report_draws_itself():
    """The report is what `replay` gives back; in a notebook its last line is the chart."""
    replay = pytest.importorskip("engine.replay")
    record = replay.TurnRecord("<b>chat</b>", 1, 100, 60, 40, 8, 0.02, 0.01, 0.05, True)
    report = replay.ReplayReport(
        "a <model>", "float32", 16, True, (record,), replay._totals([record], "generated", 1.0), ("a remark",), "tree"
    )
    bundle = report._repr_mimebundle_()
    assert "2.5 times sooner" in words_of(parsed(bundle["image/svg+xml"]))
    assert "a <model>, float32" in words_of(parsed(bundle["image/svg+xml"]))
    assert bundle["text/plain"].startswith("1 turns of 1 conversations") and bundle["text/plain"].endswith("tree")
