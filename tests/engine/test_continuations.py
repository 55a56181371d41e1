"""Several continuations, beam search, log-probabilities and ends, from `LLM` down to the model.

Tiny random models in float32. The truth is a solo run (which `test_llm.py` holds against the model itself), the
beam search of transformers, or the model's own eager logits.
"""

import copy
import functools
import itertools
import math
import random

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
transformers = pytest.importorskip("transformers", reason="the engine needs transformers")

from chat_helpers import save_tiny_chat_model  # noqa: E402

from engine import LLM, BeamSearchParams, SamplingParams, scheduler  # noqa: E402
from engine.core import EngineCore  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.scheduler import Scheduler  # noqa: E402
from radixkv import DuplicateRequest  # noqa: E402
from tiny_models import VOCAB_SIZE, tiny_model  # noqa: E402

BLOCK_SIZES = [1, 4, 16]
# Rotated positions, learned ones, and a window shorter than the prompts.
MODELS = ["llama", "gpt2", "mistral-sliding"]
PREEMPTIONS = ["recompute", "swap"]
VICTIMS = ["lifo", "largest", "least-progress"]
# Logits of size up to 11; float32 sums in another order were seen to differ by 7e-6, a missing key by more than 1e-2.
TOLERANCE = {"abs": 1e-4, "rel": 1e-4}


@functools.cache
def decoder_of(name):
    """The decoder of a tiny model; built once, since nothing here changes it."""
    return Decoder.load(tiny_model(name))


