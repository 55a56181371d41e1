"""Replay: the order of play, the counting, what is compared, and how a chat that has no room left ends.

Most tests use `FakeLLM`, whose time to the first token is the number of tokens computed; the last ones a real model.
"""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
from chat_helpers import CHATML, FakeLLM, make_tokenizer, save_tiny_chat_model

from engine.chats import Conversation, Message, builtin_chats
from engine.replay import print_report, replay, shortened

PARAMS = SimpleNamespace(max_tokens=8)


def chat(name: str, num_turns: int, system: str | None = "You answer.", recorded: bool = True) -> Conversation:
    """A conversation of short texts that say where they stand."""
    messages = [] if system is None else [Message("system", system)]
    for i in range(num_turns):
        messages.append(Message("user", f"{name} asks {i}"))
        if recorded:
            messages.append(Message("assistant", f"reply {i} to {name}"))
    return Conversation(name, tuple(messages))


class TestOrder:
    def test_turns_are_played_in_waves_over_all_conversations(self):
        """That is how a server sees them: every user's first message, then the second ones as they come."""
        report = replay(FakeLLM(), [chat("a", 3), chat("b", 1), chat("c", 2)], PARAMS)
        assert [(r.conversation, r.turn) for r in report.turns] == [
            *(("a", 1), ("b", 1), ("c", 1)),
            *(("a", 2), ("c", 2)),
            ("a", 3),
        ]

    def test_concurrency_submits_a_wave_in_batches(self):
        """Three conversations two at a time are a batch of two and one of one."""
        llm = FakeLLM()
        replay(llm, [chat(name, 2) for name in "abc"], PARAMS, concurrency=2)
        assert llm.log == [("warm", 2), ("warm", 1)] * 2

    def test_warm_and_cold_runs_alternate_in_who_goes_first(self):
        """A slow spell of the machine must not always hit the same side; the first cold run is a warm-up."""
        llm = FakeLLM()
        replay(llm, [chat("a", 4)], PARAMS, compare=True)
        kinds = [kind for kind, _ in llm.log]
        assert kinds == ["cold", "warm", "cold", "cold", "warm", "warm", "cold", "cold", "warm"]

    def test_progress_is_told_turn_by_turn(self):
        """A long replay shows that it lives."""
        seen = []
        report = replay(FakeLLM(), [chat("a", 2), chat("b", 2)], PARAMS, on_turn=seen.append)
        assert seen == list(report.turns)


class TestCounting:
    def test_later_turns_hit_the_whole_conversation_before_them(self):
        """Prompt and output of the turn before, less the last token, which has no KV; and a bit of the tail's start."""
        report = replay(FakeLLM(), builtin_chats(), PARAMS)
        last = {}
        for record in report.turns:
            assert record.cached_tokens + record.computed_tokens == record.prompt_tokens
            if record.turn > 1:
                before = last[record.conversation]
                assert record.cached_tokens >= before.prompt_tokens + before.output_tokens - 1
            last[record.conversation] = record
        assert report.totals.num_full_hits == report.totals.num_later_turns == 27 - 6
        assert report.remarks == ()

    def test_first_turns_hit_the_shared_system_prompt(self):
        """The second conversation under a prompt does not compute it again."""
        report = replay(FakeLLM(), [chat("a", 1), chat("b", 1)], PARAMS)
        assert report.turns[0].cached_tokens == 0
        assert report.turns[1].cached_tokens == len("### System:\nYou answer.\n\n### User:\n")

    def test_totals_are_the_sums_of_the_turns(self):
        """A reader adds the columns up."""
        report = replay(FakeLLM(), [chat("a", 3), chat("b", 2)], PARAMS)
        totals = report.totals
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens"):
            assert getattr(totals, name) == sum(getattr(record, name) for record in report.turns)
        assert totals.token_hit_rate == totals.cached_tokens / totals.prompt_tokens
        assert [(wave.turn, wave.num_turns) for wave in totals.by_turn] == [(1, 2), (2, 2), (3, 1)]
        assert totals.by_turn[2].median_ttft_s == report.turns[-1].ttft_s
        assert totals.mean_tpot_s == 0.5
        assert totals.same_output is None

    def test_compare_gives_cold_times_and_whether_the_outputs_are_the_same(self):
        """The fake needs a unit of time for each token computed, so the speed-up is exact."""
        report = replay(FakeLLM(), [chat("a", 3)], PARAMS, compare=True)
        for record in report.turns:
            assert record.ttft_cold_s == record.prompt_tokens
            assert record.speedup == record.prompt_tokens / record.computed_tokens
            assert record.same_output is True
        assert report.totals.same_output is True

    def test_a_different_output_is_never_called_the_same(self):
        """The one thing that the comparison must not miss."""
        report = replay(FakeLLM(is_wrong_when_cold=True), [chat("a", 2)], PARAMS, compare=True)
        assert [record.same_output for record in report.turns] == [False, False]
        assert report.totals.same_output is False

    def test_a_reply_of_one_token_has_no_time_per_further_token(self):
        """None, not zero: a mean over turns must leave it out."""
        report = replay(FakeLLM(), [chat("a", 2)], SimpleNamespace(max_tokens=1))
        assert any(record.output_tokens == 1 for record in report.turns)
        assert all(record.tpot_s is None for record in report.turns)


