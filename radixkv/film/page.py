"""The page that plays a film: one file, which asks for nothing outside itself and runs no script but its own.

What comes from users (texts, namespaces, file names) reaches the page in three ways: inside the packed data, which is
base64; inside pictures, which `radixkv.render` has escaped; and in the head and the notes, escaped here. The page's
policy names the one script that may run by its digest, so even markup that slipped through would do nothing.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..render.svg import escape

if TYPE_CHECKING:
    from .film import Film, Frame

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_NODE = '<g class="node'
_OPEN = "\nopenPage();\n"


def page(film: Film, title: str, *, subtitle: str = "", plots: Iterable[str] = (), notes: Iterable[str] = ()) -> str:
    """A whole HTML document that plays `film`.

    title, subtitle   plain text
    plots             SVGs that `radixkv.render` drew, shown below the film
    notes             sentences of plain text, shown at the end; that a film was thinned is said by itself
    O(frames * nodes in a picture).
    """
    script = read("view.js") + _OPEN
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    notes = [*notes, *thinning(film)]
    frames = film.frames
    return _filled(
        read("page.html"),
        TITLE=escape(title),
        SUBTITLE=escape(subtitle),
        DIGEST=digest,
        STYLE=read("view.css"),
        SCRIPT=script,
        FILM=packed(film),
        LAST=frames[-1].svg if frames else "",
        PLOTS="".join(f'<figure class="plot">{plot}</figure>' for plot in plots),
        NOTES="".join(f"<p>{escape(note)}</p>" for note in notes),
    )


def thinning(film: Film) -> list[str]:
    """What to say of a film that was thinned: a sentence, or none."""
    if film.steps_per_frame == 1:
        return []
    num_steps = sum(frame.num_steps for frame in film.frames)
    return [
        f"This film is thinned evenly: {num_steps:,} steps in {len(film.frames):,} pictures, one for every "
        f"{film.steps_per_frame} steps. What is marked in a picture changed since the picture before."
    ]


def packed(film: Film) -> str:
    """The film as gzipped JSON in base64. Pieces that pictures have in common are kept once."""
    pieces: dict[str, int] = {}
    frames = []
    for frame in film.frames:
        # A picture is cut before each node; most nodes look in the next picture as they do in this one.
        head, *nodes = frame.svg.split(_NODE)
        parts = [head, *(_NODE + node for node in nodes)]
        frames.append({**told(frame), "picture": [pieces.setdefault(part, len(pieces)) for part in parts]})
    data = {
        "num_blocks": film.cache.num_blocks,
        "block_size": film.cache.block_size,
        "chapters": film.chapters,
        "steps_per_frame": film.steps_per_frame,
        "pieces": list(pieces),
        "frames": frames,
    }
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def told(frame: Frame) -> dict[str, Any]:
    """All of a frame but its picture, for JSON."""
    return {
        "kinds": frame.kinds,
        "sentences": frame.sentences,
        "num_steps": frame.num_steps,
        "chapter": frame.chapter,
        "changed": sorted(frame.changed),
        "gone": sorted(frame.gone),
        "matched": sorted(frame.matched),
        "meters": frame.meters._asdict(),
    }


def read(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(template: str, **places: str) -> str:
    """The template with its `{{PLACES}}` filled in one pass, so that what is filled in is not looked at again."""
    return _PLACE.sub(lambda place: places[place[1]], template)
