"""What can go wrong, as one tree of exceptions.

    RadixKVError
    ├── OutOfBlocks        no room; carries needed, free, evictable
    ├── UnknownRequest     (also a KeyError)    no request of that id is running
    ├── DuplicateRequest   (also a ValueError)  a request of that id is running already
    └── TraceError         (also a ValueError)  a trace that cannot be read, with file and line; in `traces.errors`

A bad argument is a ValueError or TypeError; a broken invariant is an AssertionError and is never caught.
"""

from __future__ import annotations


class RadixKVError(Exception):
    """Base of every error that this package defines."""


class OutOfBlocks(RadixKVError):
    """The pool cannot give `needed` blocks; nothing was changed.

    `free` blocks are unused; `evictable` ones are cached, unlocked, and not part of what the request itself hits.
    """

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        super().__init__(f"out of blocks: needed={needed} free={free} evictable={evictable}")
        self.needed = needed
        self.free = free
        self.evictable = evictable


class UnknownRequest(RadixKVError, KeyError):
    """No running request has this id."""

    def __init__(self, request_id: object) -> None:
        super().__init__(f"no running request has the id {request_id!r}")

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class DuplicateRequest(RadixKVError, ValueError):
    """A running request has this id already; it is not disturbed."""

    def __init__(self, request_id: object) -> None:
        super().__init__(f"a request with the id {request_id!r} is running already")
