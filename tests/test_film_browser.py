"""The page of a film in a real browser: it plays without errors, reacts to mouse and keys, and runs nobody's script.

Skipped where there is no Chromium; RADIXKV_CHROMIUM names one that is not found by itself. The test widget runs the
same script that anywidget would, with a model of a few lines.
"""

import json
import struct
import zlib

import pytest
from chromium import Chromium, find

from radixkv import PrefixCache
from radixkv.film import Film
from radixkv.film.page import packed, read, told

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium: install one, or name it in RADIXKV_CHROMIUM")

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>"
AT = "Number(document.querySelector('input[type=range]').value)"
READY = "document.querySelector('#film[data-ready]') !== null"
# The leftmost boxes begin at the root, so that the first node is wide enough to be hit by a click in its middle.
FIRST_NODE = ".stage g.node > rect"


def a_film(name="a"):
    """Two prompts that share a start, an eviction, and text that wants to be markup."""
    cache = PrefixCache(12, 4)
    film = Film(cache, decode=lambda ids: f"{name} {ids}")
    with film:
        for number, prompt in enumerate((range(20), [*range(12), *range(30, 38)], range(60, 100))):
            film.chapter(f"{name}, turn {number + 1}")
            request_id = f"{name}-{number}"
            cache.allocate(request_id, prompt, namespace=("tenant", name))
            cache.commit(request_id, len(prompt))
            cache.free(request_id)
    return film


@pytest.fixture(scope="module")
def browser():
    """One browser for the tests of this file."""
    with Chromium.open() as opened:
        yield opened


@pytest.fixture
def player(browser, tmp_path):
    """The browser with a film, played by the page; afterwards nothing may have gone wrong."""
    path = tmp_path / "film.html"
    film = a_film()
    film.save(path, title="A film", notes=["a note"])
    browser.problems.clear()
    browser.requests.clear()
    browser.load(path)
    browser.wait_for(READY)
    browser.film = film
    browser.press("Home")
    yield browser
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]


def caption(browser):
    """What is said of the frame that is shown."""
    return browser.evaluate("document.querySelector('.caption').innerText")


