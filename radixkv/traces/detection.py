"""Tells the format of a trace from what is in it; the names of files matter only in folders."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from . import claude_code, native, ragpulse, texts
from .csv_lengths import columns_of
from .errors import TraceError
from .rows import HASH_IDS, PROMPT_TOKENS
from .source import Source

_RECORDS_TO_TRY = 100  # a trace may start with rows that are broken


def detect_format(path: Path) -> str:
    """The format of a file or folder. Raises TraceError if it is none that is known, or cannot be read."""
    if path.is_dir():
        return _detect_folder(path)
    first = next(Source(path).lines(path), None) if _starts_as_text(path) else None
    if first is not None and (found := columns_of(first[1].decode("utf-8", "replace"))):
        return found
    first_value: Any = None
    first_line = None
    for record in islice(Source(path, skip_bad=True).records(path), _RECORDS_TO_TRY):
        if found := _format_of(record.value):
            return found
        if first_line is None:
            first_value, first_line = record.value, record.line
    keys = ", ".join(map(repr, list(first_value)[:8])) if isinstance(first_value, dict) else "none"
    raise TraceError(path, first_line, f"is in no trace format that is known here; keys of the first row: {keys}")


def _starts_as_text(path: Path) -> bool:
    """Whether the file starts as neither an object nor a list: then its first line is short enough to be read whole."""
    source = Source(path)
    return source.first_character(path) not in (b"{", b"[", b"")


def _detect_folder(path: Path) -> str:
    names = [each.name.removesuffix(".gz") for each in sorted(path.iterdir())]
    if ragpulse.TRACE_FILE in names:
        return "ragpulse"
    if any(name.endswith(texts.SWE_AGENT_SUFFIXES) for name in names):
        return "swe-agent"
    first = Source(path).files(*claude_code.SUFFIXES)[0]
    found = detect_format(first)
    if found != "claude-code":
        raise TraceError(path, None, f"is a folder, and the format {found!r} of {first.name} has one file a trace")
    return found


def _format_of(value: Any) -> str | None:
    """The format that a record is in, by its keys; from the particular to the general."""
    if isinstance(value, list):
        return "openai" if value and all(isinstance(each, dict) and "role" in each for each in value) else None
    if not isinstance(value, dict):
        return None
    if value.get("format") == native.NAME:
        return native.NAME
    ids = next((value[name] for name in HASH_IDS if name in value), None)
    checks = (
        ("dynamo", isinstance(value.get("event"), dict)),
        ("claude-code", isinstance(value.get("requests"), list)),
        ("ragpulse", isinstance(ids, dict)),
        ("bailian", ids is not None and "chat_id" in value),
        ("mooncake", ids is not None and any(name in value for name in PROMPT_TOKENS)),
        ("openai", isinstance(value.get("messages"), list)),
        ("tau-bench", isinstance(value.get("traj"), list)),
        ("swe-agent", isinstance(value.get("history"), list)),
        ("oasst", isinstance(value.get("prompt"), dict)),
        ("mt-bench", "question_id" in value and ("turns" in value or "choices" in value)),
    )
    return next((name for name, holds in checks if holds), None)