def make_llm(name="llama", block_size=4, num_tokens=512, ends=None, **options):
    """An engine over a pool of `num_tokens` slots, on a model whose end-of-sequence tokens are `ends`, if given."""
    decoder = decoder_of(name)
    if ends is not None:
        decoder = copy.copy(decoder)
        decoder.eos_token_ids = frozenset(ends)
    return LLM(decoder, block_size=block_size, num_blocks=num_tokens // block_size, **options)


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def drawn(max_tokens, seed=7, **params):
    """Params that sample widely; no end-of-sequence token ends them."""
    return SamplingParams(max_tokens=max_tokens, temperature=1.5, seed=seed, **{"ignore_eos": True, **params})


def solo(name, ids, params, ends=None):
    """Tokens and finish reason of one request alone in a new engine that keeps nothing."""
    (output,) = make_llm(name, ends=ends, enable_prefix_caching=False).generate([ids], params)
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


def solos(name, ids, params, num, ends=None):
    """What continuations 0 to num - 1 give when each is had alone, by its own seed."""
    one = {key: value for key, value in vars(params).items() if key not in ("n", "seed")}
    return [solo(name, ids, SamplingParams(n=1, seed=(params.seed or 0) + index, **one), ends) for index in range(num)]


def ends_of(sequences):
    """Tokens and finish reason of each, as `solo` gives them."""
    return [(sequence.output_token_ids, sequence.finish_reason) for sequence in sequences]


def results_of(output):
    """Tokens and finish reason of each continuation, as `solo` gives them."""
    return [(completion.token_ids, completion.finish_reason) for completion in output.outputs]


def add(llm, ids, params):
    """Queues a request; all its sequences, in order."""
    request = llm.make_request(ids, params)
    llm.core.add_request(request)
    return list(request.sequences())


def step(llm, num_steps=1):
    """So many steps, with a recount after each."""
    for _ in range(num_steps):
        llm.core.step()
        llm.cache.check()


def finish(llm):
    """Steps until nothing waits or runs, after which nothing is left of any request."""
    while llm.core.has_requests:
        step(llm)
    assert_idle(llm)


def assert_idle(llm):
    """Nothing is left of any request: every block is free or evictable, and host memory is empty."""
    llm.cache.check()
    assert llm.cache.request_ids == ()
    assert not llm.core.has_requests
    assert llm.core.num_requests == 0
    assert llm.cache.num_private_blocks == llm.cache.num_protected_blocks == 0
    assert llm.cache.num_free_blocks + llm.cache.num_cached_blocks == llm.cache.num_blocks
    if llm.core.scheduler.swap is not None:
        assert llm.core.scheduler.swap.size_bytes == 0


@pytest.fixture(scope="module")
def chat_decoder(tmp_path_factory):
    """A tiny model with a tokenizer in which each byte is a token."""
    return Decoder.load(save_tiny_chat_model(tmp_path_factory.mktemp("chat")))


class TestContinuations:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    def test_greedy_continuations_all_say_what_the_prompt_says_alone(self, name, block_size):
        """Nothing tells them apart; and their one prompt is computed once."""
        llm = make_llm(name, block_size)
        ids, params = prompt(33, 1), SamplingParams(max_tokens=10, ignore_eos=True)
        (output,) = llm.generate([ids], SamplingParams(max_tokens=10, ignore_eos=True, n=4))
        assert results_of(output) == [solo(name, ids, params)] * 4
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        counters = llm.metrics().counters
        assert (counters.prefill_tokens, counters.decode_tokens, counters.output_tokens) == (33, 4 * 9, 4 * 10)
        assert counters.steps == 10
        assert counters.finished == {"length": 4}
        assert llm.cache.stats.requests == 1
        assert_idle(llm)

    @pytest.mark.parametrize("is_caching", [True, False], ids=["cache", "no cache"])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    def test_continuation_i_can_be_had_alone_with_seed_plus_i(self, name, block_size, is_caching):
        """What was liked among several can be made again; in ragged batches, beside others, cold and warm."""
        llm = make_llm(name, block_size, enable_prefix_caching=is_caching)
        prompts = [prompt(33, 1), prompt(16, 2), prompt(1, 3)]
        params = [drawn(9, n=3), drawn(17, n=2, seed=3, top_p=0.9), drawn(5, seed=11)]
        wanted = [solos(name, ids, of, of.n) for ids, of in zip(prompts, params, strict=True)]
        assert len({tuple(tokens) for tokens, _ in wanted[0]}) == 3
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [results_of(output) for output in outputs] == wanted
            assert_idle(llm)

    def test_without_a_seed_continuations_differ(self):
        """One fresh seed for the request, and one more for each: never the same draw twice."""
        llm = make_llm()
        (output,) = llm.generate([prompt(9, 1)], drawn(12, seed=None, n=4))
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4

    @pytest.mark.parametrize("length", [32, 33, 34])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_blocks_are_shared_until_a_continuation_writes_to_one(self, monkeypatch, block_size, length):
        """Right after the prompt, one table for all four; then a copy of the tail for each but the last to write."""
        llm = make_llm(block_size=block_size)
        copies = []
        copy_block = llm.cache.storage.copy_block
        monkeypatch.setattr(llm.cache.storage, "copy_block", lambda *args: copies.append(args) or copy_block(*args))
        sequences = add(llm, prompt(length, 1), drawn(6, n=4))
        step(llm)
        num_full, num_in_tail = divmod(length, block_size)
        num_blocks = -(-length // block_size)
        table = llm.cache.block_table(sequences[0].request_id)
        assert {llm.cache.block_table(sequence.request_id) for sequence in sequences} == {table}
        assert len(table) == num_blocks
        refs = [llm.cache.ref_count(block_id) for block_id in table]
        assert refs == [5] * num_full + [4] * (num_blocks - num_full), "the tree has the full ones too"
        assert copies == []
        step(llm)
        tables = [llm.cache.block_table(sequence.request_id) for sequence in sequences]
        assert {blocks[:num_full] for blocks in tables} == {table[:num_full]}
        tails = {blocks[num_full] for blocks in tables}
        assert len(tails) == 4
        if block_size > 1:
            assert {llm.cache.ref_count(block_id) for block_id in tails} == {1}
        assert len(copies) == (3 if num_in_tail else 0)
        assert {num_tokens for _, _, num_tokens in copies} <= {num_in_tail}
        finish(llm)
        assert len(copies) == (3 if num_in_tail else 0), "nothing is shared that is written to later"
        assert ends_of(sequences) == solos("llama", prompt(length, 1), drawn(6), 4)

    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    @pytest.mark.parametrize("victim", VICTIMS)
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_continuations_that_do_not_fit_together_are_preempted_one_by_one(self, block_size, victim, preemption):
        """The pool holds one of them to its end and little more: each is still what it is alone, cache or not."""
        ids, params = prompt(17, 4), drawn(40, n=4)
        wanted = solos("llama", ids, params, 4)
        for is_caching in (True, False):
            llm = make_llm(
                block_size=block_size,
                num_tokens=64,
                victim=victim,
                preemption=preemption,
                enable_prefix_caching=is_caching,
            )
            (output,) = llm.generate([ids], params)
            assert results_of(output) == wanted
            assert output.metrics.num_preemptions > 0
            assert llm.metrics().counters.preemptions == {preemption: output.metrics.num_preemptions}
            assert_idle(llm)

    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_single_continuation_may_be_preempted_and_return(self, place, preemption):
        """The others go on with the blocks that they shared with it, the first of them included."""
        llm = make_llm(block_size=16, preemption=preemption)
        ids, params = prompt(33, 1), drawn(20, n=3)
        sequences = add(llm, ids, params)
        step(llm, 4)
        llm.core.scheduler._preempt(sequences[place])
        llm.cache.check()
        finish(llm)
        assert ends_of(sequences) == solos("llama", ids, params, 3)
        assert [sequence.num_preemptions for sequence in sequences] == [int(i == place) for i in range(3)]

    def test_a_prompt_preempted_before_the_fork_forks_when_it_is_back(self):
        """The forks have no blocks yet, and wait with their prompt."""
        llm = make_llm(max_num_batched_tokens=7)
        ids, params = prompt(33, 1), drawn(9, n=3)
        sequences = add(llm, ids, params)
        step(llm, 2)
        llm.core.scheduler._preempt(sequences[0])
        assert llm.cache.request_ids == ()
        finish(llm)
        assert ends_of(sequences) == solos("llama", ids, params, 3)

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_an_abort_before_the_fork_ends_all_continuations(self, num_steps):
        """Queued, and between two chunks of the prompt."""
        llm = make_llm(max_num_batched_tokens=7)
        sequences = add(llm, prompt(33, 1), drawn(9, n=3))
        step(llm, num_steps)
        assert llm.core.abort(sequences[0].request_id) is sequences[0]
        assert ends_of(sequences) == [([], "abort")] * 3
        assert llm.metrics().counters.finished == {"abort": 3}
        assert_idle(llm)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_after_the_fork_each_continuation_ends_alone(self, place):
        """They are requests of their own then: the others say what they would have said."""
        llm = make_llm(block_size=16)
        ids, params = prompt(33, 1), drawn(9, n=3)
        wanted = solos("llama", ids, params, 3)
        sequences = add(llm, ids, params)
        step(llm, 4)
        assert llm.core.abort(sequences[place].request_id) is sequences[place]
        finish(llm)
        wanted[place] = (wanted[place][0][:4], "abort")
        assert ends_of(sequences) == wanted

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_continuations_of_one_token_end_in_the_step_of_the_fork(self, block_size):
        """All of them are done before any has written a token."""
        llm = make_llm(block_size=block_size)
        ids, params = prompt(17, 1), drawn(1, n=4)
        (output,) = llm.generate([ids], params)
        assert results_of(output) == solos("llama", ids, params, 4)
        assert llm.metrics().counters.steps == 1
        assert_idle(llm)

    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_a_continuation_may_end_with_its_first_token(self, block_size, place):
        """The others go on, also where it was the first, whose blocks they were forked from."""
        ids, params = prompt(17, 1), drawn(9, n=3, ignore_eos=False)
        free = solos("llama", ids, params, 3, ends=())
        ends = {free[place][0][0]}
        wanted = solos("llama", ids, params, 3, ends)
        assert wanted[place] == ([*ends], "stop")
        assert {len(tokens) for tokens, _ in wanted} >= {1, 9}
        llm = make_llm(block_size=block_size, ends=ends)
        (output,) = llm.generate([ids], params)
        assert results_of(output) == wanted
        assert_idle(llm)

    @pytest.mark.parametrize("limits", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 4}])
    def test_more_continuations_than_may_run_at_once_are_refused(self, limits):
        """They run side by side, so it could never begin; as many as may run do begin, also several times over."""
        llm = make_llm(**limits)
        with pytest.raises(ValueError, match=r"has n = 5; allowed: at most 4, which max_num_seqs and"):
            llm.generate([prompt(5, 1)], drawn(3, n=5))
        assert_idle(llm)
        prompts = [prompt(9, seed) for seed in range(3)]
        num_tokens = []
        run = llm.core.runner.run

        def counting(scheduled, cache):
            num_tokens.append(sum(len(work.token_ids) for work in scheduled))
            assert len(llm.core.scheduler.running) <= 4
            return run(scheduled, cache)

        llm.core.runner.run = counting
        outputs = llm.generate(prompts, drawn(5, n=4))
        assert [results_of(output) for output in outputs] == [solos("llama", ids, drawn(5), 4) for ids in prompts]
        if "max_num_batched_tokens" in limits:
            assert max(num_tokens) <= 4

    def test_log_probabilities_of_the_prompt_are_given_once_for_all_continuations(self):
        """The forks judge no prompt: it was judged before they began, and is not computed again for them."""
        llm = make_llm()
        ids, params = prompt(13, 1), drawn(6, n=3, prompt_logprobs=2, logprobs=1)
        sequences = add(llm, ids, params)
        step(llm, 3)
        llm.core.scheduler._preempt(sequences[1])
        finish(llm)
        assert ends_of(sequences) == solos("llama", ids, drawn(6), 3)
        output = llm.output_of(sequences)
        assert_prompt_is_judged(output.prompt_logprobs, "llama", ids, 2)
        assert llm.metrics().counters.recomputed_tokens == 0
        for completion in output.outputs:
            assert_outputs_are_judged(completion, "llama", ids, 1)

    def test_an_interrupt_at_the_fork_leaves_nothing_behind(self, monkeypatch):
        """Ctrl-C between two forks: some have begun, some have not, and none is left."""
        llm = make_llm()
        for owner in (Scheduler, EngineCore):
            name = "fork" if owner is Scheduler else "_take"
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted_after(getattr(owner, name), 2 if owner is Scheduler else 1))
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([prompt(9, 1)], drawn(6, n=4))
            assert_idle(llm)
        assert results_of(llm.generate([prompt(9, 1)], drawn(6, n=4))[0]) == solos("llama", prompt(9, 1), drawn(6), 4)


