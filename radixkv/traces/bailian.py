"""Qwen-Bailian JSON lines: `timestamp` (s), `chat_id`, `parent_chat_id` (-1 at a root), `turn`, 16-token blocks.

Each request has a chat id of its own and names the one that it continues, so a conversation is a tree of them; its
thread is called after the root. A parent that is not among the earlier requests (a trace is a window of time) still
names the thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from .errors import BadRow
from .rows import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TENANT,
    DenseIds,
    Row,
    as_object,
    assemble,
    check_num_ids,
    hash_ids,
    length,
    seconds,
    take,
    text,
)
from .source import Source
from .trace import Trace

BLOCK_SIZE = 16
ROOT = "-1"


def read(source: Source) -> Trace:
    """The trace of one file."""
    block_size = source.block_size or BLOCK_SIZE
    return assemble(
        source,
        _with_threads(take(source, _rows(source, block_size))),
        format="bailian",
        definition=(
            f"Bailian: by timestamp, file order on ties; one hash id a block of {block_size} tokens, the partial last "
            "one included; threads follow parent_chat_id, turns are the file's"
        ),
        block_size=block_size,
        counts_partial=True,
    )


def _rows(source: Source, block_size: int) -> Iterator[Row]:
    dense = DenseIds()
    for record in source.records(source.path):
        try:
            row = as_object(record.value)
            ids = hash_ids(row)
            num_prompt_tokens = length(row, PROMPT_TOKENS)
            check_num_ids(ids, num_prompt_tokens, block_size, counts_partial=True)
            chat_id, parent_id = text(row, ("chat_id",)), text(row, ("parent_chat_id",))
            if chat_id is None:
                raise BadRow("has no chat_id")
            turn = length(row, ("turn",)) if row.get("turn") is not None else None
            if turn == 0:
                raise BadRow("turn is 0; allowed: 1 and more")
            fields = Row(
                arrival_s=seconds(row, ("timestamp",)),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=length(row, OUTPUT_TOKENS),
                turn=turn,
                tenant=text(row, TENANT),
                key=chat_id,
                parent_key=None if parent_id == ROOT else parent_id,
            )
        except BadRow as error:
            source.skip(source.path, record.line, str(error))
            continue
        yield fields._replace(units=dense.units(ids))


def _with_threads(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows in arrival order, each with the thread of its parent, or one called after itself."""
    threads: dict[str, str] = {}
    for row in sorted(rows, key=attrgetter("arrival_s")):
        root = row.key if row.parent_key is None else threads.get(row.parent_key, row.parent_key)
        threads[row.key] = root
        yield row._replace(thread=root)
