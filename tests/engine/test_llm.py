"""`LLM` end to end on tiny random models: the tokens are those of transformers' own `generate()`, cold and warm."""

import copy
import functools
import math
import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")
np = pytest.importorskip("numpy")

from chat_helpers import save_tiny_chat_model  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402
from engine.metrics import EngineCounters  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.request import Request  # noqa: E402
from radixkv import TokenKey  # noqa: E402
from tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, model_of, tiny_model  # noqa: E402

BLOCK_SIZES = [1, 4, 16]
# Rotated and learned positions, a sliding window, and windows in every second layer with a soft cap.
MODELS = ["llama", "gpt2", "mistral-sliding", "gemma2"]
LENGTHS = (1, 15, 16, 17, 33, 40, 7)
NUM_NEW = 12
POOL_TOKENS = 512
PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


# Every fast path on, and every one off: how the model is run, and how its attention reads.
WAYS = [pytest.param("auto", "tree", id="fast"), pytest.param("transformers", "gather", id="plain")]


@functools.cache
def decoder_of(name, model_impl="auto"):
    """The decoder of a tiny model; built once, since nothing here changes it."""
    return Decoder.load(tiny_model(name), model_impl=model_impl)


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


PROMPTS = [prompt(length, length) for length in LENGTHS]


@functools.cache
def own_tokens(name, ids, num_new=NUM_NEW, eos_token_id=None):
    """What the model's own `generate()` gives for one prompt, a tuple of ids, alone and without us."""
    model = model_of(name)
    options = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": eos_token_id, "pad_token_id": 0}
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def make_llm(name="llama", block_size=16, num_tokens=POOL_TOKENS, model_impl="auto", **arguments):
    """An engine over a pool of `num_tokens` slots."""
    decoder = decoder_of(name, model_impl)
    return LLM(decoder, block_size=block_size, num_blocks=num_tokens // block_size, **arguments)


def tokens_of(outputs):
    """The generated ids of each output."""
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm):
    """Nothing is left of any request: every block is free or evictable."""
    llm.cache.check()
    assert not llm.core.has_requests
    assert llm.cache.request_ids == ()
    assert llm.cache.num_private_blocks == llm.cache.num_protected_blocks == 0
    assert llm.cache.num_free_blocks + llm.cache.num_evictable_blocks == llm.cache.num_blocks