def interrupted_after(original, num_calls):
    """The same routine, but Ctrl-C comes after so many calls of it."""
    calls = itertools.count(1)

    def routine(*arguments, **options):
        result = original(*arguments, **options)
        if next(calls) == num_calls:
            raise KeyboardInterrupt
        return result

    return routine


@functools.cache
def model_of(name):
    """A tiny model with nothing preset for `generate`, above all no EOS; built once, since nothing here changes it."""
    model = tiny_model(name)
    model.generation_config = transformers.GenerationConfig()
    return model


@functools.cache
def own_beams(name, ids, params, ends=()):
    """[(token ids, score)], best first, of transformers' own beam search without a cache. ids: a tuple."""
    model = model_of(name)
    config = transformers.GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.num_return or params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=float(params.length_penalty),
        early_stopping=params.early_stopping,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # One beam is greedy search to `generate`, so the routine is named.
    named = {"custom_generate": type(model)._beam_search} if params.beam_width == 1 else {}
    input_ids = torch.tensor([ids])
    found = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, **named)
    lengths = (found.beam_indices >= 0).sum(dim=-1).tolist()
    rows = [row[len(ids) :][:length].tolist() for row, length in zip(found.sequences, lengths, strict=True)]
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


def assert_beams_are_own(output, name, ids, params, ends=()):
    """Tokens, order and scores are those of transformers."""
    wanted = own_beams(name, tuple(ids), params, tuple(ends))
    assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in wanted]
    scores = [one.cumulative_logprob / len(one.token_ids) ** params.length_penalty for one in output.outputs]
    assert scores == pytest.approx([score for _, score in wanted], **TOLERANCE)
    for completion in output.outputs:
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ends else "length")
    assert [completion.index for completion in output.outputs] == list(range(len(wanted)))
    assert output.prompt_token_ids == ids


