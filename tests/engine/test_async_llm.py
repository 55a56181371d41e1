"""`AsyncLLM`: many coroutines on one engine. Who leaves takes only its own request along, and nothing is left behind.

Most engines here have a script for a forward pass, and many a gate in front of it, so that a test can say what happens
while a step runs. Nothing is measured in seconds.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import random
import threading
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from chat_helpers import save_tiny_chat_model  # noqa: E402
from stream_helpers import ScriptedRunner, assert_adds_up, assert_idle, load_decoder, make_llm  # noqa: E402

from engine import AsyncLLM, SamplingParams  # noqa: E402
from radixkv import DuplicateRequest  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.filterwarnings("error::RuntimeWarning")]

# Only a test that fails waits so long.
PATIENCE_S = 60


def greedy(max_tokens, **arguments):
    """Params that give `max_tokens` tokens; scripted continuations begin with the first script."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"seed": 0, **arguments})


def prompt(length, seed):
    """Random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(3, 128), k=length)


@pytest.fixture(scope="module")
def chat_decoder(tmp_path_factory):
    """A tiny model with random weights, whose tokens are bytes."""
    return load_decoder(save_tiny_chat_model(tmp_path_factory.mktemp("chat")))


@pytest.fixture(autouse=True)
def nothing_is_complained_about(caplog):
    """No task is destroyed while pending, no exception is never retrieved, no thread of an engine outlives its work."""
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio" and record.levelno > 30] == []
    assert engine_threads() == []


def engine_threads():
    """Threads that step an engine."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("engine")]


