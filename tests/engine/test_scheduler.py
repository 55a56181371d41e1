"""The scheduler and the engine's loop over a pool that remembers what was written, without a model.

`ShadowRunner` stands in for the model: each slot of its pool holds the token sequence that ends there, it checks that a
row's table names exactly the sequences that the row continues, and the next token is a function of the whole sequence.
So a stale, foreign or missing slot is found at the step that would have read it.
"""

import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from radixkv import DuplicateRequest, PrefixCache, TokenKey

VOCAB_SIZE = 3  # few tokens, so that prompts often share their starts
END = 2


def next_token(sequence):
    """The token after a sequence, which depends on all of it."""
    return zlib.crc32(bytes(sequence)) % VOCAB_SIZE


def solo_output(request):
    """What the request gives if nothing else exists."""
    sequence = list(request.prompt_token_ids)
    while len(sequence) < request.max_total_tokens:
        sequence.append(next_token(sequence))
        if sequence[-1] == END and not request.params.ignore_eos:
            break
    return sequence[len(request.prompt_token_ids) :]


def make_request(request_id, token_ids, max_tokens=4, namespace=None, ignore_eos=True):
    """A request as `LLM` would make it, for a model without a limit of its own."""
    return Request(
        request_id=request_id,
        prompt=TokenKey(token_ids, namespace),
        prompt_token_ids=list(token_ids),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        seed=0,
        max_total_tokens=len(token_ids) + max_tokens,
    )


