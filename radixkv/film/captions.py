"""What a step was, in words: its kinds, and a sentence or two for people. Draws nothing, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cache import Allocation
from ..render.svg import count, name_of, quoted
from ..tokens import normalize_namespace
from ..tree import Match
from .changes import Changes
from .meters import Meters

# In the order in which they happen within a call; the page gives each a colour.
KINDS = ("start", "match", "split", "evict", "allocate", "append", "copy", "commit", "fork", "free", "merge", "reset")


@dataclass(frozen=True)
class Call:
    """One call that changed a cache: what was asked, what was given back, and the counts around it.

    subject   the first argument: a request's id, a number of blocks or a namespace, as the method has it
    more      the second argument, if there is one
    appended  tokens that the request was given since the step before
    """

    name: str
    subject: Any
    more: Any
    result: Any
    before: Meters
    after: Meters
    changes: Changes
    appended: int = 0

    def gained(self, meter: str) -> int:
        """By how much a meter went up."""
        gained: int = getattr(self.after, meter) - getattr(self.before, meter)
        return gained


def start(meters: Meters, num_blocks: int, block_size: int) -> str:
    """The sentence under a film's first picture."""
    cached = f"{count(meters.cached, 'block')} cached" if meters.cached else "empty"
    return f"The cache as it is: {cached}. Its pool has {count(num_blocks, 'block')} of {count(block_size, 'token')}."


def match(request_id: str | int, num_tokens: int, found: Match, block_size: int) -> str:
    """The sentence for a prompt that hits."""
    num_shared = len(found.blocks)
    num_cached = num_shared * block_size + found.partial_tokens
    parts = [f"{count(num_shared, 'block')} to share"] if num_shared else []
    if found.partial_tokens:
        parts.append(f"{count(found.partial_tokens, 'token')} to copy out of block {found.partial_block}")
    return (
        f"Request {quoted(request_id)} matches {num_cached} of its {count(num_tokens, 'token')}: {' and '.join(parts)}."
    )


def tell(call: Call) -> tuple[tuple[str, ...], list[str]]:
    """Kinds and sentences for a call that changed something."""
    own_kind, own_sentence = _OWN[call.name](call)
    found: dict[str, str | None] = {own_kind: own_sentence} if own_kind else {}
    changes = call.changes
    if call.name == "allocate":  # an allocation adds no tokens to the tree, so whatever is new there is part of a split
        num_split = len(changes.split | changes.added)
    else:
        num_split = len(changes.split)
    if num_split:
        found["split"] = f"{count(num_split, 'node')} split where the path ends, so that the rest can go on its own."
    evicted = call.gained("evicted_blocks")
    if evicted:
        whole = [f"{count(len(changes.gone), 'node')} gone"] if changes.gone else []
        part = [f"{count(len(changes.trimmed), 'node')} trimmed from the end"] if changes.trimmed else []
        found["evict"] = f"{count(evicted, 'block')} evicted, what the policy values least: {', '.join(whole + part)}."
    if call.gained("cow_copies"):
        found["copy"] = (
            f"Request {quoted(call.subject)} gets its own copy of a block that others read too, before it writes."
        )
    if changes.merged:
        found["merge"] = f"{count(len(changes.merged), 'split')} undone: nothing ends there any more."
    kinds = tuple(kind for kind in KINDS if kind in found)
    return kinds, [sentence for kind in kinds if (sentence := found[kind])]


# One function a call: the kind of the step, and its sentence ----------------------------------------------------------


def _allocate(call: Call) -> tuple[str, str]:
    given: Allocation = call.result
    shared = "all new"
    if given.num_shared_blocks:
        shared = f"{given.num_shared_blocks} shared and {given.num_new_blocks} new"
    num_blocks = count(given.num_shared_blocks + given.num_new_blocks, "block")
    to_compute = count(call.more - given.num_cached_tokens, "prompt token")
    return "allocate", f"Request {quoted(call.subject)} gets {num_blocks}, {shared}; {to_compute} to compute."


def _append(call: Call) -> tuple[str, str]:
    is_new_block = call.after.private > call.before.private and not call.gained("cow_copies")
    tokens = "a token" if call.appended <= 1 else count(call.appended, "token")
    return (
        "append",
        f"Request {quoted(call.subject)} appends {tokens}{', and takes a new block' if is_new_block else ''}.",
    )


def _commit(call: Call) -> tuple[str, str]:
    new = call.gained("committed_blocks")
    parts = [f"{count(new, 'block')} can be found from now on"] if new else []
    if call.gained("free"):
        parts.append(f"{count(call.gained('free'), 'block')} given back, since the tree has their tokens")
    appended = f", {call.appended:,} of them new" if call.appended > 1 else ""
    what = "; ".join(parts) or "its path is protected"
    return "commit", f"Request {quoted(call.subject)} has computed {count(call.more, 'token')}{appended}: {what}."


def _fork(call: Call) -> tuple[str, str]:
    return "fork", f"Request {quoted(call.more)} goes on from request {quoted(call.subject)} and shares all its blocks."


def _write(call: Call) -> tuple[str, str]:
    return "", ""  # the copy says it all


def _free(call: Call) -> tuple[str, str]:
    freed = call.gained("free")
    kept = call.after.cached - call.before.cached
    parts = ["what it committed stays cached"]
    if kept > 0:
        parts.append("its partly filled last block too")
    if freed > 0:
        parts.append(f"{count(freed, 'block')} free at once")
    return "free", f"Request {quoted(call.subject)} ends: {', '.join(parts)}."


def _evict(call: Call) -> tuple[str, str]:
    return "evict", ""  # told with the numbers that every eviction has


def _reset(call: Call) -> tuple[str, str]:
    return "reset", f"The cache is emptied: {count(call.gained('free'), 'block')} free again."


def _drop_namespace(call: Call) -> tuple[str, str]:
    name = name_of(normalize_namespace(call.subject))
    return "reset", f"Namespace {name} is dropped: {count(call.gained('free'), 'block')} free again."


_OWN = {
    "allocate": _allocate,
    "append_token": _append,
    "commit": _commit,
    "fork": _fork,
    "write": _write,
    "free": _free,
    "evict": _evict,
    "reset": _reset,
    "drop_namespace": _drop_namespace,
}