def run(main):
    """`asyncio.run` in debug mode, which complains more."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S), debug=True)


class Gate:
    """Holds each step before its forward pass until it is let go; remembers which requests were in it."""

    def __init__(self):
        self.steps = []
        self._begun = threading.Semaphore(0)
        self._may_go = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, scheduled):
        self.steps.append([work.request.request_id for work in scheduled])
        self._begun.release()
        if not self._is_open:
            assert self._may_go.acquire(timeout=PATIENCE_S), "the step was never let go"

    async def begun(self):
        """Waits until the next step has begun."""
        while not self._begun.acquire(blocking=False):
            await asyncio.sleep(0)

    def go(self):
        """Lets one step go."""
        self._may_go.release()

    def open(self):
        """Lets all steps go."""
        self._is_open = True
        self.go()


def scripted(decoder, text="abcdefgh", before_run=lambda scheduled: None, **arguments):
    """An engine that says the text to everybody."""
    llm = make_llm(decoder, **arguments)
    ScriptedRunner(llm, [llm.tokenizer.encode(text)] * 4, before_run)
    return AsyncLLM(llm)


def gated(decoder, **arguments):
    """An engine whose steps wait at a gate."""
    gate = Gate()
    return scripted(decoder, before_run=gate, **arguments), gate


async def read(stream):
    """All deltas of a stream."""
    return [delta async for delta in stream]


async def turns(num=10):
    """So many turns of the loop."""
    for _ in range(num):
        await asyncio.sleep(0)


def text_of(output):
    """What the first continuation says, and why it ended."""
    return output.outputs[0].text, output.outputs[0].finish_reason


class TestSharing:
    def test_twenty_coroutines_share_steps_and_each_says_what_it_says_alone(self, chat_decoder):
        """Were they served in turn, there would be as many forward passes as alone."""
        cases = [(prompt(3 + 5 * (place % 7), place), greedy(4 + place % 9, n=1 + place % 2)) for place in range(20)]
        alone = [make_llm(chat_decoder) for _ in cases]
        wanted = [llm.generate(*case)[0] for llm, case in zip(alone, cases, strict=True)]

        async def main():
            async with AsyncLLM(make_llm(chat_decoder)) as llm:
                streams = [read(llm.stream(*case)) for case in cases[:10]]
                outputs = [llm.generate(*case) for case in cases[10:]]
                results = await asyncio.gather(*streams, *outputs)
                return results[:10], results[10:], llm

        deltas, outputs, llm = run(main())
        for own, want in zip(deltas, wanted, strict=False):
            assert_adds_up(own, want)
        assert [output.outputs for output in outputs] == [want.outputs for want in wanted[10:]]
        num_steps = llm.metrics().counters.steps
        assert max(engine.metrics().counters.steps for engine in alone) <= num_steps
        assert num_steps < sum(engine.metrics().counters.steps for engine in alone) / 5
        assert_idle(llm.llm)

    def test_a_request_joins_while_others_run(self, chat_decoder):
        """It need not wait for a batch to end: it is in the step after the one it came in."""
        llm, gate = gated(chat_decoder)

        async def main():
            first = asyncio.create_task(llm.generate([5], greedy(3), request_id="first"))
            await gate.begun()
            second = asyncio.create_task(llm.generate([6], greedy(3), request_id="second"))
            await turns()
            gate.open()
            return [text_of(output) for output in await asyncio.gather(first, second)]

        assert run(main()) == [("abc", "length")] * 2
        assert gate.steps == [["first"], ["first", "second"], ["first", "second"], ["second"]]

    def test_the_loop_has_turns_while_a_step_runs(self, chat_decoder):
        """A step that held the loop would end only when the test gives up: it waits for what a coroutine does."""
        ticked = threading.Event()
        llm = scripted(chat_decoder, before_run=lambda scheduled: pytest_wait(ticked))

        async def tick():
            await turns(20)
            ticked.set()

        async def main():
            output, _ = await asyncio.gather(llm.generate([5], greedy(3)), tick())
            return text_of(output)

        assert run(main()) == ("abc", "length")

    def test_a_slow_reader_does_not_hold_up_the_others(self, chat_decoder):
        """Its text waits for it; nothing is dropped, and nothing is merged."""
        llm = scripted(chat_decoder)

        async def main():
            slow = llm.stream([5], greedy(8))
            assert await anext(slow) == "a"
            assert await read(llm.stream([6], greedy(8))) == list("abcdefgh")
            assert_idle(llm.llm)
            return await read(slow)

        assert run(main()) == list("bcdefgh")

    def test_chat_says_what_the_engine_says_without_asyncio(self, chat_decoder):
        """The same template, the same namespaces."""
        messages = [{"role": "user", "content": "hello"}]
        plain = make_llm(chat_decoder)
        wanted = [plain.chat(messages, greedy(6), namespace=name)[0] for name in ("a", "a", "b")]

        async def main():
            async with AsyncLLM(make_llm(chat_decoder)) as llm:
                return [await llm.chat(messages, greedy(6), namespace=name) for name in ("a", "a", "b")]

        outputs = run(main())
        assert [output.outputs for output in outputs] == [want.outputs for want in wanted]
        assert [output.num_cached_tokens for output in outputs] == [want.num_cached_tokens for want in wanted]
        assert wanted[1].num_cached_tokens > 0

    def test_progress_is_logged_while_it_is_busy(self, chat_decoder, caplog):
        """A server shows its load with nothing but the standard logger."""
        llm = scripted(chat_decoder, log_interval_s=1e-9)
        with caplog.at_level(logging.INFO, "engine"):
            run(llm.generate([5], greedy(8)))
        lines = [record.getMessage() for record in caplog.records if record.name == "engine"]
        assert len(lines) == 7
        assert lines[0].startswith("1 running, 0 waiting; prefill ")

    @staticmethod
    @functools.cache
    def alone(decoder, ids, params):
        """What a request gives that shares nothing."""
        return make_llm(decoder).generate(ids, params)[0]

    @given(data=st.data())
    def test_whoever_stays_says_what_it_says_alone_whatever_the_others_do(self, chat_decoder, data):
        """Any mixture of coroutines that come, are cancelled, stop reading, are aborted, or hand in a bad request."""
        llm = AsyncLLM(
            make_llm(
                chat_decoder,
                data.draw(st.sampled_from([48, 1024]), "pool"),
                max_num_seqs=data.draw(st.sampled_from([2, 64]), "sequences"),
                preemption=data.draw(st.sampled_from(["recompute", "swap"]), "preemption"),
            )
        )
        endings = ["stay", "stay", "break", "cancel", "abort", "too large", "duplicate"]
        cases = data.draw(
            st.lists(
                st.tuples(st.sampled_from(endings), st.integers(0, 12), st.integers(0, 12), st.integers(1, 20)),
                min_size=2,
                max_size=8,
            ),
            "ending, turns before, turns or deltas until it leaves, tokens",
        )
        said = []

        async def client(place, ending, before, until, num_tokens):
            ids, params = prompt(1 + place * 3 % 20, place % 3), greedy(num_tokens, n=1 + place % 2)
            if ending == "too large":
                ids = prompt(60, 1)
            await turns(before)
            deltas = []
            try:
                async with contextlib.aclosing(llm.stream(ids, params, request_id=str(place))) as stream:
                    async for delta in stream:
                        deltas.append(delta)
                        if ending == "break" and len(deltas) > until:
                            return
            except ValueError:
                assert ending == "duplicate" or (ending == "too large" and llm.llm.cache.num_blocks == 12)
                return
            if ending == "stay" or deltas[-1].finish_reason != "abort":
                # Compared afterwards: one model must not run in two threads, and the engine's may be at it now.
                said.append((deltas, tuple(ids), params))

        async def main():
            tasks = [asyncio.create_task(client(place, *case)) for place, case in enumerate(cases)]
            for place, (ending, _, until, _) in enumerate(cases):
                if ending in ("cancel", "abort", "duplicate"):
                    await turns(until)
                if ending == "cancel":
                    tasks[place].cancel()
                elif ending == "abort":
                    await llm.abort(str(place))
                elif ending == "duplicate":  # whichever of the two comes first
                    with contextlib.suppress(DuplicateRequest):
                        await llm.generate([5], greedy(2), request_id=str(place))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [result for result in results if isinstance(result, Exception)] == []
            await llm.close()

        run(main())
        assert_idle(llm.llm)
        for deltas, ids, params in said:
            assert_adds_up(deltas, self.alone(chat_decoder, ids, params))


def pytest_wait(event):
    """Blocks a step until the event."""
    assert event.wait(PATIENCE_S), "the loop had no turns"


class TestLeaving:
    @pytest.mark.parametrize("how", ["cancel", "break", "close", "drop"])
    def test_who_leaves_while_it_runs_is_not_in_the_next_step(self, chat_decoder, how):
        """A042: it left while a step ran; that one is its last, and the other does not notice."""
        llm, gate = gated(chat_decoder)

        async def leave(stream, left):
            async for _ in stream:
                if left.is_set():
                    break

        async def main():
            stays = asyncio.create_task(llm.generate([6], greedy(5), request_id="stays"))
            stream, left = llm.stream(prompt(30, 1), greedy(5000), request_id="leaves"), asyncio.Event()
            if how == "cancel":
                task = asyncio.create_task(read(stream))
            elif how == "break":
                task = asyncio.create_task(leave(stream, left))
                left.set()
            else:
                task = asyncio.ensure_future(anext(stream))
            await gate.begun()
            gate.go()
            await gate.begun()
            assert gate.steps == [["stays", "leaves"]] * 2
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "close":
                await task
                await stream.aclose()
            else:
                await task
                del task, stream
                gc.collect()
            await turns()
            gate.open()
            assert text_of(await stays) == ("abcde", "length")

        run(main())
        assert gate.steps[2:] == [["stays"]] * 3
        assert_idle(llm.llm)
        assert llm.metrics().counters.finished == {"length": 1, "abort": 1}

    def test_who_is_cancelled_while_queued_never_runs(self, chat_decoder):
        """A042: one that waits for a sequence, and one that came during the step and is not even queued."""
        llm, gate = gated(chat_decoder, max_num_seqs=1)

        async def main():
            first = asyncio.create_task(llm.generate([5], greedy(3), request_id="first"))
            queued = asyncio.create_task(llm.generate([6], greedy(3), request_id="queued"))
            await gate.begun()
            fresh = asyncio.create_task(llm.generate([7], greedy(3), request_id="fresh"))
            last = asyncio.create_task(llm.generate([8], greedy(2), request_id="last"))
            await turns()
            assert llm.metrics().num_waiting == 1
            for task in (queued, fresh):
                task.cancel()
            await turns()
            gate.open()
            assert (text_of(await first), text_of(await last)) == (("abc", "length"), ("ab", "length"))
            assert queued.cancelled() and fresh.cancelled()

        run(main())
        assert gate.steps == [["first"]] * 3 + [["last"]] * 2
        assert_idle(llm.llm)

    @pytest.mark.parametrize("when", ["in its last step", "not read yet", "read"])
    def test_who_leaves_when_it_has_just_ended_does_no_harm(self, chat_decoder, monkeypatch, when):
        """The end and the leaving cross: there is one end, the first, and nothing to abort."""
        llm, gate = gated(chat_decoder)
        aborted = []
        monkeypatch.setattr(llm.llm.core, "abort", aborted.append)

        async def main():
            stream = llm.stream([5], greedy(2))
            stays, first = asyncio.create_task(llm.generate([6], greedy(3))), asyncio.ensure_future(anext(stream))
            await gate.begun()
            gate.go()
            await gate.begun()
            assert await first == "a"
            if when == "in its last step":
                await stream.aclose()
            gate.go()
            await gate.begun()
            if when == "read":
                assert (await anext(stream)).finish_reason == "length"
            await stream.aclose()
            gate.open()
            assert text_of(await stays) == ("abc", "length")

        run(main())
        assert aborted == []
        assert llm.metrics().counters.finished == {"length": 2}
        assert_idle(llm.llm)

    def test_an_id_is_free_as_soon_as_its_stream_was_left(self, chat_decoder):
        """A043: a client that hangs up and tries again at once is not told that its id is in use."""
        llm, gate = gated(chat_decoder)

        async def main():
            first = asyncio.create_task(llm.generate([5], greedy(5000), request_id="x"))
            await gate.begun()
            first.cancel()
            await turns()
            second = asyncio.create_task(llm.generate([6], greedy(3), request_id="x"))
            await turns()
            gate.open()
            return text_of(await second)

        assert run(main()) == ("abc", "length")
        assert_idle(llm.llm)

    def test_a_stream_that_was_never_read_leaves_nothing(self, chat_decoder):
        """Nothing of it is in the engine, and nobody is woken up."""
        llm = scripted(chat_decoder)

        async def main():
            llm.stream([5], greedy(3))
            await llm.stream([5], greedy(3)).aclose()
            await turns()
            assert llm._driver is None

        run(main())
        assert_idle(llm.llm)

    def test_a_thousand_normal_ends_abort_nothing(self, chat_decoder, monkeypatch):
        """C111: an abort for each request that ends anyway was a storm of messages elsewhere."""
        llm = scripted(chat_decoder)
        aborted = []
        monkeypatch.setattr(llm.llm.core, "abort", aborted.append)

        async def one(place):
            if place % 2:
                return text_of(await llm.generate([5 + place % 9], greedy(2)))
            async for delta in llm.stream([5 + place % 9], greedy(2)):
                if delta.output is not None:
                    return text_of(delta.output)
            return None

        async def main():
            async with llm:
                return await asyncio.gather(*[one(place) for place in range(1000)])

        assert asyncio.run(main()) == [("ab", "length")] * 1000
        assert aborted == []
        assert llm.metrics().counters.finished == {"length": 1000}
        assert_idle(llm.llm)


class TestAborts:
    def test_abort_by_id_ends_queued_and_running_requests_once(self, chat_decoder):
        """A007: True for the call that ended it, False for a second one, for an unknown id, and after the end."""
        llm, gate = gated(chat_decoder, max_num_seqs=1)

        async def main():
            running = asyncio.create_task(read(llm.stream([5], greedy(9), request_id="running")))
            queued = asyncio.create_task(read(llm.stream([6], greedy(9), request_id="queued")))
            await gate.begun()
            fresh = asyncio.create_task(read(llm.stream([7], greedy(9), request_id="fresh")))
            await turns()
            gate.go()
            await gate.begun()
            last = asyncio.create_task(llm.generate([8], greedy(2), request_id="last"))
            ids = ["running", "queued", "fresh", "unknown", ""]
            assert [await llm.abort(request_id) for request_id in ids] == [True, True, True, False, False]
            assert [await llm.abort(request_id) for request_id in ids] == [False] * 5
            gate.open()
            assert text_of(await last) == ("ab", "length")
            assert not await llm.abort("last")
            deltas = [await task for task in (running, queued, fresh)]
            assert [list(own) for own in deltas] == [["a", "b", ""], [""], [""]]
            assert [own[-1].finish_reason for own in deltas] == ["abort"] * 3
            assert [text_of(own[-1].output) for own in deltas] == [("ab", "abort"), ("", "abort"), ("", "abort")]
            assert not await llm.abort("running")

        run(main())
        assert gate.steps == [["running"]] * 2 + [["last"]] * 2
        assert_idle(llm.llm)

    @pytest.mark.parametrize("is_early", [False, True], ids=["queued", "just come"])
    def test_abort_all_ends_two_that_run_and_five_that_wait(self, chat_decoder, is_early):
        """C111: seven are reported, none of the five starts, every stream says so; each continuation of n ends."""
        llm, gate = gated(chat_decoder, max_num_seqs=4)

        async def main():
            streams = [llm.stream([5 + place], greedy(9, n=2), request_id=str(place)) for place in range(7)]
            readers = [asyncio.create_task(read(stream)) for stream in (streams[:2] if is_early else streams)]
            await gate.begun()
            if is_early:
                readers += [asyncio.create_task(read(stream)) for stream in streams[2:]]
                await turns()
            assert [await llm.abort_all(), await llm.abort_all()] == [7, 0]
            gate.go()
            deltas = await asyncio.gather(*readers)
            assert [[(d, d.continuation, d.finish_reason) for d in own] for own in deltas[:2]] == [
                [("a", 0, None), ("a", 1, None), ("", 0, "abort"), ("", 1, "abort")]
            ] * 2
            for own in deltas[2:]:
                assert [(d, d.continuation, d.finish_reason) for d in own] == [("", 0, "abort"), ("", 1, "abort")]
            assert all(own[-1].output.outputs[1].finish_reason == "abort" for own in deltas)
            assert_idle(llm.llm)
            gate.open()
            return text_of(await llm.generate([5], greedy(3)))

        assert run(main()) == ("abc", "length")
        assert gate.steps[0] == ["0", "1"]
        assert len(gate.steps) == 4, "the last three belong to the request that came afterwards"
        assert_idle(llm.llm)

    def test_close_ends_open_streams_and_refuses_new_ones(self, chat_decoder):
        """C111: a shutdown waits for the step that runs, and leaves no client waiting."""
        llm, gate = gated(chat_decoder, max_num_seqs=1)

        async def main():
            early = llm.stream([5], greedy(9))
            readers = [asyncio.create_task(read(llm.stream([5 + place], greedy(9)))) for place in range(3)]
            await gate.begun()
            closing = [asyncio.create_task(llm.close()) for _ in range(2)]
            await turns()
            assert not closing[0].done()
            with pytest.raises(RuntimeError, match="this engine is closed"):
                await llm.generate([5], greedy(3))
            gate.go()
            await asyncio.gather(*closing)
            assert_idle(llm.llm)
            assert engine_threads() == []
            deltas = await asyncio.gather(*readers)
            assert [list(own) for own in deltas] == [["a", ""], [""], [""]]
            assert [own[-1].finish_reason for own in deltas] == ["abort"] * 3
            with pytest.raises(RuntimeError, match="this engine is closed"):
                await anext(early)
            with pytest.raises(RuntimeError, match="this engine is closed"):
                await read(llm.stream([5], greedy(3)))
            await llm.close()
            assert await llm.abort_all() == 0

        run(main())
        assert len(gate.steps) == 1
        assert_idle(llm.llm)

    def test_close_from_within_a_stream_ends_it(self, chat_decoder):
        """Whoever closes may be reading itself; waiting for its own reading would never end."""
        llm = scripted(chat_decoder)

        async def main():
            seen = []
            async for delta in llm.stream([5], greedy(5000)):
                seen.append(delta.finish_reason)
                if len(seen) == 1:
                    await llm.close()
            return seen

        assert run(main())[-1] == "abort"
        assert_idle(llm.llm)

    def test_leaving_the_context_closes_and_keeps_the_error(self, chat_decoder):
        """An error in the body is what the caller sees, and streams are ended all the same."""
        llm = scripted(chat_decoder)

        async def main():
            async with llm as entered:
                assert entered is llm
                held.append(asyncio.create_task(read(llm.stream([5], greedy(5000)))))
                await turns()
                raise OSError("hung up")

        async def outer():
            with pytest.raises(OSError, match="hung up"):
                await main()
            return (await held[0])[-1].finish_reason

        held = []
        assert run(outer()) == "abort"
        assert_idle(llm.llm)

    def test_to_cancel_who_closes_is_not_to_break_off_the_others(self, chat_decoder):
        """Their streams end with "abort" as promised, and a second call can wait again."""
        llm, gate = gated(chat_decoder)

        async def main():
            reader = asyncio.create_task(read(llm.stream([5], greedy(9))))
            await gate.begun()
            closing = asyncio.create_task(llm.close())
            await turns()
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            gate.open()
            await llm.close()
            return [(str(delta), delta.finish_reason) for delta in await reader]

        assert run(main()) == [("a", None), ("", "abort")]
        assert_idle(llm.llm)


class TestRefusals:
    def test_a_bad_prompt_is_refused_at_the_call(self, chat_decoder):
        """As `LLM.stream` does: a server can still answer with an error then."""
        llm = scripted(chat_decoder)
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.stream([])
        with pytest.raises(TypeError, match="params must be SamplingParams"):
            llm.stream([5], "greedy")
        with pytest.raises(ValueError, match="messages is empty"):
            run(llm.chat([]))
        assert llm._driver is None

    def test_what_the_engine_refuses_reaches_its_caller_only(self, chat_decoder):
        """A prompt that never fits, too many continuations, an id in use; before, during and after others' steps."""
        llm, gate = gated(chat_decoder, num_tokens=64, max_num_seqs=8)

        async def refused():
            with pytest.raises(ValueError, match="the pool has 16"):
                await llm.generate(prompt(65, 1), greedy(2))
            with pytest.raises(ValueError, match="has n = 9; allowed: at most 8"):
                await read(llm.stream([5], greedy(2, n=9)))

        async def main():
            await refused()
            assert engine_threads() == []
            other = asyncio.create_task(llm.generate([5], greedy(3), request_id="x"))
            await gate.begun()
            bad = asyncio.create_task(refused())
            duplicate = asyncio.create_task(llm.generate([6], greedy(3), request_id="x"))
            await turns()
            gate.open()
            with pytest.raises(DuplicateRequest, match="'x'"):
                await duplicate
            await bad
            assert text_of(await other) == ("abc", "length")
            await refused()

        run(main())
        assert_idle(llm.llm)

    def test_abort_of_an_id_means_the_request_that_runs(self, chat_decoder):
        """A second one of the same id has come and will be refused; to end it instead would let the first go on."""
        llm, gate = gated(chat_decoder)

        async def main():
            first = asyncio.create_task(llm.generate([5], greedy(9), request_id="x"))
            await gate.begun()
            second = asyncio.create_task(llm.generate([6], greedy(2), request_id="x"))
            await turns()
            assert await llm.abort("x")
            gate.open()
            assert text_of(await first) == ("a", "abort")
            return text_of(await second)

        assert run(main()) == ("ab", "length"), "the id is free when it is its turn"
        assert_idle(llm.llm)

    def test_arguments_beside_an_engine_are_refused(self, chat_decoder):
        """They would be ignored: a pool size that does nothing is worse than an error."""
        with pytest.raises(TypeError, match=r"takes no more arguments, not \['block_size', 'num_blocks'\]"):
            AsyncLLM(make_llm(chat_decoder), num_blocks=8, block_size=4)
        assert AsyncLLM(chat_decoder, num_blocks=8, block_size=4).llm.cache.num_blocks == 8

    def test_a_second_loop_is_refused_while_the_first_has_requests(self, chat_decoder):
        """It would wait for a driver that runs in another thread; the first does not notice."""
        llm, gate = gated(chat_decoder)

        def elsewhere():
            with pytest.raises(RuntimeError, match="another event loop uses this engine; allowed: one at a time"):
                run(llm.generate([6], greedy(2)))

        async def main():
            first = asyncio.create_task(llm.generate([5], greedy(3)))
            await gate.begun()
            await asyncio.to_thread(elsewhere)
            gate.open()
            return text_of(await first)

        assert run(main()) == ("abc", "length")
        assert_idle(llm.llm)


