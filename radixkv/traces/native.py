"""Our own format, which holds whatever a `Trace` holds: JSON lines, the first of them about the trace.

    {"format": "radixkv", "version": 1, "name": "chats", "block_size": 1, "counts_partial": true, "definition": "…"}
    {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 2, "units": [7, 8, 9, 4, 4], "output": [5, 6]}
    {"arrival_s": 2.5, "prompt_tokens": 9, "output_tokens": 1, "after": 2, "keep": 7, "units": [1, 2]}

A prompt mostly starts as an earlier one did, so a row may say: the first `keep` units of the prompt and output on the
line `after`, then `units`. `parent` is the line of the request that this one continues. Fields that are null are left
out; without `units` there is no prefix identity. With `weights` in the first line (tokens of each unit) there is no
`block_size`.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from radixkv.tokens import TOKEN_BYTES, common_prefix, pack

from .errors import BadRow, TraceError
from .rows import Row, as_object, assemble, check_num_ids, length, seconds, take, text, type_of
from .source import Record, Source
from .trace import Trace

NAME = "radixkv"
VERSION = 1
_KEY_UNITS = 16  # prompts that agree in so many units are worth comparing


def write(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes the trace; packed if the name ends in `.gz`, with the same bytes each time."""
    path = Path(path)
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                packed.writelines(_lines(trace))
        else:
            raw.writelines(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    header = {
        "format": NAME,
        "version": VERSION,
        "name": trace.name,
        "block_size": trace.block_size,
        "weights": None if trace.weights is None else trace.weights.tolist(),
        "counts_partial": trace.counts_partial,
        "definition": trace.definition,
    }
    yield _json_line(header)
    sequences: list[bytes] = []  # prompt and output of each request, packed
    latest: dict[bytes, int] = {}  # the last request that starts with these units
    for index, request in enumerate(trace.requests):
        row: dict[str, Any] = {
            "arrival_s": request.arrival_s,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
        }
        if request.units is not None:
            prompt = pack(request.units)
            start = prompt[: _KEY_UNITS * TOKEN_BYTES]
            keep, after = max(
                (
                    (common_prefix(sequences[other], prompt, 0, len(prompt)), other)
                    for other in {request.parent, latest.get(start)} - {None}
                    if other is not None
                ),
                default=(0, 0),
            )
            if keep:
                row |= {"after": after + 2, "keep": keep}  # requests start on line 2
            row["units"] = request.units[keep:].tolist()
            latest[start] = index
            sequences.append(prompt + pack(request.output_units or ()))
        row |= {
            "output": None if request.output_units is None else request.output_units.tolist(),
            "thread": request.thread,
            "turn": request.turn,
            "tenant": request.tenant,
            "parent": None if request.parent is None else request.parent + 2,
            "cached_tokens": request.cached_tokens,
            "worker": request.worker,
        }
        yield _json_line(row)


def _json_line(fields: dict[str, Any]) -> bytes:
    """The fields that are not None. Plain ASCII, so that any text goes through."""
    present = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(present, separators=(",", ":")).encode("ascii") + b"\n"


def read(source: Source) -> Trace:
    """The trace of one file."""
    records = source.records(source.path)
    header = next(records, None)
    if header is None:
        raise TraceError(source.path, None, "is empty")
    try:
        fields = _Header(as_object(header.value))
    except BadRow as error:
        raise TraceError(source.path, header.line, str(error)) from None
    return assemble(
        source,
        take(source, _rows(source, records, fields)),
        format=NAME,
        definition=fields.definition,
        block_size=fields.block_size,
        counts_partial=fields.counts_partial,
        weights=fields.weights,
        name=fields.name,
    )


class _Header:
    """What the first line says."""

    def __init__(self, header: dict[str, Any]) -> None:
        if header.get("format") != NAME or header.get("version") != VERSION:
            raise BadRow(f"the first line must have format {NAME!r} and version {VERSION}")
        self.name = text(header, ("name",)) or NAME
        self.definition = text(header, ("definition",)) or "radixkv: by arrival_s, file order on ties"
        self.block_size = length(header, ("block_size",)) if "block_size" in header else None
        if self.block_size == 0:
            raise BadRow("block_size is 0; allowed: 1 and more")
        self.counts_partial = bool(header.get("counts_partial", True))
        self.weights = _units(header["weights"], "weights") if "weights" in header else None

    def check(self, units: array[int], num_prompt_tokens: int) -> None:
        """Refuses a prompt whose units do not make its length."""
        if self.weights is not None:
            if len(units) and max(units) >= len(self.weights):
                raise BadRow(f"unit {max(units)} has no weight; there are {len(self.weights)}")
            num_tokens = sum(map(self.weights.__getitem__, units))
            if num_tokens > num_prompt_tokens:
                raise BadRow(f"prompt_tokens is {num_prompt_tokens}, but the units weigh {num_tokens}")
        elif self.block_size is None:
            raise BadRow("has units, but the first line has neither block_size nor weights")
        else:
            check_num_ids(units, num_prompt_tokens, self.block_size, self.counts_partial)


def _rows(source: Source, records: Iterator[Record], header: _Header) -> Iterator[Row]:
    sequences: dict[int, array[int]] = {}  # prompt and output by line
    for record in records:
        try:
            row = as_object(record.value)
            num_prompt_tokens = length(row, ("prompt_tokens",))
            units = None
            if "units" in row:
                units = _start(row, sequences) + _units(row["units"], "units")
                header.check(units, num_prompt_tokens)
            num_output_tokens = length(row, ("output_tokens",))
            output_units = _units(row["output"], "output") if "output" in row else None
            if output_units is not None and len(output_units) != num_output_tokens:
                raise BadRow(f"output has {len(output_units)} tokens, but output_tokens is {num_output_tokens}")
            parsed = Row(
                arrival_s=seconds(row, ("arrival_s",)),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                units=units,
                output_units=output_units,
                thread=text(row, ("thread",)),
                turn=length(row, ("turn",)) if "turn" in row else None,
                tenant=text(row, ("tenant",)),
                key=record.line,
                parent_key=length(row, ("parent",)) if "parent" in row else None,
                cached_tokens=length(row, ("cached_tokens",)) if "cached_tokens" in row else None,
                worker=text(row, ("worker",)),
            )
        except BadRow as error:
            source.skip(source.path, record.line, str(error))
            continue
        if units is not None:
            sequences[record.line] = units if output_units is None else units + output_units
        yield parsed


def _start(row: dict[str, Any], sequences: dict[int, array[int]]) -> array[int]:
    """The units that a row takes from an earlier one."""
    if "after" not in row:
        return array("I")
    after, keep = length(row, ("after",)), length(row, ("keep",))
    if after not in sequences:
        raise BadRow(f"after is {after}; there is no earlier request with units on that line")
    if keep > len(sequences[after]):
        raise BadRow(f"keep is {keep}, but line {after} has {len(sequences[after])} units")
    return sequences[after][:keep]


def _units(value: Any, name: str) -> array[int]:
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list, not {type_of(value)}")
    if set(map(type, value)) - {int}:
        raise BadRow(f"{name} must hold integers only")
    try:
        return array("I", value)
    except OverflowError:
        raise BadRow(f"{name} must be at least 0 and less than 2**32") from None
