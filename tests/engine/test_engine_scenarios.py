"""What broke real engines, one test per row, on tiny random models in float32.

The truth is a solo run: the same request alone in a new engine, which `test_llm.py` holds against the model itself.
"""

import contextlib
import copy
import functools
import math
import random

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from chat_helpers import save_tiny_chat_model  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from tiny_models import VOCAB_SIZE, model_of, tiny_model  # noqa: E402

BLOCK_SIZES = [1, 4, 16]
# Logits of size up to 11; float32 sums in another order were seen to differ by 7e-6, a missing key by more than 1e-2.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@functools.cache
def decoder_of(name):
    """The decoder of a tiny model; built once, since nothing here changes it."""
    return Decoder.load(tiny_model(name))


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def greedy(max_tokens):
    """Params that always give `max_tokens` tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@functools.cache
def solo(name, ids, max_tokens):
    """The tokens of one request, a tuple of ids, alone in a new engine."""
    (output,) = LLM(decoder_of(name), num_blocks=16).generate(ids, greedy(max_tokens))
    return output.outputs[0].token_ids


@functools.cache
def own_logits(name, ids):
    """(vocab_size,): the model's own eager logits after a whole prompt, a tuple of ids, uncached."""
    with torch.no_grad():
        return model_of(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


@functools.cache
def sampled_with_a_new_last_token(num_new):
    """A seed and the tokens sampled with it after `prompt(5, 0)`, the last of which is not among the others."""
    llm = LLM(decoder_of("llama"), num_blocks=16)
    for seed in range(100):
        params = SamplingParams(max_tokens=num_new, temperature=3.0, seed=seed, ignore_eos=True)
        tokens = llm.generate(prompt(5, 0), params)[0].outputs[0].token_ids
        if tokens[-1] not in tokens[:-1]:
            return seed, tokens
    raise AssertionError("at this temperature, the first seeds should do")


class Engine:
    """An `LLM` driven step by step, with the logits of each step and a recount after it."""

    def __init__(self, name="llama", num_blocks=64, block_size=16, eos_token_ids=None, **limits):
        decoder = copy.copy(decoder_of(name))
        if eos_token_ids is not None:
            decoder.eos_token_ids = frozenset(eos_token_ids)
        forward = decoder.forward

        def remembering(batch, storage):
            self.logits = forward(batch, storage)
            self.batch = batch
            return self.logits

        decoder.forward = remembering
        self.llm = LLM(decoder, num_blocks=num_blocks, block_size=block_size, **limits)
        self.core, self.cache = self.llm.core, self.llm.cache
        self.storage = self.core.runner.storage
        self.logits = self.batch = None

    def add(self, ids, max_tokens=1, **params):
        """Queues a request and gives it back."""
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})
        request = self.llm.make_request(ids, params)
        self.core.add_request(request)
        return request

    def step(self, num_steps=1):
        """So many steps; the requests that ended in the last."""
        for _ in range(num_steps):
            finished = self.core.step()
            self.cache.check()
        return finished

    def finish(self):
        """Steps until nothing waits or runs."""
        while self.core.has_requests:
            self.step()

    def contents(self, block_ids):
        """The bits of these blocks, K and V of all layers: slots never written may hold NaN, which equals nothing."""
        return self.storage.data[:, :, list(block_ids)].clone().view(torch.int32)

    def fill_free_blocks(self, value):
        """Overwrites what idle blocks hold."""
        free = [block for block in range(self.cache.num_blocks) if self.cache.ref_count(block) == 0]
        self.storage.data[:, :, free] = value

    def assert_idle(self):
        """Nothing is left of any request: every block is free or evictable."""
        self.cache.check()
        assert not self.core.has_requests
        assert self.cache.request_ids == ()
        assert self.cache.num_private_blocks == self.cache.num_protected_blocks == 0
        assert self.cache.num_free_blocks + self.cache.num_evictable_blocks == self.cache.num_blocks

    def cached_blocks(self):
        """Ids of all blocks in the tree."""
        return [block_id for node in self.cache.tree.nodes() for block_id in node.blocks]

    def num_cached_tokens(self):
        """Tokens in the tree, the partial leaves' included."""
        return sum(len(node.label) for node in self.cache.tree.nodes()) // 4