class TestHistory:
    def test_recorded_history_continues_with_the_replies_in_the_file(self):
        """The prompts are then the same whatever the model says."""
        report = replay(FakeLLM(), [chat("a", 2, system=None)], PARAMS, history="recorded")
        text = "### User:\na asks 0\n\n### Assistant:\nreply 0 to a\n\n### User:\na asks 1\n\n### Assistant:\n"
        assert report.turns[1].prompt_tokens == len(text)
        assert report.turns[1].cached_tokens == report.turns[0].prompt_tokens  # the reply on record was never computed
        assert report.totals.num_full_hits == 1
        assert report.remarks == ()

    def test_a_turn_without_a_recorded_reply_keeps_the_models_own_and_says_so(self):
        """One gap in a file should not stop the rest, nor pass unseen."""
        gap = Conversation("gap", (Message("user", "a"), Message("user", "b")))
        report = replay(FakeLLM(), [gap, chat("full", 2)], PARAMS, history="recorded")
        assert len(report.turns) == 4
        assert report.remarks == ("gap: turn 1 has no recorded reply, so the model's own was kept",)

    def test_recorded_history_without_any_recorded_reply_is_refused(self):
        """Asking for it is a mistake that the user wants to hear of at once."""
        with pytest.raises(ValueError, match="no reply is recorded"):
            replay(FakeLLM(), [chat("a", 2, recorded=False)], PARAMS, history="recorded")


class TestLimits:
    def test_a_conversation_that_outgrows_the_context_ends_with_a_remark(self):
        """The others go on; nothing crashes and nothing is cut silently."""
        long, short = chat("long", 6, system="x" * 40), chat("short", 4, system=None)
        report = replay(FakeLLM(max_model_len=210), [long, short], PARAMS)
        num_long = sum(record.conversation == "long" for record in report.turns)
        assert 0 < num_long < 6
        assert sum(record.conversation == "short" for record in report.turns) == 4
        (remark,) = report.remarks
        assert remark.startswith(f"long ended before turn {num_long + 1} of 6: a prompt of ")
        assert remark.endswith("8 for the reply do not fit the model's context of 210")

    def test_prompts_that_are_not_what_the_template_would_write_are_remarked_once(self):
        """A reader who compares with the template must know; the same sentence a hundred times would hide the rest."""
        pytest.importorskip("transformers", reason="chat templates need transformers")
        llm = FakeLLM()
        llm.tokenizer = make_tokenizer(CHATML.replace("{% for", "{{ messages | length }}{% for"))
        report = replay(llm, [chat("a", 2), chat("b", 2)], PARAMS, history="recorded")
        (remark,) = report.remarks
        assert remark.startswith("a and 1 more: the chat template writes earlier messages in another way")

    def test_a_prompt_that_the_pool_cannot_hold_ends_its_conversation_too(self):
        """The pool may be smaller than the context."""
        report = replay(FakeLLM(num_blocks=10), [chat("a", 2)], PARAMS)
        assert report.turns == ()
        assert "do not fit the pool of 10 blocks of 4" in report.remarks[0]
        assert report.totals.token_hit_rate is None
        json.dumps(report.to_json())
        print_report(report, console())

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"history": "none"}, "'none' is not one of generated, recorded"),
            ({"concurrency": 0}, "at least 1, not 0"),
            ({"conversations": []}, "no conversations"),
            ({"conversations": [chat("a", 1), chat("a", 1)]}, "'a' is there twice"),
        ],
    )
    def test_bad_arguments_are_refused_before_anything_runs(self, change, reason):
        """A long replay should not fail at its end."""
        llm = FakeLLM()
        arguments = {"conversations": [chat("a", 1)], "params": PARAMS, **change}
        with pytest.raises(ValueError, match=reason):
            replay(llm, **arguments)
        assert llm.log == []


