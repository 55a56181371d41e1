"""The engine's loop on a clock of its own: what a load would take, without a model. Imports no torch.

Scheduler, cache and preemption are the real ones; only the forward pass is replaced, by a model of its time. So what is
admitted, hit, evicted and preempted is what an engine of that speed would do, and every run with the same arguments
gives the same numbers.

    a step takes    step_s                          weights are read, kernels start
                  + token_s    * tokens computed
                  + context_s  * tokens attended to, over all rows
                  + swap_s     * tokens copied to host memory or back, whole blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from radixkv import TokenKey
from radixkv.baselines import CacheManager

from .config import EngineConfig
from .core import EngineCore
from .logprobs import Sampled
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import Computed, Scheduled, Scheduler


@dataclass(frozen=True)
class TimeModel:
    """Seconds. The defaults are the size of an 8-billion-parameter model in 16 bits on a data-centre GPU.

    step_s      16 GB of weights at 2 TB/s, and launches
    token_s     16 GFLOP a token at 400 TFLOP/s
    context_s   128 KiB of KV a token at 2 TB/s
    swap_s      the same at 25 GB/s, what PCIe 4 x16 gives
    """

    step_s: float = 0.010
    token_s: float = 40e-6
    context_s: float = 65e-9
    swap_s: float = 5.2e-6


class TimedRunner:
    """Advances the clock instead of computing; also the host memory that preempted requests are swapped to.

    next_token: the token that follows, by request; by default one that no prompt has, which differs by request
    """

    end_token_ids: frozenset[int] = frozenset()

    def __init__(self, model: TimeModel, block_size: int, next_token: Callable[[Request], int] | None = None) -> None:
        self.model = model
        self.now_s = 0.0
        self.block_size = block_size
        self.bytes_per_block = block_size * 128 * 1024
        self._next_token = next_token or _next_token
        self._num_swapped_blocks = 0

    def clock(self) -> float:
        """Seconds since the start."""
        return self.now_s

    def run(self, scheduled: Sequence[Scheduled], cache: CacheManager) -> list[Computed]:
        """Lets the time of a step pass."""
        model = self.model
        num_tokens = sum(len(work.token_ids) for work in scheduled)
        num_context = sum(work.end for work in scheduled)
        self.now_s += model.step_s + model.token_s * num_tokens + model.context_s * num_context
        self.now_s += model.swap_s * self._num_swapped_blocks * self.block_size
        self._num_swapped_blocks = 0
        return [
            Computed([Sampled(self._next_token(sequence)) for sequence in work.request.sequences()])
            if work.is_last
            else Computed()
            for work in scheduled
        ]

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Counts what the next step's time includes."""
        self._num_swapped_blocks += len(block_ids)

    def restore(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        """Counts what the next step's time includes."""
        self._num_swapped_blocks += len(block_ids)

    def drop(self, request_id: str) -> None:
        """Nothing is kept here."""


def _next_token(request: Request) -> int:
    """An id from the upper half of all ids, so that no output is the start of a prompt."""
    return 2**31 + hash((request.number, request.num_tokens)) % 2**31


def timed_request(request_id: str, key: TokenKey, num_output_tokens: int, arrival_s: float) -> Request:
    """A request that samples exactly so many tokens, one or more, and arrives at a time of the model's clock."""
    return Request(
        request_id=request_id,
        prompt=key,
        prompt_token_ids=list(key),
        params=SamplingParams(max_tokens=num_output_tokens, ignore_eos=True),
        seed=0,
        max_total_tokens=len(key) + num_output_tokens,
        arrival_s=arrival_s,
    )


def run_timed(
    requests: Iterable[Request],
    config: EngineConfig,
    cache: CacheManager,
    model: TimeModel | None = None,
    next_token: Callable[[Request], int] | None = None,
) -> EngineCore:
    """Plays requests, each from its `arrival_s` on, to the end; the engine with its counters and its last time.

    Times of each request are in the request itself. Raises ValueError for a request that can never fit.
    """
    runner = TimedRunner(model or TimeModel(), config.block_size, next_token)
    scheduler = Scheduler(config, cache, runner if config.preemption == "swap" else None, runner.clock)
    core = EngineCore(scheduler, runner, cache)
    coming = sorted(requests, key=lambda request: request.arrival_s, reverse=True)
    while coming or core.has_requests:
        if not core.has_requests:
            runner.now_s = max(runner.now_s, coming[-1].arrival_s)
        while coming and coming[-1].arrival_s <= runner.now_s:
            core.add_request(coming.pop())
        core.step()
    return core