class TestBeamSearch:
    # The first tokens differ, so that none of these hits another.
    PROMPTS = (prompt(1, 1), prompt(15, 2), prompt(16, 3), prompt(33, 6))
    PARAMS = (
        BeamSearchParams(4, 12),
        BeamSearchParams(1, 9),
        BeamSearchParams(2, 17, length_penalty=0.5, early_stopping=True),
        BeamSearchParams(4, 11, length_penalty=2.0, early_stopping="never", num_return=2),
    )

    def assert_all_own(self, outputs, name, ends=()):
        """All of `PROMPTS` and `PARAMS`."""
        for output, ids, params in zip(outputs, self.PROMPTS, self.PARAMS, strict=True):
            assert_beams_are_own(output, name, ids, params, ends)

    @staticmethod
    @functools.cache
    def liked_ends(name):
        """EOS ids that beams really say: one in the middle of the best hypothesis, one from another prompt's."""
        best = own_beams(name, tuple(TestBeamSearch.PROMPTS[0]), TestBeamSearch.PARAMS[0])[0][0]
        other = own_beams(name, tuple(TestBeamSearch.PROMPTS[3]), TestBeamSearch.PARAMS[3])[1][0]
        return best[5], other[3]

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    def test_it_finds_what_transformers_finds(self, name, block_size):
        """Widths 1, 2 and 4 in one ragged batch, with and without ends, cold and warm; each prompt is computed once."""
        for ends in ((), self.liked_ends(name)):
            llm = make_llm(name, block_size, ends=ends)
            outputs = llm.beam_search(list(self.PROMPTS), self.PARAMS)
            self.assert_all_own(outputs, name, ends)
            assert llm.metrics().counters.prefill_tokens == sum(map(len, self.PROMPTS))
            assert [output.num_cached_tokens for output in outputs] == [0] * 4
            assert_idle(llm)
            outputs = llm.beam_search(list(self.PROMPTS), self.PARAMS)
            self.assert_all_own(outputs, name, ends)
            assert [output.num_cached_tokens for output in outputs] == [len(ids) - 1 for ids in self.PROMPTS]
            assert_idle(llm)
            reasons = {one.finish_reason for output in outputs for one in output.outputs}
            assert ("stop" in reasons) == bool(ends)

    @pytest.mark.parametrize("name", MODELS)
    def test_ordinary_requests_run_beside_it(self, name):
        """They share each step: drawn, greedy and several continuations, each as it is alone."""
        llm = make_llm(name, 4, ends=())
        asked = [(prompt(20, 8), drawn(15)), (prompt(7, 9), drawn(6, n=2)), (self.PROMPTS[3], drawn(30))]
        groups = [add(llm, ids, params) for ids, params in asked]
        outputs = llm.beam_search(list(self.PROMPTS), self.PARAMS)
        self.assert_all_own(outputs, name)
        assert groups[1][0].finish_reason == "length"
        finish(llm)
        for group, (ids, params) in zip(groups, asked, strict=True):
            assert ends_of(group) == solos(name, ids, params, len(group))

    @pytest.mark.parametrize("is_caching", [True, False], ids=["cache", "no cache"])
    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    def test_beams_may_be_preempted(self, name, block_size, preemption, is_caching):
        """The pool holds the longest beam and no more; one that pauses keeps its candidates, and its KV comes back."""
        num_slots = -(-43 // block_size) * block_size
        llm = make_llm(name, block_size, num_slots, ends=(), preemption=preemption, enable_prefix_caching=is_caching)
        outputs = llm.beam_search(list(self.PROMPTS), self.PARAMS)
        self.assert_all_own(outputs, name)
        num_preemptions = [output.metrics.num_preemptions for output in outputs]
        assert sum(num_preemptions) > 0
        assert llm.metrics().counters.preemptions == {preemption: sum(num_preemptions)}
        if preemption == "swap":
            assert llm.metrics().counters.recomputed_tokens == 0
        assert_idle(llm)

    @pytest.mark.parametrize("victim", VICTIMS)
    def test_preemption_beside_ordinary_requests(self, victim):
        """Whoever gives way, all come to their ends."""
        llm = make_llm("llama", 4, 64, ends=(), victim=victim, max_num_batched_tokens=16)
        asked = [(prompt(20, 8), drawn(40)), (prompt(7, 9), drawn(30))]
        groups = [add(llm, ids, params) for ids, params in asked]
        self.assert_all_own(llm.beam_search(list(self.PROMPTS), self.PARAMS), "llama")
        finish(llm)
        for group, (ids, params) in zip(groups, asked, strict=True):
            assert ends_of(group) == solos("llama", ids, params, 1)
        assert llm.metrics().counters.preemptions.total() > 0

    @pytest.mark.parametrize("limits", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 4}])
    def test_all_beams_together_stay_within_the_limits_of_a_step(self, limits):
        """Two searches of width 4 where four sequences, or four tokens, are allowed: they take turns."""
        llm = make_llm(ends=(), **limits)
        run, num_tokens, num_rows = llm.core.runner.run, [], []

        def counting(scheduled, cache):
            num_rows.append(len(scheduled))
            num_tokens.append(sum(len(work.token_ids) for work in scheduled))
            return run(scheduled, cache)

        llm.core.runner.run = counting
        prompts = [prompt(1, 1), prompt(2, 2)]
        outputs = llm.beam_search(prompts, self.PARAMS[0])
        for output, ids in zip(outputs, prompts, strict=True):
            assert_beams_are_own(output, "llama", ids, self.PARAMS[0])
        assert max(num_rows) <= 4
        if "max_num_batched_tokens" in limits:
            assert max(num_tokens) <= 4

    def test_beams_wider_than_may_run_at_once_are_refused(self):
        """With the number that is allowed; and nothing of the batch is left."""
        llm = make_llm(max_num_seqs=3)
        with pytest.raises(ValueError, match="beam_width is 4; allowed: at most 3, which max_num_seqs and"):
            llm.beam_search(self.PROMPTS[:2], [self.PARAMS[1], self.PARAMS[0]])
        assert_idle(llm)

    @pytest.mark.parametrize("is_caching", [True, False], ids=["cache", "no cache"])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_beams_share_all_blocks_before_they_part(self, block_size, is_caching):
        """Blocks in use stay near prompt + width * tail: with one table for each beam they would be four times that."""
        ids, params = prompt(64, 5), BeamSearchParams(4, 20)
        llm = make_llm(block_size=block_size, ends=(), enable_prefix_caching=is_caching)
        run, peak = llm.core.runner.run, 0

        def watching(scheduled, cache):
            nonlocal peak
            peak = max(peak, cache.num_private_blocks + cache.num_protected_blocks)
            return run(scheduled, cache)

        llm.core.runner.run = watching
        (output,) = llm.beam_search([ids], params)
        assert_beams_are_own(output, "llama", ids, params)
        tail = math.ceil(20 / block_size) + 1
        assert 64 // block_size < peak <= 64 // block_size + 4 * tail
        if block_size == 1:
            assert peak < 4 * (64 + 19) / 2
        assert_idle(llm)

    @pytest.mark.parametrize("num_calls", [1, 2, 5])
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (EngineCore, "step"),
            (EngineCore, "fork"),
            (EngineCore, "continue_with"),
            (EngineCore, "abort"),
            (Scheduler, "fork"),
            (Scheduler, "resume"),
            (Scheduler, "finish"),
        ],
    )
    def test_an_interrupt_leaves_nothing_behind(self, monkeypatch, owner, name, num_calls):
        """Ctrl-C falls where it likes, also between a fork and the line that remembers it."""
        llm = make_llm("llama", 4, ends=())
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted_after(getattr(owner, name), num_calls))
            with pytest.raises(KeyboardInterrupt):
                llm.beam_search(list(self.PROMPTS), self.PARAMS)
        assert_idle(llm)
        self.assert_all_own(llm.beam_search(list(self.PROMPTS), self.PARAMS), "llama")

    def test_a_search_ends_where_the_pool_or_the_context_does(self):
        """The last token needs no slot: 33 prompt tokens leave room for 8 in 40 slots, and for 7 in a context of 40."""
        wide, ids = BeamSearchParams(2, 30), self.PROMPTS[3]
        for options, num_new in (({"num_tokens": 40}, 8), ({"max_model_len": 40}, 7)):
            (output,) = make_llm(ends=(), **options).beam_search([ids], wide)
            assert_beams_are_own(output, "llama", ids, BeamSearchParams(2, num_new))

    def test_text_and_metrics_of_the_best_hypotheses(self, chat_decoder):
        """Best first, each with its text; times are those of the whole search."""
        llm = LLM(chat_decoder, num_blocks=64)
        (output,) = llm.beam_search("Which rivers?", BeamSearchParams(3, 8, num_return=2))
        assert len(output.outputs) == 2
        for completion in output.outputs:
            assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        metrics = output.metrics
        assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.total_s
        with pytest.raises(TypeError, match="params must be BeamSearchParams"):
            llm.beam_search("x", SamplingParams())