class TestEquivalence:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("model_impl", "attention"), WAYS)
    def test_tokens_equal_those_of_the_model_alone_cold_and_warm(self, model_impl, attention, name, block_size):
        """The one promise: a ragged batch changes no token, and neither does a hit on all but the last one."""
        wanted = [own_tokens(name, tuple(ids)) for ids in PROMPTS]
        llm = make_llm(name, block_size, model_impl=model_impl, attention=attention)
        for expected_hits in ([0] * len(PROMPTS), [length - 1 for length in LENGTHS]):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert tokens_of(outputs) == wanted
            assert [output.num_cached_tokens for output in outputs] == expected_hits
            assert [output.prompt_token_ids for output in outputs] == PROMPTS
            assert_idle(llm)

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("model_impl", "attention"), WAYS)
    def test_a_small_pool_changes_no_token(self, model_impl, attention, name, block_size):
        """Queueing and eviction are matters of time: with room for one request only, each equals its solo run."""
        wanted = [own_tokens(name, tuple(ids)) for ids in PROMPTS]
        just_enough = math.ceil((max(LENGTHS) + NUM_NEW - 1) / block_size) * block_size
        llm = make_llm(name, block_size, just_enough, model_impl=model_impl, attention=attention)
        order = random.Random(block_size).sample(range(len(PROMPTS)), len(PROMPTS))
        for _ in range(2):
            outputs = llm.generate([PROMPTS[index] for index in order], PARAMS)
            assert tokens_of(outputs) == [wanted[index] for index in order]
            assert_idle(llm)
        assert llm.cache.stats.evicted_blocks > 0

    @pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 20}])
    def test_limits_of_a_step_change_no_token(self, limits):
        """How requests are batched is nobody's business but the engine's; one prompt here is longer than the budget."""
        llm = make_llm("llama", 4, **limits)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == [own_tokens("llama", tuple(ids)) for ids in PROMPTS]

    @pytest.mark.parametrize(("model_impl", "attention"), WAYS)
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_order_and_repetition_of_prompts_change_no_token(self, block_size, model_impl, attention):
        """Prompts that share starts, and whole prompts twice, in three orders over one cache that grows."""
        stem = prompt(40, 5)
        prompts = [stem[:n] + prompt(m, n + m) for n, m in ((16, 9), (33, 1), (40, 0), (15, 3), (40, 5), (40, 0))]
        wanted = [own_tokens("llama", tuple(ids)) for ids in prompts]
        llm = make_llm("llama", block_size, model_impl=model_impl, attention=attention)
        for seed in range(3):
            order = random.Random(seed).sample(range(len(prompts)), len(prompts))
            outputs = llm.generate([prompts[index] for index in order], PARAMS)
            assert tokens_of(outputs) == [wanted[index] for index in order]

    def test_without_a_cache_tokens_are_the_same_and_nothing_is_kept(self):
        """What `--compare` compares with: it must never hit, and never differ."""
        llm = make_llm("gpt2", 4)
        cold = llm.without_cache()
        assert cold.cache is not llm.cache
        for _ in range(2):
            outputs = cold.generate([*PROMPTS, PROMPTS[0]], PARAMS)
            assert tokens_of(outputs) == [own_tokens("gpt2", tuple(ids)) for ids in [*PROMPTS, PROMPTS[0]]]
            assert [output.num_cached_tokens for output in outputs] == [0] * (len(PROMPTS) + 1)
            assert cold.cache.num_free_blocks == cold.cache.num_blocks
        assert llm.cache.stats.requests == 0, "the two share weights, and no pool"

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_a_conversation_hits_all_that_was_computed(self, block_size):
        """Each turn's prompt is the last prompt, its output and more; only the last sampled token had no KV."""
        llm = make_llm("llama", block_size)
        ids, previous = prompt(9, 1), 0
        for turn in range(4):
            (output,) = llm.generate(ids, PARAMS)
            assert output.outputs[0].token_ids == own_tokens("llama", tuple(ids))
            assert output.num_cached_tokens == previous
            previous = len(ids) + NUM_NEW - 1
            ids = ids + output.outputs[0].token_ids + prompt(5, 10 + turn)

    def test_generation_ends_at_an_end_of_sequence_token_like_the_model_alone(self):
        """The token that ends a reply is part of it, and the reason says which of the two ends it was."""
        ids = PROMPTS[3]
        free = own_tokens("llama", tuple(ids))
        end = free[4]
        decoder = copy.copy(decoder_of("llama"))
        decoder.eos_token_ids = frozenset({end})
        llm = LLM(decoder, num_blocks=16)
        wanted = own_tokens("llama", tuple(ids), NUM_NEW, end)
        assert wanted[-1] == end
        (stopped,) = llm.generate(ids, SamplingParams(max_tokens=NUM_NEW))
        assert (stopped.outputs[0].token_ids, stopped.outputs[0].finish_reason) == (wanted, "stop")
        (ignoring,) = llm.generate(ids, PARAMS)
        assert (ignoring.outputs[0].token_ids, ignoring.outputs[0].finish_reason) == (free, "length")
        (last,) = llm.generate(ids, SamplingParams(max_tokens=len(wanted)))
        assert last.outputs[0].finish_reason == "stop", "the last token that is allowed ended the reply by itself"


