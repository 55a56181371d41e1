"""`Film`: pictures of one cache, a picture and a caption for each step of its life.

A step is a call that changed something one can see: blocks, nodes, locks or requests. Tokens that go into a block that
was there before, and commits that complete no block, are counted into the request's next step. An allocation that hits
makes two steps, the match (the tree as it was, with the matched path marked) and what came of it.

A long film is thinned evenly while it is made: when there are more frames than wanted, every second one is merged into
the one after it, and from then on only every second step is drawn. So a film draws at most a few times `max_frames`
pictures, however long the play is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from ..arguments import at_least
from ..cache import PrefixCache
from ..node import RadixNode
from ..render import draw_cache
from ..tokens import NamespaceLike, TokenKey
from . import captions
from .calls import stand_between, with_tree
from .captions import KINDS, Call
from .changes import Changes, Shape
from .meters import Meters
from .page import page

Decode: TypeAlias = Callable[[list[int]], str]
Listener: TypeAlias = Callable[["Frame | None"], None]

TITLE = "The life of a prefix cache"
MAX_FRAMES = 500  # at two a second four minutes, and some hundred kilobytes to a few megabytes
MAX_NODES = 150  # in a picture; a screen has room for few more
_MOST_SENTENCES = 8  # of a frame that stands for many steps; it says how many those were


@dataclass(frozen=True)
class Frame:
    """A picture of the cache, and what happened since the picture before.

    kinds       of what happened, from `KINDS`
    sentences   the same for people, the last few
    num_steps   steps that the frame stands for; more than one in a thinned film
    chapter     index into `Film.chapters`; -1 before the first
    meters      what the cache counts at the moment of the picture
    changed     serials of the nodes that changed
    gone        serials of the nodes that left
    matched     serials of the nodes on the path of a match, which has changed nothing yet
    """

    kinds: tuple[str, ...]
    sentences: tuple[str, ...]
    num_steps: int
    chapter: int
    meters: Meters
    changed: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    matched: frozenset[int] = frozenset()
    picture: bytes = b""

    @property
    def svg(self) -> str:
        """The picture: a whole SVG."""
        return zlib.decompress(self.picture).decode()

    def then(self, later: Frame) -> Frame:
        """One frame for both: the later picture, and all that happened."""
        kinds = {*self.kinds, *later.kinds}
        return replace(
            later,
            kinds=tuple(kind for kind in KINDS if kind in kinds),
            sentences=(self.sentences + later.sentences)[-_MOST_SENTENCES:],
            num_steps=self.num_steps + later.num_steps,
            changed=self.changed | later.changed,
            gone=self.gone | later.gone,
        )


class Film:
    """Draws a cache at each step while the film runs: from `start` (or the beginning of a `with` block) to `stop`.

    decode      a tokenizer's `decode`, to show text instead of ids (default: `cache.decode`)
    max_frames  frames at most, 3 and more; a longer film is thinned evenly
    max_nodes   nodes in a picture at most

    >>> from radixkv import PrefixCache
    >>> cache = PrefixCache(num_blocks=8, block_size=4)
    >>> with Film(cache) as film:
    ...     _ = cache.allocate("a", [1, 2, 3, 4, 5])
    ...     cache.commit("a", 5); cache.free("a")
    >>> [frame.kinds for frame in film.frames]
    [('start',), ('allocate',), ('commit',), ('free',)]

    A step costs O(nodes), and where it is drawn some milliseconds; where times are measured use a `Recording`. One
    owner drives it, like the cache. Raises TypeError for a cache without a tree, ValueError for numbers out of range.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        decode: Decode | None = None,
        max_frames: int = MAX_FRAMES,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self.cache = with_tree(cache)
        self.decode = cache.decode if decode is None else decode
        self.max_frames = at_least(3, max_frames, "max_frames")
        self.max_nodes = at_least(1, max_nodes, "max_nodes")
        self.chapters: list[str] = []
        self.steps_per_frame = 1
        self._frames: list[Frame] = []
        self._pending: Frame | None = None  # steps that are not drawn yet
        self._listeners: list[Listener] = []
        self._end: Callable[[], None] | None = None
        self._appended: dict[Any, int] = {}  # tokens that are in no step yet, by request
        self._look()

    # ---------------------------------------------------------------- from outside

    def start(self) -> None:
        """Lets the film run; it begins with a picture of the cache as it is. A film that was stopped can go on."""
        if self._end is not None:
            return
        self._end = stand_between(self.cache, self._around)
        self._look()
        if not self._frames:
            sentence = captions.start(self._meters, self.cache.num_blocks, self.cache.block_size)
            self._add(self._step(("start",), [sentence]))

    def stop(self) -> None:
        """Ends it, with a picture of the cache as it is; from here on nobody stands before the cache."""
        if self._end is not None:
            self._end()
            self._end = None
            self._draw_pending(None)

    def __enter__(self) -> Film:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether the cache is being filmed now."""
        return self._end is not None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames so far. While the film runs, the last one shows the cache as it is."""
        if self.is_running:
            self._draw_pending(None)
        return tuple(self._frames)

    def chapter(self, title: str) -> None:
        """What happens from here on belongs to this chapter; the page marks where it begins."""
        self.chapters.append(title)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each new frame, and with None after a thinning; what was given back ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def to_html(
        self, title: str = TITLE, *, subtitle: str = "", plots: Iterable[str] = (), notes: Iterable[str] = ()
    ) -> str:
        """The page that plays the film; arguments as in `radixkv.film.page`."""
        return page(self, title, subtitle=subtitle, plots=plots, notes=notes)

    def save(self, path: str | PathLike[str], title: str = TITLE, **options: Any) -> int:
        """Writes that page to a file; its size in bytes. Raises OSError where that fails."""
        return Path(path).write_bytes(self.to_html(title, **options).encode())

    # ---------------------------------------------------------------- from a call to a step

    def _around(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Makes the call; then a step of it, if one can see that it did something."""
        if name == "allocate":
            return self._allocate(method, *args, **options)
        result = method(*args, **options)
        given = signature(method).bind(*args, **options).arguments.values()  # in the method's own order
        subject, more, *_ = (*given, None, None)
        if name == "append_token":
            self._appended[subject] = self._appended.get(subject, 0) + 1
        self._told(name, subject, more, result)
        if name == "free":
            self._appended.pop(subject, None)
        return result

    def _allocate(
        self,
        method: Callable[..., Any],
        request_id: str | int,
        token_ids: Any,
        namespace: NamespaceLike = None,
        **options: Any,
    ) -> Any:
        """An allocation: what it matches is drawn before it changes anything, and kept if it succeeds."""
        key = TokenKey.of(token_ids, namespace)
        limit = max(len(key) - 1, 0)
        if options.get("max_cached_tokens") is not None:
            limit = min(limit, options["max_cached_tokens"])
        found = self.cache.tree.match(key, limit)
        if found.partial_tokens < self.cache.min_copy_tokens:
            found = found._replace(partial_tokens=0)
        is_hit = bool(found.blocks or found.partial_tokens)
        match = None
        if is_hit:
            sentence = captions.match(request_id, len(key), found, self.cache.block_size)
            match = self._step(("match",), [sentence], matched=_path(found.node))
            if self._is_due():
                match = replace(match, picture=self._draw(frozenset(), None))
        result = method(request_id, key, **options)
        if match is not None:
            self._add(match)
        self._told("allocate", request_id, len(key), result)
        return result

    def _told(self, name: str, subject: Any, more: Any, result: Any) -> None:
        """A step for a call, unless nothing that one can see has changed."""
        before, shape, num_nodes = self._meters, self._shape, self._num_nodes
        after = Meters.of(self.cache)
        if after == before and self.cache.tree.num_nodes == num_nodes:
            return
        self._look()
        changes = Changes.between(shape, self._shape)
        call = Call(name, subject, more, result, before, after, changes, self._appended.pop(subject, 0))
        kinds, sentences = captions.tell(call)
        request_id = {"fork": more, "evict": None, "reset": None, "drop_namespace": None}.get(name, subject)
        self._add(self._step(kinds, sentences, changes.changed, changes.gone), request_id)

    def _look(self) -> None:
        """Takes in what the next step will be compared with."""
        self._meters = Meters.of(self.cache)
        self._num_nodes = self.cache.tree.num_nodes
        self._shape = Shape.of(self.cache.tree)

    # ---------------------------------------------------------------- from steps to frames

    def _is_due(self) -> bool:
        """Whether the next step is one that is drawn."""
        return (self._pending.num_steps if self._pending else 0) + 1 >= self.steps_per_frame

    def _step(
        self,
        kinds: tuple[str, ...],
        sentences: Sequence[str],
        changed: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        matched: frozenset[int] = frozenset(),
    ) -> Frame:
        """A step that has no picture yet."""
        return Frame(kinds, tuple(sentences), 1, len(self.chapters) - 1, self._meters, changed, gone, matched)

    def _add(self, step: Frame, request_id: str | int | None = None) -> None:
        """Takes in a step. request_id: whose it is, so that its path stands out."""
        is_due = self._is_due()
        self._pending = step if self._pending is None else self._pending.then(step)
        if is_due:
            self._draw_pending(request_id)

    def _draw_pending(self, request_id: str | int | None) -> None:
        """Makes a frame of the steps that are not drawn yet."""
        frame, self._pending = self._pending, None
        if frame is None:
            return
        if not frame.picture:
            frame = replace(frame, picture=self._draw(frame.changed, request_id))
        self._frames.append(frame)
        if len(self._frames) > self.max_frames:
            self._thin()
            frame = None
        for listener in list(self._listeners):
            listener(frame)

    def _thin(self) -> None:
        """Keeps the first frame, merges the others two by two, and draws half as often from now on."""
        first, *others = self._frames
        pairs = [others[index : index + 2] for index in range(0, len(others), 2)]
        self._frames = [first, *(pair[0].then(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs)]
        self.steps_per_frame *= 2

    def _draw(self, changed: frozenset[int], request_id: str | int | None) -> bytes:
        """The cache as it is, packed: a film holds hundreds of pictures that are much alike."""
        running = request_id if request_id in self.cache.request_ids else None
        svg = draw_cache(self.cache, decode=self.decode, request_id=running, changed=changed, max_nodes=self.max_nodes)
        return zlib.compress(svg.encode("utf-8", "replace"), 1)


def _path(node: RadixNode | None) -> frozenset[int]:
    """Serials of the nodes from the root, which has none to show, to this one."""
    serials = set()
    while node is not None and node.parent is not None:
        serials.add(node.serial)
        node = node.parent
    return frozenset(serials)
