"""Films of a cache: what is told at each step, thinning, recordings, the widget, and a page that no text can break."""

import base64
import gzip
import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import OutOfBlocks, PrefixCache
from radixkv.baselines import FlatHashCache
from radixkv.film import Film, Recording, page
from radixkv.film.calls import CHANGES
from radixkv.film.captions import KINDS
from radixkv.film.changes import Changes, Shape
from radixkv.widget import NOT_INSTALLED, CacheView

NASTY = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]></title></svg><script>alert(1)</script>",
    "\" onload='alert(1)'",
    "\u2028\u2029\x00\ud800{{FILM}}&#60;b&gt;",
    "javascript:alert(1)",
)


def a_life(cache):
    """A bit of everything that a cache of 12 blocks of 4 tokens can do."""
    cache.allocate("a", range(10))
    cache.commit("a", 10)
    for place in range(9):
        cache.append_token("a", 100 + place)
        cache.commit("a", 11 + place)
    cache.allocate("b", [*range(6), 50, 51, 52])
    cache.commit("b", 9)
    cache.fork("b", "c")
    cache.append_token("b", 7)
    cache.append_token("c", 8)
    cache.free("a")
    cache.free("b")
    cache.free("c")
    cache.allocate("d", range(500, 530))
    cache.commit("d", 30)
    cache.free("d")
    cache.evict(2)
    cache.reset()


def data_of(html):
    """What the page carries, unpacked as the browser does it."""
    return json.loads(gzip.decompress(base64.b64decode(re.search(r'id="film-data">([^<]*)<', html)[1])))


class Elements(HTMLParser):
    """The elements of a page, and the attributes that run something or ask for something."""

    def __init__(self, html):
        super().__init__()
        self.names, self.attributes = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]


# ---------------------------------------------------------------- what is told


def test_each_step_of_a_life_is_told():
    """What a reader of the page sees, in the order in which it happened."""
    cache = PrefixCache(12, 4)
    with Film(cache) as film:
        a_life(cache)
    told = [(frame.kinds, " ".join(frame.sentences)) for frame in film.frames]
    expected = [
        (("start",), "empty. Its pool has 12 blocks of 4 tokens"),
        (("allocate",), "Request a gets 3 blocks, all new; 10 prompt tokens to compute"),
        (("commit",), "Request a has computed 10 tokens: 2 blocks can be found"),
        (("commit",), "Request a has computed 12 tokens, 2 of them new: 1 block can be found"),
        (("append",), "Request a appends a token, and takes a new block"),
        (("commit",), "Request a has computed 16 tokens, 3 of them new"),
        (("append",), "Request a appends a token, and takes a new block"),
        (("match",), "Request b matches 6 of its 9 tokens: 1 block to share and 2 tokens to copy out of block 1"),
        (("split", "allocate"), "Request b gets 3 blocks, 1 shared and 2 new; 3 prompt tokens to compute"),
        (("commit",), "Request b has computed 9 tokens: 1 block"),
        (("fork",), "Request c goes on from request b and shares all its blocks"),
        (("append", "copy"), "Request b gets its own copy of a block"),
        (("free",), "Request a ends: what it committed stays cached, its partly filled last block too"),
        (("free",), "Request b ends"),
        (("free",), "Request c ends: what it committed stays cached, 1 block free at once"),
        (("evict", "allocate"), "3 blocks evicted, what the policy values least: 1 node gone, 1 node trimmed"),
        (("commit",), "Request d has computed 30 tokens: 7 blocks"),
        (("free",), "Request d ends"),
        (("evict",), "2 blocks evicted, what the policy values least: 2 nodes gone"),
        (("reset",), "The cache is emptied: 10 blocks free again"),
    ]
    assert [kinds for kinds, _ in told] == [kinds for kinds, _ in expected]
    for (_, sentences), (_, start) in zip(told, expected, strict=True):
        assert start in sentences
    assert {kind for kinds, _ in told for kind in kinds} <= set(KINDS)


