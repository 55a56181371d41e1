"""What the simulator's questions give back: plain records, each with the definition of its numbers in a line.

A rate that a trace cannot give is None, never 0: a trace without prefix identity says nothing about hits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..traces.trace import TraceRequest


def rate(part: int | None, whole: int | None) -> float | None:
    """part / whole; None where one is unknown or there is nothing to divide by."""
    return None if part is None or not whole else part / whole


@dataclass(frozen=True)
class Replay:
    """What one cache did with one trace.

    trace, definition      the trace's name, and how the numbers were taken
    allocator, policy      as given; policy "optimal" is the offline optimum
    num_blocks             capacity; None: infinite
    block_size             tokens per block; None where the trace's blocks have no common size
    first_counted          index of the first request that the sums below count (0: cold)
    requests               requests counted
    total_blocks, hit_blocks, total_tokens, hit_tokens   sums over them; None where the trace has no prefix identity
                           (total_tokens is known all the same)
    evicted_blocks         over the whole replay, those before `first_counted` included
    seconds                wall time of the replay
    per_request_hit_blocks, per_request_hit_tokens       by index, of all requests
    """

    trace: str
    definition: str
    allocator: str
    policy: str
    num_blocks: int | None
    block_size: int | None
    first_counted: int
    requests: int
    total_blocks: int | None
    hit_blocks: int | None
    total_tokens: int
    hit_tokens: int | None
    evicted_blocks: int | None
    seconds: float
    per_request_hit_blocks: array[int] | None
    per_request_hit_tokens: array[int] | None

    @property
    def block_hit_rate(self) -> float | None:
        """hit_blocks / total_blocks."""
        return rate(self.hit_blocks, self.total_blocks)

    @property
    def token_hit_rate(self) -> float | None:
        """hit_tokens / total_tokens."""
        return rate(self.hit_tokens, self.total_tokens)

    def as_dict(self, per_request: bool = False) -> dict[str, Any]:
        """The record for JSON; per_request adds the hit blocks of each request."""
        result: dict[str, Any] = {
            "allocator": self.allocator,
            "policy": self.policy,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "first_counted": self.first_counted,
            "requests": self.requests,
            "total_blocks": self.total_blocks,
            "hit_blocks": self.hit_blocks,
            "block_hit_rate": self.block_hit_rate,
            "total_tokens": self.total_tokens,
            "hit_tokens": self.hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "evicted_blocks": self.evicted_blocks,
            "seconds": self.seconds,
            "definition": self.definition,
        }
        if per_request:
            hits = self.per_request_hit_blocks
            result["per_request_hit_blocks"] = None if hits is None else hits.tolist()
        return result


@dataclass(frozen=True)
class GroupHits:
    """Hits of the requests that have one value of something in common: a turn, a tenant.

    name, value    what they share, as in ("turn", 3)
    """

    name: str
    value: int | str
    definition: str
    requests: int
    total_tokens: int
    hit_tokens: int | None

    @property
    def token_hit_rate(self) -> float | None:
        """hit_tokens / total_tokens."""
        return rate(self.hit_tokens, self.total_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {
            self.name: self.value,
            "requests": self.requests,
            "total_tokens": self.total_tokens,
            "hit_tokens": self.hit_tokens,
            "token_hit_rate": self.token_hit_rate,
        }


def hits_by(
    name: str, value_of: Callable[[TraceRequest], int | str | None], requests: list[TraceRequest], replay: Replay
) -> list[GroupHits]:
    """A replay's hits by what `value_of` says of each counted request, in order; who has none is left out."""
    groups: dict[int | str, list[int]] = {}
    for index in range(replay.first_counted, len(requests)):
        value = value_of(requests[index])
        if value is not None:
            groups.setdefault(value, []).append(index)
    hits = replay.per_request_hit_tokens
    return [
        GroupHits(
            name,
            value,
            replay.definition,
            len(groups[value]),
            sum(requests[index].num_prompt_tokens for index in groups[value]),
            None if hits is None else sum(map(hits.__getitem__, groups[value])),
        )
        for value in sorted(groups, key=lambda value: (isinstance(value, str), value))
    ]