@functools.cache
def own_logprobs(name, ids):
    """(length, vocab_size) float64: log-probabilities after each token of a tuple of ids, eager and uncached."""
    with torch.no_grad():
        logits = model_of(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1)


def assert_is_judged(entry, token_id, logprobs, num_top):
    """The token itself comes first, then the most likely ones, with their ranks. logprobs: (vocab_size,)."""
    most_likely = logprobs.topk(num_top).indices.tolist() if num_top else []
    assert list(entry) == [token_id, *(other for other in most_likely if other != token_id)]
    for other, judged in entry.items():
        assert judged.logprob == pytest.approx(logprobs[other].item(), **TOLERANCE)
        assert judged.rank == 1 + int((logprobs > logprobs[other]).sum())


def assert_prompt_is_judged(entries, name, ids, num_top):
    """B051: an entry for each prompt token, None for the first."""
    assert len(entries) == len(ids)
    assert entries[0] is None
    logprobs = own_logprobs(name, tuple(ids))
    for position in range(1, len(ids)):
        assert_is_judged(entries[position], ids[position], logprobs[position - 1], num_top)


def assert_outputs_are_judged(completion, name, ids, num_top):
    """An entry for each output token, and their sum."""
    assert len(completion.logprobs) == len(completion.token_ids)
    logprobs = own_logprobs(name, (*ids, *completion.token_ids))
    for index, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert_is_judged(entry, token_id, logprobs[len(ids) - 1 + index], num_top)
    own = [logprobs[len(ids) - 1 + index, token_id].item() for index, token_id in enumerate(completion.token_ids)]
    assert completion.cumulative_logprob == pytest.approx(sum(own), **TOLERANCE)


class TestLogprobs:
    @pytest.mark.parametrize("budget", [1, 7, 16, 8192])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("name", MODELS)
    def test_they_are_the_model_s_own_cold_warm_and_after_another_prompt(self, name, block_size, budget):
        """B051: a cached prompt is computed again when it is to be judged, and its entries are the same each time."""
        llm = make_llm(name, block_size, max_num_batched_tokens=budget)
        ids = prompt(40, 1)
        params = drawn(6, logprobs=3, prompt_logprobs=2, repetition_penalty=1.5)
        for other in (None, None, prompt(40, 2)):
            if other is not None:
                llm.generate([other], drawn(3))
            (output,) = llm.generate([ids], params)
            assert output.num_cached_tokens == 0
            assert_prompt_is_judged(output.prompt_logprobs, name, ids, 2)
            assert_outputs_are_judged(output.outputs[0], name, ids, 3)
            assert results_of(output) == [solo(name, ids, drawn(6, repetition_penalty=1.5))]
        (hit,) = llm.generate([ids], drawn(6, logprobs=3, repetition_penalty=1.5))
        assert hit.num_cached_tokens == 39
        assert hit.prompt_logprobs is None
        assert_outputs_are_judged(hit.outputs[0], name, ids, 3)

    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
    @pytest.mark.parametrize("num_top", [0, 1, 500])
    def test_any_number_of_them_at_any_length(self, length, num_top):
        """A prompt of one token has none to judge; more than the vocabulary are as many as it has."""
        llm = make_llm(block_size=16)
        ids = prompt(length, length)
        for _ in range(2):
            (output,) = llm.generate([ids], drawn(2, logprobs=num_top, prompt_logprobs=num_top))
            assert_prompt_is_judged(output.prompt_logprobs, "llama", ids, min(num_top, VOCAB_SIZE))
            assert_outputs_are_judged(output.outputs[0], "llama", ids, min(num_top, VOCAB_SIZE))

    def test_nothing_is_given_that_was_not_asked_for(self):
        """None, and neither an empty list nor a sum of 0."""
        (output,) = make_llm().generate([prompt(5, 1)], drawn(3))
        assert output.prompt_logprobs is None
        assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)

    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    @pytest.mark.parametrize("num_steps", [1, 2, 4, 6, 8])
    @pytest.mark.parametrize("is_caching", [True, False], ids=["cache", "no cache"])
    def test_a_preemption_in_the_middle_changes_none(self, is_caching, num_steps, preemption):
        """Between chunks and while it decodes: no entry is lost, none comes twice, what is judged stays cached.

        Another request takes a token of the first steps, so that the second time the chunks are cut elsewhere.
        """
        llm = make_llm(max_num_batched_tokens=7, preemption=preemption, enable_prefix_caching=is_caching)
        ids, params = prompt(33, 1), drawn(6, logprobs=1, prompt_logprobs=1)
        add(llm, prompt(3, 9), drawn(3))
        sequences = add(llm, ids, params)
        step(llm, num_steps)
        llm.core.scheduler._preempt(sequences[0])
        finish(llm)
        output = llm.output_of(sequences)
        assert_prompt_is_judged(output.prompt_logprobs, "llama", ids, 1)
        assert_outputs_are_judged(output.outputs[0], "llama", ids, 1)
        assert (output.metrics.num_recomputed_tokens > 0) == (preemption == "recompute" and not is_caching)

    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    def test_a_pool_too_small_for_all_changes_none(self, preemption):
        """Three requests preempt each other; prompts that share a start are each judged to the end."""
        llm = make_llm("mistral-sliding", 4, 64, preemption=preemption)
        stem = prompt(12, 3)
        prompts = [stem + prompt(3, 1), stem + prompt(4, 2), stem]
        outputs = llm.generate(prompts, drawn(40, logprobs=2, prompt_logprobs=2))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        for output, ids in zip(outputs, prompts, strict=True):
            assert_prompt_is_judged(output.prompt_logprobs, "mistral-sliding", ids, 2)
            assert_outputs_are_judged(output.outputs[0], "mistral-sliding", ids, 2)
        assert_idle(llm)

    def test_prompts_to_be_judged_come_in_chunks_of_their_own(self, monkeypatch):
        """Logits of all their tokens exist at once, which for a long prompt is more memory than the model takes."""
        monkeypatch.setattr(scheduler, "PROMPT_LOGPROBS_CHUNK", 5)
        llm = make_llm()
        ids = prompt(33, 1)
        sequences = add(llm, ids, drawn(2, prompt_logprobs=1))
        computed = []
        while llm.core.has_requests:
            step(llm)
            computed.append(sequences[0].num_computed_tokens)
        assert computed == [5, 10, 15, 20, 25, 30, 33, 34]
        assert_prompt_is_judged(llm.output_of(sequences).prompt_logprobs, "llama", ids, 1)

    def test_each_token_has_its_text_where_there_is_a_tokenizer(self, chat_decoder):
        """A byte of a longer character is shown as the tokenizer shows it."""
        llm = LLM(chat_decoder, num_blocks=64)
        (output,) = llm.generate("Straße, stern", drawn(8, logprobs=2, prompt_logprobs=1))
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for entry in entries:
            for token_id, judged in entry.items():
                assert judged.decoded_token == llm.tokenizer.decode([token_id])
        own = [entry[token_id] for entry, token_id in zip(entries, output.prompt_token_ids[1:], strict=False)]
        assert "st" in [judged.decoded_token for judged in own], "a token of two letters"
        (plain,) = make_llm().generate([prompt(3, 1)], drawn(1, logprobs=1))
        assert {judged.decoded_token for judged in plain.outputs[0].logprobs[0].values()} == {None}