def test_duplicates_merges_writes_and_namespaces_are_told():
    """What the first life above has none of."""
    cache = PrefixCache(16, 2)
    with Film(cache) as film:
        cache.allocate("a", [1, 2, 3, 4, 5, 6, 7])
        cache.allocate("b", [1, 2, 3, 4, 9])
        cache.commit("a", 7)
        cache.commit("b", 5)
        cache.write("b", 0)
        cache.free("b")
        cache.free("a")
        cache.allocate("c", [1], namespace=("x", "<y>"))
        cache.commit("c", 1)
        cache.free("c")
        assert cache.drop_namespace(("x", "<y>"))
    told = [(frame.kinds, " ".join(frame.sentences)) for frame in film.frames]
    assert ("2 blocks given back, since the tree has their tokens") in told[4][1] and "split" in told[4][0]
    assert told[5][0] == ("copy",)
    assert told[-1] == (("reset",), "Namespace x/<y> is dropped: 1 block free again.")


def test_a_split_whose_reason_is_gone_is_told_as_undone():
    """The tree grows together again, which would look like an eviction."""
    cache = PrefixCache(16, 2)
    cache.allocate("a", range(8))
    cache.commit("a", 8)
    cache.free("a", tick=5)
    with Film(cache) as film:
        cache.allocate("b", [0, 1, 2, 3, 100], tick=5)  # at the same tick, so that the policy sees no difference
        cache.free("b", tick=5)
    assert [frame.kinds for frame in film.frames] == [("start",), ("match",), ("split", "allocate"), ("free", "merge")]
    assert cache.tree.num_nodes == 1
    assert not film.frames[-1].gone


def test_a_match_marks_its_path_in_the_tree_as_it_was():
    """The split that locking will make is not there yet, and nothing has changed."""
    cache = PrefixCache(16, 2)
    cache.allocate("a", range(8))
    cache.commit("a", 8)
    (only,) = [node.serial for node in cache.tree.nodes() if node.parent is not None]
    with Film(cache) as film:
        cache.allocate("b", [0, 1, 2, 3, 100])
    before, match, after = film.frames
    assert match.matched == {only} and not match.changed and not before.matched and not after.matched
    assert match.svg == before.svg and match.meters == before.meters
    assert only in after.changed and len(after.changed) == 2


def test_an_argument_that_is_named_out_of_order_is_understood():
    """Callers may write the number before the request."""
    cache = PrefixCache(8, 4)
    with Film(cache) as film:
        cache.allocate(token_ids=[1, 2, 3, 4, 5], request_id="r")
        cache.commit(num_computed_tokens=5, request_id="r")
    assert film.frames[-1].sentences == ("Request r has computed 5 tokens: 1 block can be found from now on.",)


def test_a_number_of_blocks_is_not_taken_for_a_request():
    """`evict(2)` while request 2 runs must not mark that request's path."""
    cache = PrefixCache(8, 2)
    with Film(cache) as film:
        cache.allocate(2, [1, 2, 3])
        cache.allocate(3, [7, 8, 9, 10, 11])
        cache.commit(3, 5)
        cache.free(3)
        cache.evict(2)
    assert film.frames[-1].kinds == ("evict",)
    assert "path of request" not in film.frames[-1].svg


def test_a_prompt_of_an_iterator_is_read_once():
    """The film looks at the prompt before the cache does."""
    cache = PrefixCache(8, 4)
    with Film(cache):
        assert cache.allocate("a", iter([1, 2, 3, 4, 5])).num_new_blocks == 2
        assert cache.num_tokens("a") == 5


def test_a_hit_too_small_to_be_copied_is_no_match():
    """What is told must be what `allocate` does."""
    cache = PrefixCache(8, 4, min_copy_tokens=3)
    cache.allocate("a", range(4))
    cache.commit("a", 4)
    cache.free("a")
    with Film(cache) as film:
        assert cache.allocate("b", [0, 1, 9, 9, 9]).num_cached_tokens == 0
    assert [frame.kinds for frame in film.frames] == [("start",), ("allocate",)]


