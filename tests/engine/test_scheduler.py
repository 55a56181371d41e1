"""The scheduler and the engine's loop over a pool that remembers what was written, without a model.

`scheduler_models` says how a stale, foreign or missing slot is found at the step that would have read it; random
traffic is in `test_scheduler_machine.py`. Numbers such as A021 name the engines' bugs that a test is about.
"""

import gc
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_models import (
    assert_idle,
    assert_solo,
    checked_step,
    ids_of,
    make_beams,
    make_core,
    make_request,
    prompt_logprobs_of,
    run_to_end,
    solo_output,
)

from engine.config import ORDERS, PREEMPTIONS, VICTIMS
from engine.metrics import EngineCounters, ProgressLog
from engine.preemption import choose_victim
from engine.request import RequestState
from radixkv import DuplicateRequest, OutOfBlocks

REPOSITORY = Path(__file__).resolve().parents[2]


def add(core, *requests):
    """Adds requests; the last of them."""
    for request in requests:
        core.add_request(request)
    return requests[-1]


def step(core, times=1):
    """Steps, looked at; the rows of the last one as (request id, start, end)."""
    for _ in range(times):
        checked_step(core)
    return [(ran.request_id, ran.start, ran.end) for ran in core.runner.steps[-1]]


def starts(core):
    """Ids in the order of their first rows."""
    return list(dict.fromkeys(ran.request_id for step in core.runner.steps for ran in step))


def preempt(core, request):
    """What happens to a running request when another one needs its blocks."""
    core.scheduler._preempt(request)


@pytest.mark.parametrize("module", ["engine.scheduler", "engine.core", "engine.preemption", "engine.metrics"])
def test_no_torch_is_loaded(module):
    """A simulator drives the loop with a time model, on machines where torch is not installed."""
    code = f"import {module}, sys; print(*{{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == ""


