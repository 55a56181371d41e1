"""What is wrong with a trace file: which file, which line, and why."""

from __future__ import annotations

from os import PathLike, fspath

from radixkv.errors import RadixKVError


class TraceError(RadixKVError, ValueError):
    """A trace that cannot be used: `path`, `line` (from 1; None where no line is to blame) and `reason`."""

    def __init__(self, path: str | PathLike[str], line: int | None, reason: str) -> None:
        self.path, self.line, self.reason = fspath(path), line, reason
        super().__init__(f"{self.path}:{line}: {reason}" if line is not None else f"{self.path}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (self.path, self.line, self.reason)


class BadRow(Exception):
    """What is wrong with one row; the reader of the file knows the line."""
