"""A pool that remembers what was written, in place of a model, and ways to drive the engine's loop over it.

`ShadowRunner` stands in for the model: each slot of its pool holds the namespace and the token sequence that ends
there. It checks that a row's table names exactly the slots that the row continues, and the next token is a function of
the whole sequence and the request's seed. So a stale, foreign or missing slot is found at the step that would have read
it. `ShadowSwap` moves such slots out and back. No torch, no sampling, no time.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.beam_search import BeamSearchParams
from engine.beams import Beams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.logprobs import Logprob, Sampled
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Computed, Scheduled, Scheduler
from radixkv import PrefixCache, TokenKey
from radixkv.baselines import CacheManager

VOCAB_SIZE = 3  # few tokens, so that prompts often share their starts
END = 2
SEEDS = range(4)  # of the continuations of a prompt


def next_token(sequence: Iterable[int], seed: int = 0) -> int:
    """The token after a sequence, which depends on all of it and on the seed."""
    return zlib.crc32(bytes([seed, *sequence])) % VOCAB_SIZE


def likely_tokens(sequence: Iterable[int]) -> list[tuple[int, float]]:
    """All tokens that may follow a sequence, with log-probabilities that depend on all of it; most likely first."""
    sequence = list(sequence)
    scores = [(token, -zlib.crc32(bytes([*sequence, token])) / 2**32) for token in range(VOCAB_SIZE)]
    return sorted(scores, key=lambda scored: -scored[1])


def solo_output(request: Request) -> list[int]:
    """What the request gives if nothing else exists."""
    sequence = list(request.prompt_token_ids)
    while len(sequence) < request.max_total_tokens:
        sequence.append(next_token(sequence, request.seed))
        if sequence[-1] == END and not request.params.ignore_eos:
            break
    return sequence[len(request.prompt_token_ids) :]


def solo_finish_reason(request: Request) -> str:
    """How it ends then."""
    is_stopped = solo_output(request)[-1] == END and not request.params.ignore_eos
    return "stop" if is_stopped else "length"


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    max_tokens: int = 4,
    namespace: Any = None,
    ignore_eos: bool = True,
    *,
    n: int = 1,
    priority: int = 0,
    store: bool = True,
    prompt_logprobs: int | None = None,
) -> Request:
    """A request as `LLM` would make it, for a model without a limit of its own."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, n=n, prompt_logprobs=prompt_logprobs)
    request = Request(
        request_id=request_id,
        prompt=TokenKey(token_ids, namespace),
        prompt_token_ids=list(token_ids),
        params=params,
        seed=0,
        max_total_tokens=len(token_ids) + max_tokens,
        priority=priority,
        store=store,
    )
    for index in range(1, n):
        fork = request.sibling(f"{request_id}/{index}")
        fork.seed = SEEDS[index]
        request.forks.append(fork)
    return request