def pixels(png):
    """Different bytes among the pixels of a PNG: an empty page has a handful."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    packed_rows, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            packed_rows += png[place + 8 : place + 8 + length]
        place += length + 12
    return len(set(zlib.decompress(packed_rows)))


def test_the_page_opens_on_its_last_frame_or_on_the_one_that_the_address_names(browser, tmp_path):
    """The last shows the most; a link may mean another."""
    film = a_film()
    last = len(film.frames) - 1
    for number, (fragment, at) in enumerate((("#3", 2), ("", last), ("#<script>", last), ("#9999", last))):
        path = tmp_path / f"film{number}.html"  # another fragment alone would not load the page again
        film.save(path)
        browser.load(path, fragment)
        browser.wait_for(READY)
        assert browser.evaluate(AT) == at


def test_the_first_frame_is_an_empty_cache_and_nothing_is_asked_for(player):
    """The policy of the page forbids whatever does not come with it; the fixture checks that nothing was tried."""
    assert player.evaluate("document.title") == "A film"
    assert player.evaluate(AT) == 0
    assert "The cache as it is: empty" in caption(player)
    assert player.evaluate("document.querySelectorAll('.stage > svg').length") == 1
    assert player.evaluate("document.querySelector('.where').textContent") == (
        f"Picture 1 of {len(player.film.frames)}"
    )


def test_the_slider_moves_by_mouse_and_by_key(player):
    """The picture, the caption, the counts and the cursor of the plot go along."""
    last = len(player.film.frames) - 1
    player.click("input[type=range]", at=(0.999, 0.5))
    assert player.evaluate(AT) == last
    player.press("Home")
    player.press("ArrowRight")
    assert player.evaluate(AT) == 1
    assert player.film.frames[1].sentences[0] in caption(player)
    player.press("End")
    assert player.evaluate(AT) == last
    assert player.film.frames[last].sentences[0] in caption(player)
    assert float(player.evaluate("document.querySelector('.cursor').getAttribute('x1')")) == 1000
    assert player.evaluate("document.querySelectorAll('.stage g.node').length") == player.film.cache.tree.num_nodes
    assert "requests 3, 0 running" in player.evaluate("document.querySelector('.numbers').innerText")


def test_every_frame_shows_its_own_picture(player):
    """What the browser puts together is what was drawn."""
    for index, frame in enumerate(player.film.frames):
        assert player.evaluate(AT) == index
        drawn = player.evaluate("document.querySelector('.stage > svg').getAttribute('aria-label')")
        nodes = player.evaluate("[...document.querySelectorAll('.stage g.node')].map(node => node.dataset.node)")
        assert drawn and nodes == [piece.split('"')[0] for piece in frame.svg.split('data-node="')[1:]]
        for sentence in frame.sentences:
            assert sentence in caption(player)
        player.press("ArrowRight")


def test_buttons_the_plot_and_chapters_go_to_frames(player):
    """Each way to a frame leads there."""
    frames = player.film.frames
    player.click("button[aria-label=Forward]")
    player.click("button[aria-label=Forward]")
    assert player.evaluate(AT) == 2
    player.click("button[aria-label=Back]")
    assert player.evaluate(AT) == 1
    player.click("button[aria-label=Last]")
    assert player.evaluate(AT) == len(frames) - 1
    player.click("button[aria-label=First]")
    assert player.evaluate(AT) == 0
    player.click(".course", at=(0.5, 0.5))
    assert player.evaluate(AT) == round((len(frames) - 1) / 2)
    chapters = "document.querySelector('.chapters')"
    player.evaluate(f"({chapters}.value = '2', {chapters}.dispatchEvent(new Event('change')))")
    assert frames[player.evaluate(AT)].chapter == 2 and frames[player.evaluate(AT) - 1].chapter == 1


def test_it_plays_by_itself_until_the_end_and_stops(player):
    """And once more from the beginning, if it is asked to."""
    player.evaluate("document.querySelector('.speed').value = '16'")
    player.click("button.play")
    player.wait_for(f"{AT} === {len(player.film.frames) - 1}")
    player.wait_for("document.querySelector('button.play').textContent.includes('Play')")
    player.press("Home")
    player.press(" ")
    assert "Pause" in player.evaluate("document.querySelector('button.play').textContent")
    player.press(" ")
    assert "Play" in player.evaluate("document.querySelector('button.play').textContent")


def test_a_node_opens_by_mouse_and_by_key_and_is_followed(player):
    """Its panel says what the picture says on hovering, and in which pictures it changes."""
    player.press("End")
    assert player.evaluate("document.querySelector('.panel').hidden")
    player.click(FIRST_NODE)
    assert not player.evaluate("document.querySelector('.panel').hidden")
    serial = player.evaluate("document.querySelector('.stage g.open').dataset.node")
    text = player.evaluate("document.querySelector('.panel').innerText")
    assert f"Node {serial}" in text and "lock_ref" in text
    changed = [index for index, frame in enumerate(player.film.frames) if int(serial) in frame.changed | frame.gone]
    shown = player.evaluate(
        "[...document.querySelectorAll('.panel .steps button')].map(b => Number(b.textContent) - 1)"
    )
    assert shown == changed
    player.click(".panel .steps button")
    assert player.evaluate(AT) == changed[0]
    player.press("Home")
    assert "Not in this picture" in player.evaluate("document.querySelector('.panel').innerText")
    player.press("Escape")
    assert player.evaluate("document.querySelector('.panel').hidden")
    player.press("End")
    player.evaluate("document.querySelector('.stage g.node').focus()")
    player.press("Enter")
    assert not player.evaluate("document.querySelector('.panel').hidden")


def test_the_path_of_a_match_is_marked(player):
    """Before anything is split or locked."""
    index = next(index for index, frame in enumerate(player.film.frames) if frame.matched)
    for _ in range(index):
        player.press("ArrowRight")
    marked = player.evaluate(
        "[...document.querySelectorAll('.stage g.matched')].map(node => Number(node.dataset.node))"
    )
    assert marked and set(marked) == player.film.frames[index].matched
    assert "Black outline: the path that it matches." in caption(player)


def test_what_leaves_next_is_marked(player):
    """An eviction is seen before it happens; afterwards there would be nothing to mark."""
    index = next(index for index, frame in enumerate(player.film.frames) if frame.gone)
    gone = player.film.frames[index].gone
    for _ in range(index - 1):
        player.press("ArrowRight")
    marked = player.evaluate(
        "[...document.querySelectorAll('.stage g.leaving')].map(node => Number(node.dataset.node))"
    )
    assert marked and set(marked) <= gone
    assert "Dashed in magenta: leaves in the next picture." in caption(player)


def test_nobodys_script_runs(browser, tmp_path):
    """Namespaces, ids, token text, titles, notes and file names with scripts in them do nothing, in any frame."""
    folder = tmp_path / "<script>alert(4)"
    folder.mkdir()
    path = folder / "<img src=x onerror=alert(5)>.html"
    film = a_film(NASTY)
    film.save(path, title=NASTY, subtitle=NASTY, notes=[NASTY])
    browser.problems.clear()
    browser.requests.clear()
    browser.load(path)
    browser.wait_for(READY)
    browser.press("Home")
    for _ in film.frames:
        browser.press("ArrowRight")
    browser.click(FIRST_NODE)
    assert "alert(1)" in browser.evaluate("document.querySelector('.panel').innerText")
    assert browser.evaluate("document.title") == NASTY
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.problems == [] and browser.requests == [path.as_uri()]


def test_a_script_that_slipped_in_would_not_run(browser, tmp_path):
    """The second wall: the page's policy knows its own script by digest and refuses every other."""
    path = tmp_path / "film.html"
    html = a_film().to_html()
    slipped = "<script>window.slipped = 1</script><img src='data:,' onerror='window.slipped = 2'>"
    path.write_text(html.replace("</header>", f"</header>{slipped}"), encoding="utf-8")
    browser.load(path)
    browser.wait_for(READY)
    assert browser.evaluate("window.slipped === undefined")
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_a_page_whose_film_is_damaged_keeps_its_last_picture_and_says_so(browser, tmp_path):
    """A mail program cut it short, or a browser is too old."""
    path = tmp_path / "film.html"
    film = a_film()
    path.write_text(film.to_html().replace(packed(film), packed(film)[:100]), encoding="utf-8")
    browser.load(path)
    browser.wait_for("document.querySelector('.failed') !== null")
    assert "cannot be played" in browser.evaluate("document.querySelector('.failed').textContent")
    assert browser.evaluate("document.querySelectorAll('.stage > svg g.node').length") > 0