class TestAdmission:
    def test_whoever_is_first_is_not_passed_for_want_of_room(self):
        """B098: small requests that would fit do not pass a large one, however long it waits: the policy is stated."""
        core = make_core(num_blocks=10, block_size=4)
        add(core, make_request("long", [1] * 20, 5), make_request("large", [0] * 32, 1))
        for number in range(10):
            add(core, make_request(f"small {number}", [number % 2], 1))
        for number in range(10, 14):
            assert [row[0] for row in step(core)] == ["long"], "6 of 10 blocks are in use in the end, 8 are needed"
            add(core, make_request(f"small {number}", [number % 2], 1))
        run_to_end(core)
        assert starts(core) == ["long", "large", *(f"small {number}" for number in range(14))]
        assert_idle(core)

    def test_running_requests_decode_while_waiting_ones_are_prefilled(self):
        """Continuous batching: no request waits for another to end if there is room."""
        core = make_core()
        add(core, make_request("a", [1, 1, 1], 5))
        step(core)
        add(core, make_request("b", [0, 0, 0, 0, 0], 5))
        assert step(core) == [("a", 3, 4), ("b", 0, 5)]
        assert step(core) == [("a", 4, 5), ("b", 5, 6)]

    def test_only_what_is_not_cached_is_computed_and_counts_against_the_budget(self):
        """A long prompt with a short rest is a short prompt; one token of it is computed at the least."""
        core = make_core(max_num_batched_tokens=3)
        ids = [0, 1, 1, 0] * 4
        add(core, make_request("first", ids, 1))
        run_to_end(core)
        add(core, make_request("same", ids, 1), make_request("longer", [*ids, 1], 1))
        assert step(core) == [("same", 15, 16), ("longer", 16, 17)]

    def test_no_more_requests_run_than_allowed(self):
        """`max_num_seqs` bounds a step's rows, and so its memory."""
        core = make_core(num_blocks=64, max_num_seqs=3)
        for number in range(7):
            add(core, make_request(str(number), [number % 2, number // 2 % 2, number // 4], 3))
        run_to_end(core)
        assert max(len(step) for step in core.runner.steps) == 3

    def test_continuations_count_as_sequences_before_they_begin(self):
        """A prompt with n = 3 is one row until it is computed, and three from then on."""
        core = make_core(num_blocks=64, max_num_seqs=4)
        add(core, make_request("a", [0], 3, n=3), make_request("b", [1], 3, n=2), make_request("c", [1, 1], 3))
        assert [row[0] for row in step(core)] == ["a"], "b would make it five, and c is behind b"
        assert sorted(row[0] for row in step(core)) == ["a", "a/1", "a/2"]
        run_to_end(core)
        assert [len(step) for step in core.runner.steps] == [1, 3, 3, 2, 3, 3]

    def test_continuations_of_a_prompt_under_way_are_expected(self):
        """They will each need a row of a step, and a token of its budget."""
        for limits in ({"max_num_seqs": 4, "max_num_batched_tokens": 8}, {"max_num_batched_tokens": 4}):
            core = make_core(num_blocks=64, **limits)
            add(core, make_request("a", [0] * 9, 3, n=3), make_request("b", [1], 3, "tenant", n=2))
            rows = []
            while "b" not in rows:
                rows = [row[0] for row in step(core)]
            assert core.scheduler.counters.finished == {"length": 3}
            run_to_end(core)
            core = make_core(num_blocks=64, **limits)
            add(core, *(make_request(name, [token], 3, n=2) for name, token in (("a", 0), ("b", 1))))
            assert step(core) == [("a", 0, 1), ("b", 0, 1)]
            run_to_end(core)

    def test_a_long_prompt_is_prefilled_in_chunks_beside_the_decodes(self):
        """The budget is a hard limit on a step's time: decodes come first, and the prompt gets what they leave."""
        core = make_core(num_blocks=32, max_num_batched_tokens=8)
        add(core, make_request("a", [0, 0, 1], 6), make_request("b", [0, 1, 1], 6))
        step(core)
        add(core, make_request("long", [1] * 20, 2), make_request("next", [0, 0, 0], 2, "tenant"))
        assert step(core) == [("a", 3, 4), ("b", 3, 4), ("long", 0, 6)]
        assert step(core) == [("a", 4, 5), ("b", 4, 5), ("long", 6, 12)]
        assert step(core) == [("a", 5, 6), ("b", 5, 6), ("long", 12, 18)]
        assert step(core) == [("a", 6, 7), ("b", 6, 7), ("long", 18, 20), ("next", 0, 3)]
        run_to_end(core)
        assert_idle(core)

    def test_prompt_logprobs_are_computed_in_small_chunks(self, monkeypatch):
        """Their logits exist at once. What is left of the budget is for others, and where nothing is, they wait."""
        monkeypatch.setattr("engine.scheduler.PROMPT_LOGPROBS_CHUNK", 4)
        core = make_core(num_blocks=64, max_num_batched_tokens=8)
        add(core, make_request("four", [1], 2, n=4), make_request("judged", [0] * 10, 2, prompt_logprobs=0))
        add(core, make_request("other", [1] * 9, 2, "tenant"))
        assert step(core) == [("four", 0, 1), ("judged", 0, 4), ("other", 0, 3)]
        assert step(core)[4:] == [("judged", 4, 8)], "four decodes and four tokens"
        assert step(core) == [("judged", 8, 10), ("other", 3, 9)]
        run_to_end(core)
        assert_idle(core)

    def test_a_step_never_exceeds_its_budget_and_uses_it(self):
        """The old rule let a prompt run alone that was longer than the budget; now it is cut."""
        core = make_core(num_blocks=64, max_num_batched_tokens=10)
        requests = [make_request(str(n), [n % 2] * length, 3) for n, length in enumerate([4, 5, 1, 3, 25, 9, 2])]
        add(core, *requests)
        run_to_end(core)
        assert max(core.runner.num_tokens_by_step) == 10
        assert_solo(*requests)

    def test_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers(self):
        """A018: waiting for room that never comes would block everything behind it for ever."""
        core = make_core(num_blocks=4, block_size=16)
        with pytest.raises(ValueError, match=r"'big' needs 5 blocks of 16 tokens for its 70 prompt tokens; .* has 4"):
            add(core, make_request("big", [1] * 70, 1))
        assert core.abort("big") is None
        small = add(core, make_request("small", [1] * 10, 3))
        assert run_to_end(core) == [small]
        assert_solo(small)

    @pytest.mark.parametrize(("length", "num_output"), [(54, 10), (55, 10), (62, 3), (63, 2), (64, 1), (65, None)])
    def test_a_request_that_outgrows_the_pool_ends_by_length_where_the_pool_does(self, length, num_output):
        """A018, B085: the last token sampled needs no slot, so prompt + output may exceed the 64 slots by one."""
        core = make_core(num_blocks=4, block_size=16)
        request = make_request("edge", [1] * length, 10)
        if num_output is None:
            with pytest.raises(ValueError, match="the pool has 4"):
                add(core, request)
            return
        add(core, make_request("other", [0] * 20, 20), request)
        run_to_end(core)
        assert (len(request.output_token_ids), request.finish_reason) == (num_output, "length")
        assert_solo(request)
        assert_idle(core)

    def test_more_continuations_than_may_ever_run_are_refused_at_once(self):
        """They begin together, when their prompt is computed."""
        for limits in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
            core = make_core(**limits)
            with pytest.raises(ValueError, match="'x' has n = 3; allowed: at most 2, which max_num_seqs and"):
                add(core, make_request("x", [1], n=3))
            add(core, make_request("x", [1], n=2))
            run_to_end(core)
            assert_idle(core)

    def test_a_full_hit_as_large_as_the_pool_is_admitted(self):
        """What is hit is no room for others, but neither must it be taken a second time."""
        core = make_core(num_blocks=4, block_size=4)
        for name in ("cold", "warm", "again"):
            request = add(core, make_request(name, [1, 0, 1, 1] * 4, 1))
            assert core.step() == [request]
        assert request.num_cached_tokens == 15
        assert_idle(core)

    @pytest.mark.parametrize(("length", "is_admitted"), [(44, False), (36, True)])
    def test_what_a_request_hits_is_no_room_for_it(self, length, is_admitted):
        """A016: of 12 blocks 6 are cached, 2 are held and 4 are free; 4 of the cached ones are hit."""
        core = make_core(num_blocks=12, block_size=4)
        chain = [0, 1, 1] * 8
        add(core, make_request("chain", chain, 1))
        run_to_end(core)
        add(core, make_request("held", [1] * 7, 2))
        step(core)
        assert (core.cache.num_free_blocks, core.cache.num_evictable_blocks) == (4, 6)
        add(core, make_request("new", chain[:16] + [0] * (length - 16), 1))
        rows = step(core)
        assert rows == ([("held", 7, 8), ("new", 16, 36)] if is_admitted else [("held", 7, 8)])
        assert core.cache.stats.evicted_blocks == (1 if is_admitted else 0)
        run_to_end(core)
        assert_idle(core)

    @pytest.mark.parametrize(
        ("num_preemptions", "max_tokens", "n", "needed"),
        # The other one holds 2 blocks and may grow by 14 more; the prompt takes 2, and a continuation may grow by 25.
        # Of 3 continuations 2 need a copy of the last block too.
        [(0, 1, 1, 4 + 1), (0, 100, 1, 4 + 2), (1, 100, 1, 4 + 4), (2, 5, 1, 4 + 4 + 1), (2, 100, 1, 4 + 8),
         (3, 100, 1, 4 + 16), (4, 100, 1, 4 + 14 + 16), (9, 100, 1, 4 + 14 + 25), (0, 1, 3, 4 + 1 + 2),
         (0, 100, 3, 4 + 1 + 3), (1, 100, 3, 4 + 2 + 6), (9, 2, 3, 4 + 14 + 3 + 2)],
    )  # fmt: skip
    def test_room_is_left_for_all_to_grow_and_doubles_with_each_preemption(
        self, num_preemptions, max_tokens, n, needed
    ):
        """Or to their ends, if these are nearer. Without it the next decode would throw out who just came in."""
        for num_blocks, is_admitted in ((needed, True), (needed - 1, False)):
            core = make_core(num_blocks, block_size=4)
            other, request = make_request("other", [0] * 4, 61), make_request("new", [1] * 8, max_tokens, n=n)
            add(core, other)
            step(core)
            add(core, request)
            other.max_total_tokens, request.max_total_tokens = 4 + 61, 8 + max_tokens  # as if the pool set no limit
            request.num_preemptions = num_preemptions
            assert [row[0] for row in step(core)] == (["other", "new"] if is_admitted else ["other"])

    def test_alone_a_request_needs_no_room_to_grow(self):
        """Its continuations may need more blocks than there are; then they take turns."""
        core = make_core(num_blocks=2, block_size=4)
        request = make_request("x", [0, 1] * 3, 4, n=3)
        sequences = list(request.sequences())
        add(core, request)
        assert step(core) == [("x", 0, 6)]
        run_to_end(core)
        assert [len(sequence.output_token_ids) for sequence in sequences] == [3, 3, 3], "6 + 3 is one more than 8"
        assert_solo(*sequences)
        assert_idle(core)

    def test_what_a_priority_leaves_in_the_cache_stays_longer(self):
        """The cache is told the priority; its policy of that name goes by it."""
        core = make_core(num_blocks=3, block_size=4, policy="priority")
        for name, token, priority in (("high", 0, 1), ("low", 1, 0)):
            add(core, make_request(name, [token] * 4, 1, priority=priority))
            run_to_end(core)
        add(core, make_request("more", [0, 1] * 4, 1, "tenant"))
        run_to_end(core)
        assert core.cache.lookup_prefix([0] * 4).num_tokens == 4
        assert core.cache.lookup_prefix([1] * 4).num_tokens == 0

    def test_blocks_held_by_someone_else_are_an_error_and_no_endless_loop(self):
        """The scheduler waits for its own requests to end; nobody else will tell it that there is room again."""
        core = make_core(num_blocks=4, block_size=4)
        core.cache.allocate("outsider", [0] * 8)
        request = add(core, make_request("a", [1] * 12, 1))
        for _ in range(2):
            with pytest.raises(OutOfBlocks, match="needed=3 free=2 evictable=0"):
                core.step()
        core.cache.free("outsider")
        run_to_end(core)
        assert_solo(request)
        assert_idle(core)

    def test_blocks_taken_by_someone_else_meanwhile_are_an_error_too(self):
        """A request that cannot grow alone gives its blocks up, and then there is no room to come back."""
        core = make_core(num_blocks=4, block_size=4)
        request = add(core, make_request("a", [1] * 8, 9))
        core.step()
        core.cache.allocate("outsider", [0] * 8)
        assert core.step() == []
        assert request.state is RequestState.PREEMPTED
        with pytest.raises(OutOfBlocks, match="needed=3 free=0 evictable=2"):
            core.step()
        core.cache.free("outsider")
        run_to_end(core)
        assert_solo(request)
        assert_idle(core)


class TestLoop:
    def test_an_id_in_use_is_refused_and_free_again_afterwards(self):
        """A043: the second would take over the first one's blocks."""
        core = make_core()
        first = add(core, make_request("x", [1, 0, 1], 3))
        for _ in range(2):  # waiting, then running
            with pytest.raises(DuplicateRequest, match="'x'"):
                add(core, make_request("x", [0], 3))
            core.step()
        run_to_end(core)
        second = add(core, make_request("x", [0], 3))
        run_to_end(core)
        assert_solo(first, second)

    def test_an_id_that_is_taken_by_a_continuation_is_refused(self):
        """Also before it begins; and what was refused leaves nothing behind."""
        core = make_core()
        add(core, make_request("x", [1, 0, 1], 3, n=2))
        for request in (make_request("x/1", [0]), make_request("x", [0], n=3)):
            with pytest.raises(DuplicateRequest):
                add(core, request)
        run_to_end(core)
        assert_idle(core)

    def test_a_step_without_work_does_nothing(self):
        """An idle server steps too; there is no forward pass without rows."""
        core = make_core()
        assert core.step() == []
        assert core.runner.steps == []
        assert core.scheduler.counters == EngineCounters()

    def test_a_request_moves_through_its_states_once(self):
        """Every request has exactly one end."""
        core = make_core()
        request = add(core, make_request("a", [1, 0], 3))
        assert request.state is RequestState.WAITING
        assert core.step() == []
        assert request.state is RequestState.RUNNING
        preempt(core, request)
        assert request.state is RequestState.PREEMPTED
        assert core.step() == []
        assert request.state is RequestState.RUNNING
        assert core.step() == [request]
        assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
        assert core.step() == []
        with pytest.raises(AssertionError, match="finished already"):
            request.finish("abort", 0.0)

    def test_continuations_share_the_prompt_and_each_says_what_it_says_alone(self):
        """n = 3 costs one prefill; from the first token on they are requests of their own."""
        core = make_core(num_blocks=32)
        add(core, make_request("cached", [1, 0, 1, 1], 1))
        run_to_end(core)
        request = make_request("x", [1, 0, 1, 1, 0, 1], 9, n=3)
        sequences = list(request.sequences())
        add(core, request)
        assert step(core) == [("x", 4, 6)]
        assert sorted(step(core)) == [("x", 6, 7), ("x/1", 6, 7), ("x/2", 6, 7)]
        assert Counter(run_to_end(core)) == Counter(sequences)
        assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 3
        assert_solo(*sequences)
        assert core.cache.stats.requests == 2
        assert {(each.num_cached_tokens, each.scheduled_s) for each in sequences} == {(4, request.scheduled_s)}
        assert_idle(core)

    def test_continuations_stand_beside_their_first(self):
        """They came when it came, so that those who came later are preempted before them."""
        core = make_core(num_blocks=32)
        add(core, make_request("x", [1, 0, 1], 9, n=2), make_request("y", [0], 9))
        step(core)
        assert ids_of(core.scheduler.running) == ["x", "x/1", "y"]

    @pytest.mark.parametrize("is_caching", [True, False])
    def test_many_requests_with_shared_starts_in_a_small_pool(self, is_caching):
        """A072 in small: every output is the solo one, with the cache and without, and without it nothing is kept."""
        core = make_core(num_blocks=6, block_size=4, enable_prefix_caching=is_caching, max_num_batched_tokens=12)
        requests = [
            make_request(str(n), [n % 2, 1, 0, 1, n % 3, 0, 1][: 2 + n % 6], 1 + n % 7, ignore_eos=n % 4 > 0)
            for n in range(40)
        ]
        add(core, *requests)
        run_to_end(core)
        assert_solo(*requests)
        assert any(request.num_cached_tokens for request in requests) == is_caching
        assert core.cache.num_cached_blocks > 0 or not is_caching
        assert_idle(core)

    def test_nothing_of_a_failed_pass_is_committed(self):
        """Half of the step's slots hold garbage; they may be neither found nor taken for computed."""
        core = make_core(max_num_batched_tokens=6)
        first, second = make_request("a", [0, 1] * 5, 3), make_request("b", [1, 1], 3)
        add(core, first)
        step(core)
        add(core, second)
        core.runner.is_failing = True
        for _ in range(3):
            with pytest.raises(RuntimeError, match="half of the step"):
                core.step()
            assert (first.num_computed_tokens, second.num_computed_tokens) == (6, 0)
            assert core.cache.num_cached_blocks == 1
        core.runner.is_failing = False
        run_to_end(core)
        assert_solo(first, second)
        assert_idle(core)

    def test_the_same_work_in_chunks_and_at_once_with_and_without_the_cache(self):
        """B072: eight equal outputs, and without the cache each computes its whole prompt."""
        prompt, outputs = [0, 1, 1, 0, 1] * 10, set()
        for is_caching in (True, False):
            for budget in (7, 64):
                for block_size in (1, 16):
                    core = make_core(
                        256 // block_size, block_size,
                        enable_prefix_caching=is_caching, max_num_batched_tokens=budget,
                    )  # fmt: skip
                    for name in ("cold", "warm"):
                        request = add(core, make_request(name, prompt, 6))
                        run_to_end(core)
                        outputs.add(tuple(request.output_token_ids))
                        num_cached = 49 if is_caching and name == "warm" else 0
                        assert request.num_cached_tokens == num_cached
                        assert sum(end - start for start, end in core.runner.rows_of(name)) == 50 - num_cached + 5
        assert outputs == {tuple(solo_output(request))}

    def test_what_must_not_be_stored_is_computed_in_chunks_and_leaves_nothing(self):
        """B071: no block is taken twice on the way, each token is computed once, and nothing of it is found later."""
        core = make_core(num_blocks=8, block_size=4, max_num_batched_tokens=4)
        add(core, make_request("secret", [1, 0, 0] * 5, 1, store=False))
        num_private = []
        while core.has_requests:
            checked_step(core)
            num_private.append(core.cache.num_private_blocks)
            assert core.cache.num_cached_blocks == 0
        assert num_private == [4, 4, 4, 0]
        assert core.runner.rows_of("secret") == [(0, 4), (4, 8), (8, 12), (12, 15)]
        add(core, make_request("again", [1, 0, 0] * 5, 1))
        run_to_end(core)
        assert core.runner.rows_of("again") == [(0, 4), (4, 8), (8, 12), (12, 15)]
        assert_idle(core)


def waiting(core):
    """Added, and that is all."""
    return add(core, make_request("x", [1, 0, 1], 5))


def waiting_for_room(core):
    """The pool of 8 blocks has none to spare."""
    add(core, make_request("other", [0] * 24, 9))
    request = add(core, make_request("x", [1] * 12, 5))
    step(core)
    assert request.state is RequestState.WAITING
    return request


def waiting_for_a_prefill(core):
    """Someone else computes the same."""
    add(core, make_request("other", [1, 0] * 8, 5))
    request = add(core, make_request("x", [1, 0] * 8, 5))
    step(core)
    assert request.state is RequestState.WAITING
    return request


def waiting_first_of_all(core):
    """It has been overtaken as often as allowed."""
    add(core, make_request("other", [0] * 8, 20, priority=1))
    request = add(core, make_request("x", [1] * 25, 2))
    for number in range(2):
        add(core, make_request(f"later {number}", [number], 1, priority=1))
        step(core)
    assert core.scheduler._aged == [request]
    return request


def between_two_chunks(core):
    """A part of the prompt is computed."""
    request = add(core, make_request("x", [1, 0, 1] * 6, 5))
    step(core)
    assert 0 < request.num_computed_tokens < 18
    return request


def decoding(core):
    """Some of the output is there."""
    request = add(core, make_request("x", [1, 0, 1], 5))
    step(core, 3)
    assert len(request.output_token_ids) == 3
    return request


def in_the_step_that_fails(core):
    """Its slots are half written."""
    request = decoding(core)
    core.runner.is_failing = True
    with pytest.raises(RuntimeError, match="half of the step"):
        core.step()
    core.runner.is_failing = False
    return request


def preempted(core):
    """It waits again."""
    request = decoding(core)
    preempt(core, request)
    assert request.state is RequestState.PREEMPTED
    return request


def preempted_between_two_chunks(core):
    """It waits again, with nothing said yet."""
    request = between_two_chunks(core)
    preempt(core, request)
    return request


def before_its_continuations_begin(core):
    """They end with it."""
    request = add(core, make_request("x", [1, 0, 1] * 6, 5, n=3))
    step(core)
    return request


class TestAbort:
    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    @pytest.mark.parametrize(
        "point",
        [
            waiting, waiting_for_room, waiting_for_a_prefill, waiting_first_of_all, between_two_chunks, decoding,
            in_the_step_that_fails, preempted, preempted_between_two_chunks, before_its_continuations_begin,
        ],
    )  # fmt: skip
    def test_a_request_is_gone_wherever_it_stood(self, point, preemption):
        """A007: its blocks, locks and saved KV go with it; the second time it is nobody; others do not notice."""
        core = make_core(
            8, 4, max_num_batched_tokens=8, max_overtakes=2, preemption=preemption, num_swap_blocks=8
        )  # fmt: skip
        request = point(core)
        others = [other for other in core.scheduler.requests() if other is not request]
        sequences = list(request.sequences())
        assert core.abort("x") is request
        core.cache.check()
        assert "x" not in core.cache.request_ids
        assert all(sequence.finish_reason == "abort" for sequence in sequences)
        assert core.abort("x") is core.abort("nobody") is None
        assert run_to_end(core) == others
        assert_solo(*others)
        assert core.scheduler.counters.finished["abort"] == len(sequences)
        assert_idle(core)
        add(core, make_request("x", [1, 0, 1], 5))  # its id is free, and so is what it held
        run_to_end(core)

    def test_a_request_that_has_just_ended_is_nobody(self):
        """A007: a client that goes away with the last token makes no second end."""
        core = make_core()
        request = add(core, make_request("x", [1], 1))
        assert core.step() == [request]
        assert core.abort("x") is None
        assert request.finish_reason == "length"
        assert core.scheduler.counters.finished == {"length": 1}

    def test_continuations_that_have_begun_go_on_without_the_first(self):
        """From its first token on, each is a request of its own."""
        core = make_core(num_blocks=32)
        request = make_request("x", [1, 0, 1], 6, n=3)
        forks = list(request.forks)
        add(core, request)
        step(core, 2)
        assert core.abort("x") is request
        assert sorted(ids_of(run_to_end(core))) == ["x/1", "x/2"]
        assert_solo(*forks)
        assert_idle(core)

    def test_a_continuation_ends_alone_also_before_it_begins(self):
        """The others of its prompt go on: one client less is no reason to fail."""
        core = make_core(num_blocks=32)
        request = make_request("x", [1, 0, 1], 6, n=3)
        first, gone, last = request.sequences()
        add(core, request)
        assert core.abort("x/1") is gone
        assert sorted(ids_of(run_to_end(core))) == ["x", "x/2"]
        assert_solo(first, last)
        assert (gone.output_token_ids, gone.finish_reason) == ([], "abort")
        assert_idle(core)

    def test_all_are_aborted_and_none_starts(self):
        """C111: 2 run and 5 wait; each is reported once."""
        core = make_core(max_num_seqs=2)
        requests = [make_request(str(number), [number % 2, number // 2 % 2, number // 4], 5) for number in range(7)]
        add(core, *requests)
        step(core)
        assert ids_of(core.scheduler.requests()) == list("0123456")
        assert core.abort_all() == requests
        assert [request.finish_reason for request in requests] == ["abort"] * 7
        assert core.step() == []
        assert len(core.runner.steps) == 1
        assert core.abort_all() == []
        assert_idle(core)

    def test_thousands_of_requests_leave_no_object_behind(self):
        """B077: one in three is aborted on its way; what the loop can reach does not grow."""
        core = make_core(12, 4, max_num_seqs=5, preemption="swap", num_swap_blocks=4, order="longest-prefix")
        sizes = []
        for number in range(5_000):
            bits = [number >> bit & 1 for bit in range(13)]
            namespace = [None, "tenant"][number % 2]
            add(core, make_request(str(number), bits, 1 + number % 9, namespace, priority=number % 3, n=1 + number % 2))
            core.step()
            if number % 3 == 0:
                core.abort(str(number - number % 7))
            if number % 50 == 49:
                while core.has_requests:
                    core.step()
            if number in (2_499, 4_999):
                assert_idle(core)
                core.runner.steps.clear()
                core.scheduler.swap.restored.clear()
                assert core.cache.reset()
                sizes.append(reachable(core))
        assert core.scheduler.counters.finished["abort"] > 900
        assert core.scheduler.counters.preemptions.total() > 100
        assert max((sizes[1] - sizes[0]).values(), default=0) <= 5, sizes[1] - sizes[0]


def reachable(root):
    """How many objects of which type hang on an object. Numbers left out: equal ones may be one object or several."""
    seen, todo = {id(root): root}, [root]
    while todo:
        for found in gc.get_referents(todo.pop()):
            if id(found) not in seen and not isinstance(found, (type, type(gc), type(reachable), int, float)):
                seen[id(found)] = found
                todo.append(found)
    return Counter(type(found).__name__ for found in seen.values())


class TestOrder:
    @pytest.mark.parametrize(
        ("order", "started"),
        [("fcfs", ["none", "half", "all", "half again"]), ("longest-prefix", ["all", "half", "half again", "none"])],
    )
    def test_who_comes_first(self, order, started):
        """ "longest-prefix" takes who hits most, and among equals the one that came first."""
        core = make_core(num_blocks=32, max_num_seqs=1, order=order)
        prompt = [0, 1, 1, 0] * 4
        add(core, make_request("cached", prompt, 1))
        run_to_end(core)
        for name, num_hit in (("none", 0), ("half", 8), ("all", 16), ("half again", 8)):
            add(core, make_request(name, prompt[:num_hit] + [1, 0, 0, 0] * 2, 2, store=False))
        run_to_end(core)
        assert starts(core) == ["cached", *started]

    @pytest.mark.parametrize("order", ORDERS)
    def test_higher_priorities_go_first(self, order):
        """Whatever they hit; among equals the one that came first."""
        core = make_core(num_blocks=32, max_num_seqs=1, order=order)
        add(core, make_request("cached", [0, 1] * 6, 1))
        run_to_end(core)
        for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 1)):
            prompt = [0, 1] * 6 if priority == 0 else [1, 1, 1]
            add(core, make_request(name, prompt, 1, priority=priority, store=False))
        run_to_end(core)
        assert starts(core) == ["cached", "d", "b", "e", "a", "c"]

    def test_only_so_many_waiting_requests_are_looked_at(self, monkeypatch):
        """Each look is a walk of the tree; with thousands waiting, a step would take longer than its forward pass."""
        monkeypatch.setattr("engine.scheduler.ADMISSION_WINDOW", 3)
        core = make_core(max_num_seqs=1, order="longest-prefix")
        add(core, make_request("cached", [0, 1] * 6, 1))
        run_to_end(core)
        for name, prompt in (("a", [1]), ("b", [1]), ("c", [1]), ("hot", [0, 1] * 6), ("d", [1])):
            add(core, make_request(name, prompt, 1, store=False))
        run_to_end(core)
        assert starts(core) == ["cached", "a", "hot", "b", "c", "d"]

    @pytest.mark.parametrize("order", ORDERS)
    def test_the_preempted_come_back_before_the_new_ones(self, order):
        """B097: with room for one, the one that had begun is first, also if all of it is lost and the others hit."""
        core = make_core(num_blocks=8, max_num_seqs=1, order=order)
        add(core, make_request("cached", [0, 1] * 4, 1))
        run_to_end(core)
        request = add(core, make_request("a", [1, 0, 1] * 4, 5, store=False))
        step(core, 2)
        preempt(core, request)
        add(core, *(make_request(name, [0, 1] * 4, 1) for name in "bcdef"))
        run_to_end(core)
        assert [step[0].request_id for step in core.runner.steps] == ["cached", *("aa" + "aaa" + "bcdef")]
        assert_solo(request)

    @pytest.mark.parametrize("max_overtakes", [1, 4, 32])
    def test_a_cold_request_starts_under_a_stream_of_hot_ones(self, max_overtakes):
        """A039: with one sequence at a time and a hot arrival every step, exactly `max_overtakes` go before it."""
        core = make_core(max_num_seqs=1, order="longest-prefix", max_overtakes=max_overtakes)
        hot = [0, 1] * 6
        add(core, make_request("hot", hot, 1))
        run_to_end(core)
        add(core, make_request("cold", [1] * 6, 1))
        for number in range(500):
            add(core, make_request(f"hot {number}", hot, 1))
            step(core)
        assert starts(core).index("cold") == 1 + max_overtakes
        run_to_end(core)
        assert_idle(core)

    def test_nobody_passes_it_within_one_step_either(self):
        """A step may admit many: the bound counts requests, not steps."""
        core = make_core(num_blocks=32, order="longest-prefix", max_overtakes=2)
        add(core, make_request("hot", [0, 1] * 6, 1))
        run_to_end(core)
        add(core, make_request("cold", [1] * 6, 1), *(make_request(f"hot {n}", [0, 1] * 6, 1) for n in range(5)))
        run_to_end(core)
        assert starts(core) == ["hot", "hot 0", "hot 1", "cold", "hot 2", "hot 3", "hot 4"]

    @given(
        order=st.sampled_from(ORDERS),
        max_overtakes=st.sampled_from([1, 2, 3]),
        max_num_seqs=st.sampled_from([1, 2, 4]),
        arrivals=st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 6), st.integers(0, 3)), max_size=20
        ),
    )
    def test_each_start_is_the_one_that_the_policy_says(self, order, max_overtakes, max_num_seqs, arrivals):
        """Nothing is shared here, so that who is next depends on priority, arrival and overtaking only."""
        core = make_core(num_blocks=12, max_num_seqs=max_num_seqs, order=order, max_overtakes=max_overtakes)
        scheduler, num_overtaken = core.scheduler, Counter()
        for number, (delay, length, max_tokens, priority) in enumerate([*arrivals, (400, 1, 1, 0)]):
            for _ in range(delay):
                queue = list(scheduler.waiting)
                has_begun = {request for request in queue if request.scheduled_s is not None}
                was_running = set(ids_of(scheduler.running))
                num_overtaken = Counter({request: num_overtaken[request] for request in queue})
                if core.has_requests:
                    step(core)
                    for ran in core.runner.steps[-1]:
                        if ran.request_id in was_running:
                            continue
                        aged = [request for request in queue if num_overtaken[request] >= max_overtakes]
                        expected = min(
                            aged or queue,
                            key=lambda r: (
                                not aged and order != "fcfs" and r not in has_begun,
                                0 if aged else -r.priority,
                                r.number,
                            ),
                        )
                        assert ran.request_id == expected.request_id
                        queue.remove(expected)
                        num_overtaken.update(request for request in queue if request.number < expected.number)
                    assert all(num_overtaken[request] <= max_overtakes for request in queue)
            add(core, make_request(str(number), [number % 2] * length, max_tokens, str(number), priority=priority))
        assert scheduler.running == []

    def test_a_request_is_counted_once_however_long_it_waits(self):
        """A040: 32 cached tokens, 50 steps without room: one look-up, its tokens and its hit once."""
        core = make_core(num_blocks=6, block_size=16)
        prompt = [0, 1] * 16
        add(core, make_request("cached", prompt, 1))
        run_to_end(core)
        add(core, make_request("holder", [1] * 15, 50))
        step(core)
        stats = core.cache.stats
        before = (stats.requests, stats.prompt_tokens, stats.hit_tokens)
        request = add(core, make_request("waits", prompt + [1, 1] * 32, 1))
        step(core, 49)
        assert core.scheduler.running == []
        assert (stats.requests, stats.prompt_tokens, stats.hit_tokens) == before
        step(core)
        assert request.num_cached_tokens == 32
        assert (stats.requests, stats.prompt_tokens, stats.hit_tokens) == (
            before[0] + 1,
            before[1] + 96,
            before[2] + 32,
        )


class TestSharing:
    @pytest.mark.parametrize(("block_size", "rest"), [(1, 1), (4, 1), (16, 8)])
    @pytest.mark.parametrize("budget", [16, 64, 1000])
    def test_identical_prompts_that_arrive_together_are_computed_once(self, block_size, rest, budget):
        """A005: the first of 8 is computed, the others wait and hit all of its full blocks, to the last token but one.

        Of the first one's partly filled last block they cannot know yet: the first goes on writing to it.
        """
        core = make_core(64 * 16 // block_size, block_size, max_num_batched_tokens=budget)
        requests = [make_request(str(number), [0, 1, 1, 0, 1] * 8, 20) for number in range(8)]
        add(core, *requests)
        step(core)
        run_to_end(core)
        assert core.scheduler.counters.prefill_tokens == 40 + 7 * rest
        assert [request.num_cached_tokens for request in requests] == [0] + [40 - rest] * 7
        assert_solo(*requests)

    @pytest.mark.parametrize("is_failed", [False, True])
    def test_if_the_first_is_aborted_before_it_is_computed_the_next_takes_over(self, is_failed):
        """A005: a block is findable only when its KV exists; what a failed pass left in it is not KV."""
        core = make_core(64, 4)
        requests = [make_request(str(number), [0, 1, 1, 0, 1] * 8, 20) for number in range(8)]
        add(core, *requests)
        if is_failed:
            core.runner.is_failing = True
            with pytest.raises(RuntimeError, match="half of the step"):
                core.step()
            core.runner.is_failing = False
        core.abort("0")
        assert core.cache.num_cached_blocks == 0
        run_to_end(core)
        assert core.scheduler.counters.prefill_tokens == 40 + 6
        assert_solo(*requests[1:])

    def test_if_the_first_is_aborted_between_chunks_the_next_goes_on_from_there(self):
        """A005: what was computed until then is found."""
        core = make_core(64, 4, max_num_batched_tokens=20)
        requests = [make_request(str(number), [0, 1, 1, 0, 1] * 8, 20) for number in range(8)]
        add(core, *requests)
        assert step(core) == [("0", 0, 20)]
        core.abort("0")
        assert step(core) == [("1", 20, 40)]
        run_to_end(core)
        assert core.scheduler.counters.prefill_tokens == 40 + 6
        assert_solo(*requests[1:])

    def test_a_follower_waits_while_a_block_or_more_is_under_way_and_no_longer(self):
        """It needs only what both share: the first one's rest is its own affair."""
        core = make_core(64, 4, max_num_batched_tokens=6)
        add(core, make_request("first", [0, 1] * 4 + [0] * 12, 9), make_request("follows", [0, 1] * 4 + [1] * 2, 9))
        assert step(core) == [("first", 0, 6)]
        assert step(core) == [("first", 6, 12)], "of the 8 shared tokens 4 are not cached yet"
        assert step(core) == [("first", 12, 18)]
        assert step(core) == [("first", 18, 20), ("follows", 8, 10)]

    def test_nobody_waits_for_a_last_block_of_which_a_token_must_be_computed_anyway(self):
        """Of 20 identical tokens 19 can be hit, which is 4 full blocks, and these are cached already."""
        core = make_core(64, 4, max_num_batched_tokens=16)
        add(core, make_request("first", [0, 1] * 10, 9), make_request("follows", [0, 1] * 10, 9))
        assert step(core) == [("first", 0, 16)]
        assert step(core) == [("first", 16, 20), ("follows", 16, 20)]

    def test_nobody_waits_for_a_decode(self):
        """It may fill a block that another one's prompt begins with, but that is seldom, and one block only."""
        core = make_core(64, 4)
        request = add(core, make_request("decodes", [1, 0, 1], 9))
        step(core)
        add(core, make_request("next", [1, 0, 1, *request.output_token_ids, 0, 0], 9))
        assert step(core) == [("decodes", 3, 4), ("next", 0, 6)]

    @pytest.mark.parametrize(("max_overtakes", "passes"), [(1, []), (2, ["short"]), (3, ["short", "shorter"])])
    def test_others_do_not_wait_with_a_follower(self, max_overtakes, passes):
        """Who shares nothing goes on, but only so many times: then nobody passes it, for whatever it waits."""
        core = make_core(64, 4, max_num_batched_tokens=20, max_overtakes=max_overtakes)
        add(core, make_request("first", [0, 1] * 25, 2), make_request("follows", [0, 1] * 25, 2))
        add(core, make_request("high", [1], 9, "tenant", priority=1))
        assert step(core) == [("high", 0, 1), ("first", 0, 19)]
        core.abort("high")
        add(core, make_request("short", [1, 1], 2, "tenant"), make_request("shorter", [0], 2, "tenant"))
        assert step(core) == [("first", 19, 39)]
        assert [row[0] for row in step(core)] == ["first", *passes]
        assert ("follows", 48, 50) in step(core)
        run_to_end(core)
        assert_idle(core)

    @pytest.mark.parametrize(
        ("first", "follower", "limits"),
        [
            ({"store": False}, {}, {}),
            ({"namespace": "tenant"}, {}, {}),
            ({}, {"namespace": "tenant"}, {}),
            ({}, {"prompt_logprobs": 0}, {}),
            ({}, {}, {"enable_prefix_caching": False}),
            ({}, {}, {"block_size": 64}),
        ],
    )  # fmt: skip
    def test_who_will_not_hit_does_not_wait(self, first, follower, limits):
        """What is not stored, is another's, or must be computed all the same, is not worth waiting for."""
        core = make_core(**{"num_blocks": 64, "block_size": 4, **limits})
        prompt = [0, 1, 1, 0, 1] * 8
        one, two = make_request("first", prompt, 3, **first), make_request("follower", prompt, 3, **follower)
        add(core, one, two)
        assert step(core) == [("first", 0, 40), ("follower", 0, 40)]
        run_to_end(core)
        assert_solo(one, two)

    def test_nobody_waits_for_what_is_cached_or_decodes(self):
        """A request that computes again what is cached, for its log-probabilities, keeps nobody from hitting it."""
        core = make_core(64, 4, max_num_batched_tokens=20)
        prompt = [0, 1, 1, 0, 1] * 6
        add(core, make_request("cached", prompt, 1))
        run_to_end(core)
        add(core, make_request("judged", prompt, 3, prompt_logprobs=0))
        assert step(core) == [("judged", 0, 20)]
        add(core, make_request("hits", prompt, 3))
        assert step(core) == [("judged", 20, 30), ("hits", 29, 30)]
        add(core, make_request("later", prompt, 3))
        assert step(core) == [("judged", 30, 31), ("hits", 30, 31), ("later", 29, 30)]

    def test_a_request_for_prompt_logprobs_computes_all_of_its_prompt(self):
        """It neither waits nor hits, however often it is preempted, until it has them; then it hits like any other."""
        core = make_core(64, 4, max_num_batched_tokens=16)
        prompt = [0, 1, 1, 0, 1] * 8
        add(core, make_request("cached", prompt, 1))
        run_to_end(core)
        request = make_request("judged", prompt, 5, prompt_logprobs=0, n=2)
        first, second = request.sequences()
        add(core, request)
        step(core)
        preempt(core, request)
        assert request.max_cached_tokens == 16
        step(core, 3)
        assert core.runner.rows_of("judged") == [(0, 16), (16, 32), (32, 40), (40, 41)]
        assert request.prompt_logprobs == prompt_logprobs_of(request)
        preempt(core, second)
        assert step(core) == [("judged", 41, 42), ("judged/1", 41, 42)]
        run_to_end(core)
        assert_solo(first, second)
        assert core.cache.stats.requests == 2
        assert_idle(core)


def running(request_id, *, priority=0, num_prompt=4, num_output=1, num_pending=1, num_preemptions=0):
    """A request as it stands between two steps."""
    request = make_request(request_id, [0] * num_prompt, 100, priority=priority)
    request.start(num_prompt + num_output - num_pending, 0.0)
    request.output_token_ids = [0] * num_output
    request.num_preemptions = num_preemptions
    return request


VICTIM_TABLE = [
    # running, in order of admission; whom each policy picks
    ([running("a"), running("b")], "b", "b", "b"),
    ([running("a", num_prompt=9), running("b")], "b", "a", "b"),
    ([running("a", num_output=7, num_prompt=1), running("b", num_output=2, num_prompt=1)], "b", "a", "b"),
    ([running("a", num_output=2), running("b", num_output=7)], "b", "b", "a"),
    (
        [running("a", num_output=2, num_prompt=20), running("b", num_output=7), running("c", num_output=4)],
        "c",
        "a",
        "a",
    ),
    ([running("a", num_output=0, num_prompt=9, num_pending=7), running("b", num_output=2)], "b", "a", "a"),
    ([running("a"), running("b", num_prompt=9, num_preemptions=2)], "b", "b", "b"),
    ([running("a"), running("b", num_prompt=9, num_preemptions=3)], "a", "a", "a"),
    ([running("a", num_preemptions=3), running("b", num_preemptions=9)], "b", "b", "b"),
    ([running("a", priority=1), running("b", num_preemptions=3)], "b", "b", "b"),
    ([running("a"), running("b", priority=1)], "a", "a", "a"),
    ([running("a", num_output=9), running("b"), running("c", priority=1, num_prompt=30)], "b", "a", "b"),
    ([running("a", priority=2), running("b", priority=1), running("c", priority=3)], "b", "b", "b"),
    ([running("a", num_pending=0, priority=5), running("b"), running("c")], "a", "a", "a"),
    ([running("a", num_pending=0), running("b", num_pending=0, priority=1), running("c")], "a", "a", "a"),
    ([running("a", num_pending=0), running("b", num_pending=0), running("c")], "b", "b", "b"),
]


class TestPreemption:
    @pytest.mark.parametrize("policy", VICTIMS)
    @pytest.mark.parametrize(("requests", "lifo", "largest", "least_progress"), VICTIM_TABLE)
    def test_whom_each_policy_picks(self, requests, lifo, largest, least_progress, policy):
        """Paused ones, the lowest priority, those stopped seldom; then the policy's choice, then who came last."""
        chosen = {"lifo": lifo, "largest": largest, "least-progress": least_progress}[policy]
        assert choose_victim(policy, requests).request_id == chosen

    def test_a_high_priority_takes_blocks_from_a_low_one_and_never_the_other_way_round(self):
        """Who asks gives its own up, if it is the least important."""
        for asking, priorities in (("a", (0, 1)), ("b", (1, 0))):
            core = make_core(num_blocks=5, block_size=4)
            for name, token, priority in zip("ab", (0, 1), priorities, strict=True):
                add(core, make_request(name, [token] * 4, 9, priority=priority))
            step(core, 6)
            assert ids_of(core.scheduler.waiting) == [asking], "both need a third block in step 6, and there is one"
            run_to_end(core)
            assert_idle(core)

    @pytest.mark.parametrize("victim", VICTIMS)
    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    def test_two_that_do_not_fit_together_do_not_throw_each_other_out_in_turn(self, victim, preemption):
        """A020: a pool of 12 blocks, two requests of 5 blocks of prompt and 4 of output."""
        core = make_core(12, 4, victim=victim, preemption=preemption, num_swap_blocks=12)
        requests = [make_request(name, [token] * 20, 17) for name, token in (("a", 0), ("b", 1))]
        add(core, *requests)
        run_to_end(core)
        assert core.scheduler.counters.preemptions.total() == 1
        assert_solo(*requests)
        assert_idle(core)

    @pytest.mark.parametrize("num_swap_blocks", [None, 0, 100])
    @pytest.mark.parametrize("is_evicted", [False, True])
    @pytest.mark.parametrize("budget", [8, 64])
    @pytest.mark.parametrize("num_output", [1, 15, 16, 17])
    def test_output_goes_on_after_a_preemption_as_if_nothing_had_been(
        self, num_output, budget, is_evicted, num_swap_blocks
    ):
        """A021: tokens, their number and the end are the same; what is lost of prompt and output is computed again."""
        swap = {} if num_swap_blocks is None else {"preemption": "swap", "num_swap_blocks": num_swap_blocks}
        core = make_core(8, 16, max_num_batched_tokens=budget, **swap)
        request = add(core, make_request("x", [0, 1, 1, 0, 1] * 4, 40))
        while len(request.output_token_ids) < num_output:
            step(core)
        num_before = len(core.runner.rows_of("x"))
        preempt(core, request)
        if is_evicted:
            core.cache.evict(8)
        run_to_end(core)
        assert (request.output_token_ids, request.finish_reason) == (solo_output(request), "length")
        num_computed, num_blocks = 19 + num_output, -(-(19 + num_output) // 16)
        counters, rows = core.scheduler.counters, core.runner.rows_of("x")[num_before:]
        is_saved = num_swap_blocks == 100
        num_lost = num_computed if is_evicted and not is_saved else 0
        assert rows[0][0] == num_computed - num_lost
        assert [start for start, _ in rows[1:]] == [end for _, end in rows[:-1]], "without a gap, and nothing twice"
        assert rows[-1][1] == 20 + 39
        assert counters.recomputed_tokens == request.num_recomputed_tokens == num_lost
        assert counters.preemptions == {"swap" if is_saved else "recompute": 1}
        assert counters.swapped_out_blocks == (num_blocks if is_saved else 0)
        assert counters.swapped_in_blocks == (num_blocks if is_saved and is_evicted else 0)
        assert_idle(core)

    @pytest.mark.parametrize("is_stored", [True, False])
    def test_as_many_are_preempted_as_the_others_need_blocks(self, is_stored):
        """A024: 15 requests need a block each, 5 are free: 5 give one up, and 10 have theirs."""
        core = make_core(20, 16, max_num_batched_tokens=1000)
        requests = [make_request(f"{n:02}", [n >> bit & 1 for bit in range(16)], 1, store=is_stored) for n in range(15)]
        add(core, *requests)
        run = core.runner.run

        def run_on(scheduled, cache):
            for request in requests:  # else room for growth would have been left
                request.max_total_tokens = 40
            return run(scheduled, cache)

        core.runner.run = run_on
        assert len(step(core)) == 15
        assert (core.cache.num_free_blocks, core.cache.num_evictable_blocks) == (5, 0)
        assert [row[0] for row in step(core)] == [f"{n:02}" for n in range(10)]
        assert (core.cache.num_free_blocks, core.cache.num_evictable_blocks) == (0, 0)
        assert ids_of(core.scheduler.waiting) == [f"{n:02}" for n in range(10, 15)]
        run_to_end(core)
        assert_solo(*requests)
        assert_idle(core)

    def test_nobody_is_admitted_in_a_step_that_preempted(self):
        """The blocks that a victim gives up are for those who lack them, not for the next in line."""
        core = make_core(num_blocks=5, block_size=4)
        add(core, make_request("a", [0] * 4, 9), make_request("b", [1] * 4, 9, store=False))
        step(core, 5)
        add(core, make_request("c", [1, 0], 1, priority=1))
        assert step(core) == [("a", 8, 9)]
        assert core.cache.num_free_blocks == 2, "c would have had room"
        assert step(core) == [("a", 9, 10), ("c", 0, 2)]

    def test_a_prefill_that_is_broken_off_starts_again_where_its_blocks_end(self):
        """It had all its blocks from the start, so only the growth of others can stop it."""
        core = make_core(num_blocks=7, block_size=2, max_num_batched_tokens=2)
        request = make_request("long", [1, 0, 0, 1] * 2, 1)
        add(core, make_request("a", [0, 0], 20), request)
        step(core, 6)
        assert core.runner.rows_of("long") == [(0, 1), (1, 2), (2, 3), (3, 4)]
        assert (request.state, request.num_lost_tokens) == (RequestState.PREEMPTED, 4)
        run_to_end(core)
        assert core.runner.rows_of("long")[4:] == [(0, 2), (2, 4), (4, 6), (6, 8)], "the other one needed every block"
        assert core.scheduler.counters.recomputed_tokens == request.num_recomputed_tokens == 4
        assert_solo(request)

    @pytest.mark.parametrize("victim", VICTIMS)
    @pytest.mark.parametrize(("num_blocks", "per_step", "max_tokens"), [(64, 1, 8), (128, 2, 32), (256, 1, 32)])
    def test_a_request_is_preempted_a_few_times_only_however_many_come(self, victim, num_blocks, per_step, max_tokens):
        """Room for it doubles, and whoever was stopped a few times is spared: O(log length) times, not once a block."""
        core = make_core(num_blocks, 2, victim=victim, max_num_batched_tokens=256)
        long = add(core, make_request("long", [0, 1, 1, 0], 3 * num_blocks // 2, store=False))
        requests = [long]
        while long.finish_reason is None:
            for _ in range(per_step):
                if len(core.scheduler.waiting) < 4:
                    number = len(requests)
                    requests.append(make_request(str(number), [number % 2, 1], max_tokens, store=False))
                    add(core, requests[-1])
            core.step()
        run_to_end(core)
        most = max(request.num_preemptions for request in requests)
        assert most <= (num_blocks * 3 // 4).bit_length(), f"{long.num_preemptions} times the long one"
        assert_solo(*requests)

    def preempt_by_need(self, num_evicted=0, is_stored=True, **limits):
        """Two requests of 4 + 9 tokens in 5 blocks of 4; b gives up 8 computed tokens in step 6, a ends in step 9."""
        core = make_core(5, 4, preemption="swap", **limits)
        add(core, make_request("a", [0] * 4, 9))
        request = add(core, make_request("b", [1] * 4, 9, store=is_stored))
        step(core, 6)
        assert (request.state, request.num_lost_tokens) == (RequestState.PREEMPTED, 8)
        assert step(core, 3) == [("a", 11, 12)]
        assert core.cache.evict(num_evicted) == num_evicted
        run_to_end(core)
        assert_solo(request)
        assert_idle(core)
        return core

    @pytest.mark.parametrize(
        ("num_evicted", "is_stored", "limits", "restored"),
        [
            (0, True, {}, []),
            (1, True, {}, [("b", 1, 1)]),
            (2, True, {}, [("b", 0, 2)]),
            (0, False, {}, [("b", 0, 2)]),
            (0, True, {"enable_prefix_caching": False}, [("b", 0, 2)]),
        ],
    )  # fmt: skip
    def test_swapping_copies_back_only_what_the_cache_has_lost(self, num_evicted, is_stored, limits, restored):
        """Most blocks of a victim are still cached when it returns; a copy of what is there is a waste of bandwidth."""
        core = self.preempt_by_need(num_evicted, is_stored, num_swap_blocks=2, **limits)
        counters = core.scheduler.counters
        assert core.scheduler.swap.restored == restored
        assert (counters.swapped_out_blocks, counters.swapped_in_blocks) == (2, sum(row[2] for row in restored))
        assert (counters.preemptions, counters.recomputed_tokens) == ({"swap": 1}, 0)
        assert core.runner.rows_of("b")[-4:] == [(8, 9), (9, 10), (10, 11), (11, 12)]
        is_kept = is_stored and core.scheduler.config.enable_prefix_caching
        assert core.cache.lookup_prefix([1] * 4).num_tokens == (4 if is_kept else 0)

    @pytest.mark.parametrize("num_swap_blocks", [0, 1])
    def test_without_room_to_swap_a_request_is_recomputed(self, num_swap_blocks):
        """Host memory is a pool too, and half a request is no use."""
        core = self.preempt_by_need(is_stored=False, num_swap_blocks=num_swap_blocks)
        counters = core.scheduler.counters
        assert (counters.swapped_out_blocks, counters.swapped_in_blocks) == (0, 0)
        assert (counters.preemptions, counters.recomputed_tokens) == ({"recompute": 1}, 8)
        assert core.runner.rows_of("b")[-4:] == [(0, 9), (9, 10), (10, 11), (11, 12)]

    def test_only_what_is_computed_is_copied_out(self):
        """A request has blocks for its whole prompt from the start; what is in the others is nobody's KV."""
        core = make_core(16, 4, max_num_batched_tokens=6, preemption="swap", num_swap_blocks=5)
        request = add(core, make_request("x", [0, 1, 1] * 6, 3))
        core.runner.is_failing = True
        with pytest.raises(RuntimeError, match="half of the step"):
            core.step()
        core.runner.is_failing = False
        preempt(core, request)
        assert (core.scheduler.swap.saved, core.scheduler.counters.preemptions) == ({}, {"recompute": 1})
        step(core)
        preempt(core, request)
        assert core.scheduler.swap.num_blocks == core.scheduler.counters.swapped_out_blocks == 2
        assert core.scheduler.counters.preemptions == {"recompute": 1, "swap": 1}
        run_to_end(core)
        assert_solo(request)
        assert_idle(core)

    def test_room_to_swap_comes_back_with_its_owner(self):
        """Returned, aborted: either way the next victim finds it."""
        core = make_core(16, 4, preemption="swap", num_swap_blocks=3)
        requests = [make_request(name, [number, 1, 0, 1, 0], 8) for number, name in enumerate("ab")]
        add(core, *requests)
        step(core)
        preempt(core, requests[0])
        preempt(core, requests[1])
        assert core.scheduler.counters.preemptions == {"swap": 1, "recompute": 1}
        step(core)
        preempt(core, requests[1])
        core.abort("b")
        preempt(core, requests[0])
        assert core.scheduler.counters.preemptions == {"swap": 3, "recompute": 1}
        run_to_end(core)
        assert_idle(core)

    def test_if_others_have_computed_more_of_it_meanwhile_nothing_is_copied_back(self):
        """A hit costs nothing, and may be longer than what was saved."""
        core = make_core(16, 4, max_num_batched_tokens=8, preemption="swap", num_swap_blocks=8)
        request = add(core, make_request("a", [0, 1, 1] * 6, 3))
        step(core)
        preempt(core, request)
        add(core, make_request("b", [0, 1, 1] * 6, 1, priority=1))
        assert step(core) == [("b", 8, 16)]
        assert step(core) == [("b", 16, 18), ("a", 16, 18)]
        assert core.scheduler.swap.restored == []
        run_to_end(core)
        assert_solo(request)
        assert_idle(core)

    def test_what_is_copied_back_can_be_hit_like_what_is_computed(self):
        """It is the same KV."""
        core = make_core(16, 4, preemption="swap", num_swap_blocks=8)
        request = add(core, make_request("a", [0, 1, 1, 0] * 3, 9))
        step(core)
        preempt(core, request)
        core.cache.evict(16)
        add(core, make_request("b", [0, 1, 1, 0] * 3, 1))
        assert step(core) == [("a", 12, 13), ("b", 11, 12)]
        run_to_end(core)
        assert_solo(request)

    def test_whoever_is_paused_makes_room_for_those_who_wait(self):
        """Beams wait for each other: one that is computed holds blocks that another needs to be computed."""
        core = make_core(num_blocks=3, block_size=4)
        beam = make_request("beam", [0] * 8, 5)
        beam.num_candidates = 2
        add(core, beam)
        step(core)
        assert [token for token, _ in beam.candidates] != []
        assert core.scheduler.schedule() == [], "it is paused, and nobody waits"
        other = add(core, make_request("other", [1] * 5, 2))
        assert step(core) == [("other", 0, 5)]
        assert beam.state is RequestState.PREEMPTED
        assert core.num_requests == 2
        run_to_end(core)
        core.continue_with(beam, 1)
        assert beam.candidates == []
        assert step(core) == [("beam", 8, 9)] or core.runner.rows_of("beam")[-1][1] == 9
        assert core.abort("beam") is beam
        assert_solo(other)
        assert_idle(core)

    def test_no_more_of_the_paused_make_room_than_needed(self):
        """The policy chooses among them too."""
        core = make_core(num_blocks=4, block_size=4)
        beams = [make_request(name, [token] * 4, 5) for name, token in (("a", 0), ("b", 1))]
        for beam in beams:
            beam.num_candidates = 2
        add(core, *beams)
        step(core)
        add(core, make_request("other", [0, 1] * 4, 1, "tenant"))
        assert step(core) == [("other", 0, 8)]
        assert [beam.state for beam in beams] == [RequestState.RUNNING, RequestState.PREEMPTED]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class TestMetrics:
    @pytest.mark.parametrize(
        ("preemption", "prefill", "decode", "recomputed", "swapped"),
        [("recompute", 4 + 4 + 9, 8 + 4 + 3, 8, 0), ("swap", 4 + 4, 8 + 4 + 4, 0, 2)],
    )
    def test_the_counters_say_what_was_done(self, preemption, prefill, decode, recomputed, swapped):
        """The example of `preempt_by_need`, by hand: a is computed in 9 steps; b loses 8 tokens, and needs 4 more."""
        core = make_core(5, 4, preemption=preemption, num_swap_blocks=2)
        add(core, make_request("a", [0] * 4, 9), make_request("b", [1] * 4, 9, store=False))
        add(core, make_request("gone", [1]))
        core.abort("gone")
        run_to_end(core)
        assert core.scheduler.counters == EngineCounters(
            steps=13,
            prefill_tokens=prefill,
            decode_tokens=decode,
            output_tokens=18,
            finished=Counter({"length": 2, "abort": 1}),
            preemptions=Counter({preemption: 1}),
            recomputed_tokens=recomputed,
            swapped_out_blocks=swapped,
            swapped_in_blocks=swapped,
        )
        metrics = core.metrics()
        assert (metrics.swapped_out_bytes, metrics.swapped_in_bytes) == (100 * swapped, 100 * swapped)

    def test_what_is_computed_again_token_by_token_is_no_decode(self):
        """A chunk may be one token long; a decode gives the next token."""
        core = make_core(max_num_batched_tokens=1)
        request = add(core, make_request("a", [0, 1, 1], 4))
        step(core, 4)
        preempt(core, request)
        core.cache.evict(16)
        run_to_end(core)
        counters = core.scheduler.counters
        assert (counters.recomputed_tokens, counters.prefill_tokens, counters.decode_tokens) == (4, 3 + 4, 3)

    def test_the_metrics_say_how_the_engine_stands(self):
        """Shares of the pool, and copies of the counters: what was given does not change later."""
        core = make_core(num_blocks=10, block_size=4, max_num_seqs=2)
        assert core.metrics().token_hit_rate is None
        add(core, make_request("done", [0] * 8, 1))
        run_to_end(core)
        for name, prompt in (("a", [0] * 8 + [1]), ("b", [1] * 2), ("c", [0])):
            add(core, make_request(name, prompt, 3))
        step(core)
        metrics = core.metrics()
        assert (metrics.num_running, metrics.num_waiting) == (2, 1)
        assert metrics.block_use == pytest.approx(0.4), "a has 3 blocks, 2 of them cached; b has one"
        assert metrics.cached == 0
        assert metrics.token_hit_rate == pytest.approx(8 / (8 + 9 + 2))
        run_to_end(core)
        assert (metrics.counters.finished, metrics.counters.output_tokens) == ({"length": 1}, 3)
        assert core.metrics().counters.finished == {"length": 4}
        assert core.metrics().block_use == pytest.approx(0)
        assert core.metrics().cached == pytest.approx(core.cache.num_cached_blocks / 10)

    def test_times_of_a_request_are_the_clock_s(self):
        """One clock for all, which a simulator may replace."""
        clock = Clock()
        core = make_core(clock=clock, max_num_seqs=1)
        add(core, make_request("a", [0], 2))
        request = add(core, make_request("b", [1], 2))
        for _ in range(4):
            clock.now_s += 1
            step(core)
        assert (request.scheduled_s, request.first_token_s, request.finished_s) == (103, 103, 104)

    def test_a_busy_engine_writes_a_line_now_and_then(self, caplog):
        """One line per interval, with the rates since the last; the first comes an interval after the first step."""
        clock = Clock()
        core = make_core(20, 4, clock=clock, log_interval_s=2.0)
        add(core, make_request("a", [0] * 8, 7), make_request("b", [1] * 4, 7))
        with caplog.at_level(logging.INFO, logger="engine"):
            lines = []
            while core.has_requests:
                step(core)
                lines.append(len(caplog.messages))
                clock.now_s += 1
        assert lines == [0, 0, 1, 1, 2, 2, 3]
        assert caplog.messages[1] == (
            "2 running, 0 waiting; prefill 0.0 tokens/s, output 2.0 tokens/s; blocks 25.0% used, 0.0% cached; "
            "hit rate 0.0%; 0 preemptions"
        )
        assert caplog.messages[2].startswith("0 running, 0 waiting; prefill 0.0 tokens/s, output 2.0 tokens/s; ")

    def test_time_without_work_does_not_count(self, caplog):
        """A line after an idle hour would say that the engine is slow; and what came before is not counted again."""
        clock = Clock()
        core = make_core(20, 4, clock=clock, log_interval_s=2.0)
        with caplog.at_level(logging.INFO, logger="engine"):
            for name in ("a", "b"):
                add(core, make_request(name, [0] * 4, 2 if name == "a" else 9, name))
                for _ in range(2):
                    step(core)
                    clock.now_s += 1
                if name == "a":
                    assert not core.has_requests
                    clock.now_s += 3600
                    assert core.step() == []
                    assert caplog.messages == []
            step(core)
        assert len(caplog.messages) == 1
        assert "prefill 2.0 tokens/s, output 1.5 tokens/s" in caplog.messages[0]

    def test_no_lines_unless_wanted(self, caplog):
        """0 = none; and an interval that is none is refused."""
        clock = Clock()
        core = make_core(clock=clock)
        add(core, make_request("a", [0], 5))
        with caplog.at_level(logging.INFO, logger="engine"):
            while core.has_requests:
                step(core)
                clock.now_s += 1e6
        assert caplog.messages == []
        for interval_s in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=r"log_interval_s is (-1.0|nan); allowed: 0 \(no lines\) and more"):
                ProgressLog(interval_s)


class TestBeams:
    def test_beams_count_as_sequences_before_they_begin(self):
        """Three beams of one prompt become three rows; beside three more of four, that would be too many."""
        core = make_core(64, 4, max_num_seqs=4, max_num_batched_tokens=4)
        add(core, *(make_request(str(number), [number % 2, 1], 9) for number in range(3)))
        beams = make_beams(core, "beams", [0, 0], 3, 6)
        while core.has_requests or not beams.is_finished:
            checked_step(core)
            beams.advance()
        beams.close()
        assert_idle(core)