class TestPrompts:
    @pytest.mark.parametrize(
        "form",
        [
            [5, 6, 7],
            (5, 6, 7),
            [[5, 6, 7]],
            ([5, 6, 7],),
            np.array([5, 6, 7]),
            [np.array([5, 6, 7])],
            list(np.array([5, 6, 7])),
            torch.tensor([5, 6, 7]),
            [torch.tensor([5, 6, 7])],
            range(5, 8),
            {"prompt_token_ids": [5, 6, 7]},
            [{"prompt_token_ids": torch.tensor([5, 6, 7]), "namespace": ""}],
        ],
        ids=repr,
    )
    def test_every_form_of_one_prompt_means_the_same(self, form):
        """A list may hold ids or prompts; which of the two it is must be plain from what is in it."""
        (output,) = make_llm().generate(form, SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == [5, 6, 7]

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=lambda kind: kind.__name__)
    def test_prompts_of_one_token_are_not_taken_for_one_prompt(self, kind):
        """Arrays and tensors of one id can serve as an integer, and a list of them was taken for a single prompt."""
        outputs = make_llm().generate([kind([5]), kind([6])], SamplingParams(max_tokens=1))
        assert [output.prompt_token_ids for output in outputs] == [[5], [6]]

    def test_outputs_stand_in_the_order_of_the_prompts_with_params_for_each(self):
        """Requests end at different steps; callers zip outputs with what they asked."""
        lengths = [5, 1, 9, 3]
        prompts = PROMPTS[:4]
        outputs = make_llm().generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
        assert [output.prompt_token_ids for output in outputs] == prompts
        wanted = [own_tokens("llama", tuple(ids))[:n] for ids, n in zip(prompts, lengths, strict=True)]
        assert tokens_of(outputs) == wanted

    def test_no_prompts_give_no_outputs(self):
        """An empty list of prompts is a batch like any other; only an empty prompt is a mistake."""
        llm = make_llm()
        assert llm.generate([]) == []
        assert_idle(llm)

    def test_token_ids_alone_need_no_tokenizer_and_text_says_that_it_does(self):
        """A model built by the caller has none; the error must name the way out."""
        llm = make_llm()
        assert llm.generate([5], SamplingParams(max_tokens=2))[0].outputs[0].text == ""
        with pytest.raises(ValueError, match="no tokenizer: give prompts as token ids"):
            llm.generate("some text")
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}])

    def test_metrics_are_in_order(self):
        """Waiting comes before the first token, which comes before the end; one token has no time per further token."""
        outputs = make_llm(max_num_seqs=1).generate(
            PROMPTS[:3], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 4, 1)]
        )
        for output in outputs:
            metrics = output.metrics
            assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.total_s
        assert outputs[0].metrics.tpot_s > 0
        assert outputs[2].metrics.tpot_s is None
        assert outputs[1].metrics.queue_s >= outputs[0].metrics.total_s / 2, "the second waited for the first"