def console():
    """A rich console that writes to its `.file`."""
    Console = pytest.importorskip("rich.console").Console
    return Console(file=io.StringIO(), width=132)


class TestOutput:
    KEYS: ClassVar = {
        *("conversation", "turn", "prompt_tokens", "cached_tokens", "computed_tokens"),
        *("output_tokens", "ttft_s", "tpot_s"),
    }

    @pytest.mark.parametrize("compare", [False, True])
    def test_json_has_the_keys_that_scripts_rely_on(self, compare):
        """Those of the comparison are there only when something was compared."""
        report = replay(FakeLLM(), [chat("a", 2)], PARAMS, compare=compare)
        data = json.loads(json.dumps(report.to_json()))
        assert list(data) == ["model", "dtype", "block_size", "turns", "totals"]
        assert (data["model"], data["dtype"], data["block_size"]) == ("fake", "float32", 4)
        for entry in data["turns"]:
            assert set(entry) == self.KEYS | ({"ttft_cold_s", "same_output"} if compare else set())
        assert ("same_output" in data["totals"]) == compare

    def test_the_table_shows_each_turn_the_totals_the_remarks_and_the_tree(self):
        """What a person sees at the end of a run."""
        to = console()
        report = replay(FakeLLM(max_model_len=150), [chat("[/b]", 6), chat("b", 2)], PARAMS, compare=True)
        print_report(report, to)
        text = to.file.getvalue()
        assert "[/b]" in text  # a name is not markup
        assert "cold TTFT" in text
        assert "speed-up" in text
        assert "All outputs are identical with and without the cache." in text
        assert "Remark: [/b] ended before turn" in text
        assert text.endswith("root\n  node\n")

    def test_a_long_tree_is_shortened_and_says_by_how_much(self):
        """Thousands of lines would push the table off the screen."""
        assert shortened("a\nb") == ["a", "b"]
        assert shortened("a\nb\nc\nd", max_lines=2) == ["a", "b", "... and 2 more lines"]


class TestRealModel:
    @pytest.mark.parametrize("concurrency", [1, 3])
    def test_a_tiny_model_says_the_same_with_and_without_the_cache_and_hits_every_token(self, tmp_path, concurrency):
        """The same play as `radixkv replay --compare`, on random weights, with every part real."""
        pytest.importorskip("transformers", reason="the engine needs transformers")
        from engine import LLM, SamplingParams

        llm = LLM(save_tiny_chat_model(tmp_path), block_size=4, num_blocks=1024, max_num_seqs=concurrency)
        conversations = [chat(name, 3) for name in "abcd"]
        report = replay(llm, conversations, SamplingParams(max_tokens=6), concurrency=concurrency, compare=True)
        assert len(report.turns) == 12
        assert report.totals.same_output is True
        assert report.totals.num_full_hits == report.totals.num_later_turns == 8
        assert all(record.cached_tokens > 0 for record in report.turns if record.conversation == "d")
        assert report.tree
        llm.cache.check()
