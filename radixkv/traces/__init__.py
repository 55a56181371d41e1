"""Traces of LLM serving traffic, from the formats that they are published in into one `Trace`.

`load` reads a file or folder, plain or gzip, and tells the format from its content. Formats (`FORMATS`):

- ``mooncake``: JSON lines with hash ids of 512-token blocks, times in ms; the field names of other servers too.
- ``bailian``: the same with 16-token blocks, times in s, and chats that name the one they continue.
- ``claude-code``: coding-agent sessions with 64-token blocks and nested sub-agents; a file, or a folder of them.
- ``ragpulse``: prompts as segments whose lengths stand in files beside the trace; the folder, or its trace file.
- ``dynamo``: events of a running server, with the cached tokens that it measured.
- ``azure``, ``burstgpt``: CSV of times and lengths; no prefix identity.
- ``openai``, ``oasst``, ``mt-bench``, ``tau-bench``, ``swe-agent``: chats, with their bytes as tokens.
- ``radixkv``: our own, which `write` writes.

Rules, the same in all of them. Requests are sorted by arrival, and keep the file's order where they arrive together: an
unsorted file is no fault. A row must have one hash id a block, by its format's way of counting; a prompt of length 0
with no ids is a request like any other. An id that stands twice in a row names two blocks, since a block is the path up
to it. Ids are integers of any size, or texts. Lengths are integers of at least 0, times finite numbers. Whatever breaks
a rule is a `TraceError` with file, line and reason, or with `skip_bad` a row that is passed over and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from radixkv.arguments import at_least

from . import bailian, claude_code, csv_lengths, dynamo, mooncake, native, ragpulse, texts
from .detection import detect_format
from .errors import TraceError
from .native import write
from .source import Progress, Source
from .trace import Trace, TraceRequest

_READERS: dict[str, Callable[[Source], Trace]] = {
    "mooncake": mooncake.read,
    "bailian": bailian.read,
    "claude-code": claude_code.read,
    "ragpulse": ragpulse.read,
    "dynamo": dynamo.read,
    "azure": csv_lengths.read_azure,
    "burstgpt": csv_lengths.read_burstgpt,
    **{name: partial(texts.read, format=name) for name in texts.FORMATS},
    native.NAME: native.read,
}
FORMATS = ("auto", *_READERS)
_OPEN_BLOCK_SIZE = ("mooncake", "bailian")


def load(
    path: str | PathLike[str],
    format: str = "auto",
    *,
    skip_bad: bool = False,
    limit: int | None = None,
    block_size: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """The trace in a file or folder, read row by row.

    format       one of `FORMATS`; `auto` tells it from the content
    skip_bad     passes over bad rows and counts them in `Trace.num_skipped`, instead of raising
    limit        reads that many requests, the first ones in the file, and no further
    block_size   tokens a hash id stands for, in a Mooncake or Bailian file that does not have the usual 512 or 16
    progress     called with the bytes read and the size of the file at hand, as they are on disk

    Raises TraceError (a ValueError) for a file that cannot be read or breaks a rule, and for one without any request;
    ValueError for an unknown format. O(n log n) in the requests, O(n) in their ids.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if limit is not None:
        at_least(1, limit, "limit")
    path = Path(path)
    found = detect(path) if format == "auto" else format
    if block_size is not None:
        at_least(1, block_size, "block_size")
        if found not in _OPEN_BLOCK_SIZE:
            raise ValueError(f"block_size={block_size} is given, but a {found} trace says itself what its blocks are")
    return _READERS[found](Source(path, skip_bad, limit, block_size, progress))


def detect(path: str | PathLike[str]) -> str:
    """The format of a file or folder, by its content. Raises TraceError if it is none of `FORMATS`."""
    return detect_format(Path(path))


__all__ = ["FORMATS", "Trace", "TraceError", "TraceRequest", "detect", "load", "write"]
