"""`LLM.stream`: the text that `generate` gives, in pieces, and nothing left behind however the reading ends.

Most engines here are tiny random models; where the text matters, their forward pass is replaced by a script.
"""

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from chat_helpers import save_tiny_chat_model  # noqa: E402
from stream_helpers import ScriptedRunner, assert_adds_up, assert_idle, load_decoder, make_llm  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402
from engine.stream import DeltaReader, TextDelta  # noqa: E402
from radixkv import DuplicateRequest  # noqa: E402
from tiny_models import VOCAB_SIZE, tiny_model  # noqa: E402

# One, two, three and four bytes, a combining accent, a family joined by U+200D, a flag, and the sign for bad bytes.
CHARACTERS = [*"abß中한🙂\ufffd \n", "e\u0301", "日本", "👩\u200d👧", "🇩🇪"]
TEXTS = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12).map("".join)


def greedy(max_tokens, **arguments):
    """Params that give `max_tokens` tokens, unless a stop string ends them."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **arguments)


def prompt(length, seed):
    """Random token ids, the same for the same seed; no special tokens of either model."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


@pytest.fixture(scope="module")
def chat_decoder(tmp_path_factory):
    """A tiny model whose tokens are bytes, with random weights: most of what it says is no valid text."""
    return load_decoder(save_tiny_chat_model(tmp_path_factory.mktemp("chat")))


@functools.cache
def plain_decoder():
    """A tiny model without a tokenizer."""
    return load_decoder(tiny_model("llama"))


def scripted(decoder, *scripts, **arguments):
    """An engine whose continuation number i says the i-th text, or list of token ids."""
    llm = make_llm(decoder, **arguments)
    tokenized = [llm.tokenizer.encode(script) if isinstance(script, str) else script for script in scripts]
    ScriptedRunner(llm, tokenized)
    return llm, tokenized


def take_in_turn(streams, order):
    """The deltas of several streams, read in an order of their places; each is read to its end."""
    deltas, alive = [[] for _ in streams], list(range(len(streams)))
    turns = itertools.chain(order, itertools.count())
    while alive:
        place = alive[next(turns) % len(alive)]
        delta = next(streams[place], None)
        if delta is None:
            alive.remove(place)
        else:
            deltas[place].append(delta)
    return deltas