class ShadowRunner:
    """A model that knows of each slot which sequence ends there, and is the storage of its cache too."""

    decoder = SimpleNamespace(eos_token_ids=frozenset({END}))

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots = [None] * (num_blocks * block_size)
        self.num_tokens_by_step = []
        self.is_failing = False

    def copy_block(self, source, target, num_tokens):
        first, second = source * self.block_size, target * self.block_size
        self.slots[second : second + num_tokens] = self.slots[first : first + num_tokens]

    def run(self, scheduled, cache):
        self.num_tokens_by_step.append(sum(len(work.token_ids) for work in scheduled))
        rows = []
        for work in scheduled:
            request = work.request
            table = cache.block_table(request.request_id)
            sequence = tuple(request.prompt_token_ids + request.output_token_ids)
            end = work.start + len(work.token_ids)
            assert list(sequence[work.start :]) == work.token_ids, "a step computes up to the last token that is known"
            slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(end)]
            for position in range(work.start, end):
                slot = slots[position]
                assert not cache.pool.is_cached(slot // self.block_size), (
                    f"request {request.request_id} writes a cached block"
                )
                assert cache.ref_count(slot // self.block_size) == 1, f"block of slot {slot} has another owner"
                self.slots[slot] = sequence[: position + 1]
            rows.append((sequence, slots))
            if self.is_failing:
                raise RuntimeError("half of the step is written")
        for sequence, slots in rows:
            for position, slot in enumerate(slots):
                assert self.slots[slot] == sequence[: position + 1], f"slot {slot} holds {self.slots[slot]}"
        return [next_token(sequence) for sequence, _ in rows]


def make_core(num_blocks=16, block_size=4, **limits):
    """The engine's loop over a shadow pool. Imports torch, since the loop's module knows the real runner."""
    pytest.importorskip("torch", reason="the loop's module knows the real runner")
    from engine.core import EngineCore

    config = EngineConfig(block_size=block_size, num_blocks=num_blocks, max_model_len=10_000, **limits)
    runner = ShadowRunner(num_blocks, block_size)
    cache = PrefixCache(num_blocks, block_size, storage=runner)
    return EngineCore(Scheduler(config, cache), runner, cache)


def make_scheduler(num_blocks=16, block_size=4, **limits):
    """A scheduler over an empty pool."""
    config = EngineConfig(block_size=block_size, num_blocks=num_blocks, max_model_len=10_000, **limits)
    return Scheduler(config, PrefixCache(num_blocks, block_size))


def ids_of(scheduled):
    """Request ids, in the order of the step."""
    return [work.request.request_id for work in scheduled]


def complete(scheduler, scheduled):
    """Does what the loop does after a forward pass, with token 0 for everyone."""
    for work in scheduled:
        work.request.num_computed_tokens = work.start + len(work.token_ids)
        scheduler.cache.commit(work.request.request_id, work.request.num_computed_tokens)
        work.request.add_output(0, frozenset())
        if work.request.finish_reason is not None:
            scheduler.finish(work.request)


def assert_idle(cache):
    """Nothing is left of any request: every block is free or evictable."""
    cache.check()
    assert cache.request_ids == ()
    assert cache.num_private_blocks == cache.num_protected_blocks == 0
    assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks


def test_the_scheduler_loads_no_torch():
    """A simulator drives it with a time model, on machines where torch is not installed."""
    code = "import engine.scheduler, sys; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repository)
    assert done.stdout.strip() == ""


class TestAdmission:
    def test_first_come_first_served(self):
        """B098: a small request does not pass a large one, however long that waits; the policy is the one stated."""
        scheduler = make_scheduler(num_blocks=10, block_size=1)
        requests = [make_request(name, [ord(name)] * length, 2) for name, length in (("a", 4), ("b", 8), ("c", 1))]
        for request in requests:
            scheduler.add(request)
        started = []
        while scheduler.has_requests:
            scheduled = scheduler.schedule()
            started += [name for name in ids_of(scheduled) if name not in started]
            if len(started) == 1:
                assert ids_of(scheduled) == ["a"], "b does not fit beside a, and c is behind b"
            complete(scheduler, scheduled)
        assert started == ["a", "b", "c"]
        assert_idle(scheduler.cache)

    def test_running_requests_decode_while_waiting_ones_are_prefilled(self):
        """Continuous batching: no request waits for another to end if there is room."""
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [1, 1, 1], 5))
        complete(scheduler, scheduler.schedule())
        scheduler.add(make_request("b", [2, 2, 2, 2, 2], 5))
        scheduled = scheduler.schedule()
        assert [(work.request.request_id, work.start, work.token_ids) for work in scheduled] == [
            ("a", 3, [0]),
            ("b", 0, [2, 2, 2, 2, 2]),
        ]

    def test_only_what_is_not_cached_is_computed_and_counts_against_the_budget(self):
        """A long prompt with a short rest is a short prompt; one token of it is computed at the least."""
        scheduler = make_scheduler(max_num_batched_tokens=3)
        ids = [5, 6, 7, 8] * 4
        scheduler.add(make_request("first", ids, 1))
        complete(scheduler, scheduler.schedule())
        for name, rest in (("same", []), ("longer", [9])):
            scheduler.add(make_request(name, ids + rest, 1))
        scheduled = scheduler.schedule()
        assert [(work.start, work.token_ids) for work in scheduled] == [(15, [8]), (16, [9])]

    def test_no_more_requests_run_than_allowed(self):
        """`max_num_seqs` bounds a step's rows, and so its memory."""
        scheduler = make_scheduler(num_blocks=64, max_num_seqs=3)
        for number in range(7):
            scheduler.add(make_request(str(number), [number], 3))
        most = 0
        while scheduler.has_requests:
            scheduled = scheduler.schedule()
            most = max(most, len(scheduled))
            assert len(scheduler.running) <= 3
            complete(scheduler, scheduled)
        assert most == 3

    def test_a_step_stays_within_its_budget_unless_one_prompt_alone_is_longer(self):
        """The budget bounds a step's time; a prompt that is longer must run all the same, and runs alone."""
        core = make_core(num_blocks=64, max_num_batched_tokens=10)
        for number, length in enumerate([4, 5, 1, 3, 25, 9, 2]):
            core.add_request(make_request(str(number), [number] * length, 3))
        while core.has_requests:
            core.step()
        assert [num for num in core.runner.num_tokens_by_step if num > 10] == [25]
        assert max(num for num in core.runner.num_tokens_by_step if num != 25) == 10, "and the budget is used"

    def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers(self):
        """A018: waiting for room that never comes would block everything behind it for ever."""
        core = make_core(num_blocks=4, block_size=16)
        with pytest.raises(ValueError, match=r"'big' may need 5 blocks of 16 tokens for its 70 prompt tokens .* has 4"):
            core.add_request(make_request("big", [1] * 70, 1))
        assert core.abort("big") is None
        core.add_request(make_request("small", [1] * 10, 3))
        core.step()
        assert core.has_requests

    @pytest.mark.parametrize(
        ("length", "max_tokens", "fits"),
        [(64, 1, True), (63, 2, True), (63, 1, True), (60, 5, True), (64, 2, False), (60, 6, False), (65, 1, False)],
    )
    def test_requests_as_large_as_the_pool_complete_and_larger_ones_are_refused(self, length, max_tokens, fits):
        """A018: the last token sampled needs no slot, so prompt + output may exceed the pool's 64 slots by one."""
        core = make_core(num_blocks=4, block_size=16)
        request = make_request("edge", [1] * length, max_tokens)
        if not fits:
            with pytest.raises(ValueError, match="the pool has 4"):
                core.add_request(request)
            return
        core.add_request(make_request("other", [0] * 20, 20))
        core.add_request(request)
        for _ in range(30):
            core.step()
        assert not core.has_requests
        assert request.output_token_ids == solo_output(request)
        assert_idle(core.cache)

    def test_a_full_hit_as_large_as_the_pool_is_admitted(self):
        """A016: what is hit is no room for others, but neither must it be taken a second time."""
        core = make_core(num_blocks=4, block_size=4)
        for name in ("cold", "warm", "again"):
            request = make_request(name, [1, 0, 1, 1] * 4, 1)
            core.add_request(request)
            assert core.step() == [request]
        assert request.num_cached_tokens == 15
        assert_idle(core.cache)