def own_choice(name, ids, params, ends=()):
    """Greedy tokens by the model's own logits, the documented formulas, and a loop."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    output = []
    while len(output) < params.max_tokens:
        with torch.no_grad():
            logits = model_of(name)(input_ids=torch.tensor([[*ids, *output]])).logits[0, -1].double()
        for token_id in {*ids, *output}:
            by = params.repetition_penalty
            logits[token_id] = logits[token_id] / by if logits[token_id] > 0 else logits[token_id] * by
        for token_id in set(output):
            logits[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
        if len(output) < params.min_tokens:
            logits[list(stops)] = -math.inf
        output.append(int(logits.argmax()))
        if output[-1] in stops:
            break
    return output


class TestChoices:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(
        "penalties",
        [
            {"repetition_penalty": 1.4},
            {"repetition_penalty": 0.7},
            {"presence_penalty": 2.0},
            {"frequency_penalty": 1.5},
            {"frequency_penalty": -1.0},
            {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.8},
        ],
        ids=repr,
    )
    def test_penalties_change_what_the_model_says_as_documented(self, name, penalties):
        """Cold, warm, and with a preemption in the middle: they look at prompt and output, wherever the KV is from."""
        ids, params = prompt(20, 3), SamplingParams(max_tokens=16, ignore_eos=True, **penalties)
        wanted = own_choice(name, ids, params)
        llm = make_llm(name)
        for _ in range(2):
            assert llm.generate([ids], params)[0].outputs[0].token_ids == wanted
        sequences = add(llm, ids, params)
        step(llm, 7)
        llm.core.scheduler._preempt(sequences[0])
        finish(llm)
        assert sequences[0].output_token_ids == wanted

    def test_penalties_matter_on_these_models(self):
        """Else the tests above would show nothing."""
        ids = prompt(20, 3)
        free = own_choice("llama", ids, SamplingParams(max_tokens=16, ignore_eos=True))
        assert free == solo("llama", ids, SamplingParams(max_tokens=16, ignore_eos=True))[0]
        assert free != own_choice("llama", ids, SamplingParams(max_tokens=16, ignore_eos=True, presence_penalty=2.0))

    @pytest.mark.parametrize("ignore_eos", [True, False])
    def test_stop_tokens_end_the_output_and_are_its_reason(self, ignore_eos):
        """They are part of the output, as an end-of-sequence token is, and count also where that is ignored."""
        ids = prompt(20, 3)
        free = solo("llama", ids, SamplingParams(max_tokens=12, ignore_eos=True))[0]
        at = next(index for index in range(3, 12) if free[index] not in free[:index])
        for by in ("stop_token_ids", "model"):
            if by == "model" and ignore_eos:
                continue
            llm = make_llm(ends={free[at]} if by == "model" else ())
            stops = [free[at], 5000] if by == "stop_token_ids" else []
            params = SamplingParams(max_tokens=12, ignore_eos=ignore_eos, stop_token_ids=stops)
            (completion,) = llm.generate([ids], params)[0].outputs
            assert completion.token_ids == free[: at + 1]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", free[at])
        (completion,) = make_llm().generate([ids], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)

    @pytest.mark.parametrize("min_tokens", [0, 1, 4, 12])
    @pytest.mark.parametrize("place", [0, 3])
    def test_no_end_comes_before_min_tokens(self, place, min_tokens):
        """The next most likely token is taken instead; neither the model's ends nor stop tokens can be."""
        ids = prompt(20, 3)
        free = solo("llama", ids, SamplingParams(max_tokens=12, ignore_eos=True))[0]
        ends, stops = {free[place]}, [free[place + 1]]
        params = SamplingParams(max_tokens=12, min_tokens=min_tokens, stop_token_ids=stops)
        wanted = own_choice("llama", ids, params, ends)
        (completion,) = make_llm(ends=ends).generate([ids], params)[0].outputs
        assert completion.token_ids == wanted
        assert len(wanted) >= max(1, min_tokens)
        assert not {*ends, *stops} & {*wanted[:min_tokens]}