class TestText:
    @given(data=st.data())
    def test_deltas_add_up_to_what_generate_gives(self, chat_decoder, data):
        """The promise, with stop strings that are somewhere in the text or nearly, and cut off at any byte."""
        texts = data.draw(st.lists(TEXTS, min_size=1, max_size=3), "texts")
        llm, scripts = scripted(chat_decoder, *texts)
        pieces = st.sampled_from([text[i : i + size] for text in texts for i in range(len(text)) for size in (1, 2, 3)])
        stop = data.draw(st.lists(pieces | st.just("a中b"), max_size=2), "stop")
        max_tokens = data.draw(st.integers(1, max(map(len, scripts))), "max tokens")
        params = greedy(
            max_tokens,
            n=len(texts),
            seed=0,
            stop=stop,
            include_stop_str_in_output=data.draw(st.booleans(), "include"),
            min_tokens=data.draw(st.integers(0, max_tokens), "min tokens"),
        )
        (wanted,) = llm.generate([5, 6, 7], params)
        deltas = list(llm.stream([5, 6, 7], params))
        assert_adds_up(deltas, wanted)
        for completion in wanted.outputs:
            event(f"ended by {completion.finish_reason}")
        assert_idle(llm)

    @given(data=st.data())
    def test_deltas_of_a_random_model_add_up_too(self, chat_decoder, data):
        """Most of it is bad bytes, special tokens among them; greedy or sampled, several continuations, any prompt."""
        llm = make_llm(chat_decoder, max_num_batched_tokens=data.draw(st.sampled_from([3, 64]), "budget"))
        ids = prompt(data.draw(st.integers(1, 9), "prompt length"), data.draw(st.integers(0, 99), "prompt"))
        params = SamplingParams(
            max_tokens=data.draw(st.sampled_from([1, 2, 5, 16]), "max tokens"),
            temperature=data.draw(st.sampled_from([0.0, 1.0, 3.0]), "temperature"),
            seed=data.draw(st.integers(0, 9), "seed"),
            n=data.draw(st.sampled_from([1, 3]), "n"),
            stop=data.draw(st.lists(st.sampled_from(["e", "\ufffd", "\ufffd\ufffd", "st"]), max_size=1), "stop"),
            min_tokens=data.draw(st.sampled_from([0, 1]), "min tokens"),
            logprobs=data.draw(st.sampled_from([None, 1]), "logprobs"),
        )
        (wanted,) = llm.without_cache().generate(ids, params)
        deltas = list(llm.stream(ids, params))
        if params.logprobs is None:
            assert_adds_up(deltas, wanted)
        else:  # sums in another order differ in the last bits
            assert "".join(d for d in deltas if not d.continuation) == wanted.outputs[0].text
            assert len(deltas[-1].output.outputs[0].logprobs) == len(wanted.outputs[0].token_ids)
        assert_idle(llm)

    @pytest.mark.parametrize("text", ["日本語中文한국어", "🙂👩\u200d👩\u200d👧🇩🇪", "e\u0301ß中🙂a"])
    def test_characters_are_never_shown_by_halves(self, chat_decoder, text):
        """B090: each token is a byte here; a character comes whole, with its last byte, and without waiting longer."""
        llm, (script,) = scripted(chat_decoder, text)
        deltas = list(llm.stream([5], greedy(len(script), seed=0)))
        assert deltas == list(text)
        assert [bytes_of(delta) for delta in deltas] == [len(character.encode()) for character in text]

    @pytest.mark.parametrize(
        "text", ["你好世界，你好世界，你好世界，", "🎉🎊🎈🎉🎊🎈🎉🎊🎈🎉🎊🎈", "привет мир, привет мир, привет"]
    )
    def test_a_real_model_streams_what_it_says(self, real_llm, text):
        """B090: real tokens are pieces of words, whole characters and parts of them, in one text."""
        params = greedy(10)
        (wanted,) = real_llm.generate(text, params)
        deltas = list(real_llm.stream(text, params))
        assert_adds_up(deltas, wanted)
        assert not wanted.outputs[0].text.isascii()
        is_whole = "\ufffd" not in wanted.outputs[0].text
        assert is_whole == all("\ufffd" not in delta for delta in deltas)
        assert len(deltas) > 2
        assert_idle(real_llm)

    def test_text_comes_in_the_step_of_its_token(self, chat_decoder):
        """A stream that holds everything back until the end would add up as well."""
        llm, (script,) = scripted(chat_decoder, "plain")
        stream = llm.stream([5], greedy(len(script), seed=0))
        for number, letter in enumerate("plain", 1):
            assert next(stream) == letter
            assert llm.core.runner.num_steps == number

    def test_what_a_stop_string_may_take_back_is_not_shown(self, chat_decoder):
        """It is held back while a stop string may begin there, and comes once that is impossible."""
        llm, (script,) = scripted(chat_decoder, "xabcabdabey")
        deltas = list(llm.stream([5], greedy(len(script), seed=0, stop="abe")))
        assert deltas == ["x", "abc", "abd", ""]
        assert (deltas[-1].finish_reason, deltas[-1].output.outputs[0].stop_reason) == ("stop", "abe")
        assert [len(delta.token_ids) for delta in deltas] == [1, 3, 3, 3]

    def test_special_tokens_are_tokens_and_no_text(self, chat_decoder):
        """The token that ends a reply is in `token_ids`, with its text nowhere."""
        llm = make_llm(chat_decoder)
        start, end = llm.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        letters = llm.tokenizer.encode("ab")
        ScriptedRunner(llm, [[letters[0], start, letters[1], end]])
        deltas = list(llm.stream([5], SamplingParams(max_tokens=9, seed=0)))
        assert deltas == ["a", "b", ""]
        assert [delta.token_ids for delta in deltas] == [letters[:1], [start, letters[1]], [end]]
        assert deltas[-1].finish_reason == "stop"

    def test_continuations_end_each_for_itself(self, chat_decoder):
        """The one that ends early says so at once, and the output comes with the last of all."""
        llm, _ = scripted(chat_decoder, "a!", "abcd")
        deltas = list(llm.stream([5], greedy(4, n=2, seed=0, stop="!")))
        seen = [(str(delta), delta.continuation, delta.finish_reason) for delta in deltas]
        assert seen == [
            ("a", 0, None), ("a", 1, None), ("", 0, "stop"), ("b", 1, None), ("c", 1, None), ("d", 1, "length")
        ]  # fmt: skip
        assert [delta.output is None for delta in deltas] == [True] * 5 + [False]

    def test_a_model_without_a_tokenizer_streams_tokens(self):
        """There is no text then; each token comes with its step all the same."""
        llm = make_llm(plain_decoder())
        (wanted,) = llm.generate(prompt(9, 1), greedy(5))
        deltas = list(llm.stream(prompt(9, 1), greedy(5)))
        assert [(delta, len(delta.token_ids)) for delta in deltas] == [("", 1)] * 5
        assert_adds_up(deltas, wanted)


