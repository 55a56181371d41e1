"""Reads trace files piece by piece: lines, JSON values, and what to do with bad ones.

Knows nothing about formats. A file may be gzip (known by its content). No file is held as a whole, except one that is a
single JSON object: that is one record anyway.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from .errors import TraceError

# Called with the bytes read so far and the size of the file, both as they are on disk.
Progress: TypeAlias = Callable[[int, int], None]

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_WHITE = b" \t\r\n"
_CHUNK = 1 << 18  # bytes or characters a read


class Record(NamedTuple):
    """One JSON value of a file.

    number   its place among the file's values, from 0, bad ones counted
    line     the line on which it starts, from 1
    """

    number: int
    line: int
    value: Any


@dataclass(slots=True)
class Source:
    """A file or folder to read, how it is to be read, and the bad rows that were passed over so far.

    limit        requests to read, in file order; None for all
    block_size   tokens a hash id, where the format leaves that open
    """

    path: Path
    skip_bad: bool = False
    limit: int | None = None
    block_size: int | None = None
    progress: Progress | None = None
    num_skipped: int = 0

    @property
    def name(self) -> str:
        """What the trace is called: the name of the file or folder, without the suffixes of the format."""
        return stem(self.path)

    def files(self, *suffixes: str) -> list[Path]:
        """The file itself, or the files of the folder that have one of the suffixes (`.gz` apart), in name order."""
        if not self.path.is_dir():
            return [self.path]
        found = sorted(path for path in self.path.iterdir() if path.name.removesuffix(".gz").endswith(suffixes))
        if not found:
            raise TraceError(self.path, None, f"the folder has no file that ends in {' or '.join(suffixes)}")
        return found

    def skip(self, path: Path, line: int, reason: str) -> None:
        """Counts a bad row, or raises TraceError where bad rows are not to be passed over."""
        if not self.skip_bad:
            raise TraceError(path, line, reason) from None
        self.num_skipped += 1

    def first_character(self, path: Path) -> bytes:
        """The first byte of the file that is no white space; empty where there is none."""
        with self._open(path) as stream:
            _skip_white(stream)
            first: bytes = stream.peek(1)[:1]
            return first

    def lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers."""
        with self._open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(_BOM)
                if not line.isspace():
                    yield number, line

    def records(self, path: Path) -> Iterator[Record]:
        """The JSON values of a file: one a line, the elements of a list, or one object over many lines.

        A list of messages (objects with a role) is one value. A line that is no JSON is a bad row; a fault in a list or
        in an object over many lines leaves nothing to go on from, and is always an error.
        """
        with self._open(path) as stream:
            line = 1 + _skip_white(stream)
            if stream.peek(1)[:1] == b"[":
                yield from self._elements(path, stream, line)
                return
            first = stream.readline()
            # A row that is cut off does not end like this, and an object that goes on does.
            if first.rstrip().endswith((b"{", b"[", b",", b":")) and not _is_json(first):
                yield Record(0, line, _loads_document(path, line, first + stream.read()))
                return
            number = 0
            while first:
                if not first.isspace():
                    try:
                        value = json.loads(first)
                    except (ValueError, RecursionError) as error:
                        self.skip(path, line, _json_reason(error))
                    else:
                        yield Record(number, line, value)
                    number += 1
                line += 1
                first = stream.readline()

    def _elements(self, path: Path, stream: IO[bytes], line: int) -> Iterator[Record]:
        """The elements of the top-level list, or of several lists one after the other."""
        text = _ListText(path, io.TextIOWrapper(stream, encoding="utf-8", errors="strict", newline=""), line)
        number = 0
        while text.skip_white() == "[":
            opened_at = text.line
            text.take()
            messages: list[Any] = []
            if text.skip_white() == "]":
                text.take()
                continue
            while True:
                text.skip_white()
                element_line = text.line
                value = text.value()
                if messages or (isinstance(value, dict) and "role" in value):
                    messages.append(value)
                else:
                    yield Record(number, element_line, value)
                    number += 1
                after = text.skip_white()
                if after not in (",", "]"):
                    raise TraceError(path, text.line, f"expected a comma or the end of the list, not {after!r}")
                text.take()
                if after == "]":
                    break
            if messages:
                yield Record(number, opened_at, messages)
                number += 1
        if text.skip_white():
            raise TraceError(path, text.line, "there is more text after the list")

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        """The file's bytes, unpacked; what goes wrong while reading becomes a TraceError."""
        try:
            with _Watched(path, self.progress) as raw, io.BufferedReader(raw, _CHUNK) as packed:
                if packed.peek(2)[:2] == _GZIP_MAGIC:
                    with gzip.GzipFile(fileobj=packed) as stream:
                        yield stream
                else:
                    yield packed
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(path, None, f"cannot be decompressed: {error}") from error
        except OSError as error:
            raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from error