class TestStopStrings:
    IDS = tuple(b"rivers that end")

    def free(self, llm, **params):
        """Tokens of a long output, drawn so that it has text, and the text after each of them."""
        (output,) = llm.generate([self.IDS], drawn(60, seed=4, **params))
        tokens = output.outputs[0].token_ids
        return tokens, [llm.tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in range(61)]

    def cases(self, llm):
        """(stop string, tokens until it is there) for strings of some characters that several tokens spell."""
        _, texts = self.free(llm)
        for size in (2, 3, 4):
            for begin in range(len(texts[-1]) - size):
                stop = texts[-1][begin : begin + size]
                if "\ufffd" not in stop and texts[-1].find(stop) == begin:
                    yield stop, next(end for end, text in enumerate(texts) if stop in text)

    @pytest.mark.parametrize("is_included", [False, True])
    def test_the_text_ends_at_a_stop_string_that_several_tokens_spell(self, chat_decoder, is_included):
        """No token more is computed, and the string is the reason; the tokens stay whole, the text does not."""
        llm = LLM(chat_decoder, num_blocks=64)
        tokens, texts = self.free(llm)
        cases = list(self.cases(llm))
        assert len(cases) >= 3
        for stop, num_tokens in cases:
            params = drawn(60, seed=4, stop=[stop, "never said"], include_stop_str_in_output=is_included)
            (completion,) = llm.generate([self.IDS], params)[0].outputs
            assert completion.token_ids == tokens[:num_tokens]
            assert num_tokens < 60
            before = texts[-1][: texts[-1].index(stop)]
            assert completion.text == before + (stop if is_included else "")
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert_idle(llm)

    def test_each_continuation_ends_at_its_own(self, chat_decoder):
        """n > 1: one stops, another goes on; each equals the run that has it alone, preempted or not."""
        llm = LLM(chat_decoder, num_blocks=64)
        stop, _ = next(self.cases(llm))
        alone = [llm.generate([self.IDS], drawn(60, seed=seed, stop=stop))[0].outputs[0] for seed in (3, 4, 5)]
        assert {completion.finish_reason for completion in alone} == {"stop", "length"}
        small = LLM(chat_decoder, num_blocks=28, block_size=4)
        for engine in (llm, small):
            (output,) = engine.generate([self.IDS], drawn(60, seed=3, stop=stop, n=3))
            for completion, wanted in zip(output.outputs, alone, strict=True):
                assert (completion.token_ids, completion.text) == (wanted.token_ids, wanted.text)
                assert completion.stop_reason == wanted.stop_reason
        assert output.metrics.num_preemptions > 0

    def test_it_is_not_looked_for_before_min_tokens(self, chat_decoder):
        """A string that is complete too early does not count, then or later."""
        llm = LLM(chat_decoder, num_blocks=64)
        stop, num_tokens = next(self.cases(llm))
        for min_tokens in (num_tokens - 1, num_tokens, num_tokens + 1):
            params = drawn(60, seed=4, stop=stop, min_tokens=min_tokens)
            (completion,) = llm.generate([self.IDS], params)[0].outputs
            assert (len(completion.token_ids) == num_tokens) == (min_tokens <= num_tokens)

    def test_a_stop_token_that_completes_a_stop_string_is_the_reason(self, chat_decoder):
        """One end has one reason, and the text of a token that ended the output stays."""
        llm = LLM(chat_decoder, num_blocks=64)
        tokens, texts = self.free(llm)
        stop, num_tokens = next(
            (stop, num) for stop, num in self.cases(llm) if tokens.index(tokens[num - 1]) == num - 1
        )
        params = drawn(60, seed=4, stop=stop, stop_token_ids=[tokens[num_tokens - 1]])
        (completion,) = llm.generate([self.IDS], params)[0].outputs
        assert (completion.token_ids, completion.text) == (tokens[:num_tokens], texts[num_tokens])
        assert completion.stop_reason == tokens[num_tokens - 1]

    def test_a_model_without_a_tokenizer_has_no_text_to_stop_at(self):
        """The error names the way out."""
        llm = make_llm()
        with pytest.raises(ValueError, match="no tokenizer: stop strings need one; use stop_token_ids"):
            llm.generate([prompt(3, 1)], drawn(3, stop="x"))
        assert_idle(llm)