def bytes_of(delta):
    """Tokens of a delta whose tokens are bytes."""
    return len(delta.token_ids)


class TestDelta:
    def test_a_delta_is_a_string_with_attributes(self):
        """Users print it, join it, search it and send it on; none of that may lose the text."""
        delta = TextDelta("a中", 2, [7, 8], "length")
        assert delta == "a中" and f"{delta}!" == "a中!" and delta.index("中") == 1
        assert (delta.continuation, delta.token_ids, delta.finish_reason, delta.output) == (2, [7, 8], "length", None)
        for other in (copy.copy(delta), copy.deepcopy(delta), pickle.loads(pickle.dumps(delta))):
            assert isinstance(other, TextDelta)
            assert (other, vars(other)) == (delta, vars(delta))

    def test_deltas_do_not_share_a_list(self):
        """A default that is one list for all would collect the tokens of others."""
        TextDelta("a").token_ids.append(5)
        assert TextDelta("b").token_ids == []

    def test_a_reader_gives_nothing_twice(self):
        """Not without news, and not after the end."""
        llm = make_llm(plain_decoder())
        request = llm.make_request([5], greedy(2), is_streamed=True)
        reader = DeltaReader(request, 0)
        assert reader.read() is None
        llm.core.add_request(request)
        llm.core.step()
        assert len(reader.read().token_ids) == 1
        assert reader.read() is None
        llm.core.step()
        assert reader.read().finish_reason == "length"
        assert reader.read() is None


