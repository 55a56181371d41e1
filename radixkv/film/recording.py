"""The calls that drove a cache, noted while they happen and drawn afterwards.

Drawing takes milliseconds a picture, which would be counted as time to first token where an engine is timed. Noting a
call takes a microsecond. A cache does the same again for the same calls, since order of use goes by tick and not by
clock; so a second cache, without tensors, lives the first one's life again for the camera.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..cache import PrefixCache
from ..tokens import TokenKey
from .calls import stand_between, with_tree
from .film import MAX_FRAMES, MAX_NODES, Decode, Film

_CHAPTER = "chapter"  # noted among the calls; no method of a cache has this name


class Recording:
    """Notes the calls that change a cache, from `start` (or the `with` block's beginning) to `stop`.

    Raises ValueError where the cache is not empty at the start: what it holds came by calls that nobody noted.
    TypeError for a cache without a tree.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = with_tree(cache)
        self._notes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._end: Callable[[], None] | None = None
        self._policy: Any = None

    def start(self) -> None:
        """Begins; what was noted before is forgotten."""
        cache = self._cache
        if self._end is None:
            self._end = stand_between(cache, self._around)
        if cache.num_free_blocks < cache.num_blocks or cache.request_ids:
            self.stop()
            raise ValueError(f"a recording starts with an empty cache, not with {cache!r}; reset it, or film it")
        self._notes.clear()
        self._policy = copy.deepcopy(cache.tree._policy)  # as it is now: one with ageing goes on changing

    def stop(self) -> None:
        """Ends; the cache is as if nobody had been there."""
        if self._end is not None:
            self._end()
            self._end = None

    def __enter__(self) -> Recording:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def chapter(self, title: str) -> None:
        """What is noted from here on belongs to this chapter of the film."""
        self._notes.append((_CHAPTER, (title,), {}))

    def film(self, *, decode: Decode | None = None, max_frames: int = MAX_FRAMES, max_nodes: int = MAX_NODES) -> Film:
        """The film of what was noted, drawn now; its arguments are those of `Film`. The cache itself is not touched."""
        cache = self._cache
        again = PrefixCache(
            cache.num_blocks,
            cache.block_size,
            copy.deepcopy(self._policy),
            keep_partial=cache.keep_partial,
            min_copy_tokens=cache.min_copy_tokens,
        )
        again.decode = cache.decode
        film = Film(again, decode=decode, max_frames=max_frames, max_nodes=max_nodes)
        with film:
            for name, args, options in self._notes:
                if name == _CHAPTER:
                    film.chapter(*args)
                else:
                    getattr(again, name)(*args, **options)
        return film

    def _around(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Notes a call that succeeded: one that failed has changed nothing."""
        if name == "allocate":
            args, options = _with_key(*args, **options)
        result = method(*args, **options)
        self._notes.append((name, args, options))
        return result


def _with_key(
    request_id: str | int, token_ids: Any, namespace: Any = None, **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `allocate` with the tokens packed: a list may be changed later, an iterator is read once."""
    return (request_id, TokenKey.of(token_ids, namespace)), options
