"""Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

The last block is counted though it is partial. Servers that write such traces name the fields differently; `rows` and
`TIME_MS` have the names that are understood. A row may also have a `session_id` (or `conversation_id`), which then is
its thread, and a tenant.
"""

from __future__ import annotations

from collections.abc import Iterator

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

BLOCK_SIZE = 512
TIME_MS = ("timestamp", "timestamp_ms", "arrival_ms")
SESSION = ("session_id", "conversation_id")


def read(source: Source) -> Trace:
    """The trace of one file."""
    block_size = source.block_size or BLOCK_SIZE
    return assemble(
        source,
        take(source, _rows(source, block_size)),
        format="mooncake",
        definition=(
            f"Mooncake: by timestamp, file order on ties; one hash id a block of {block_size} tokens, "
            "the partial last one included"
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
            fields = Row(
                arrival_s=seconds(row, TIME_MS, unit_s=1000),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=length(row, OUTPUT_TOKENS),
                thread=text(row, SESSION),
                tenant=text(row, TENANT),
            )
        except BadRow as error:
            source.skip(source.path, record.line, str(error))
            continue
        # Only rows that are kept may number ids.
        yield fields._replace(units=dense.units(ids))
