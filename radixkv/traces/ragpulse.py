"""RAGPulse: a week of a question-answering service, its prompts as segments of five kinds.

`0_trace.jsonl` has `timestamp` (s, a text), lengths, `session_id`, and `hash_ids`, an object of lists by kind. Five
files beside it give the `token_length` of each id; no id is of two kinds. A unit is a segment, and weighs its length.
Ids are not chained: the same segment stands at many places, and may stand twice in a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadRow, TraceError
from .rows import DenseIds, Row, as_object, assemble, checked_ids, find, length, seconds, take, text
from .source import Source
from .trace import Trace

TRACE_FILE = "0_trace.jsonl"
# Kinds of segments in the order that they have in a prompt, with the file and the key of their lengths.
SEGMENTS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}


def read(source: Source) -> Trace:
    """The trace of a folder, or of the file `0_trace.jsonl` with the others beside it."""
    folder = source.path if source.path.is_dir() else source.path.parent
    trace_file = _either(folder, TRACE_FILE) if source.path.is_dir() else source.path
    num_tokens = _lengths(source, folder)
    dense = DenseIds()
    rows = take(source, _rows(source, trace_file, num_tokens, dense))
    return assemble(
        source,
        rows,
        format="ragpulse",
        definition=(
            "RAGPulse: by timestamp, file order on ties; a prompt is its segments in the order "
            f"{', '.join(SEGMENTS)}, each weighing its token_length; threads are sessions"
        ),
        block_size=None,
        counts_partial=True,
        weights=array("I", map(num_tokens.__getitem__, dense)),
    )


def _rows(source: Source, path: Path, num_tokens: dict[Any, int], dense: DenseIds) -> Iterator[Row]:
    for record in source.records(path):
        try:
            row = as_object(record.value)
            ids = _segments(find(row, ("hash_ids",)))
            unknown = next((hash_id for hash_id in ids if hash_id not in num_tokens), None)
            if unknown is not None:
                raise BadRow(f"the segment {unknown!r} has no token_length in the files beside the trace")
            num_prompt_tokens = length(row, ("input_length",))
            num_segment_tokens = sum(map(num_tokens.__getitem__, ids))
            if num_segment_tokens > num_prompt_tokens:
                raise BadRow(f"input_length is {num_prompt_tokens}, but the segments have {num_segment_tokens} tokens")
            fields = Row(
                arrival_s=_time(row),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=length(row, ("output_length",)),
                thread=text(row, ("session_id",)),
            )
        except BadRow as error:
            source.skip(path, record.line, str(error))
            continue
        yield fields._replace(units=dense.units(ids))


def _segments(by_kind: Any) -> list[Any]:
    """The ids of a prompt in the order of its segments."""
    by_kind = as_object(by_kind)
    if by_kind.keys() != SEGMENTS.keys():
        raise BadRow(f"hash_ids must have the kinds {', '.join(SEGMENTS)}, not {', '.join(by_kind) or 'none'}")
    ids: list[Any] = []
    for kind in SEGMENTS:
        ids += checked_ids(by_kind[kind], kind)
    return ids


def _time(row: dict[str, Any]) -> float:
    value = find(row, ("timestamp",))
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise BadRow(f"timestamp must be a number, not {value!r}") from None
    return seconds({"timestamp": value}, ("timestamp",))


def _lengths(source: Source, folder: Path) -> dict[Any, int]:
    """Tokens of each segment id, of all kinds."""
    num_tokens: dict[Any, int] = {}
    for file, key in SEGMENTS.values():
        path = _either(folder, file)
        for record in source.records(path):
            try:
                row = as_object(record.value)
                (segment,) = checked_ids([find(row, (key,))], key)
                weight = length(row, ("token_length",))
                if weight > 2**32 - 1:
                    raise BadRow(f"token_length is {weight}; allowed: less than 2**32")
                if num_tokens.setdefault(segment, weight) != weight:
                    raise BadRow(f"{key} {segment!r} has {weight} tokens here and {num_tokens[segment]} above")
            except BadRow as error:
                source.skip(path, record.line, str(error))
    return num_tokens


def _either(folder: Path, name: str) -> Path:
    """The file in the folder, packed or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise TraceError(folder, None, f"a RAGPulse trace needs the file {name} (or {name}.gz) here")
