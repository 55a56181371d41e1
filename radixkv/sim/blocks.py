"""How a trace is seen in blocks: which units make a block, how many a request has, what a hit weighs in tokens.

A unit is what a trace gives an identity: a hash block of 512, 64 or 16 tokens, a segment of text, or a token. A block
is a whole number of units; by default one. Only whole blocks are cached, so where a block is one unit a partial last
one counts like any other, as the trace gives it an identity of its own; in larger blocks the rest of a prompt is in
none.

Knows nothing of caches and policies.
"""

from __future__ import annotations

from array import array

from ..arguments import at_least
from ..tokens import TOKEN_BYTES, pack
from ..traces.trace import Trace, TraceRequest

NO_UNITS = array("I")


class BlockView:
    """A trace in blocks of `block_size` tokens (None: one unit each).

    recompute_last   the last token of a prompt is always computed, so that a hit is at most length - 1 tokens. None:
                     as the engine does, for traces of tokens; not for traces of hashes, which name whole blocks.
    Raises ValueError for a block that is no whole number of units, and for units that have no common size.
    """

    def __init__(self, trace: Trace, block_size: int | None = None, recompute_last: bool | None = None) -> None:
        self.trace = trace
        self.has_tokens = trace.block_size == 1
        self.recompute_last = self.has_tokens if recompute_last is None else recompute_last
        self.block_size = trace.block_size if block_size is None else at_least(1, block_size, "block_size")
        self.units_per_block = 1
        if block_size is not None:
            if trace.block_size is None:
                raise ValueError(
                    f"block_size is {block_size}; {trace.name} has no blocks of one size, so allowed: None"
                )
            if block_size % trace.block_size:
                raise ValueError(f"block_size is {block_size}; allowed: multiples of {trace.block_size}")
            self.units_per_block = block_size // trace.block_size

    def units(self, request: TraceRequest) -> array[int]:
        """The prompt's units; none where the trace has no prefix identity."""
        return NO_UNITS if request.units is None else request.units

    def num_blocks(self, request: TraceRequest) -> int:
        """Blocks of the prompt, a last one that is not full included."""
        return -(-len(self.units(request)) // self.units_per_block)

    def num_full_blocks(self, request: TraceRequest) -> int:
        """Blocks of the prompt that can be cached."""
        return len(self.units(request)) // self.units_per_block

    def hit_limit(self, request: TraceRequest) -> int:
        """Units of the prompt that a hit can have at most."""
        num_units = len(self.units(request))
        return max(num_units - 1, 0) if self.has_tokens and self.recompute_last else num_units

    def packed_blocks(self, request: TraceRequest) -> bytes:
        """The full blocks' units, packed as `TokenKey` packs them. O(units)."""
        num_bytes = self.num_full_blocks(request) * self.units_per_block * TOKEN_BYTES
        return pack(self.units(request))[:num_bytes]

    def hit_tokens(self, request: TraceRequest, num_units: int) -> int:
        """Tokens in the first `num_units` units of the prompt: all that a hit of so many saves."""
        tokens = self._tokens(request, num_units)
        return min(tokens, max(request.num_prompt_tokens - 1, 0)) if self.recompute_last else tokens

    def _tokens(self, request: TraceRequest, num_units: int) -> int:
        if self.trace.weights is not None:
            return sum(map(self.trace.weights.__getitem__, self.units(request)[:num_units]))
        assert self.trace.block_size is not None, "a trace with units has a block size or weights"
        return min(num_units * self.trace.block_size, request.num_prompt_tokens)

    def describe(self) -> str:
        """How blocks and tokens are counted, in a few words."""
        if self.block_size is None:
            size = "blocks as the trace gives them"
        elif self.block_size == 1:
            size = "blocks of one token"
        else:
            size = f"blocks of {self.block_size} tokens"
        if self.units_per_block > 1:
            size += ", full ones only"
        elif self.block_size != 1 and self.trace.counts_partial:
            size += ", a partial last one counts one"
        return size + (", last token recomputed" if self.recompute_last else "")


def first_counted(trace: Trace, warmup: float) -> int:
    """Index of the first request that counts: floor(N * warmup). Raises ValueError for what is no share."""
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup is {warmup}; allowed: 0 to 1, a share of the requests")
    return int(len(trace.requests) * warmup)


def describe_counted(warmup: float) -> str:
    """Which requests count, in a few words."""
    return f"warm: requests from floor({warmup:g} N) on are counted" if warmup else "cold: every request is counted"


def known_outputs(trace: Trace) -> list[array[int]]:
    """The units that each request's output adds behind its full prompt units; empty where nobody knows them.

    Texts and generated traces give the output's tokens. A trace of hashes gives them only in hindsight: where the next
    request of the same thread begins with this one's full blocks, what follows there, up to the last block that prompt
    and output fill, is this request's output.
    """
    outputs = [NO_UNITS] * len(trace.requests)
    if trace.block_size is None:
        return outputs
    latest: dict[str, int] = {}
    for index, request in enumerate(trace.requests):
        if request.output_units is not None:
            outputs[index] = request.output_units
            continue
        if request.thread is None or request.units is None:
            continue
        before = latest.get(request.thread)
        latest[request.thread] = index
        if before is not None:
            outputs[before] = _output_in_hindsight(trace.requests[before], request, trace.block_size)
    return outputs


def num_full_units(request: TraceRequest, unit_tokens: int) -> int:
    """Units of the prompt that are full: all, but for a partial last one."""
    return 0 if request.units is None else min(len(request.units), request.num_prompt_tokens // unit_tokens)


def _output_in_hindsight(request: TraceRequest, following: TraceRequest, unit_tokens: int) -> array[int]:
    assert request.units is not None and following.units is not None
    start = num_full_units(request, unit_tokens)
    stop = min(
        (request.num_prompt_tokens + request.num_output_tokens) // unit_tokens, num_full_units(following, unit_tokens)
    )
    if start >= stop or following.units[:start] != request.units[:start]:
        return NO_UNITS
    return following.units[start:stop]