@pytest.fixture(scope="module")
def chat_llm(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template."""
    return LLM(save_tiny_chat_model(tmp_path_factory.mktemp("chat")), num_blocks=64)


class TestChat:
    def test_chat_is_generate_on_the_template(self, chat_llm):
        """A chat is nothing but a prompt that the model's template wrote."""
        messages = [{"role": "user", "content": "Which rivers end in the sea?"}]
        (output,) = chat_llm.chat(messages, PARAMS)
        ids = chat_llm.tokenizer.encode(
            "<|im_start|>user\nWhich rivers end in the sea?<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        )
        assert output.prompt_token_ids == ids
        wanted = LLM(chat_llm._decoder, num_blocks=64).generate({"prompt_token_ids": ids}, PARAMS)
        assert output.outputs[0].token_ids == wanted[0].outputs[0].token_ids
        assert output.outputs[0].text == chat_llm.tokenizer.decode(
            wanted[0].outputs[0].token_ids, skip_special_tokens=True
        )

    def test_several_chats_at_once_and_their_shared_system_prompt(self, chat_llm):
        """The second round of chats hits the system prompt that they share, and more."""
        system = {"role": "system", "content": "You are terse, and you never answer a question with another question."}
        first, second = ([system, {"role": "user", "content": text}] for text in ("Why?", "Who are you?"))
        chat_llm.chat([first], PARAMS)
        outputs = chat_llm.chat([first, second], PARAMS)
        shared = TokenKey(outputs[0].prompt_token_ids).common_prefix(TokenKey(outputs[1].prompt_token_ids))
        assert outputs[0].num_cached_tokens == len(outputs[0].prompt_token_ids) - 1
        assert outputs[1].num_cached_tokens == shared > 60

    @pytest.mark.parametrize(
        ("messages", "match"),
        [
            ([], "messages is empty"),
            ([[]], "messages is empty"),
            ([{"role": "user"}], "a role and a content"),
            ([{"role": 3, "content": "x"}], "a role and a content"),
            ([[{"role": "user", "content": "x"}, "y"]], "a role and a content"),
        ],
    )
    def test_malformed_messages_are_refused(self, chat_llm, messages, match):
        """A template would fail deep inside, or render a hole."""
        with pytest.raises(ValueError, match=match):
            chat_llm.chat(messages, PARAMS)
        assert_idle(chat_llm)

    def test_empty_text_is_refused(self, chat_llm):
        """A025: no token, no logits; said before anything starts."""
        with pytest.raises(ValueError, match="the prompt is empty"):
            chat_llm.generate("", PARAMS)
        with pytest.raises(ValueError, match="the prompt is empty"):
            chat_llm.generate(["fine", {"prompt": ""}], PARAMS)
        assert_idle(chat_llm)


class TestInterruption:
    @pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, MemoryError])
    @pytest.mark.parametrize("call", [1, 2, 6])
    def test_nothing_is_left_running_when_generate_is_interrupted(self, monkeypatch, interruption, call):
        """Ctrl-C in a notebook, or a forward that fails: the next call must find the pool whole, and be right."""
        llm = make_llm("llama", 4, max_num_seqs=3)
        run, num_calls = llm.core.runner.run, 0

        def failing(*arguments):
            nonlocal num_calls
            num_calls += 1
            if num_calls == call:
                raise interruption("in the middle")
            return run(*arguments)

        monkeypatch.setattr(llm.core.runner, "run", failing)
        with pytest.raises(interruption, match="in the middle"):
            llm.generate(PROMPTS, PARAMS)
        assert_idle(llm)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == [own_tokens("llama", tuple(ids)) for ids in PROMPTS]

    @pytest.mark.parametrize("place", ["start", "add_output"])
    def test_an_interrupt_between_two_lines_leaves_nothing_behind(self, monkeypatch, place):
        """Ctrl-C may come when a request has blocks but does not run yet, or has ended but is not forgotten yet."""
        llm = make_llm("llama", 4)
        original = getattr(Request, place)

        def interrupted(request, *arguments):
            if place == "add_output":
                while request.finish_reason is None:
                    original(request, *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(Request, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
        monkeypatch.undo()
        assert_idle(llm)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == [own_tokens("llama", tuple(ids)) for ids in PROMPTS]

    def test_a_refused_batch_ends_only_its_own_requests(self):
        """`generate` queues a batch one by one; if the last is refused, the first ones go, and those of others stay."""
        llm = make_llm("llama", 4, num_tokens=72)
        other = llm.make_request(PROMPTS[4], PARAMS)
        llm.core.add_request(other)
        llm.core.step()
        with pytest.raises(ValueError, match=r"needs 20 blocks of 4 tokens for its 77 .* the pool has 18"):
            llm.generate([PROMPTS[0], prompt(77, 1)], PARAMS)
        llm.cache.check()
        assert llm.cache.request_ids == (other.request_id,)
        assert list(llm.core.scheduler.requests()) == [other]
        while llm.core.has_requests:
            llm.core.step()
        assert other.output_token_ids == own_tokens("llama", tuple(PROMPTS[4]))
        assert_idle(llm)


class TestLimits:
    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"block_size": 0}, ValueError, "block_size is 0"),
            ({"block_size": True}, TypeError, "block_size must be an integer"),
            ({"num_blocks": 0}, ValueError, "num_blocks is 0"),
            ({"num_blocks": 2.0}, TypeError, "num_blocks must be an integer"),
            ({"kv_cache_memory": "2 parsecs"}, ValueError, "parsecs"),
            ({"kv_cache_memory": 0}, ValueError, "not positive"),
            ({"kv_cache_memory": 100}, ValueError, "one block of this model takes"),
            ({"max_model_len": 0}, ValueError, "max_model_len is 0"),
            ({"max_model_len": MAX_MODEL_LEN + 1}, ValueError, f"the model's context is {MAX_MODEL_LEN}"),
            ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0"),
            ({"max_num_batched_tokens": -1}, ValueError, "max_num_batched_tokens is -1"),
            ({"policy": "best"}, ValueError, "best"),
            ({"order": "random"}, ValueError, "order is 'random'; allowed: fcfs, longest-prefix"),
            ({"max_overtakes": 0}, ValueError, "max_overtakes is 0"),
            ({"victim": "me"}, ValueError, "victim is 'me'; allowed: lifo, largest, least-progress"),
            ({"preemption": "drop"}, ValueError, "preemption is 'drop'; allowed: recompute, swap"),
            ({"swap_memory": "none"}, ValueError, "size 'none' is not understood"),
            ({"log_interval_s": -1.0, "num_blocks": 4}, ValueError, "log_interval_s is -1.0; allowed: 0"),
        ],
    )
    def test_limits_that_cannot_be_kept_are_refused(self, arguments, error, match):
        """At the start, with the value and the rule, and not in the middle of the first request."""
        with pytest.raises(error, match=match):
            LLM(decoder_of("llama"), **arguments)

    def test_memory_decides_the_number_of_blocks(self):
        """A budget in bytes is what a user knows; the pool must not be larger."""
        decoder = decoder_of("llama")
        bytes_per_block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, KV heads, head_dim, tokens, bytes
        llm = LLM(decoder, block_size=4, kv_cache_memory=10 * bytes_per_block + 5)
        assert llm.cache.num_blocks == 10
        assert LLM(decoder, block_size=4, kv_cache_memory="1 MiB").cache.num_blocks == 2**20 // bytes_per_block