class TestSharing:
    @given(data=st.data())
    def test_streams_and_generate_share_steps_and_each_says_what_it_says_alone(self, chat_decoder, data):
        """Whoever asks for text makes a step for all; a request that ends in a step of another's loses no text."""
        pool = data.draw(st.sampled_from([1024, 48]), "pool")
        llm = make_llm(chat_decoder, pool, preemption=data.draw(st.sampled_from(["recompute", "swap"])))
        cases = data.draw(
            st.lists(
                st.tuples(st.integers(1, 20), st.sampled_from([1, 2, 7, 20]), st.sampled_from([1, 2])),
                min_size=2,
                max_size=4,
            ),
            "prompt length, tokens, n",
        )
        params = [greedy(tokens, n=n, seed=3, temperature=1.0) for _, tokens, n in cases]
        prompts = [prompt(length, place) for place, (length, _, _) in enumerate(cases)]
        alone = make_llm(chat_decoder, pool, enable_prefix_caching=False)
        wanted = [alone.generate(*pair)[0] for pair in zip(prompts, params, strict=True)]

        streams = [llm.stream(*pair) for pair in zip(prompts[1:], params[1:], strict=True)]
        order = data.draw(st.lists(st.integers(0, 2), max_size=30), "order")
        num_before = data.draw(st.integers(0, 5), "deltas before generate")
        deltas = [[] for _ in streams]
        for place in range(num_before):
            if delta := next(streams[place % len(streams)], None):
                deltas[place % len(streams)].append(delta)
        (output,) = llm.generate(prompts[0], params[0])
        assert output.outputs == wanted[0].outputs
        for own, more in zip(deltas, take_in_turn(streams, order), strict=True):
            own += more
        for own, want in zip(deltas, wanted[1:], strict=True):
            assert_adds_up(own, want)
        assert_idle(llm)

    def test_a_stream_whose_request_ended_in_another_s_step_still_gives_its_rest(self, chat_decoder):
        """Ended, but not read: the text and the output are to come."""
        llm, _ = scripted(chat_decoder, "abcd")
        first = llm.stream([5], greedy(4, seed=0))
        assert next(first) == "a"
        llm.generate([6], greedy(9))
        (rest,) = first
        assert (rest, rest.finish_reason, rest.output.outputs[0].text) == ("bcd", "length", "abcd")
        assert_idle(llm)

    def test_a_stream_reads_what_is_there_before_it_makes_a_step(self, chat_decoder):
        """Other streams made the steps; a step more would only delay the text."""
        llm, _ = scripted(chat_decoder, "abcdefgh")
        first, second = llm.stream([5], greedy(8, seed=0)), llm.stream([6], greedy(8, seed=0))
        assert next(first) == "a"
        assert [next(second), next(second)] == ["a", "b"]
        num_steps = llm.core.runner.num_steps
        assert next(first) == "bc"
        assert llm.core.runner.num_steps == num_steps
        first.close()
        second.close()

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_streams_that_preempt_each_other_send_no_token_twice(self, chat_decoder, preemption):
        """A021: two that do not fit together, read in turn; what a victim had said is not said again."""
        prompts = [prompt(20, 1), prompt(20, 2)]
        alone = make_llm(chat_decoder)
        wanted = [alone.generate(ids, greedy(24))[0] for ids in prompts]
        llm = make_llm(chat_decoder, 56, preemption=preemption)
        deltas = take_in_turn([llm.stream(ids, greedy(24)) for ids in prompts], [])
        assert llm.metrics().counters.preemptions[preemption] > 0
        for own, want in zip(deltas, wanted, strict=True):
            assert_adds_up(own, want)
        assert_idle(llm)

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    @pytest.mark.parametrize("budget", [7, 8192], ids=["chunked", "whole"])
    @pytest.mark.parametrize("num_before", [1, 15, 16, 17])
    def test_a_stream_goes_on_where_it_was_preempted(self, chat_decoder, num_before, budget, preemption):
        """A021: after 1, 15, 16 and 17 tokens, computed again in chunks or at once, or copied back."""
        ids, params = prompt(21, 4), greedy(30)
        (wanted,) = make_llm(chat_decoder, block_size=16).generate(ids, params)
        llm = make_llm(
            chat_decoder,
            block_size=16,
            max_num_batched_tokens=budget,
            preemption=preemption,
            enable_prefix_caching=False,  # so that nothing is found again
        )
        deltas, stream = [], llm.stream(ids, params)
        while sum(len(delta.token_ids) for delta in deltas) < num_before:
            deltas.append(next(stream))
        (request,) = llm.core.scheduler.running
        llm.core.scheduler._preempt(request)
        num_prefilled = llm.metrics().counters.prefill_tokens
        deltas += stream
        assert_adds_up(deltas, wanted)
        assert deltas[-1].output.metrics.num_preemptions == 1
        if preemption == "recompute":
            num_computed = 21 + len(request.output_token_ids[:num_before]) - 1
            assert deltas[-1].output.metrics.num_recomputed_tokens >= num_computed
            assert llm.metrics().counters.prefill_tokens > num_prefilled
        assert_idle(llm)