class TestFailures:
    @pytest.mark.parametrize("num_steps", [0, 2])
    def test_a_step_that_fails_reaches_every_client_and_the_engine_goes_on(self, chat_decoder, num_steps):
        """Running, queued, aborted and just come: each hears of it; afterwards nothing is left and all works."""
        error, is_broken = RuntimeError("out of something"), threading.Event()
        gate = Gate()

        def before_run(scheduled):
            gate(scheduled)
            if is_broken.is_set():
                raise error

        llm = scripted(chat_decoder, before_run=before_run, max_num_seqs=2)

        async def main():
            tasks = [asyncio.create_task(read(llm.stream([5 + place], greedy(9)))) for place in range(3)]
            for _ in range(num_steps):
                await gate.begun()
                gate.go()
            await gate.begun()
            tasks += [asyncio.create_task(read(llm.stream([9], greedy(9), request_id=name))) for name in ("x", "late")]
            await turns()
            assert await llm.abort("x")
            is_broken.set()
            gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results == [error] * 5
            assert len(traceback.extract_tb(error.__traceback__)) < 10, "each client shows the step and itself"
            assert_idle(llm.llm)
            is_broken.clear()
            return text_of(await llm.generate([5], greedy(3)))

        assert run(main()) == ("abc", "length")
        assert_idle(llm.llm)

    def test_an_interrupt_in_a_step_ends_the_loop_and_leaves_nothing(self, chat_decoder):
        """It is no error of a request's; it goes on through the loop, and the next loop finds a clean engine."""
        llm = scripted(chat_decoder)
        original = llm.llm.core.runner.run

        def interrupted(scheduled, cache):
            raise KeyboardInterrupt

        async def main():
            return text_of(await llm.generate([5], greedy(3)))

        llm.llm.core.runner.run = interrupted
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        assert isinstance(llm._driver.exception(), KeyboardInterrupt)  # else the loop complains that nobody asked
        assert_idle(llm.llm)
        llm.llm.core.runner.run = original
        assert run(main()) == ("abc", "length")


