"""`CacheView`: a cache in a notebook, followed while it works. Needs anywidget, from the extra "notebooks".

    view = CacheView(llm.cache)
    view                     shows a player; whatever the cache does from now on is added to it
    view.close()             the cache is left alone again; the player can still be played

Where anywidget is not installed, or nobody renders widgets, the same object shows the cache as a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from .cache import PrefixCache
from .film import MAX_FRAMES, Film, Frame
from .film.page import packed, read, told
from .render import draw_cache, mime_bundle, safe

NOT_INSTALLED = 'anywidget is not installed, so this is a picture: pip install "radixkv[notebooks]" for the player'


class CacheView:
    """A player for a cache, or for a film.

    subject     a `PrefixCache`, which is filmed from now on until `close`, or a `Film`, finished or running
    decode      a tokenizer's `decode`, to show text instead of ids (default: `cache.decode`; a film has its own)
    max_frames  frames at most; a longer play is thinned evenly

    Each step of a cache that is followed costs a drawing, some milliseconds: not for measurements. Raises TypeError for
    anything else, ValueError for a cache that is filmed already.
    """

    def __init__(
        self,
        subject: PrefixCache | Film,
        *,
        decode: Callable[[list[int]], str] | None = None,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        if isinstance(subject, Film):
            self.film = subject
        elif isinstance(subject, PrefixCache):
            self.film = Film(subject, decode=decode, max_frames=max_frames)
            self.film.start()
        else:
            raise TypeError(f"a CacheView shows a PrefixCache or a Film, not {subject!r}")
        self.widget = _make_widget()
        """The anywidget, to put beside other widgets; None where it is not installed."""
        self._unsubscribe = None if self.widget is None else self.film.subscribe(self._send)

    def close(self) -> None:
        """Stops following; what was filmed can still be played."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self.film.stop()
        self._refresh()

    def __enter__(self) -> CacheView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refresh(self) -> None:
        """Puts the whole film into the widget's state, from which every view starts."""
        if self.widget is not None:
            self.widget.is_live = self.film.is_running
            self.widget.film = packed(self.film)

    def _send(self, frame: Frame | None) -> None:
        """Adds a frame to the views that are open; after a thinning all frames are sent anew."""
        assert self.widget is not None
        if frame is None:
            self._refresh()
        else:
            self.widget.send({"frame": {**told(frame), "picture": frame.svg}, "chapters": list(self.film.chapters)})

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The player, and for those who cannot play it a picture of the cache and its text."""
        cache, decode = self.film.cache, safe(self.film.decode)
        bundle = mime_bundle(draw_cache(cache, decode=decode), cache.show(decode))
        if self.widget is None:
            html = f"{bundle['text/html']}<p>{escape(NOT_INSTALLED)}</p>"
            return {**bundle, "text/html": html, "text/plain": f"{bundle['text/plain']}\n{NOT_INSTALLED}"}
        self._refresh()
        found = self.widget._repr_mimebundle_(**options)
        if found is None:
            return bundle
        data, metadata = found if isinstance(found, tuple) else (found, {})
        return {**bundle, **data, "text/plain": bundle["text/plain"]}, metadata


def _make_widget() -> Any:
    """A new widget that plays a film; None without anywidget."""
    try:
        anywidget, traitlets = import_module("anywidget"), import_module("traitlets")
    except ModuleNotFoundError:
        return None

    class Player(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """The player of `radixkv.film`, as a widget: the film as `packed` packs it, and whether more is to come."""

        _esm = read("view.js")
        _css = read("view.css")
        film = traitlets.Unicode("").tag(sync=True)
        is_live = traitlets.Bool(False).tag(sync=True)

    return Player()