class _Watched(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        super().__init__(path, "rb")
        self._progress = progress
        self._size = path.stat().st_size

    def readinto(self, buffer: Any) -> int | None:
        num_bytes = super().readinto(buffer)
        if self._progress is not None:
            self._progress(self.tell(), self._size)
        return num_bytes


class _ListText:
    """The text of a JSON list, of which only the element at hand is in memory."""

    def __init__(self, path: Path, stream: io.TextIOWrapper, line: int) -> None:
        self.line = line
        self._path = path
        self._stream = stream
        self._buffer = ""
        self._position = 0
        self._decoder = json.JSONDecoder()

    def skip_white(self) -> str:
        """The next character that is no white space, without taking it; an empty text at the end."""
        while True:
            rest = self._buffer[self._position : self._position + 1]
            if not rest:
                if not self._read_more():
                    return ""
            elif rest in " \t\r\n":
                self.line += rest == "\n"
                self._position += 1
            else:
                return rest

    def take(self) -> None:
        """Moves past the character that `skip_white` showed."""
        self._position += 1

    def value(self) -> Any:
        """The JSON value that starts here; text is read until there is a whole one.

        Each read doubles what is there, so a value is tried a few times only.
        """
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
            except (ValueError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError) and self._read_more():
                    continue
                line = self.line
                if isinstance(error, json.JSONDecodeError):
                    line += self._buffer.count("\n", self._position, error.pos)
                raise TraceError(self._path, line, _json_reason(error)) from None
            if end == len(self._buffer) and self._read_more():
                continue  # the number at the end may have more digits
            self.line += self._buffer.count("\n", self._position, end)
            self._position = end
            return value

    def _read_more(self) -> bool:
        """Reads on; False at the end of the file."""
        rest = self._buffer[self._position :]
        try:
            more = self._stream.read(max(_CHUNK, len(rest)))
        except UnicodeDecodeError as error:
            raise TraceError(self._path, None, f"is not UTF-8 text: {error.reason}") from None
        self._buffer, self._position = rest + more, 0
        return bool(more)


def stem(path: Path) -> str:
    """The name of a file or folder without `.gz` and then one more suffix."""
    name = path.resolve().name.removesuffix(".gz")
    return name if path.is_dir() else Path(name).stem


def _skip_white(stream: Any) -> int:
    """Moves to the first character that is no white space (nor a byte order mark); gives the line feeds on the way."""
    if stream.peek(3)[:3] == _BOM:
        stream.read(3)
    num_lines = 0
    while head := stream.peek(1):
        white = head[: len(head) - len(head.lstrip(_WHITE))]
        num_lines += white.count(b"\n")
        stream.read(len(white))
        if len(white) < len(head):
            break
    return num_lines


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _loads_document(path: Path, first_line: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = first_line + error.lineno - 1 if isinstance(error, json.JSONDecodeError) else first_line
        raise TraceError(path, line, _json_reason(error)) from None


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, RecursionError):
        return "is nested too deeply to be read"
    return f"is not usable JSON: {error}"  # a number with more digits than Python converts
