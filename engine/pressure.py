"""A trace through the real scheduler, on a clock of its own: what preemption wastes by policy. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from radixkv import PrefixCache, TokenKey
from radixkv.arguments import at_least
from radixkv.tokens import TOKEN_BYTES, pack_one
from radixkv.traces import Trace, TraceRequest

from .config import PREEMPTIONS, VICTIMS, EngineConfig
from .request import Request
from .timed import TimeModel, run_timed, timed_request

# Tokens without an identity: larger than any dense id, and another one for each request.
_FIRST_UNKNOWN = 2**31


@dataclass(frozen=True)
class Pressure:
    """One way to preempt, and what it cost.

    recomputed_tokens   tokens whose KV was computed again; wasted_share of all that were computed
    swapped_tokens      tokens copied to host memory and back, in whole blocks
    finish_s            when the last request ended, on the model's clock
    """

    definition: str
    victim: str
    preemption: str
    num_blocks: int
    requests: int
    refused: int
    preemptions: int
    recomputed_tokens: int
    wasted_share: float
    swapped_tokens: int
    token_hit_rate: float | None
    finish_s: float
    mean_ttft_s: float
    longest_wait_s: float

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def preemption_pressure(
    trace: Trace,
    num_blocks: int,
    *,
    block_size: int | None = None,
    victims: Iterable[str] = VICTIMS,
    preemptions: Iterable[str] = PREEMPTIONS,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8_192,
    model: TimeModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Pressure]:
    """Each victim policy with each way back, on the same trace in a pool of `num_blocks`.

    block_size: tokens per block; None = the trace's own, 16 where it has none. Tokens that the trace does not identify
    are shared with nobody. A request whose prompt the whole pool cannot hold is refused and counted; one that would
    outgrow it ends early. O(tokens of the trace) memory: take a `limit` when loading a long one.
    """
    at_least(1, num_blocks, "num_blocks")
    if block_size is None:
        block_size = trace.block_size if trace.block_size not in (None, 1) else 16
    unit_tokens = trace.block_size if trace.has_prefixes else None
    if trace.has_prefixes and (unit_tokens is None or block_size % unit_tokens):
        raise ValueError(f"block_size is {block_size}; allowed: multiples of the trace's own, {unit_tokens}")
    definition = (
        f"{num_blocks} blocks of {block_size} tokens, first come, first served, at most {max_num_batched_tokens} "
        f"tokens a step; {model or TimeModel()}"
    )
    fitting = [r for r in trace.requests if 0 < r.num_prompt_tokens <= num_blocks * block_size]
    results = []
    ways = list(itertools.product(victims, preemptions))
    for number, (victim, preemption) in enumerate(ways):
        config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=2**31,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            victim=victim,
            preemption=preemption,
            num_swap_blocks=2**31 if preemption == "swap" else 0,
        )
        requests = [_request(index, request, unit_tokens) for index, request in enumerate(fitting)]
        core = run_timed(requests, config, PrefixCache(num_blocks, block_size), model)
        counters = core.scheduler.counters
        computed = counters.prefill_tokens + counters.decode_tokens
        first_s = [(r.first_token_s or r.arrival_s) - r.arrival_s for r in requests]
        waits_s = [(r.scheduled_s or r.arrival_s) - r.arrival_s for r in requests]
        results.append(
            Pressure(
                definition=definition,
                victim=victim,
                preemption=preemption,
                num_blocks=num_blocks,
                requests=len(requests),
                refused=len(trace.requests) - len(requests),
                preemptions=counters.preemptions.total(),
                recomputed_tokens=counters.recomputed_tokens,
                wasted_share=counters.recomputed_tokens / computed if computed else 0.0,
                swapped_tokens=(counters.swapped_out_blocks + counters.swapped_in_blocks) * block_size,
                token_hit_rate=core.cache.stats.token_hit_rate if trace.has_prefixes else None,
                finish_s=core.scheduler.clock(),
                mean_ttft_s=sum(first_s) / len(first_s) if first_s else 0.0,
                longest_wait_s=max(waits_s, default=0.0),
            )
        )
        if progress is not None:
            progress(number + 1, len(ways))
    return results


def _request(index: int, request: TraceRequest, unit_tokens: int | None) -> Request:
    """The request for the engine. A unit of B tokens becomes B equal tokens, so that blocks are alike as units are."""
    known = b""
    if request.units is not None and unit_tokens is not None:
        num_full = min(len(request.units), request.num_prompt_tokens // unit_tokens)
        known = b"".join(pack_one(unit) * unit_tokens for unit in request.units[:num_full])
    num_unknown = request.num_prompt_tokens - len(known) // TOKEN_BYTES
    key = TokenKey.from_packed(known + pack_one(_FIRST_UNKNOWN + index) * num_unknown)
    return timed_request(str(index), key, max(1, request.num_output_tokens), request.arrival_s)