class TestLeaving:
    @pytest.mark.parametrize("by", ["close", "garbage collector", "exception"])
    @pytest.mark.parametrize("n", [1, 3])
    def test_leaving_after_the_first_delta_frees_everything(self, chat_decoder, by, n):
        """A042: max_tokens 5000 and a reader that hangs up; the next request's first token comes in its first step."""
        llm, _ = scripted(chat_decoder, *["a" * 5000] * 3)
        stream = llm.stream(prompt(17, 1), greedy(5000, n=n, seed=0))
        next(stream)
        assert llm.core.num_requests == n
        if by == "close":
            stream.close()
        elif by == "exception":
            with pytest.raises(OSError, match="hung up"):
                stream.throw(OSError("hung up"))
        else:
            del stream
            gc.collect()
        assert_idle(llm)
        num_steps = llm.core.runner.num_steps
        following = llm.stream(prompt(9, 2), greedy(2, seed=0))
        assert next(following) == "a"
        assert llm.core.runner.num_steps == num_steps + 1
        following.close()
        assert_idle(llm)

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_leaving_while_preempted_frees_everything(self, chat_decoder, preemption):
        """Its KV may be in host memory then, and its place is in the queue; the other goes on alone."""
        llm = make_llm(chat_decoder, 56, preemption=preemption)
        first, second = llm.stream(prompt(20, 1), greedy(24)), llm.stream(prompt(20, 2), greedy(24))
        deltas = [next(first)]
        next(second)
        while not llm.core.scheduler.waiting:
            deltas.append(next(first))
        second.close()
        llm.cache.check()
        assert llm.core.num_requests == 1
        assert_adds_up([*deltas, *first], make_llm(chat_decoder).generate(prompt(20, 1), greedy(24))[0])
        assert_idle(llm)

    def test_leaving_while_queued_frees_the_place(self, chat_decoder):
        """A042: with one sequence at a time, a stream's first step may give it nothing."""
        llm, _ = scripted(chat_decoder, "abcdefgh", max_num_seqs=1)
        first = llm.stream([5], greedy(8, seed=0))
        assert next(first) == "a"
        request = llm.make_request([6], greedy(8, seed=0))
        llm.core.add_request(request)
        assert next(first) == "b"
        assert llm.metrics().num_waiting == 1
        llm.core.abort(request.request_id)
        first.close()
        assert_idle(llm)

    def test_a_stream_that_was_never_read_leaves_nothing(self, chat_decoder):
        """It holds no id, no place and no block, read or closed or dropped."""
        llm, _ = scripted(chat_decoder, "ab")
        streams = [llm.stream(prompt(9, 1), greedy(2, seed=0), request_id="x") for _ in range(4)]
        assert_idle(llm)
        streams.pop().close()
        streams.pop()
        assert_idle(llm)
        assert [list(stream) for stream in streams] == [["a", "b"]] * 2
        assert_idle(llm)

    def test_a_stream_that_the_collector_takes_in_the_middle_of_a_step_does_no_harm(self, chat_decoder):
        """A collection may start anywhere, also while the scheduler or the runner works on that very request."""
        llm, _ = scripted(chat_decoder, "abcdef")
        for name in ("run", "schedule", "computed"):
            left, stays = llm.stream([5, 6, 7], greedy(6, seed=0)), llm.stream([8, 9, 5], greedy(6, seed=0))
            deltas = [next(stays)]
            next(left)
            owner = llm.core.runner if name == "run" else llm.core.scheduler
            original = getattr(owner, name)

            def collecting(*arguments, original=original, left=left):
                left.close()
                return original(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, collecting)
                deltas += [next(stays), next(stays)]
            assert llm.core.num_requests == 1, name
            deltas += stays
            assert "".join(deltas) == "abcdef"
            assert_idle(llm)

    def test_abort_by_id_ends_a_stream_with_a_reason(self, chat_decoder):
        """Somebody else ended the request; the reader gets what was said, and the output."""
        llm, _ = scripted(chat_decoder, "abcdef")
        stream = llm.stream([5], greedy(6, seed=0, stop="bc!"), request_id="x")
        assert next(stream) == "a"
        llm.core.step()
        llm.core.abort("x")
        (last,) = stream
        assert (last, last.finish_reason, last.output.outputs[0].text) == ("b", "abort", "ab")
        assert_idle(llm)


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "arguments", "error", "match"),
        [
            ([], {}, ValueError, "the prompt is empty"),
            (prompt(512, 1), {}, ValueError, "the prompt has 512 tokens; allowed: at most 511"),
            ([10**6], {}, ValueError, "not in the vocabulary"),
            ([5], {"request_id": ""}, TypeError, "a request id must be a string that is not empty"),
            ([5], {"request_id": 5}, TypeError, "a request id must be a string"),
            ([5], {"params": "greedy"}, TypeError, "params must be SamplingParams"),
        ],
    )
    def test_a_bad_prompt_is_refused_at_the_call(self, chat_decoder, bad, arguments, error, match):
        """Not at the first text, where a server has sent its headers already."""
        llm, _ = scripted(chat_decoder)
        with pytest.raises(error, match=match):
            llm.stream(bad, **arguments)
        assert_idle(llm)

    @pytest.mark.parametrize(
        ("length", "n", "match"), [(65, 1, "the pool has 16"), (5, 9, "has n = 9; allowed: at most 8")]
    )
    def test_what_can_never_run_is_refused_and_leaves_nothing(self, chat_decoder, length, n, match):
        """A stream beside it goes on."""
        llm, _ = scripted(chat_decoder, "abcd", num_tokens=64, max_num_seqs=8)
        other = llm.stream([5], greedy(4, seed=0))
        assert next(other) == "a"
        with pytest.raises(ValueError, match=match):
            next(llm.stream(prompt(length, 1), greedy(2, n=n)))
        assert list(other) == ["b", "c", "d"]
        assert_idle(llm)

    def test_an_id_is_refused_while_it_is_in_use_and_free_afterwards(self, chat_decoder):
        """A043: the second is refused and the first does not notice; after its end, or its abort, the id is free."""
        llm, _ = scripted(chat_decoder, "abcd")
        first = llm.stream([5], greedy(4, seed=0), request_id="x")
        assert next(first) == "a"
        with pytest.raises(DuplicateRequest, match="'x'"):
            next(llm.stream([6], greedy(4, seed=0), request_id="x"))
        with pytest.raises(DuplicateRequest, match="'x'"):
            llm.generate({"prompt_token_ids": [6], "request_id": "x"}, greedy(4, seed=0))
        assert list(first) == ["b", "c", "d"]
        third = llm.stream([6], greedy(4, seed=0), request_id="x")
        assert next(third) == "a"
        third.close()
        fourth = list(llm.stream({"prompt_token_ids": [7], "request_id": "x"}, greedy(4, seed=0)))
        assert (fourth, fourth[-1].output.request_id) == (["a", "b", "c", "d"], "x")
        assert_idle(llm)

    def test_an_id_that_the_engine_gave_is_none_that_a_user_has_taken(self, chat_decoder):
        """Users number their requests too; who names none must not be told that it is in use."""
        llm, _ = scripted(chat_decoder, "abcd")
        streams = [llm.stream([5], greedy(4, seed=0), request_id=str(number)) for number in range(3)]
        assert [next(stream) for stream in streams] == ["a"] * 3
        assert [output.outputs[0].text for output in llm.generate([[6], [7]], greedy(4, seed=0))] == ["abcd"] * 2