class TestMetrics:
    def test_a_fresh_engine_has_done_nothing(self):
        """There is no hit rate before the first prompt: 0 would say that something was looked for and not found."""
        metrics = make_llm().metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.block_use, metrics.cached) == (0, 0, 0.0, 0.0)
        assert metrics.token_hit_rate is None
        assert metrics.counters == EngineCounters()

    def test_they_follow_the_engine_step_by_step(self):
        """What a dashboard shows: who runs, who waits, what they hold, and what stays behind for others."""
        llm = make_llm("llama", 4, num_tokens=64, max_num_seqs=1)
        for seed in (1, 2):
            llm.core.add_request(llm.make_request(prompt(10, seed), SamplingParams(max_tokens=3, ignore_eos=True)))
        seen = [self.standing(llm.metrics())]
        while llm.core.has_requests:
            llm.core.step()
            seen.append(self.standing(llm.metrics()))
        # running, waiting, blocks in use, blocks cached and idle: 10 prompt tokens and 2 outputs with KV fill 3 of 16
        once = [(1, 1, 3, 0), (1, 1, 3, 0), (0, 1, 0, 3)]
        twice = [(1, 0, 3, 3), (1, 0, 3, 3), (0, 0, 0, 6)]
        assert seen == [(0, 2, 0, 0), *once, *twice]

    @staticmethod
    def standing(metrics):
        return metrics.num_running, metrics.num_waiting, metrics.block_use * 16, metrics.cached * 16

    def test_totals_count_each_token_once(self):
        """Hits are not computed, the last token sampled has no KV, and what was shown before does not change."""
        llm = make_llm("llama", 4)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        llm.generate([prompt(13, 1), prompt(21, 2)], params)
        first = llm.metrics()
        assert first.counters == EngineCounters(
            steps=5, prefill_tokens=34, decode_tokens=8, output_tokens=10, finished=Counter(length=2)
        )
        assert first.token_hit_rate == 0
        (warm,) = llm.generate(prompt(13, 1), params)
        assert warm.num_cached_tokens == 12
        assert llm.metrics().counters == EngineCounters(
            steps=10, prefill_tokens=35, decode_tokens=12, output_tokens=15, finished=Counter(length=3)
        )
        assert llm.metrics().token_hit_rate == 12 / 47
        assert first.counters.finished == {"length": 2}, "a picture of one moment stays as it was"

    def test_ends_are_counted_by_their_reason(self):
        """Aborts and stops are what an operator looks for."""
        llm = make_llm("llama", 4)
        (free,) = llm.generate(PROMPTS[2], PARAMS)
        stop = free.outputs[0].token_ids[3]
        llm.generate(PROMPTS[2], SamplingParams(max_tokens=NUM_NEW, stop_token_ids=[stop], ignore_eos=True))
        request = llm.make_request(PROMPTS[3], PARAMS)
        llm.core.add_request(request)
        llm.core.abort(request.request_id)
        assert llm.metrics().counters.finished == {"length": 1, "stop": 1, "abort": 1}

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_what_preemptions_cost_is_counted(self, preemption):
        """Without a cache, a preempted request's tokens are all computed again, or all copied out and back."""
        llm = make_llm("llama", 4, num_tokens=48, preemption=preemption, enable_prefix_caching=False)
        outputs = llm.generate([prompt(20, 1), prompt(20, 2)], SamplingParams(max_tokens=24, ignore_eos=True))
        metrics = llm.metrics()
        counters = metrics.counters
        num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
        assert counters.preemptions == {preemption: num_preemptions}
        assert num_preemptions > 0
        recomputed = sum(output.metrics.num_recomputed_tokens for output in outputs)
        assert counters.recomputed_tokens == recomputed
        # A token that was sampled while its request was preempted is computed with those that were lost.
        assert counters.prefill_tokens + counters.decode_tokens == 2 * (20 + 24 - 1) + recomputed
        assert counters.swapped_out_blocks == counters.swapped_in_blocks
        bytes_per_block = llm.core.runner.bytes_per_block
        assert metrics.swapped_out_bytes == metrics.swapped_in_bytes == counters.swapped_in_blocks * bytes_per_block
        assert (recomputed == 0, counters.swapped_out_blocks > 0) == (preemption == "swap", preemption == "swap")
        assert_idle(llm)