class TestLoops:
    def test_one_engine_serves_one_loop_after_another(self, chat_decoder):
        """A notebook and a test call `asyncio.run` again and again; what is cached stays."""
        llm = AsyncLLM(make_llm(chat_decoder))
        outputs = [run(llm.generate(prompt(20, 1), greedy(4))) for _ in range(3)]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert [output.num_cached_tokens for output in outputs] == [0, 19, 19]
        assert engine_threads() == []
        assert_idle(llm.llm)

    @pytest.mark.parametrize("how", ["main returns", "main raises", "after a break", "a hundred in line"])
    def test_a_loop_that_ends_leaves_no_request_and_no_thread(self, chat_decoder, how):
        """Nobody closed anything: tasks read on, a stream is held, and a step is running when the loop goes."""
        llm, gate = gated(chat_decoder)
        held = []

        async def main():
            held.append(llm.stream([9], greedy(5000)))
            first = asyncio.create_task(anext(held[0]))
            await turns()
            num_readers = 100 if "hundred" in how else 3
            readers = [
                asyncio.create_task(read(llm.stream([5 + place % 9], greedy(5000)))) for place in range(num_readers)
            ]
            await gate.begun()
            gate.go()
            await gate.begun()
            assert await first == "a"
            assert len(readers) == num_readers
            if how == "after a break":
                gate.go()
                async for _ in held.pop():
                    break
            threading.Timer(0.05, gate.open).start()  # in the middle of the shutdown, as far as one can say
            if how == "main raises":
                raise OSError("hung up")

        with contextlib.suppress(OSError):
            asyncio.run(main(), debug=True)
        assert engine_threads() == []
        assert_idle(llm.llm)
        gate.open()
        assert text_of(run(llm.generate([5], greedy(3)))) == ("abc", "length")
        assert_idle(llm.llm)
        run(llm.close())

    def test_an_engine_can_be_closed_from_the_next_loop(self, chat_decoder):
        """The loop before was shut down with a stream open; its driver is no longer there to be waited for."""
        llm = scripted(chat_decoder)

        async def main():
            stream = llm.stream([5], greedy(5000))
            await anext(stream)

        asyncio.run(main())
        assert_idle(llm.llm)
        run(llm.close())
        with pytest.raises(RuntimeError, match="this engine is closed"):
            run(llm.generate([5], greedy(3)))

    def test_no_thread_waits_while_there_is_nothing_to_do(self, chat_decoder):
        """The thread belongs to the work: it goes with the last request, and comes back with the next."""
        llm = scripted(chat_decoder)

        async def main():
            seen = []
            for _ in range(2):
                seen += [len(engine_threads()) async for _ in llm.stream([5], greedy(2))]
                await turns()
                seen.append(len(engine_threads()))
            return seen

        seen = run(main())
        assert seen[2] == seen[5] == 0
        assert seen[0] == seen[3] == 1