@dataclass(frozen=True)
class Ran:
    """A row of a step that was run: the request's tokens [start, end)."""

    request_id: str
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the row computes."""
        return self.end - self.start


class ShadowRunner:
    """A model that knows of each slot which sequence ends there, and is the storage of its cache too."""

    end_token_ids = frozenset({END})
    bytes_per_block = 100

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots: list[Any] = [None] * (num_blocks * block_size)
        self.steps: list[list[Ran]] = []
        self.is_failing = False

    @property
    def num_tokens_by_step(self) -> list[int]:
        """Tokens computed in each step."""
        return [sum(ran.num_tokens for ran in step) for step in self.steps]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed so far."""
        return sum(self.num_tokens_by_step)

    def rows_of(self, request_id: str) -> list[tuple[int, int]]:
        """[start, end) of each row of a request so far."""
        return [(ran.start, ran.end) for step in self.steps for ran in step if ran.request_id == request_id]

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        first, second = source * self.block_size, target * self.block_size
        self.slots[second : second + num_tokens] = self.slots[first : first + num_tokens]

    def run(self, scheduled: list[Scheduled], cache: CacheManager) -> list[Computed]:
        self.steps.append([Ran(work.request.request_id, work.start, work.end) for work in scheduled])
        rows = []
        for work in scheduled:
            request = work.request
            table = cache.block_table(request.request_id)
            sequence = tuple(request.prompt_token_ids + request.output_token_ids)[: work.end]
            assert list(sequence[work.start :]) == work.token_ids != [], "a step computes tokens that are known"
            written = [(request.prompt.namespace, sequence[: position + 1]) for position in range(work.end)]
            slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(work.end)]
            for position in range(work.start, work.end):
                assert_writable(cache, slots[position] // self.block_size, request.request_id)
                self.slots[slots[position]] = written[position]
            rows.append((work, sequence, slots, written))
            if self.is_failing:
                raise RuntimeError("half of the step is written")
        for _, _, slots, written in rows:
            for slot, wanted in zip(slots, written, strict=True):
                assert self.slots[slot] == wanted, f"slot {slot} holds {self.slots[slot]}, not {wanted}"
        return [_computed(work, sequence) for work, sequence, _, _ in rows]


def _computed(work: Scheduled, sequence: tuple[int, ...]) -> Computed:
    request = work.request
    judged: list[dict[int, Logprob]] = []
    if request.params.prompt_logprobs is not None:
        end = min(work.end + 1, len(request.prompt_token_ids))
        judged = prompt_logprobs_of(request)[len(request.prompt_logprobs) : end]
        assert work.start < len(request.prompt_logprobs) or not judged, "a token is judged by the one before it"
    if not work.is_last:
        return Computed(prompt_logprobs=judged)
    if request.num_candidates:
        return Computed(candidates=likely_tokens(sequence)[: request.num_candidates])
    sampled = [Sampled(next_token(sequence, each.seed)) for each in request.sequences()]
    return Computed(sampled, prompt_logprobs=judged)


def prompt_logprobs_of(request: Request) -> list[Any]:
    """What a request that wants to know is told of its prompt tokens: here, each one's position."""
    return [None, *({token: Logprob(-p, 1)} for p, token in enumerate(request.prompt_token_ids[1:], start=1))]


def assert_writable(cache: CacheManager, block_id: int, request_id: str) -> None:
    """Nobody else reads a block that is written to."""
    assert cache.ref_count(block_id) == 1, f"request {request_id} writes block {block_id}, which has another owner"
    assert block_id in cache.block_table(request_id), f"request {request_id} writes block {block_id} of another"


class ShadowSwap:
    """Host memory for the slots of a `ShadowRunner`."""

    def __init__(self, runner: ShadowRunner, cache: CacheManager) -> None:
        self.runner, self.cache = runner, cache
        self.saved: dict[str, list[list[Any]]] = {}
        self.restored: list[tuple[str, int, int]] = []  # request id, first place, blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept now."""
        return sum(len(blocks) for blocks in self.saved.values())

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        assert request_id not in self.saved, f"request {request_id} is saved already"
        size = self.runner.block_size
        self.saved[request_id] = [self.runner.slots[b * size : (b + 1) * size] for b in block_ids]

    def restore(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        blocks, size = self.saved[request_id][first:], self.runner.block_size
        self.restored.append((request_id, first, len(block_ids)))
        for block_id, block in zip(block_ids, blocks, strict=True):
            assert_writable(self.cache, block_id, request_id)
            self.runner.slots[block_id * size : (block_id + 1) * size] = block

    def drop(self, request_id: str) -> None:
        del self.saved[request_id]


def make_core(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    clock: Callable[[], float] = time.perf_counter,
    log_interval_s: float = 0.0,
    **limits: Any,
) -> EngineCore:
    """The engine's loop over a shadow pool."""
    config = EngineConfig(block_size=block_size, num_blocks=num_blocks, max_model_len=10_000, **limits)
    runner = ShadowRunner(num_blocks, block_size)
    cache = PrefixCache(num_blocks, block_size, config.policy, runner)
    swap = ShadowSwap(runner, cache) if config.preemption == "swap" else None
    return EngineCore(Scheduler(config, cache, swap, clock), runner, cache, log_interval_s)


def make_beams(core: EngineCore, request_id: str, token_ids: Sequence[int], width: int, max_tokens: int) -> Beams:
    """A beam search as `LLM` starts it."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    beams = Beams(core, make_request(request_id, token_ids, max_tokens), params)
    beams.start()
    return beams


def ids_of(requests: Iterable[Request]) -> list[str]:
    """Their ids, in their order."""
    return [request.request_id for request in requests]


def checked_step(core: EngineCore) -> list[Request]:
    """Does a step; what ended in it. What must hold after any step, does."""
    scheduler, config = core.scheduler, core.scheduler.config
    num_steps = len(core.runner.steps)
    finished = core.step()
    core.cache.check()
    for step in core.runner.steps[num_steps:]:
        assert sum(ran.num_tokens for ran in step) <= config.max_num_batched_tokens
        assert len(step) <= config.max_running
        assert len({ran.request_id for ran in step}) == len(step), "one row for each request"
    assert len(scheduler.running) <= config.max_running
    assert {request.request_id for request in scheduler.running} == set(core.cache.request_ids)
    assert not set(scheduler.running) & set(scheduler.waiting)
    assert set(scheduler._aged) <= set(scheduler.waiting)
    saved = scheduler.swap.saved if scheduler.swap is not None else {}
    assert saved.keys() == scheduler._swapped.keys(), "what is saved is known"
    num_saved = sum(len(blocks) for blocks in saved.values())
    assert num_saved == scheduler._num_swapped_blocks <= config.num_swap_blocks
    return finished


def run_to_end(core: EngineCore, max_steps: int = 1000) -> list[Request]:
    """Steps until nothing waits or runs; what ended, in that order."""
    ended = []
    for _ in range(max_steps):
        if not core.has_requests:
            return ended
        ended += checked_step(core)
    raise AssertionError(f"{max_steps} steps were not enough")


def assert_solo(*requests: Request) -> None:
    """They said what they say alone."""
    for request in requests:
        assert request.output_token_ids == solo_output(request), request


def assert_idle(core: EngineCore) -> None:
    """Nothing is left of any request: every block is free or evictable, and nobody remembers one."""
    cache, scheduler = core.cache, core.scheduler
    cache.check()
    assert cache.request_ids == ()
    assert cache.num_private_blocks == cache.num_protected_blocks == 0
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks
    assert cache.num_evictable_blocks == cache.num_cached_blocks, "no locks"
    assert not core.has_requests
    assert core.num_requests == 0
    assert (scheduler.running, list(scheduler.waiting), scheduler._aged) == ([], [], [])
    assert (scheduler._swapped, scheduler._num_swapped_blocks) == ({}, 0)
    assert scheduler.swap is None or scheduler.swap.saved == {}
