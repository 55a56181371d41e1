"""Dynamo request traces: one event a line, `{"timestamp", "event"}`, as a running server wrote them.

Requests are the events of the type `request_end`, so the lines are in order of finishing; they are sorted by
`request_received_ms`. Other events (tool calls) are passed over. Block hashes are unsigned 64-bit numbers. The server's
own count of cached tokens is kept, and the worker whose cache that was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import BadRow
from .rows import DenseIds, Row, as_object, assemble, check_num_ids, find, hash_ids, length, take, text
from .source import Source
from .trace import Trace


def read(source: Source) -> Trace:
    """The trace of one file."""
    reader = _Reader(source)
    rows = take(source, reader.rows())
    first_ms = min(row.key for row in rows)
    return assemble(
        source,
        (row._replace(arrival_s=(row.key - first_ms) / 1000, key=None) for row in rows),
        format="dynamo",
        definition=(
            "dynamo: by request_received_ms, from the first one on, file order on ties; one sequence hash a block of "
            f"{reader.block_size} tokens, the partial last one included; threads are sessions; workers as recorded"
        ),
        block_size=reader.block_size,
        counts_partial=True,
    )


class _Reader:
    """Rows in file order, with the time in ms as their key, and the block size that they agree on."""

    def __init__(self, source: Source) -> None:
        self.block_size: int | None = None
        self._source = source

    def rows(self) -> Iterator[Row]:
        """The requests that ended."""
        dense = DenseIds()
        for record in self._source.records(self._source.path):
            try:
                event = as_object(find(as_object(record.value), ("event",)))
                if find(event, ("event_type",)) != "request_end":
                    continue
                fields, ids = self._request(event)
            except BadRow as error:
                self._source.skip(self._source.path, record.line, str(error))
                continue
            yield fields._replace(units=dense.units(ids))

    def _request(self, event: dict[str, Any]) -> tuple[Row, list[Any]]:
        request = as_object(find(event, ("request",)))
        replay = as_object(find(request, ("replay",)))
        ids = hash_ids(replay, ("input_sequence_hashes",))
        block_size = length(replay, ("trace_block_size",))
        if block_size == 0 or (self.block_size is not None and block_size != self.block_size):
            raise BadRow(f"trace_block_size is {block_size}; the trace's is {self.block_size or 'not known yet'}")
        num_prompt_tokens = length(replay, ("input_length",))
        check_num_ids(ids, num_prompt_tokens, block_size, counts_partial=True)
        cached_tokens = length(request, ("cached_tokens",)) if request.get("cached_tokens") is not None else None
        if cached_tokens is not None and cached_tokens > num_prompt_tokens:
            raise BadRow(f"cached_tokens is {cached_tokens}, but the prompt has {num_prompt_tokens} tokens")
        row = Row(
            arrival_s=0.0,  # not known before the first one is
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=length(request, ("output_tokens",)),
            thread=text(_object_or_empty(event, "agent_context"), ("session_id",)),
            key=length(request, ("request_received_ms",)),
            cached_tokens=cached_tokens,
            worker=text(_object_or_empty(request, "worker"), ("prefill_worker_id",)),
        )
        self.block_size = block_size
        return row, ids


def _object_or_empty(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return {} if value is None else as_object(value)
