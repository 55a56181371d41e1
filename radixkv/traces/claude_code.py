"""Coding-agent sessions: one JSON object a session, one a line or one a file, with 64-token blocks.

Only full blocks have ids, and these mean something within their session only. A session has no start time; the one on
line k (from 0) starts at 60·k s. A request of type "subagent" holds requests of its own, whose times count from its
start; they share the session's ids and are a thread of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadRow
from .rows import DenseIds, Names, Row, as_object, assemble, check_num_ids, hash_ids, length, seconds, take, text
from .source import Record, Source
from .trace import Trace

SUFFIXES = (".json", ".jsonl")
SESSION_GAP_S = 60  # a choice that the files leave open; the same one everywhere makes results comparable
_SCOPES = (None, "local")


def read(source: Source) -> Trace:
    """The trace of a file, or of a folder with one session a file, in name order."""
    reader = _Reader(source)
    rows = take(source, reader.rows())
    assert reader.block_size is not None
    return assemble(
        source,
        rows,
        format="claude-code",
        definition=(
            f"agent sessions: session k starts at {SESSION_GAP_S}·k s, by time, then session, then listing; identity "
            f"is (session, hash id), full blocks of {reader.block_size} tokens only; a sub-agent is its own thread"
        ),
        block_size=reader.block_size,
        counts_partial=False,
    )


class _Reader:
    """Rows of all sessions in file order, and the block size that they agree on."""

    def __init__(self, source: Source) -> None:
        self.block_size: int | None = None
        self._source = source
        self._names = Names()
        self._num_ids = 0  # dense ids of the sessions before

    def rows(self) -> Iterator[Row]:
        """The requests of all sessions."""
        num_sessions = 0
        for path in self._source.files(*SUFFIXES):
            last = 0
            for record in self._source.records(path):
                last = record.number
                yield from self._session(path, record, num_sessions + record.number)
            num_sessions += last + 1

    def _session(self, path: Path, record: Record, number: int) -> Iterator[Row]:
        try:
            session = as_object(record.value)
            scope = session.get("hash_id_scope")
            if scope not in _SCOPES:
                raise BadRow(f"hash_id_scope is {scope!r}; only 'local' is understood")
            requests = _listed(session)
            block_size = length(session, ("block_size",))
            if block_size == 0 or (self.block_size is not None and block_size != self.block_size):
                raise BadRow(f"block_size is {block_size}; the trace's is {self.block_size or 'not known yet'}")
            name = text(session, ("id",)) or f"session-{number}"
        except BadRow as error:
            self._source.skip(path, record.line, str(error))
            return
        self.block_size = block_size
        dense = DenseIds(first=self._num_ids)
        start_s = float(SESSION_GAP_S * number)
        yield from self._requests(path, record.line, requests, start_s, self._names.unique(name), dense, "request")
        self._num_ids += len(dense)

    def _requests(
        self, path: Path, line: int, requests: list[Any], start_s: float, thread: str, dense: DenseIds, where: str
    ) -> Iterator[Row]:
        """The requests of a session or of a sub-agent in order of listing, those of sub-agents where these stand."""
        assert self.block_size is not None
        for index, value in enumerate(requests):
            try:
                request = as_object(value)
                # 60·k + subagent.t + request.t, added from the left: ties are told by the last bit.
                arrival_s = start_s + seconds(request, ("t",))
                if request.get("type") == "subagent":
                    nested = _listed(request)
                    name = f"{thread}/{text(request, ('agent_id',)) or index}"
                else:
                    ids = hash_ids(request)
                    num_prompt_tokens = length(request, ("in",))
                    check_num_ids(ids, num_prompt_tokens, self.block_size, counts_partial=False)
                    fields = Row(arrival_s, num_prompt_tokens, length(request, ("out",)), thread=thread)
            except BadRow as error:
                self._source.skip(path, line, f"{where} {index}: {error}")
                continue
            if request.get("type") == "subagent":
                unique = self._names.unique(name)
                yield from self._requests(path, line, nested, arrival_s, unique, dense, f"{where} {index}, request")
            else:
                yield fields._replace(units=dense.units(ids))


def _listed(holder: dict[str, Any]) -> list[Any]:
    requests = holder.get("requests")
    if not isinstance(requests, list):
        raise BadRow("has no list of requests")
    return requests
