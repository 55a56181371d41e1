"""Traces that tell when and how long, and nothing about what prompts share: Azure and BurstGPT, both CSV.

Azure has `TIMESTAMP` (a date and time with up to nine fractional digits), `ContextTokens` and `GeneratedTokens`.
BurstGPT has `Timestamp` (s), `Request tokens` and `Response tokens` (0 where the request failed), `Model` and others,
and in later versions `Session ID`. Columns are found by name; more of them do no harm.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from .errors import BadRow, TraceError
from .rows import Row, assemble, take
from .source import Source
from .trace import Trace


class _Columns(NamedTuple):
    """Names of a format's columns in lower case, and how its times are read."""

    time: str
    num_prompt_tokens: str
    num_output_tokens: str
    session: str | None
    parse_time: Callable[[str], tuple[float, int]]


_NANOSECONDS = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DATE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def read_azure(source: Source) -> Trace:
    """The trace of one Azure file; times count from its earliest row."""
    rows = take(source, _rows(source, AZURE))
    first_ns = min(row.key for row in rows)
    return assemble(
        source,
        # Exact until the last division: a float holds an absolute time to 0.2 µs only, the file gives 0.1.
        (row._replace(arrival_s=(row.key - first_ns) / _NANOSECONDS, key=None) for row in rows),
        format="azure",
        definition="Azure: by TIMESTAMP, from the first one on, file order on ties; lengths only, no prefix identity",
        block_size=None,
        counts_partial=True,
    )


def read_burstgpt(source: Source) -> Trace:
    """The trace of one BurstGPT file."""
    return assemble(
        source,
        (row._replace(key=None) for row in take(source, _rows(source, BURSTGPT))),
        format="burstgpt",
        definition="BurstGPT: by Timestamp, file order on ties; lengths only, no prefix identity",
        block_size=None,
        counts_partial=True,
    )


def columns_of(header: str) -> str | None:
    """The format whose columns a header line has, `azure` or `burstgpt`; None if it is neither."""
    names = set(_names(next(csv.reader([header]), [])))
    for name, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if {columns.time, columns.num_prompt_tokens, columns.num_output_tokens} <= names:
            return name
    return None


def _rows(source: Source, columns: _Columns) -> Iterator[Row]:
    """The rows, with exact times as their keys."""
    lines = source.lines(source.path)
    line, header = next(lines, (1, b""))
    try:
        names = _names(_cells(header))
    except BadRow as error:
        raise TraceError(source.path, line, f"the header {error}") from None
    wanted = (columns.time, columns.num_prompt_tokens, columns.num_output_tokens)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise TraceError(source.path, line, f"the header has no column {' or '.join(map(repr, missing))}")
    time, prompt, output = map(names.index, wanted)
    session = names.index(columns.session) if columns.session in names else None
    for line, text in lines:
        try:
            cells = _cells(text)
            if len(cells) != len(names):
                raise BadRow(f"has {len(cells)} cells, but the header has {len(names)} columns")
            arrival_s, key = columns.parse_time(cells[time].strip())
            yield Row(
                arrival_s=arrival_s,
                num_prompt_tokens=_length(cells[prompt].strip(), columns.num_prompt_tokens),
                num_output_tokens=_length(cells[output].strip(), columns.num_output_tokens),
                thread=None if session is None else cells[session].strip() or None,
                key=key,
            )
        except BadRow as error:
            source.skip(source.path, line, str(error))


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8").rstrip("\r\n")], strict=True), [])
    except UnicodeDecodeError as error:
        raise BadRow(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise BadRow(f"is not a line of CSV: {error}") from None


def _names(cells: list[str]) -> list[str]:
    return [cell.strip().lower() for cell in cells]


def _length(cell: str, name: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and len(cell) < 19):
        raise BadRow(f"{name} must be a number of tokens, not {cell[:40]!r}")
    return int(cell)


def _date_time(cell: str) -> tuple[float, int]:
    """Nothing yet, and the nanoseconds since 1970 (UTC where no time zone is given)."""
    match = _DATE_TIME.fullmatch(cell)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise BadRow(f"the time must be like 2023-11-16 18:15:46.6805900, not {cell[:40]!r}") from None
    whole_s = (moment - _EPOCH) // timedelta(seconds=1)
    return 0.0, whole_s * _NANOSECONDS + int((match[2] or "").ljust(9, "0"))


def _number_of_seconds(cell: str) -> tuple[float, int]:
    try:
        time_s = float(cell)
    except ValueError:
        time_s = math.nan
    if not math.isfinite(time_s):
        raise BadRow(f"the time must be a number of seconds, not {cell[:40]!r}")
    return time_s, 0


AZURE = _Columns("timestamp", "contexttokens", "generatedtokens", None, _date_time)
BURSTGPT = _Columns("timestamp", "request tokens", "response tokens", "session id", _number_of_seconds)