class TestHits:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
    def test_a_prompt_sent_again_hits_all_but_its_last_token(self, length, block_size):
        """A001: one token is always computed, its logits are the cold ones, and no shared block is written to."""
        engine = Engine(block_size=block_size)
        engine.fill_free_blocks(float("nan"))  # what fresh memory may hold as well
        ids = prompt(length, length)
        cold = engine.add(ids)
        engine.step()
        cold_logits = engine.logits.clone()
        blocks = engine.cached_blocks()
        before = engine.contents(blocks)
        warm = engine.add(ids)
        engine.step()
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, length - 1)
        assert engine.batch.input_ids.tolist() == [ids[-1:]]
        torch.testing.assert_close(engine.logits, cold_logits, **TOLERANCE)
        torch.testing.assert_close(engine.logits[0], own_logits("llama", tuple(ids)), **TOLERANCE)
        assert torch.equal(engine.contents(blocks), before)
        assert warm.output_token_ids == cold.output_token_ids
        engine.assert_idle()

    @pytest.mark.parametrize("num_new", [1, 5, 20])
    @pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-sliding"])
    def test_positions_go_on_behind_a_hit(self, name, num_new):
        """A027: rotated and learned positions of the first new token are 32 behind 32 cached ones."""
        engine = Engine(name)
        stem = prompt(32, 1)
        engine.add(stem)
        engine.finish()
        ids = stem + prompt(num_new, num_new)
        request = engine.add(ids, 8)
        engine.step()
        assert request.num_cached_tokens == 32
        assert engine.batch.position_ids.tolist() == [list(range(32, 32 + num_new))]
        torch.testing.assert_close(engine.logits[0], own_logits(name, tuple(ids)), **TOLERANCE)
        engine.finish()
        assert request.output_token_ids == solo(name, tuple(ids), 8)

    @pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
    def test_one_step_mixes_decodes_a_hit_and_a_cold_prompt(self, name):
        """A028: each row's logits are those of its own solo run."""
        engine = Engine(name)
        stem = prompt(33, 2)
        short, long = engine.add(prompt(7, 1), 9), engine.add(stem, 9)
        engine.step(2)
        hit, cold = engine.add([*stem[:32], 5], 9), engine.add(prompt(15, 4), 9)
        engine.step()
        requests = [short, long, hit, cold]
        assert [request.num_cached_tokens for request in requests] == [0, 0, 32, 0]
        assert engine.batch.input_ids.shape[1] == 1 + 1 + 1 + 15
        for row, request in enumerate(requests):
            ids = request.prompt_token_ids + request.output_token_ids[:-1]  # the last one is this step's
            torch.testing.assert_close(engine.logits[row], own_logits(name, tuple(ids)), **TOLERANCE)
        engine.finish()
        for request in requests:
            assert request.output_token_ids == solo(name, tuple(request.prompt_token_ids), 9)
        engine.assert_idle()

    @pytest.mark.parametrize("block_size", [1, 16])
    def test_a_second_turn_by_ids_hits_what_the_first_one_generated(self, block_size):
        """A013: 149 of 150, and with blocks of 16 too, since the partly filled last block is kept and copied from."""
        llm = LLM(long_context_decoder(), block_size=block_size, num_blocks=512 // block_size)
        first = llm.generate(prompt(100, 1), greedy(50))[0]
        ids = first.prompt_token_ids + first.outputs[0].token_ids
        assert len(ids) == 150
        second = llm.generate(ids + prompt(50, 2), greedy(5))[0]
        assert second.num_cached_tokens == 149
        cold = llm.without_cache().generate(ids + prompt(50, 2), greedy(5))[0]
        assert second.outputs[0].token_ids == cold.outputs[0].token_ids

    @pytest.mark.parametrize("budget", [1, 7, 16, 8192])
    def test_the_same_request_says_the_same_each_time(self, budget):
        """A029: four times in one engine, whatever the step's budget; the second and later have the same bits."""
        engine = Engine(max_num_batched_tokens=budget)
        ids = prompt(37, 6)
        logits, tokens = [], []
        for _ in range(4):
            request = engine.add(ids, 10)
            while not request.output_token_ids:
                engine.step()
            logits.append(engine.logits.clone())
            engine.finish()
            tokens.append(request.output_token_ids)
        assert tokens == [solo("llama", tuple(ids), 10)] * 4
        torch.testing.assert_close(logits[1], logits[0], **TOLERANCE)
        assert torch.equal(logits[2], logits[1])
        assert torch.equal(logits[3], logits[1])


class TestSharing:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_duplicates_of_two_cold_requests_are_given_back_and_reused_without_harm(self, block_size):
        """A004: B's table is re-pointed to A's blocks; a third request then takes all that is free while B decodes.

        B does not wait for A's prefill, as it would without: log-probabilities of its prompt need all of it computed.
        """
        shared = prompt(48, 3)
        engine = Engine(block_size=block_size, num_blocks=144 // block_size)
        a, b = engine.add(shared, 2), engine.add(shared, 24, prompt_logprobs=0)
        engine.step()
        num_full = 48 // block_size
        table = engine.cache.block_table(b.request_id)
        assert table[:num_full] == engine.cache.block_table(a.request_id)[:num_full]
        assert {engine.cache.ref_count(block_id) for block_id in table[:num_full]} == {3}, "the tree, A and B"
        engine.step()
        assert a.finish_reason == "length"
        # Admission leaves a block for each that may still grow; the third takes all the rest.
        room = engine.cache.num_free_blocks + engine.cache.num_evictable_blocks - 2
        third = engine.add(prompt(room * block_size - 4, 4), 5)
        engine.step()
        assert len(third.output_token_ids) == 1
        engine.finish()
        assert b.output_token_ids == solo("llama", tuple(shared), 24)
        assert third.output_token_ids == solo("llama", tuple(third.prompt_token_ids), 5)
        engine.assert_idle()

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_identical_cold_prompts_in_one_step(self, block_size):
        """A005: seven wait for the first and then hit what it computed, nothing before it is there; all equal solo."""
        ids = prompt(40, 8)
        engine = Engine(block_size=block_size, num_blocks=512 // block_size)
        requests = [engine.add(ids, 6) for _ in range(8)]
        engine.step()
        assert engine.batch.input_ids.tolist() == [ids]
        assert list(engine.core.scheduler.waiting) == requests[1:]
        engine.step()
        # While the first runs, its last block is found only if it is full; and one token is computed in any case.
        hit = min(39, 40 // block_size * block_size)
        assert [request.num_cached_tokens for request in requests] == [0] + [hit] * 7
        assert engine.batch.input_ids.shape[1] == 1 + 7 * (40 - hit)
        engine.finish()
        assert [request.output_token_ids for request in requests] == [solo("llama", tuple(ids), 6)] * 8
        engine.assert_idle()

    @pytest.mark.parametrize("is_scheduled", [False, True], ids=["queued", "scheduled"])
    def test_blocks_of_a_request_that_never_ran_are_never_found(self, is_scheduled):
        """A005: the first of eight goes before its forward, once with its blocks taken already."""
        ids = prompt(40, 8)
        engine = Engine()
        requests = [engine.add(ids, 6) for _ in range(8)]
        if is_scheduled:
            engine.core.scheduler.schedule()
            assert len(engine.cache.block_table(requests[0].request_id)) == 3
        engine.core.abort(requests[0].request_id)
        assert engine.cache.lookup_prefix(ids).num_tokens == 0
        if is_scheduled:
            for request in requests[1:]:
                engine.core.abort(request.request_id)
            engine.assert_idle()
            assert engine.cache.num_cached_blocks == 0
            requests[1:] = [engine.add(ids, 6) for _ in range(7)]
        engine.finish()
        assert [request.output_token_ids for request in requests[1:]] == [solo("llama", tuple(ids), 6)] * 7
        assert requests[0].output_token_ids == []
        engine.assert_idle()

    def test_tenants_never_share(self, chat_llm):
        """A030: by library call and by chat, alone and side by side: nobody hits what another tenant sent."""
        ids = prompt(64, 1)
        llm = LLM(decoder_of("llama"), num_blocks=64)

        def hits(namespace):
            (output,) = llm.generate({"prompt_token_ids": ids, "namespace": namespace}, greedy(4))
            assert output.outputs[0].token_ids == solo("llama", tuple(ids), 4)
            return output.num_cached_tokens

        assert [hits("a"), hits("b"), hits(None), hits(("a", "b"))] == [0, 0, 0, 0]
        assert [hits("a"), hits("b"), hits(""), hits(("a", "b"))] == [63, 63, 63, 63]
        both = llm.generate([{"prompt_token_ids": ids, "namespace": tenant} for tenant in "cd"] * 2, greedy(4))
        assert [output.num_cached_tokens for output in both] == [0, 0, 63, 63]

        messages = [{"role": "user", "content": "What is it that only I may know? Say nothing to anyone."}]
        cached = [chat_llm.chat(messages, greedy(4), namespace=tenant)[0] for tenant in ("a", "b", None, "a", "b")]
        length = len(cached[0].prompt_token_ids)
        assert [output.num_cached_tokens for output in cached] == [0, 0, 0, length - 1, length - 1]
        assert len({tuple(output.outputs[0].token_ids) for output in cached}) == 1


class TestEnding:
    @pytest.mark.parametrize("by", ["length", "stop"])
    @pytest.mark.parametrize("num_new", [1, 2, 11, 12, 16, 17])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_a_finished_request_leaves_what_it_computed_and_holds_nothing(self, block_size, num_new, by):
        """A002: all blocks free or evictable; in the tree, every token but the last one sampled, which had no KV."""
        ids = prompt(5, 0)
        seed, tokens = sampled_with_a_new_last_token(num_new)
        engine = Engine(block_size=block_size, eos_token_ids=tokens[-1:] if by == "stop" else [])
        max_tokens = 40 if by == "stop" else num_new
        request = engine.add(ids, max_tokens, temperature=3.0, seed=seed, ignore_eos=False)
        engine.finish()
        assert (request.finish_reason, request.output_token_ids) == (by, tokens)
        engine.assert_idle()
        assert engine.num_cached_tokens() == 5 + num_new - 1
        assert engine.cache.lookup_prefix(ids + request.output_token_ids).num_tokens == 5 + num_new - 1

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_an_aborted_request_leaves_nothing_running(self, num_steps):
        """A007: queued, after prefill, while decoding; a second abort and an unknown id do no harm."""
        engine = Engine(block_size=4)
        other = engine.add(prompt(20, 1), 12)
        request = engine.add(prompt(33, 2), 12)
        if num_steps:
            engine.step(num_steps)
        assert engine.core.abort(request.request_id) is request
        engine.cache.check()
        assert request.finish_reason == "abort"
        assert len(request.output_token_ids) == num_steps
        assert engine.cache.request_ids == ((other.request_id,) if num_steps else ())
        assert engine.core.abort(request.request_id) is None
        assert engine.core.abort("never seen") is None
        engine.finish()
        assert other.output_token_ids == solo("llama", tuple(other.prompt_token_ids), 12)
        assert request.finish_reason == "abort"
        engine.assert_idle()

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_a_request_aborted_between_two_chunks_leaves_what_they_computed(self, block_size):
        """A007: two chunks of 7 of its 33 tokens were written; they stay cached, all other blocks are free."""
        engine = Engine(block_size=block_size, max_num_batched_tokens=7)
        ids = prompt(33, 2)
        request = engine.add(ids, 12)
        engine.step(2)
        assert (request.num_computed_tokens, request.output_token_ids) == (14, [])
        assert engine.core.abort(request.request_id) is request
        engine.assert_idle()
        assert engine.cache.lookup_prefix(ids).num_tokens == 14
        again = engine.add(ids, 12)
        engine.finish()
        assert (again.num_cached_tokens, again.output_token_ids) == (14, solo("llama", tuple(ids), 12))

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_a_request_aborted_while_preempted_leaves_nothing(self, preemption):
        """A007: it holds no blocks then, but a place in the queue, and perhaps host memory."""
        engine = Engine(num_blocks=12, block_size=4, preemption=preemption)
        first, second = engine.add(prompt(20, 1), 24), engine.add(prompt(20, 2), 24)
        while not second.num_preemptions:
            engine.step()
        assert engine.core.metrics().counters.preemptions == {preemption: 1}
        assert engine.core.abort(second.request_id) is second
        assert engine.cache.request_ids == (first.request_id,)
        if preemption == "swap":
            assert engine.core.scheduler.swap.size_bytes == 0
        engine.finish()
        assert first.output_token_ids == solo("llama", tuple(first.prompt_token_ids), 24)
        assert second.finish_reason == "abort"
        engine.assert_idle()

    def test_aborting_a_request_that_finished_does_nothing(self):
        """A007: the client may hang up in the same instant; there is one end, the first."""
        engine = Engine()
        request = engine.add(prompt(5, 1), 1)
        assert engine.step() == [request]
        assert engine.core.abort(request.request_id) is None
        assert request.finish_reason == "length"

    @pytest.mark.parametrize("num_steps", [0, 3])
    def test_a_failed_forward_commits_nothing(self, monkeypatch, num_steps):
        """A007: after the aborts all is free again, and nothing that the failed pass would have written is found."""
        engine = Engine(block_size=4)
        requests = [engine.add(prompt(length, length), 12) for length in (17, 33)]
        if num_steps:
            engine.step(num_steps)
        late = engine.add(prompt(9, 9), 12)

        def failing(*arguments):
            raise RuntimeError("out of something")

        with monkeypatch.context() as patch:
            patch.setattr(engine.core.runner, "run", failing)
            with pytest.raises(RuntimeError, match="out of something"):
                engine.core.step()
        engine.cache.check()
        for request in [*requests, late]:
            engine.core.abort(request.request_id)
            engine.cache.check()
        engine.assert_idle()
        assert engine.cache.lookup_prefix(late.prompt_token_ids).num_tokens == 0
        for request in requests:
            computed = len(request.prompt_token_ids) + num_steps - 1 if num_steps else 0
            sequence = request.prompt_token_ids + request.output_token_ids
            assert engine.cache.lookup_prefix(sequence).num_tokens == computed
        again = [engine.add(request.prompt_token_ids, 12) for request in [*requests, late]]
        engine.finish()
        for request in again:
            assert request.output_token_ids == solo("llama", tuple(request.prompt_token_ids), 12)

    def test_two_hundred_distinct_requests_through_a_small_pool(self):
        """A011: nothing stays private, the pool evicts once it is full, and request 201 is admitted."""
        engine = Engine(num_blocks=32, block_size=4)
        for number in range(200):
            engine.add(prompt(6 + number % 9, 1000 + number))
            engine.step()
            assert engine.cache.num_private_blocks == 0
            assert engine.cache.num_cached_blocks <= 32
        assert engine.cache.stats.evicted_blocks > 0
        last = engine.add(prompt(90, 5), 6)
        engine.step()
        assert last.output_token_ids == solo("llama", tuple(last.prompt_token_ids), 1)
        engine.finish()
        engine.assert_idle()


@functools.cache
def ragged_batches(name, value):
    """First logits and tokens of ragged batches, cold, warm and longer, with `value` in every free block."""
    engine = Engine(name)
    logits, tokens = [], []
    for extra in ([], [], prompt(18, 7)):
        engine.fill_free_blocks(value)
        requests = [engine.add(prompt(length, length) + extra, 5) for length in (1, 15, 16, 17, 33)]
        engine.step()
        logits.append(engine.logits)
        engine.fill_free_blocks(value)
        engine.finish()
        tokens += [request.output_token_ids for request in requests]
    return logits, tokens


class TestIdleMemory:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_what_idle_blocks_hold_never_reaches_an_output(self, name, value):
        """A026: ragged batches, cold and with hits and copies of parts of blocks; all free blocks spoiled first."""
        logits, tokens = ragged_batches(name, value)
        logits_on_zeros, tokens_on_zeros = ragged_batches(name, 0.0)
        assert tokens == tokens_on_zeros
        for on_spoiled, on_zeros in zip(logits, logits_on_zeros, strict=True):
            assert torch.equal(on_spoiled, on_zeros)

    def test_only_blocks_of_running_requests_are_written(self):
        """B101: neither cached blocks nor idle ones change while others run."""
        engine = Engine(block_size=4, num_blocks=64)
        engine.fill_free_blocks(3.0)
        stem = prompt(22, 1)
        engine.add(stem, 3)
        engine.finish()
        engine.add([*stem[:14], 5, 6], 8)
        engine.add(prompt(9, 2), 8)
        before = engine.contents(range(64))
        owned = set()
        while engine.core.has_requests:
            engine.step()
            for request_id in engine.cache.request_ids:
                owned |= set(engine.cache.block_table(request_id)[3 if request_id == "1" else 0 :])
        untouched = sorted(set(range(64)) - owned)
        assert 50 < len(untouched) < 64
        assert torch.equal(engine.contents(untouched), before[:, :, untouched])


class TestLimits:
    @pytest.mark.parametrize("length", [62, 63, 64, 65])
    def test_prompt_and_output_together_stay_within_the_context(self, length):
        """B085: prompt + output tokens <= context, the last sampled one included; a prompt must leave room for one."""
        engine = Engine("gpt2", max_model_len=64, block_size=4)
        ids = prompt(length, length)
        if length >= 64:
            with pytest.raises(ValueError, match=f"the prompt has {length} tokens; allowed: at most 63"):
                engine.add(ids, 10)
        else:
            request = engine.add(ids, 10)
            engine.finish()
            assert (len(request.output_token_ids), request.finish_reason) == (64 - length, "length")
            assert request.output_token_ids == solo("gpt2", tuple(ids), 64 - length)
        engine.assert_idle()

    def test_the_model_s_own_context_is_the_limit_by_default(self):
        """B085: learned positions end there; one more would be an index error in the middle of a batch."""
        llm = LLM(decoder_of("gpt2"), num_blocks=16)
        (output,) = llm.generate(prompt(90, 1), greedy(50))
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == llm.max_model_len == 96
        assert output.outputs[0].finish_reason == "length"

    @pytest.mark.parametrize(
        ("length", "max_tokens"), [(64, 1), (63, 2), (62, 3), (48, 17), (70, 1), (64, 2), (10, 86)]
    )
    def test_a_prompt_too_large_for_the_pool_is_refused_and_the_next_one_completes(self, length, max_tokens):
        """A018: 64 slots; a prompt beyond them is refused at once with the numbers, an output ends where they do."""
        llm = LLM(decoder_of("llama"), num_blocks=4, block_size=16)
        ids = prompt(length, 1)
        if length > 64:
            with pytest.raises(ValueError, match=r"needs 5 blocks of 16 tokens for its 70 .* the pool has 4"):
                llm.generate(ids, greedy(max_tokens))
        else:
            (output,) = llm.generate(ids, greedy(max_tokens))
            num_new = min(max_tokens, 64 + 1 - length)  # the last token sampled needs no slot
            assert output.outputs[0].token_ids == solo("llama", tuple(ids), num_new)
            assert output.outputs[0].finish_reason == "length"
        small = prompt(10, 2)
        assert llm.generate(small, greedy(4))[0].outputs[0].token_ids == solo("llama", tuple(small), 4)

    def test_bad_requests_do_not_disturb_a_running_one(self):
        """A025: each is refused by its own name, before anything of it exists; the other request goes on."""
        engine = Engine(block_size=4)
        ids = prompt(21, 1)
        running = engine.add(ids, 12)
        engine.step(3)
        llm, params = engine.llm, greedy(4)
        state = (engine.cache.show(), engine.cache.stats.requests, list(engine.core.scheduler.requests()))
        bad_prompts = [
            ([[]], ValueError, "the prompt is empty"),
            ([[5], []], ValueError, "the prompt is empty"),
            ({"prompt_token_ids": []}, ValueError, "the prompt is empty"),
            (torch.tensor([], dtype=torch.int64), ValueError, "the prompt is empty"),
            (prompt(96, 1), ValueError, "the prompt has 96 tokens; allowed: at most 95"),
            (prompt(500, 1), ValueError, "the prompt has 500 tokens"),
            (
                [VOCAB_SIZE],
                ValueError,
                f"token id {VOCAB_SIZE} is not in the vocabulary",
            ),
            ([2**40], ValueError, "token id at position 0"),
            ([3, -1], ValueError, "token id at position 1 is -1"),
            ([3, 1.0], TypeError, "position 1 must be an integer"),
            ([[3], None], TypeError, "must be a one-dimensional sequence of integers, not None"),
            ([3, "4"], TypeError, "position 1 must be an integer"),
            (None, TypeError, "not None"),
            (7, TypeError, "not 7"),
            (b"text", TypeError, "not bytes"),
            ("text", ValueError, "no tokenizer"),
            ({"prompt_token_ids": [3], "prompt": "x"}, ValueError, "either prompt or prompt_token_ids"),
            ({"namespace": "x"}, ValueError, "either prompt or prompt_token_ids"),
            ({"prompt_token_ids": [3], "salt": "x"}, ValueError, "salt"),
            ({"prompt_token_ids": [3], "namespace": 0}, TypeError, "namespace must be"),
        ]
        for bad, error, match in bad_prompts:
            with pytest.raises(error, match=match):
                llm.generate(bad, params)
        for bad, error, match in [
            ("greedy", TypeError, "params must be SamplingParams"),
            ([None], TypeError, "params must be SamplingParams"),
            ([params, params], ValueError, "2 sampling params for 1 prompts"),
            ([], ValueError, "0 sampling params for 1 prompts"),
            (4, TypeError, "params must be SamplingParams"),
        ]:
            with pytest.raises(error, match=match):
                llm.generate([5], bad)
        for max_tokens in (0, -1, None, True, 1.5):
            with pytest.raises((ValueError, TypeError), match="max_tokens"):
                engine.add([5], max_tokens)
        with pytest.raises(ValueError, match="temperature is nan"):
            engine.add([5], 1, temperature=math.nan)
        engine.cache.check()
        assert (engine.cache.show(), engine.cache.stats.requests, list(engine.core.scheduler.requests())) == state
        engine.finish()
        assert running.output_token_ids == solo("llama", tuple(ids), 12)
        engine.assert_idle()

    def test_an_interruption_after_any_operation_of_generate_leaves_nothing(self, monkeypatch):
        """Ctrl-C falls where it likes: once slots are taken, after the forward, and while results are committed."""
        engine = Engine(block_size=4)
        ids = prompt(30, 3)
        runner = engine.core.runner
        for owner, name in [
            (engine.core.scheduler, "schedule"),
            (runner, "run"),
            (runner.decoder, "forward"),
            (engine.cache, "commit"),
            (engine.cache, "append_token"),
        ]:
            with monkeypatch.context() as patch:
                original, calls = getattr(owner, name), iter([False, False, True])

                def interrupted(*arguments, original=original, calls=calls):
                    result = original(*arguments)
                    if next(calls, False):
                        raise KeyboardInterrupt
                    return result

                patch.setattr(owner, name, interrupted)
                with contextlib.suppress(KeyboardInterrupt):
                    engine.llm.generate([ids, ids[:7]], greedy(6))
                    pytest.fail(f"{name} was not interrupted")
            engine.assert_idle()
            outputs = engine.llm.generate([ids, ids[:7]], greedy(6))
            wanted = [solo("llama", tuple(ids), 6), solo("llama", tuple(ids[:7]), 6)]
            assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.fixture(scope="module")
def chat_llm(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template."""
    return LLM(save_tiny_chat_model(tmp_path_factory.mktemp("chat")), num_blocks=64)


@functools.cache
def long_context_decoder():
    """A tiny Llama with room for several turns."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512
    return Decoder.load(model)