@pytest.mark.parametrize("dark", [False, True])
def test_there_is_something_to_be_seen_in_either_theme(tmp_path, dark):
    """The screenshot that a person looks at is not empty, and dark where that is asked for; nothing hangs out of it."""
    path = tmp_path / "film.html"
    a_film().save(path)
    with Chromium.open(width=420, height=800, dark=dark) as narrow:
        narrow.load(path)
        narrow.wait_for(READY)
        narrow.press("End")
        assert pixels(narrow.screenshot(tmp_path / "film.png")) > 50
        light = narrow.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (light == "rgb(255, 255, 255)") != dark
        assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert narrow.problems == []


def test_the_widget_plays_and_grows(browser, tmp_path):
    """In a notebook the same script gets its film from a model, and further frames as messages."""
    film = a_film()
    more = {"frame": {**told(film.frames[1]), "picture": film.frames[1].svg}, "chapters": [*film.chapters, "later"]}
    path = tmp_path / "widget.html"
    path.write_text(
        f"""<!doctype html><style>{read("view.css")}</style><div id="cell"></div><script type="module">
        {read("view.js")}
        const heard = {{}};
        const state = {{ film: {json.dumps(packed(film))}, is_live: true }};
        const model = {{ get: (name) => state[name], on: (name, call) => {{ heard[name] = call; }},
          off: (name) => {{ delete heard[name]; }} }};
        const stop = render({{ model, el: document.getElementById("cell") }});
        Object.assign(window, {{ heard, stop }});
        </script>""",
        encoding="utf-8",
    )
    browser.problems.clear()
    browser.load(path)
    last = len(film.frames) - 1
    browser.wait_for(f"document.querySelector('input') !== null && {AT} === {last}")
    browser.evaluate(f"heard['msg:custom']({json.dumps(more)})")
    assert browser.evaluate(AT) == last + 1
    assert film.frames[1].sentences[0] in caption(browser)
    browser.press("Tab")
    browser.evaluate("document.querySelector('input').focus()")
    browser.press("Home")
    browser.evaluate(f"heard['msg:custom']({json.dumps(more)})")
    assert browser.evaluate(AT) == 0  # who looks at another frame stays there
    assert browser.evaluate("document.querySelector('.where').textContent") == f"Picture 1 of {last + 3}"
    browser.evaluate("stop()")
    assert browser.evaluate("Object.keys(heard).length") == 0
    assert browser.problems == []
