"""SVG as text: escaping, elements, labels that fit, colours.

Why a light card of its own under each picture: Jupyter, VS Code and reports have themes of their own, which
`prefers-color-scheme` does not follow, and where a front end shows an SVG as an image, as JupyterLab does with
`image/svg+xml`, `currentColor` is black whatever the page. On its own card a picture reads the same everywhere, and a
colour means the same in each of them.

Why attributes and neither `<style>` nor ids: a style inside an inline SVG applies to the whole page, an id is the
page's too, and sanitizers drop both.

Whatever a user may have supplied (names, token text, titles) passes `escape`, and nothing is drawn by a script.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape as escape_markup
from typing import Any

from ..tokens import TOKEN_BYTES, unpack
from .subjects import Decode

SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# Monospaced fonts advance by 0.60 em, sans-serif ones by 0.55 em on average and 0.62 in capitals and digits.
EM_PER_COLUMN = 0.62
MARGIN = 14  # pixels between the card's edge and what is drawn

CARD, BORDER, INK, QUIET, LINE = "#ffffff", "#c9d1d9", "#1b2733", "#57626e", "#8a949e"
# Blue against orange stays apart for all common kinds of colour blindness, and by lightness alone in print. Orange is
# what running requests hold: dark what they share through the tree, light what is private. Blue is what only waits to
# be found again: the darker, the fresher.
PROTECTED = "#c4500c"
PRIVATE = ("#fbbf77", "#fdd9ab")  # by turns, so that neighbours of two requests are told apart
COPIED = "#7b4fa3"
FREE = "#f7f8f9"
FOLD = "#f4f6f8"
EVICTABLE = ("#2b6ca8", "#5e97cb", "#8cb6dd", "#b3d0ea", "#d3e3f3")
CHANGED = "#c2187a"
PATH = "#10161d"
_WHITE_TEXT_ON = {PROTECTED, EVICTABLE[0], COPIED}

# All that XML 1.0 cannot hold, escaped or not, and the marks that turn the direction of the text around them.
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069\x7f-\x9f]")
_SPACES = re.compile(r"\s+")


def clean(text: str) -> str:
    """The text with U+FFFD for each character that XML or a terminal cannot show: controls, lone surrogates."""
    return _NO_TEXT.sub("\ufffd", text)


def escape(text: str, quote: bool = True) -> str:
    """The text as it may stand in an attribute of XML and HTML; without `quote`, between tags only, and shorter."""
    return escape_markup(clean(text), quote)


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, content: str = "", **attributes: Any) -> str:
    """An element around `content`, which is markup already. `_` in an attribute's name is `-`; None leaves it out."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, (int, float)) else escape(value)
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    opened = " ".join(parts)
    return f"<{opened}>{content}</{name}>" if content else f"<{opened}/>"


def rect(x: float, y: float, width: float, height: float, fill: str, **attributes: Any) -> str:
    """A rectangle; no size is negative."""
    return element("rect", x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), fill=fill, **attributes)


def text(x: float, y: float, shown: str, size: float = 12, fill: str = INK, **attributes: Any) -> str:
    """A line of text whose baseline is at `y`."""
    return (
        element("text", escape(shown, quote=False), x=x, y=y, font_size=size, fill=fill, **attributes) if shown else ""
    )


def hover(shown: str) -> str:
    """What a browser shows while the pointer rests on the element that this stands in."""
    return element("title", escape(shown, quote=False))


def clipped(x: float, y: float, width: float, height: float, content: str) -> str:
    """The content, in coordinates of its own, cut at the box: a nested SVG clips by itself and needs no id."""
    return element("svg", content, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0))


def picture(width: float, height: float, label: str, parts: list[str]) -> str:
    """The whole SVG: a card with the parts on it. label: what a screen reader says."""
    card = rect(0.5, 0.5, width - 1, height - 1, CARD, stroke=BORDER, rx=6)
    return element(
        "svg",
        card + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        class_="radixkv",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        style="max-width:100%;height:auto",
        font_family=SANS,
        role="img",
        aria_label=shorten(label, 300),
    )


def mime_bundle(svg: str, plain: str) -> dict[str, str]:
    """What `_repr_mimebundle_` gives back.

    HTML comes first in JupyterLab, VS Code and nbconvert, and there the SVG stands in the page, so that hovering works.
    `image/svg+xml` is for viewers that strip SVG out of HTML. Terminals show the text.
    """
    return {"text/plain": clean(plain), "text/html": f"<div>{svg}</div>", "image/svg+xml": svg}


# Text ------------------------------------------------------------------------------------------------------------