def hits_by_turn(requests: list[TraceRequest], replay: Replay) -> list[GroupHits]:
    """A replay's hits by the request's ordinal in its thread. The published numbers take an infinite cache, cold."""
    return hits_by("turn", lambda request: request.turn, requests, replay)


@dataclass(frozen=True)
class MissRatioCurve:
    """LRU at every capacity from 0 to the trace's distinct blocks, from one pass.

    hits, hit_tokens_at    by capacity; the last holds for all larger ones
    sampling_rate          1.0: exact; otherwise the share of threads that was replayed, whose distances were scaled up
    """

    trace: str
    definition: str
    block_size: int | None
    requests: int
    total_blocks: int
    total_tokens: int
    hits: array[int]
    hit_tokens_at: array[int]
    seconds: float
    sampling_rate: float = 1.0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks: from this capacity on nothing changes (estimated, if sampled)."""
        return round((len(self.hits) - 1) / self.sampling_rate)

    def hit_blocks(self, num_blocks: int | None) -> int:
        """Hit blocks with a capacity of `num_blocks` (None: infinite). If sampled, those of the sample."""
        return self.hits[self._index(num_blocks)]

    def hit_tokens(self, num_blocks: int | None) -> int:
        """Hit tokens with a capacity of `num_blocks` (None: infinite). If sampled, those of the sample."""
        return self.hit_tokens_at[self._index(num_blocks)]

    def block_hit_rate(self, num_blocks: int | None) -> float | None:
        """hit_blocks / total_blocks."""
        return rate(self.hit_blocks(num_blocks), self.total_blocks)

    def token_hit_rate(self, num_blocks: int | None) -> float | None:
        """hit_tokens / total_tokens."""
        return rate(self.hit_tokens(num_blocks), self.total_tokens)

    def miss_ratio(self, num_blocks: int | None) -> float | None:
        """1 - block hit rate."""
        hit_rate = self.block_hit_rate(num_blocks)
        return None if hit_rate is None else 1 - hit_rate

    def _index(self, num_blocks: int | None) -> int:
        # Rounded up: the few blocks that all requests begin with are in every sample, and need their room.
        last = len(self.hits) - 1
        return last if num_blocks is None else min(math.ceil(num_blocks * self.sampling_rate), last)

    def capacities(self, most: int = 50) -> list[int]:
        """Up to `most` capacities from 0 to `num_blocks`, the steps growing by a factor: the points of a plot."""
        last = self.num_blocks
        if last < most:
            return list(range(last + 1))
        return sorted({0, *(round(last ** (step / (most - 2))) for step in range(most - 1))})

    def as_dict(self, capacities: list[int] | None = None) -> dict[str, Any]:
        """The record for JSON, with the rates at the given capacities (default: `capacities()`)."""
        return {
            "trace": self.trace,
            "definition": self.definition,
            "block_size": self.block_size,
            "requests": self.requests,
            "total_blocks": self.total_blocks,
            "total_tokens": self.total_tokens,
            "sampling_rate": self.sampling_rate,
            "seconds": self.seconds,
            "points": [
                {
                    "num_blocks": num_blocks,
                    "miss_ratio": self.miss_ratio(num_blocks),
                    "block_hit_rate": self.block_hit_rate(num_blocks),
                    "token_hit_rate": self.token_hit_rate(num_blocks),
                }
                for num_blocks in (self.capacities() if capacities is None else capacities)
            ],
        }


@dataclass(frozen=True)
class CurveError:
    """How far a sampled curve is from the exact one, in miss ratio, over capacities that grow by a factor."""

    definition: str
    sampling_rate: float
    num_points: int
    mean: float
    largest: float
    largest_at: int

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {
            "sampling_rate": self.sampling_rate,
            "num_points": self.num_points,
            "mean_error": self.mean,
            "largest_error": self.largest,
            "largest_error_at": self.largest_at,
        }
