"""A trace: requests in arrival order, each with its lengths and, where the format tells, the identity of its prompt.

Identity comes in *units*. In a hash trace a unit stands for a block, in a text or token trace for a token. Hash ids are
made dense: the n-th distinct id in the file gets n, counted from 0, so ids of any size fit 32 bits.

A unit means the *path* up to it. Where a file repeats an id within a row, or puts it behind another one than before,
these are different blocks that happen to have the same name.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    units           identities of the prompt's blocks or tokens, unsigned 32-bit; None where the format has none
    output_units    tokens of the output, where they are known
    thread, turn    the conversation, and the request's ordinal in it, from 1; None where the format has none
    parent          index of the earlier request that this one continues, if the format says so
    cached_tokens   prompt tokens that the server which recorded the trace took from its cache
    worker          the server's worker that ran the prompt
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    units: array[int] | None
    output_units: array[int] | None
    thread: str | None
    turn: int | None
    tenant: str | None
    parent: int | None = None
    cached_tokens: int | None = None
    worker: str | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in arrival order, in file order where they arrive together.

    block_size       tokens that a unit stands for: 1 for texts and token traces; None where `weights` tell, or where
                     there are no units
    weights          tokens of each unit, indexed by unit (RAGPulse)
    counts_partial   a partial last block has a unit of its own (Mooncake), or not (agent sessions)
    num_skipped      bad rows that were passed over
    definition       one line on how order, identity and lengths were taken
    """

    name: str
    format: str
    requests: list[TraceRequest]
    block_size: int | None
    weights: array[int] | None
    counts_partial: bool
    num_skipped: int
    definition: str

    @property
    def has_prefixes(self) -> bool:
        """Whether the trace tells which prompts start alike; without that no hit rate can be given."""
        return bool(self.requests) and self.requests[0].units is not None

    @cached_property
    def num_units(self) -> int:
        """Distinct units among all prompts. O(units) once."""
        distinct: set[int] = set()
        for request in self.requests:
            if request.units is not None:
                distinct.update(request.units)
        return len(distinct)

    def unit_tokens(self, request: TraceRequest, j: int) -> int:
        """Tokens that unit `j` of a request's prompt stands for: min(B, length - j·B), or the unit's weight."""
        if request.units is None:
            raise ValueError(f"a trace of the format {self.format!r} has no units")
        unit = request.units[j]
        if self.weights is not None:
            return self.weights[unit]
        assert self.block_size is not None
        return min(self.block_size, request.num_prompt_tokens - range(len(request.units))[j] * self.block_size)

    def round_robin(self) -> Trace:
        """The same requests in another order: request 1 of every thread, then request 2, and so on.

        Raises ValueError for a trace without threads, and for one whose arrival times say what the order is.
        """
        if any(request.turn is None for request in self.requests):
            raise ValueError(f"the trace {self.name!r} ({self.format}) has no threads to take in turn")
        if len({request.arrival_s for request in self.requests}) > 1:
            raise ValueError(f"the trace {self.name!r} ({self.format}) has arrival times, which give the order")
        order = sorted(range(len(self.requests)), key=lambda index: self.requests[index].turn or 0)
        place = {old: new for new, old in enumerate(order)}
        requests = [
            replace(request, parent=None if request.parent is None else place[request.parent])
            for request in map(self.requests.__getitem__, order)
        ]
        return replace(self, requests=requests, definition=f"{self.definition}; round-robin over the threads")

    def check(self) -> None:
        """Asserts what every trace keeps to. O(requests), and O(units) where there are weights."""
        arrivals = list(map(attrgetter("arrival_s"), self.requests))
        assert arrivals == sorted(arrivals), f"{self.name}: requests are not in arrival order"
        for index, request in enumerate(self.requests):
            # The messages are made on failure only: the units of a long prompt take a while to print.
            units, num_tokens = request.units, request.num_prompt_tokens
            assert num_tokens >= 0 and request.num_output_tokens >= 0, f"{self._show(index)} has a negative length"
            assert request.parent is None or 0 <= request.parent < index, (
                f"{self._show(index)} continues no earlier request"
            )
            assert request.output_units is None or len(request.output_units) == request.num_output_tokens, (
                f"{self._show(index)} has output units that are not one a token"
            )
            assert (units is not None) == self.has_prefixes, (
                f"{self._show(index)} has units, or none, unlike the first one"
            )
            if units is None:
                continue
            if self.weights is not None:
                num_unit_tokens = sum(map(self.weights.__getitem__, units))
                assert num_unit_tokens <= num_tokens, f"{self._show(index)} has units of {num_unit_tokens} tokens"
            else:
                assert self.block_size is not None, f"{self.name} has neither a block size nor weights"
                num_blocks = blocks_of(num_tokens, self.block_size, self.counts_partial)
                assert len(units) == num_blocks, f"{self._show(index)} should have {num_blocks} units"

    def _show(self, index: int) -> str:
        return f"{self.name}, request {index}, {self.requests[index]},"


def blocks_of(num_tokens: int, block_size: int, counts_partial: bool) -> int:
    """Blocks of a sequence: with the partial last one, or full ones only."""
    return -(-num_tokens // block_size) if counts_partial else num_tokens // block_size
