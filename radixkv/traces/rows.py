"""What the readers of all formats share: fields of a row, dense ids, and the last step from rows to a trace."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from .errors import BadRow, TraceError
from .source import Source
from .trace import Trace, TraceRequest, blocks_of

# Names under which the traces of different servers have the same thing; the first is the format's own.
PROMPT_TOKENS = ("input_length", "input_tokens", "prompt_tokens")
OUTPUT_TOKENS = ("output_length", "output_tokens", "completion_tokens")
HASH_IDS = ("hash_ids", "hashIds", "block_hashes")
TENANT = ("tenant", "tenant_id", "user_id", "user")

_LARGEST_LENGTH = 2**62  # keeps sums of lengths, and times made of them, finite


class Row(NamedTuple):
    """A request as its row has it, before all are sorted.

    key, parent_key   what the row calls itself, and the row that it continues. Where a format has no such names, `key`
                      is None and a request continues the one before it in its thread.
    turn              None: its ordinal in its thread, in arrival order
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    units: array[int] | None = None
    output_units: array[int] | None = None
    thread: str | None = None
    turn: int | None = None
    tenant: str | None = None
    key: Any = None
    parent_key: Any = None
    cached_tokens: int | None = None
    worker: str | None = None


class DenseIds(dict[Any, int]):
    """Numbers for hash ids in order of appearance. Looking up an id that is not there adds it.

    So a row costs one C loop, and a call from Python only for each id that is new.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, hash_id: Any) -> int:
        number = self[hash_id] = self._first + len(self)
        return number

    def units(self, hash_ids: Iterable[Any]) -> array[int]:
        """The numbers of the ids."""
        return array("I", map(self.__getitem__, hash_ids))


class Names:
    """Gives names that no two threads share: the second `a` becomes `a#2`."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # the number that a name had last

    def unique(self, name: str) -> str:
        """The name itself, or one with a number if it has been given before."""
        unique = name
        while unique in self._last:
            self._last[name] += 1
            unique = f"{name}#{self._last[name]}"
        self._last[unique] = 1
        return unique


# Fields -------------------------------------------------------------------------------------------------------------


def as_object(value: Any) -> dict[str, Any]:
    """The value, if it is a JSON object."""
    if not isinstance(value, dict):
        raise BadRow(f"expected an object, not {type_of(value)}")
    return value


def find(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value under the first of the names that the row has."""
    for name in names:
        if name in row:
            return row[name]
    others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
    raise BadRow(f"has no {names[0]}{others}")


def length(row: Mapping[str, Any], names: Sequence[str]) -> int:
    """A number of tokens, or another count."""
    value = find(row, names)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRow(f"{names[0]} must be an integer, not {value!r}")
    if not 0 <= value <= _LARGEST_LENGTH:
        raise BadRow(f"{names[0]} is {value}; allowed: 0 to 2**62")
    return value


def seconds(row: Mapping[str, Any], names: Sequence[str], unit_s: int = 1) -> float:
    """A time in seconds. `unit_s`: units of the file in a second."""
    value = find(row, names)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRow(f"{names[0]} must be a number, not {value!r}")
    try:
        time_s = value / unit_s
    except OverflowError:
        time_s = math.inf
    if not math.isfinite(time_s):
        raise BadRow(f"{names[0]} must be a finite number, not {value!r:.40}")
    return time_s


def text(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """A name, such as a session's or a tenant's; a number counts as its digits, null and a missing field as none."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise BadRow(f"{name} must be a text or an integer, not {type_of(value)}")
        return str(value)
    return None


def hash_ids(row: Mapping[str, Any], names: Sequence[str] = HASH_IDS) -> list[Any]:
    """The list of hash ids: integers of any size, or texts."""
    return checked_ids(find(row, names), names[0])


def checked_ids(ids: Any, name: str) -> list[Any]:
    """The value, if it is a list of integers or texts."""
    if not isinstance(ids, list):
        raise BadRow(f"{name} must be a list, not {type_of(ids)}")
    # One C loop. `True` and `1.0` equal 1 and would be taken for it.
    wrong = set(map(type, ids)) - {int, str}
    if wrong:
        raise BadRow(f"{name} must hold integers or texts, not {', '.join(sorted(kind.__name__ for kind in wrong))}")
    return ids


def check_num_ids(ids: Sequence[Any], num_tokens: int, block_size: int, counts_partial: bool) -> None:
    """Refuses a row whose ids are not one a block of its prompt."""
    needed = blocks_of(num_tokens, block_size, counts_partial)
    if len(ids) != needed:
        kind = "blocks" if counts_partial else "full blocks"
        raise BadRow(f"has {len(ids)} hash ids, but {num_tokens} tokens are {needed} {kind} of {block_size}")


def type_of(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# Rows to a trace ----------------------------------------------------------------------------------------------------


def take(source: Source, rows: Iterable[Row]) -> list[Row]:
    """The rows that are asked for, read one by one. Raises TraceError if there is none."""
    taken = list(islice(rows, source.limit))
    if not taken:
        skipped = f" ({source.num_skipped} bad rows were skipped)" if source.num_skipped else ""
        raise TraceError(source.path, None, f"holds no request{skipped}")
    return taken


def assemble(
    source: Source,
    rows: Iterable[Row],
    *,
    format: str,
    definition: str,
    block_size: int | None,
    counts_partial: bool,
    weights: array[int] | None = None,
    name: str | None = None,
) -> Trace:
    """The trace: rows sorted by arrival (stable), with each request's turn and parent. O(n log n)."""
    requests: list[TraceRequest] = []
    place: dict[Any, int] = {}  # the last request with this key, or of this thread
    num_turns: Counter[str] = Counter()
    for index, row in enumerate(sorted(rows, key=attrgetter("arrival_s"))):
        turn = row.turn
        if row.thread is not None:
            num_turns[row.thread] += 1
            turn = turn or num_turns[row.thread]
        # None is never a key, so a request without parent or thread continues none.
        parent = place.get(row.parent_key if row.key is not None else row.thread)
        own = row.key if row.key is not None else row.thread
        if own is not None:
            place[own] = index
        requests.append(
            TraceRequest(
                arrival_s=row.arrival_s,
                num_prompt_tokens=row.num_prompt_tokens,
                num_output_tokens=row.num_output_tokens,
                units=row.units,
                output_units=row.output_units,
                thread=row.thread,
                turn=turn,
                tenant=row.tenant,
                parent=parent,
                cached_tokens=row.cached_tokens,
                worker=row.worker,
            )
        )
    return Trace(
        name=source.name if name is None else name,
        format=format,
        requests=requests,
        block_size=block_size,
        weights=weights,
        counts_partial=counts_partial,
        num_skipped=source.num_skipped,
        definition=definition,
    )
