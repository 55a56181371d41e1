"""Stands between one cache and whoever drives it, so that a cache which nobody watches pays nothing.

The methods of a single object are covered by attributes of the same names, and uncovered again. Whoever holds the cache
(a scheduler, a notebook) goes on calling it as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from ..cache import PrefixCache

# All that changes what is in a cache. Not `lookup_prefix`: it changes nothing, and a scheduler looks up far more often
# than it allocates.
CHANGES = ("allocate", "append_token", "commit", "fork", "write", "free", "evict", "reset", "drop_namespace")

# Called with the method's name, the method, and its arguments; gives back what the method does.
Around: TypeAlias = Callable[..., Any]


def with_tree(cache: PrefixCache) -> PrefixCache:
    """The cache itself. Raises TypeError for anything but a `PrefixCache`."""
    if not isinstance(cache, PrefixCache):
        raise TypeError(f"only a PrefixCache can be filmed: it has a tree to draw; this is {cache!r}")
    return cache


def stand_between(cache: PrefixCache, around: Around) -> Callable[[], None]:
    """Has each changing call of this cache go through `around`; what is given back ends that.

    Raises ValueError if somebody stands there already.
    """
    if any(name in vars(cache) for name in CHANGES):
        raise ValueError("this cache is being filmed or recorded already; allowed: one at a time")
    for name in CHANGES:
        setattr(cache, name, partial(around, name, getattr(cache, name)))

    def end() -> None:
        for name in CHANGES:
            vars(cache).pop(name, None)

    return end