class TestLoop:
    def test_an_id_in_use_is_refused_and_free_again_afterwards(self):
        """A043: the second would take over the first one's blocks."""
        core = make_core()
        first = make_request("x", [1, 0, 1], 3)
        core.add_request(first)
        for _ in range(2):  # waiting, then running
            with pytest.raises(DuplicateRequest, match="'x'"):
                core.add_request(make_request("x", [0], 3))
            core.step()
        while core.has_requests:
            core.step()
        assert first.output_token_ids == solo_output(first)
        second = make_request("x", [0], 3)
        core.add_request(second)
        while core.has_requests:
            core.step()
        assert second.output_token_ids == solo_output(second)

    def test_a_step_without_work_does_nothing(self):
        """An idle server steps too; there is no forward pass without rows."""
        core = make_core()
        assert core.step() == []
        assert core.runner.num_tokens_by_step == []

    def test_a_request_moves_through_its_states_once(self):
        """Every request has exactly one end."""
        core = make_core()
        request = make_request("a", [1, 0], 2)
        core.add_request(request)
        assert request.state is RequestState.WAITING
        assert core.step() == []
        assert request.state is RequestState.RUNNING
        assert core.step() == [request]
        assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
        assert core.step() == []
        with pytest.raises(AssertionError, match="finished already"):
            request.finish("abort")

    @pytest.mark.parametrize("is_caching", [True, False])
    def test_many_requests_with_shared_starts_in_a_small_pool(self, is_caching):
        """A072 in small: every output is the solo one, with the cache and without, and without it nothing is kept."""
        core = make_core(num_blocks=6, block_size=4, enable_prefix_caching=is_caching, max_num_batched_tokens=12)
        requests = [
            make_request(str(n), [n % 2, 1, 0, 1, n % 3, 0, 1][: 2 + n % 6], 1 + n % 7, ignore_eos=n % 4 > 0)
            for n in range(40)
        ]
        for request in requests:
            core.add_request(request)
        while core.has_requests:
            core.step()
            core.cache.check()
        assert [request.output_token_ids for request in requests] == [solo_output(request) for request in requests]
        assert any(request.num_cached_tokens for request in requests) == is_caching
        assert core.cache.num_cached_blocks > 0 or not is_caching
        assert_idle(core.cache)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps after the one before
        TOKENS,
        st.integers(1, 9),  # max_tokens
        st.sampled_from([None, None, "tenant"]),
        st.booleans(),  # ignores the end token
        st.sampled_from([None, None, None, 0, 1, 3]),  # steps after which it is aborted
    ),
    min_size=1,
    max_size=14,
)


@given(
    arrivals=ARRIVALS,
    num_tokens=st.sampled_from([16, 24, 48]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_num_seqs=st.sampled_from([1, 2, 64]),
    budget=st.sampled_from([1, 5, 64]),
    failing_step=st.sampled_from([None, None, 2, 5]),
)
def test_admitted_requests_never_lack_a_block_and_say_what_they_say_alone(
    arrivals, num_tokens, block_size, max_num_seqs, budget, failing_step
):
    """Random arrivals, aborts and a failing pass: no step runs out of blocks, and none reads a wrong slot."""
    core = make_core(num_tokens // block_size, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    pending = list(enumerate(arrivals))
    alive, ended, aborts = {}, [], {}
    now = wait = 0
    while pending or core.has_requests:
        while pending and wait >= pending[0][1][0]:
            number, (_, token_ids, max_tokens, namespace, ignores_end, abort_after) = pending.pop(0)
            wait = 0
            request = make_request(str(number), token_ids, max_tokens, namespace, ignores_end)
            try:
                core.add_request(request)
            except ValueError:
                assert -(-(request.max_total_tokens - 1) // block_size) > core.cache.num_blocks
                continue
            alive[request.request_id] = request
            if abort_after is not None:
                aborts.setdefault(now + abort_after, []).append(request.request_id)
        for request_id in aborts.pop(now, ()):
            request = core.abort(request_id)
            assert (request is None) == (request_id not in alive)
            alive.pop(request_id, None)
            assert core.abort(request_id) is None
            core.cache.check()
        core.runner.is_failing = now == failing_step
        order = [request.request_id for request in core.scheduler.requests()]
        try:
            finished = core.step()
        except RuntimeError:
            for request_id in order:
                core.abort(request_id)
            assert_idle(core.cache)
            alive.clear()
            finished = []
        core.cache.check()
        assert [request.request_id for request in core.scheduler.requests()] == [
            request_id for request_id in order if request_id in alive and alive[request_id] not in finished
        ], "first come, first served"
        ended += [alive.pop(request.request_id) for request in finished]
        now, wait = now + 1, wait + 1
    assert not alive
    for request in ended:
        assert request.output_token_ids == solo_output(request)
        assert request.num_cached_tokens <= len(request.prompt_token_ids) - 1
    assert_idle(core.cache)