def count(number_of: int, noun: str) -> str:
    """The number with its noun, as in `1 node`, `1,234 nodes`."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def percent(rate: float | None) -> str:
    """A rate as a percentage, `–` where there is none."""
    return "–" if rate is None else f"{rate:.0%}"


def shorten(shown: str, most: int) -> str:
    """The text in at most `most` characters."""
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def columns(shown: str) -> int:
    """Columns that the text takes in a monospaced font: ideographs and emoji take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in shown)


def fit(shown: str, width: float, size: float = 11) -> str:
    """The start of the text that fits into `width` pixels, in one line; nothing if not even three columns do."""
    lines = wrap(shown, width, 1, size)
    return lines[0] if lines else ""


def wrap(shown: str, width: float, most_lines: int, size: float = 11) -> list[str]:
    """The text in lines of at most `width` pixels, with an ellipsis where it does not end."""
    room = int(width / (size * EM_PER_COLUMN))
    if room < 3 or most_lines < 1:
        return []
    rest = _SPACES.sub(" ", shown[: 2 * room * most_lines].replace("\n", "⏎").replace("\t", "⇥")).strip()
    rest += "…" * (len(shown) > 2 * room * most_lines)
    lines: list[str] = []
    while rest and len(lines) < most_lines:
        stop = min(room, len(rest))
        while columns(rest[:stop]) > room:
            stop -= 1
        is_last = len(lines) == most_lines - 1
        if stop < len(rest) and not is_last:  # between words where one ends near
            space = rest.rfind(" ", stop - min(12, room // 2), stop + 1)
            stop = stop if space < 0 else space
        line, rest = rest[:stop], rest[stop:].lstrip()
        if rest and is_last:
            while columns(line) > room - 1:
                line = line[:-1]
            line += "…"
        lines.append(line)
    return lines


def ink_on(fill: str) -> str:
    """The colour of text on that colour."""
    return "#ffffff" if fill in _WHITE_TEXT_ON else INK


def name_of(namespace: tuple[str, ...]) -> str:
    """A namespace as a label."""
    return "/".join(shorten(part, 400) for part in namespace[:20]) or "(default)"


def quoted(request_id: str | int) -> str:
    """A request id as a label."""
    return shorten(str(request_id), 60)


def token_text(packed: bytes | bytearray, decode: Decode | None, most: int = 64) -> str:
    """The first `most` of the packed tokens as text: decoded, or as ids.

    A tokenizer that fails costs its text and not the picture: ids then.
    """
    ids = unpack(packed[: most * TOKEN_BYTES])
    more = " …" if len(packed) > most * TOKEN_BYTES else ""
    if decode is not None:
        try:
            decoded = decode(ids)
        except Exception:
            decoded = None
        if isinstance(decoded, str):
            return shorten(decoded, 16 * most) + more
    return " ".join(map(str, ids)) + more


def safe(decode: Decode | None) -> Decode | None:
    """A decoder that never raises: what it cannot decode it shows as ids."""
    if decode is None:
        return None
    return lambda ids: _decoded(decode, ids)


def _decoded(decode: Decode, ids: list[int]) -> str:
    try:
        return str(decode(ids))
    except Exception:
        return " ".join(map(str, ids))


def blocks_text(blocks: Any, most: int = 6) -> str:
    """Block ids as ranges, as in `0-15,40`, after `most` ranges an ellipsis. O(len(blocks))."""
    ranges: list[list[int]] = []
    for block_id in blocks:
        if ranges and block_id == ranges[-1][1] + 1:
            ranges[-1][1] = block_id
        elif len(ranges) == most:
            break
        else:
            ranges.append([block_id, block_id])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    covered = sum(last - first + 1 for first, last in ranges)
    return ",".join(shown) + (",…" if covered < len(blocks) else "")


# What several pictures share -------------------------------------------------------------------------------------


def legend(x: float, y: float, width: float, entries: list[tuple[str, str]]) -> tuple[str, float]:
    """Swatches with their words, in lines; and the height they take. entries: markup of a 12-pixel swatch, words."""
    parts = []
    left, top = x, y
    for swatch, words in entries:
        needed = 18 + len(words) * 12 * 0.54 + 14
        if left > x and left + needed > x + width:
            left, top = x, top + 19
        parts.append(element("g", swatch, transform=f"translate({number(left)} {number(top)})"))
        parts.append(text(left + 17, top + 10.5, words, fill=QUIET))
        left += needed
    return "".join(parts), top - y + 19


def swatch(fill: str, **attributes: Any) -> str:
    """A square of the legend."""
    return rect(0.5, 0.5, 11, 11, fill, **{"stroke": LINE, "stroke_width": 0.5, **attributes})
