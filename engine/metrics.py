"""What the engine did since it was made, and how it stands now. Imports no torch."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("engine")


@dataclass
class EngineCounters:
    """Totals since the engine was made; they only grow.

    steps                 forward passes
    prefill_tokens        tokens computed for prompts, and for what preempted requests had lost
    decode_tokens         tokens computed one at a time, each of which gave the next
    output_tokens         tokens sampled
    finished              requests by finish reason; each continuation of n counts
    preemptions           by how the victim will come back: "recompute" or "swap"
    recomputed_tokens     tokens whose KV had to be computed again after a preemption
    swapped_out_blocks    blocks copied to host memory
    swapped_in_blocks     blocks copied back: of those copied out, what the cache had lost meanwhile
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


@dataclass(frozen=True)
class EngineMetrics:
    """The engine at one moment.

    num_running, num_waiting     sequences; the preempted ones wait
    block_use                    share of the pool that running requests hold, 0 to 1
    cached                       share of the pool that is cached and could be evicted, 0 to 1
    token_hit_rate               share of the prompt tokens so far that was found in the cache; None before the first
    counters                     totals, see `EngineCounters`
    swapped_out_bytes, swapped_in_bytes   what preemption by swapping has moved
    """

    num_running: int
    num_waiting: int
    block_use: float
    cached: float
    token_hit_rate: float | None
    counters: EngineCounters
    swapped_out_bytes: int
    swapped_in_bytes: int


class ProgressLog:
    """One line every few seconds while the engine is busy, on the logger "engine" at level INFO.

    interval_s: seconds between two lines; 0 = none.
    """

    def __init__(self, interval_s: float) -> None:
        if not interval_s >= 0:
            raise ValueError(f"log_interval_s is {interval_s}; allowed: 0 (no lines) and more")
        self.interval_s = interval_s
        self._last_s: float | None = None
        self._prefilled = 0
        self._sampled = 0

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for a line. The first comes one interval after the first step."""
        if not self.interval_s:
            return False
        if self._last_s is None:
            self._last_s = now_s
        return now_s - self._last_s >= self.interval_s

    def write(self, now_s: float, metrics: EngineMetrics) -> None:
        """Writes the line; rates are those since the last one."""
        assert self._last_s is not None, "a line is written when it is due"
        counters, elapsed_s = metrics.counters, now_s - self._last_s
        hits = "no prompt yet" if metrics.token_hit_rate is None else f"hit rate {metrics.token_hit_rate:.1%}"
        logger.info(
            "%d running, %d waiting; prefill %.1f tokens/s, output %.1f tokens/s; blocks %.1f%% used, %.1f%% cached; "
            "%s; %d preemptions",
            metrics.num_running,
            metrics.num_waiting,
            (counters.prefill_tokens - self._prefilled) / elapsed_s,
            (counters.output_tokens - self._sampled) / elapsed_s,
            100 * metrics.block_use,
            100 * metrics.cached,
            hits,
            counters.preemptions.total(),
        )
        self._last_s, self._prefilled, self._sampled = now_s, counters.prefill_tokens, counters.output_tokens

    def rest(self, counters: EngineCounters) -> None:
        """Nothing runs: neither the time until the next step nor what was done so far counts for the next line."""
        self._last_s, self._prefilled, self._sampled = None, counters.prefill_tokens, counters.output_tokens