class TestPromptFields:
    def test_a_request_keeps_the_id_that_it_was_given(self):
        """Callers find their own ids in outputs and logs; the others get one."""
        llm = make_llm()
        ids = prompt(9, 1)
        outputs = llm.generate([{"prompt_token_ids": ids, "request_id": "mine"}, ids, ids], drawn(3))
        assert outputs[0].request_id == "mine"
        assert len({output.request_id for output in outputs}) == 3
        (beams,) = llm.beam_search({"prompt_token_ids": ids, "request_id": "mine"}, BeamSearchParams(2, 3))
        assert beams.request_id == "mine"

    def test_an_id_of_the_caller_never_meets_a_counted_one(self):
        """Ids of callers are often numbers too; one of them must not make a request fail that has no id."""
        llm = make_llm()
        ids = prompt(9, 1)
        outputs = llm.generate([{"prompt_token_ids": ids, "request_id": "1"}, ids, ids, ids], drawn(3))
        assert len({output.request_id for output in outputs}) == 4
        assert outputs[0].request_id == "1"

    @pytest.mark.parametrize("num", [1, 3])
    def test_an_id_twice_in_a_batch_is_refused(self, num):
        """A043: before anything runs, and nothing of the batch is left; afterwards the id is free again."""
        llm = make_llm()
        mine = {"prompt_token_ids": prompt(9, 1), "request_id": "mine"}
        with pytest.raises(DuplicateRequest, match="mine"):
            llm.generate([mine, prompt(5, 1), mine], drawn(3, n=num))
        assert_idle(llm)
        assert llm.generate(mine, drawn(3))[0].request_id == "mine"

    def test_the_highest_priority_goes_first(self):
        """Where one runs at a time, ends come in order of priority, then of arrival."""
        llm = make_llm(max_num_seqs=1)
        requests = [
            llm.make_request({"prompt_token_ids": prompt(9, 10 * seed), "priority": priority}, drawn(3))
            for seed, priority in enumerate((0, 5, 1, 5))
        ]
        for request in requests:
            llm.core.add_request(request)
        finished = []
        while llm.core.has_requests:
            finished += llm.core.step()
        assert finished == [requests[index] for index in (1, 3, 2, 0)]

    def test_a_high_priority_is_preempted_last(self):
        """Though it came last, and "lifo" would stop it first, as it does where both are equal."""
        for priority, wanted in ((0, [False, True]), (3, [True, False])):
            llm = make_llm(num_tokens=52)
            requests = []
            for of_this in (0, priority):
                mapping = {"prompt_token_ids": prompt(20, len(requests)), "priority": of_this}
                requests.append(llm.make_request(mapping, drawn(24)))
                llm.core.add_request(requests[-1])
                step(llm)
            finish(llm)
            assert [request.num_preemptions > 0 for request in requests] == wanted

    @pytest.mark.parametrize("num", [1, 3])
    @pytest.mark.parametrize("block_size", [4, 16])
    def test_a_request_that_is_not_stored_leaves_nothing(self, block_size, num):
        """B071: four chunks, all computed, in as many blocks as they fill; afterwards no block is cached."""
        llm = make_llm(block_size=block_size, max_num_batched_tokens=8)
        ids = prompt(32, 1)
        request = llm.make_request({"prompt_token_ids": ids, "store": False}, drawn(1, n=num))
        llm.core.add_request(request)
        num_held = []
        while llm.core.has_requests:
            step(llm)
            num_held.append(llm.cache.num_private_blocks)
            assert llm.cache.num_cached_blocks == 0
        assert num_held == [32 // block_size] * 3 + [0]
        assert llm.metrics().counters.prefill_tokens == 32
        assert llm.cache.num_free_blocks == llm.cache.num_blocks
        (again,) = llm.generate([ids], drawn(3))
        assert again.num_cached_tokens == 0

    @pytest.mark.parametrize("preemption", PREEMPTIONS)
    def test_what_is_not_stored_may_hit_and_be_preempted(self, preemption):
        """It reads what others left, and leaves no more than there was, however often it is interrupted."""
        llm = make_llm(num_tokens=96, preemption=preemption)
        stem = prompt(24, 1)
        llm.generate([stem], SamplingParams(max_tokens=1))
        before = llm.cache.num_cached_blocks
        prompts = [{"prompt_token_ids": [*stem, seed], "store": False} for seed in (3, 4, 5)]
        outputs = llm.generate(prompts, drawn(40, n=2))
        assert [output.num_cached_tokens for output in outputs] == [24, 24, 24]
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        for output, seed in zip(outputs, (3, 4, 5), strict=True):
            assert results_of(output) == solos("llama", [*stem, seed], drawn(40), 2)
        assert_idle(llm)
        assert llm.cache.num_cached_blocks <= before

    def test_continuations_and_beams_stay_in_their_namespace(self):
        """A030: n > 1 and beam search look nowhere else, and leave nothing elsewhere."""
        llm = make_llm()
        ids = prompt(24, 1)
        for namespace, hit in (("a", 0), ("b", 0), (None, 0), ("a", 23), ("b", 23)):
            mapping = {"prompt_token_ids": ids, "namespace": namespace}
            assert llm.generate(mapping, drawn(3, n=2))[0].num_cached_tokens == hit
        for namespace, hit in (("a", 23), ("c", 0), ("c", 23)):
            mapping = {"prompt_token_ids": ids, "namespace": namespace}
            (output,) = llm.beam_search(mapping, BeamSearchParams(2, 3))
            assert output.num_cached_tokens == hit

    @pytest.mark.parametrize(
        ("fields", "error", "match"),
        [
            ({"priority": -1}, ValueError, "priority is -1; allowed: 0"),
            ({"priority": 1.5}, TypeError, "priority must be an integer, not 1.5"),
            ({"priority": True}, TypeError, "priority must be an integer, not True"),
            ({"priority": "high"}, TypeError, "priority must be an integer, not 'high'"),
            ({"store": 0}, TypeError, "store must be True or False, not 0"),
            ({"store": None}, TypeError, "store must be True or False, not None"),
            ({"request_id": ""}, TypeError, "a request id must be a string that is not empty, not ''"),
            ({"request_id": 5}, TypeError, "a request id must be a string that is not empty, not 5"),
            ({"namespace": 0}, TypeError, "namespace must be"),
            ({"salt": "x"}, ValueError, r"not \['prompt_token_ids', 'salt'\]"),
        ],
        ids=repr,
    )
    def test_bad_fields_are_refused_by_name(self, fields, error, match):
        """With the value and the rule, before any of the batch starts; beams take the same prompts."""
        llm = make_llm()
        bad = {"prompt_token_ids": [5, 6], **fields}
        with pytest.raises(error, match=match):
            llm.generate([prompt(9, 1), bad], drawn(3))
        with pytest.raises(error, match=match):
            llm.beam_search([prompt(9, 1), bad], BeamSearchParams(2, 3))
        assert_idle(llm)
        assert llm.cache.stats.requests == 0