class TestFailures:
    @pytest.mark.parametrize("error", [RuntimeError("out of something"), KeyboardInterrupt()], ids=repr)
    @pytest.mark.parametrize("num_read", [0, 2])
    @pytest.mark.parametrize("place", ["runner.run", "scheduler.schedule"])
    def test_a_step_that_fails_ends_the_stream_that_made_it_and_no_other(
        self, chat_decoder, monkeypatch, place, num_read, error
    ):
        """It is gone with all it held; the other repeats the step and says what it says alone."""
        llm = make_llm(chat_decoder)
        wanted = make_llm(chat_decoder).generate(prompt(9, 2), greedy(8))[0]
        failing, other = llm.stream(prompt(9, 1), greedy(8)), llm.stream(prompt(9, 2), greedy(8))
        deltas = []
        for _ in range(num_read):
            next(failing)
            deltas += itertools.islice(other, 1)
        owner, name = place.split(".")

        def failed(*arguments):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(getattr(llm.core, owner), name, failed)
            with pytest.raises(type(error)):
                list(failing)
        llm.cache.check()
        assert llm.core.num_requests == (1 if num_read else 0)
        assert list(failing) == []
        assert_adds_up([*deltas, *other], wanted)
        assert_idle(llm)

    def test_an_interruption_after_any_operation_of_a_stream_leaves_nothing(self, chat_decoder, monkeypatch):
        """Ctrl-C falls where it likes: once slots are taken, after the pass, and while its results are committed."""
        llm = make_llm(chat_decoder)
        (wanted,) = make_llm(chat_decoder).generate(prompt(30, 3), greedy(6, n=2))
        for owner, name in [
            (llm.core, "add_request"),
            (llm.core.scheduler, "schedule"),
            (llm.core.runner, "run"),
            (llm.cache, "commit"),
            (llm.cache, "append_token"),
            (llm.cache, "fork"),
            (llm, "deltas"),
        ]:
            with monkeypatch.context() as patch:
                original = getattr(owner, name)

                def interrupted(*arguments, original=original):
                    original(*arguments)
                    raise KeyboardInterrupt

                patch.setattr(owner, name, interrupted)
                with contextlib.suppress(KeyboardInterrupt):
                    list(llm.stream(prompt(30, 3), greedy(6, n=2)))
                    pytest.fail(f"{name} was not interrupted")
            assert_idle(llm)
            assert_adds_up(list(llm.stream(prompt(30, 3), greedy(6, n=2))), wanted)

    def test_a_stream_beside_one_that_was_interrupted_does_not_wait_forever(self, chat_decoder, monkeypatch):
        """The interrupt came while the results of both were taken; whoever goes on gets its text or an error."""
        llm = make_llm(chat_decoder)
        first, second = llm.stream(prompt(9, 1), greedy(8)), llm.stream(prompt(9, 2), greedy(8))
        deltas = [next(first)]
        next(second)
        with monkeypatch.context() as patch:
            original = llm.cache.commit

            def interrupted(*arguments):
                original(*arguments)
                raise KeyboardInterrupt

            patch.setattr(llm.cache, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(second)
        steps, step = itertools.count(), llm.core.step

        def counted():
            assert next(steps) < 100, "it waits forever"
            return step()

        monkeypatch.setattr(llm.core, "step", counted)
        deltas += first
        (wanted,) = make_llm(chat_decoder).generate(prompt(9, 1), greedy(8))
        (output,) = deltas[-1].output.outputs
        assert output.finish_reason in ("length", "abort")
        assert output.token_ids == wanted.outputs[0].token_ids[: len(output.token_ids)]
        assert_idle(llm)


@pytest.fixture(scope="module")
def real_llm(demo_model):
    """The demo model over a small pool."""
    return LLM(str(demo_model), num_blocks=16, log_interval_s=0.0)