# ---------------------------------------------------------------- the cache under the film


def test_a_filmed_cache_does_what_an_unfilmed_one_does_and_is_left_alone_after():
    """Filming must not change what is filmed, nor cost anything once it is over."""
    plain, filmed = PrefixCache(12, 4), PrefixCache(12, 4)
    a_life(plain)
    with Film(filmed) as film:
        assert "allocate" in vars(filmed)
        a_life(filmed)
        filmed.check()
    assert plain.stats == filmed.stats
    assert plain.show() == filmed.show()
    assert set(vars(filmed)) == set(vars(plain))
    num_frames = len(film.frames)
    filmed.allocate("later", [1])
    assert len(film.frames) == num_frames


def test_a_call_that_fails_changes_nothing_and_is_not_filmed():
    """Schedulers try again at every step until there is room."""
    cache = PrefixCache(4, 4)
    with Film(cache) as film:
        cache.allocate("a", range(9))
        cache.commit("a", 9)
        for _ in range(3):
            with pytest.raises(OutOfBlocks):
                cache.allocate("b", [*range(8), *range(70, 90)])
        with pytest.raises(ValueError, match="running already"):
            cache.allocate("a", [1])
    assert len(film.frames) == 3


def test_a_cache_is_filmed_by_one_at_a_time_and_only_if_it_has_a_tree():
    """Two films that end in another order than they began would leave the cache in a bad way."""
    cache = PrefixCache(4, 4)
    with Film(cache):
        with pytest.raises(ValueError, match="one at a time"):
            Film(cache).start()
        with pytest.raises(ValueError, match="one at a time"):
            Recording(cache).start()
    Film(cache).start()
    with pytest.raises(TypeError, match="only a PrefixCache"):
        Film(FlatHashCache(4, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only a PrefixCache"):
        Recording(FlatHashCache(4, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_frames is 2"):
        Film(cache, max_frames=2)


def test_every_method_of_a_cache_is_covered_or_known_to_change_nothing():
    """A method that somebody adds must not change the cache behind the camera's back."""
    reads = {
        *("block_table", "can_allocate", "check", "explain_miss", "lookup_prefix", "namespace_stats", "num_tokens"),
        *("ref_count", "show", "subscribe", "table"),
    }
    methods = {name for name, value in vars(PrefixCache).items() if callable(value) and not name.startswith("_")}
    assert methods == {*CHANGES, *reads}


def test_an_error_in_the_block_ends_the_film():
    """A notebook cell that fails must not leave the cache covered."""
    cache = PrefixCache(4, 4)
    with pytest.raises(RuntimeError, match="stop"), Film(cache):
        raise RuntimeError("stop")
    assert "allocate" not in vars(cache)


# ---------------------------------------------------------------- changes between two shapes


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=12))
def test_changes_explain_the_way_from_one_shape_to_the_next(steps):
    """Whatever a cache does, a node that appears or disappears falls under exactly one heading."""
    cache = PrefixCache(10, 2)
    running = []
    before = Shape.of(cache.tree)
    for number, (kind, tokens) in enumerate(steps):
        try:
            if kind == 0 and running:
                cache.free(running.pop())
            elif kind == 1:
                cache.evict(1)
            else:
                cache.allocate(number, tokens)
                running.append(number)
                cache.commit(number, len(tokens))
        except OutOfBlocks:
            pass
        after = Shape.of(cache.tree)
        changes = Changes.between(before, after)
        assert changes.split | changes.added == after.places.keys() - before.places.keys()
        assert changes.merged | changes.gone == before.places.keys() - after.places.keys()
        assert not changes.split & changes.added and not changes.merged & changes.gone
        assert changes.changed <= after.places.keys()
        same = after.places.keys() - changes.changed
        assert all(before.places[serial] == after.places[serial] for serial in same)
        before = after


# ---------------------------------------------------------------- thinning


@pytest.mark.parametrize("num_requests", [1, 2, 7, 20, 50])
def test_a_long_film_is_thinned_evenly_and_says_so(num_requests):
    """However long the play: at most `max_frames` pictures, the first and the last kept, and no step lost."""
    cache = PrefixCache(64, 2)
    full = PrefixCache(64, 2)
    with Film(cache, max_frames=9) as film, Film(full) as whole:
        for request_id in range(num_requests):
            for each in (cache, full):
                each.allocate(request_id, [request_id % 5, 1, 2])
                each.commit(request_id, 3)
                each.free(request_id)
    frames = film.frames
    assert 2 <= len(frames) <= 9
    assert sum(frame.num_steps for frame in frames) == sum(frame.num_steps for frame in whole.frames)
    assert frames[0].kinds == ("start",)
    assert frames[-1].svg == whole.frames[-1].svg or frames[-1].num_steps > 1
    assert frames[-1].meters == whole.frames[-1].meters
    assert all(frame.num_steps <= film.steps_per_frame for frame in frames)
    assert ("thinned evenly" in film.to_html()) == (film.steps_per_frame > 1)


def test_a_thinned_film_keeps_what_changed_and_what_left():
    """The page marks nodes by these."""
    cache = PrefixCache(64, 2)
    with Film(cache, max_frames=3) as film:
        for request_id in range(6):
            cache.allocate(request_id, [request_id, 1, 2])
            cache.commit(request_id, 3)
            cache.free(request_id)
        serials = {node.serial for node in cache.tree.nodes() if node.parent is not None}
        cache.evict(64)
    assert serials <= frozenset().union(*(frame.changed for frame in film.frames))
    assert serials <= frozenset().union(*(frame.gone for frame in film.frames))


def test_a_running_film_shows_the_cache_as_it_is():
    """Steps that are not due yet are drawn when somebody looks."""
    cache = PrefixCache(64, 2)
    film = Film(cache, max_frames=3)
    film.start()
    for request_id in range(11):
        cache.allocate(request_id, [request_id, 1, 2])
        assert re.search(rf"\b{request_id + 1} requests? so far", film.frames[-1].svg)
    film.stop()


def test_listeners_hear_of_each_frame_and_of_thinning():
    """A widget follows by this."""
    cache = PrefixCache(64, 2)
    heard = []
    film = Film(cache, max_frames=4)
    unsubscribe = film.subscribe(heard.append)
    film.start()
    for request_id in range(4):
        cache.allocate(request_id, [request_id, 1, 2])
    unsubscribe()
    unsubscribe()
    cache.allocate(9, [9, 1, 2])
    film.stop()
    assert [frame and frame.kinds for frame in heard] == [("start",), *[("allocate",)] * 3, None]


# ---------------------------------------------------------------- recordings


def test_a_recording_gives_the_film_that_a_camera_would_have_given():
    """It stands in where times are measured, so it must show the same."""
    filmed, recorded = PrefixCache(12, 4), PrefixCache(12, 4)
    with Film(filmed) as film:
        film.chapter("one")
        a_life(filmed)
    with Recording(recorded) as recording:
        recording.chapter("one")
        a_life(recorded)
    assert set(vars(recorded)) == set(vars(filmed))
    again = recording.film()
    assert again.chapters == ["one"]
    assert [frame.sentences for frame in again.frames] == [frame.sentences for frame in film.frames]
    assert [frame.svg for frame in again.frames] == [frame.svg for frame in film.frames]
    assert recording.film(max_frames=3).steps_per_frame > 1


def test_text_is_shown_as_the_cache_decodes_it_unless_a_film_has_its_own_way():
    """An engine's cache knows its tokenizer."""
    cache = PrefixCache(12, 4)
    cache.decode = lambda ids: "of the cache"
    with Recording(cache) as recording:
        cache.allocate("a", range(10))
        cache.commit("a", 10)
    assert "of the cache" in recording.film().frames[-1].svg
    assert "of the film" in recording.film(decode=lambda ids: "of the film").frames[-1].svg
    with Film(cache) as film:
        pass
    assert "of the cache" in film.frames[-1].svg


def test_a_recording_keeps_prompts_as_they_were_and_the_policy_too():
    """Lists change later; a policy that ages has aged by the time the film is made."""
    cache = PrefixCache(6, 2, "cost", min_copy_tokens=2, keep_partial=False)
    prompt = [0, 1, 2]
    with Recording(cache) as recording:
        for number in range(8):
            cache.allocate(number, prompt)
            cache.commit(number, 3)
            cache.free(number)
            prompt[0] = number + 1
    film = recording.film()
    assert film.frames[-1].meters == recording.film().frames[-1].meters
    assert film.cache.show() == cache.show()


def test_a_recording_starts_with_an_empty_cache():
    """What the cache holds came by calls that nobody noted."""
    cache = PrefixCache(6, 2)
    cache.allocate("a", [1, 2])
    with pytest.raises(ValueError, match="starts with an empty cache"):
        Recording(cache).start()
    assert "allocate" not in vars(cache)


# ---------------------------------------------------------------- the page


def test_the_page_carries_every_frame_and_its_picture():
    """What the browser puts together is what was drawn."""
    cache = PrefixCache(12, 4)
    with Film(cache) as film:
        film.chapter("chapter one")
        a_life(cache)
    html = film.to_html("A title", subtitle="a subtitle", notes=["a note"], plots=["<svg></svg>"])
    data = data_of(html)
    pictures = ["".join(data["pieces"][index] for index in frame["picture"]) for frame in data["frames"]]
    assert pictures == [frame.svg for frame in film.frames]
    assert [frame["kinds"] for frame in data["frames"]] == [list(frame.kinds) for frame in film.frames]
    assert data["chapters"] == ["chapter one"] and data["frames"][-1]["chapter"] == 0
    for text in ("<title>A title</title>", "a subtitle", "<p>a note</p>", '<figure class="plot"><svg></svg>'):
        assert text in html
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_the_page_asks_for_nothing_outside_itself():
    """It is mailed around and opened from disks."""
    cache = PrefixCache(12, 4)
    with Film(cache) as film:
        a_life(cache)
    html = film.to_html()
    assert set(re.findall(r"https?://[^\"'\s]*", html)) == {"http://www.w3.org/2000/svg"}
    elements = Elements(html)
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} - {"link"} & set(elements.names)
    asked = [value for _, name, value in elements.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert asked == ["data:,"]
    assert "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html and "'unsafe-eval'" not in html


def test_the_script_puts_no_text_in_as_markup():
    """Text of users goes into the page as text, in the player too."""
    script = page.__globals__["read"]("view.js")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in script


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_becomes_markup(nasty):
    """A namespace, an id, a token's text, a title or a file name with a script in it does nothing."""

    def html_of(text):
        cache = PrefixCache(12, 4)
        with Film(cache, decode=lambda ids: text) as film:
            film.chapter(text)
            cache.allocate(text, range(9), namespace=("tenant", text))
            cache.commit(text, 9)
        return film.to_html(text, subtitle=text, notes=[text])

    nasty_page, plain_page = Elements(html_of(nasty)), Elements(html_of("plain"))
    # The picture may break a text into other lines, so some texts have more `text` elements than others.
    drawn = {"text", "svg", "g", "rect", "title"}
    assert [name for name in nasty_page.names if name not in drawn] == [
        name for name in plain_page.names if name not in drawn
    ]
    assert nasty_page.names.count("script") == 2
    assert not [name for _, name, _ in nasty_page.attributes if name.startswith("on")]


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_gives_a_page_of_the_same_elements(one, two):
    """The same, for what nobody thought of."""
    cache = PrefixCache(8, 4)
    with Film(cache, decode=lambda ids: one + two) as film:
        cache.allocate("r" + two, range(5), namespace=("n", one))
        cache.commit("r" + two, 5)
    html = film.to_html(one, subtitle=two, notes=[one])
    html.encode("utf-8")
    assert Elements(html).names.count("script") == 2
    for frame in film.frames:
        ElementTree.fromstring(frame.svg)


def test_a_film_can_be_saved(tmp_path):
    """The one call that most people make."""
    cache = PrefixCache(8, 4)
    with Film(cache) as film:
        cache.allocate("a", [1, 2, 3])
    size = film.save(tmp_path / "film.html", title="Lone \ud800 half")
    assert (tmp_path / "film.html").stat().st_size == size
    assert b"Lone" in (tmp_path / "film.html").read_bytes()


def test_a_film_of_an_empty_cache_has_a_page():
    """Nothing happened, and that can be shown."""
    film = Film(PrefixCache(8, 4))
    assert data_of(film.to_html())["frames"] == []
    with film:
        pass
    assert len(data_of(film.to_html())["frames"]) == 1


def test_the_page_of_a_long_play_stays_small():
    """Pictures are much alike, so a page of hundreds of them can be mailed."""
    cache = PrefixCache(400, 4)
    with Film(cache) as film:
        for request_id in range(50):
            cache.allocate(request_id, [request_id % 7, *range(20), request_id, *range(20)])
            cache.commit(request_id, 42)
            cache.free(request_id)
    assert len(film.frames) > 150
    assert len(film.to_html()) < sum(len(frame.svg) for frame in film.frames) / 6


# ---------------------------------------------------------------- the widget


def unpacked(film):
    """A packed film."""
    return json.loads(gzip.decompress(base64.b64decode(film)))


def test_a_view_follows_a_cache_until_it_is_closed():
    """Show it once, and watch while cells below it run."""
    pytest.importorskip("anywidget", reason="the widget needs the extra `notebooks`")
    cache = PrefixCache(12, 4)
    sent = []
    with CacheView(cache) as view:
        view.widget.send = sent.append
        cache.allocate("a", range(10))
        cache.commit("a", 10)
        data, _ = view._repr_mimebundle_()
        assert "application/vnd.jupyter.widget-view+json" in data and "radix tree" in data["text/plain"]
        assert len(unpacked(view.widget.film)["frames"]) == 3 and view.widget.is_live
    cache.free("a")
    assert [message["frame"]["kinds"] for message in sent] == [("allocate",), ("commit",)]
    assert sent[-1]["frame"]["picture"].startswith("<svg")
    assert len(unpacked(view.widget.film)["frames"]) == 3 and not view.widget.is_live
    assert "allocate" not in vars(cache)


def test_a_view_of_a_film_sends_all_again_after_a_thinning():
    """Frames that a browser holds no longer match then."""
    pytest.importorskip("anywidget", reason="the widget needs the extra `notebooks`")
    cache = PrefixCache(64, 2)
    with Film(cache, max_frames=4) as film:
        view = CacheView(film)
        for request_id in range(4):
            cache.allocate(request_id, [request_id, 1, 2])
        assert len(unpacked(view.widget.film)["frames"]) == len(film.frames) == 3
    view.close()


def test_without_anywidget_a_view_is_a_picture_that_says_what_to_install(monkeypatch):
    """A notebook that is only read, or a machine without the extra."""
    monkeypatch.setitem(sys.modules, "anywidget", None)
    cache = PrefixCache(12, 4)
    with CacheView(cache, decode=lambda ids: "<b>") as view:
        cache.allocate("a", range(10))
        cache.commit("a", 10)
        data = view._repr_mimebundle_()
    assert view.widget is None
    assert "<svg" in data["text/html"] and "<b>" not in data["text/html"]
    assert NOT_INSTALLED in data["text/plain"] and "radixkv[notebooks]" in data["text/html"]
    ElementTree.fromstring(data["image/svg+xml"])
    assert len(view.film.frames) == 3


def test_a_view_of_something_else_is_refused():
    """An `LLM` has a cache, but is none."""
    with pytest.raises(TypeError, match="shows a PrefixCache or a Film"):
        CacheView(object())  # type: ignore[arg-type]
