"""Chat sessions: each prompt continues the last one id by id, and says what the template would have said."""

from __future__ import annotations

import random

import pytest
from chat_helpers import CHATML, make_tokenizer

from engine.chats import ChatSession, builtin_chats

pytest.importorskip("transformers", reason="chat templates need transformers")

TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
# All but a last message lose what stands before the end of the thinking.
DROPS_THINKING = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('</think>')[-1] }}",
)
# The reply starts with an opening that only the generation prompt has, and that the past never shows.
OPENS_THINKING = DROPS_THINKING.replace("assistant\n{% endif", "assistant\n<think>{% endif")
# The system prompt stands in the last user message, wherever that is.
MOVES_SYSTEM = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }} {% endif %}"
    "{{ m['content'] }} [/INST]{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
IGNORES_SYSTEM = CHATML.replace("in messages", "in messages if m['role'] != 'system'")
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def rendered(session, tokenizer) -> list[int]:
    """The ids of the chat so far as the template gives them."""
    return tokenizer.apply_chat_template(session.messages, add_generation_prompt=True, return_dict=False)


def ids_of(tokenizer, text: str) -> list[int]:
    """The ids of a text alone."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class TestRecordedText:
    @pytest.mark.parametrize("template", [CHATML, TRIMMING, NO_END], ids=["chatml", "trimming", "no end of turn"])
    @pytest.mark.parametrize("system", [None, "Be brief."])
    def test_a_session_gives_the_ids_of_the_template(self, template, system):
        """What is kept must be what the model was trained on; merges across a joint included."""
        tokenizer = make_tokenizer(template, merges=[("a", "b"), ("Ċ", "Ċ"), ("ab", "Ċ")])
        session, before = ChatSession(tokenizer, system), []
        for question, reply in [("ab\n", " abab\n"), ("b", "ab"), ("", "ab\n\nab"), ("ba", "x")]:
            prompt = session.user(question)
            assert prompt == rendered(session, tokenizer)
            assert prompt[: len(before)] == before
            session.assistant_text(reply)
            before = prompt
        assert session.is_exact
        assert session.is_append_only
        assert session.remark is None

    def test_where_a_reply_would_merge_into_the_prompt_the_text_is_still_that_of_the_template(self):
        """The prompt's last id has its KV already, so a merge across it cannot be had; the words do not change."""
        tokenizer = make_tokenizer(CHATML, merges=[("Ċ", "Ċ")])
        session = ChatSession(tokenizer)
        first = session.user("a")
        session.assistant_text("\n\nb")
        second = session.user("c")
        assert second[: len(first)] == first
        assert second != rendered(session, tokenizer)
        assert tokenizer.decode(second) == tokenizer.decode(rendered(session, tokenizer))

    def test_the_demo_models_tokenizer_gives_the_ids_of_its_template(self, demo_model):
        """The model that `radixkv replay` runs by default, on the conversations that it plays."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(demo_model)
        for chat in builtin_chats():
            assert 250 <= len(ids_of(tokenizer, chat.system)) <= 400
            session = ChatSession(tokenizer, chat.system)
            for turn in chat.turns:
                assert session.user(turn.user) == rendered(session, tokenizer)
                session.assistant_text(turn.assistant)
            assert session.is_exact
            assert session.is_append_only


class TestGeneratedIds:
    def test_an_unusual_split_of_a_reply_is_kept(self):
        """C115: the reply was sampled as two tokens where the tokenizer gives one; text again would break the hit."""
        tokenizer = make_tokenizer(CHATML, merges=[("a", "b")])
        session = ChatSession(tokenizer)
        prompt = session.user("hello")
        reply = [*ids_of(tokenizer, "a"), *ids_of(tokenizer, "b")]
        session.assistant(reply)
        after = session.user("more")
        assert after[: len(prompt) + 2] == [*prompt, *reply]
        assert rendered(session, tokenizer)[: len(prompt) + 2] != [*prompt, *reply]
        assert tokenizer.decode(after) == tokenizer.decode(rendered(session, tokenizer))
        assert session.is_exact
        assert session.is_append_only

    def test_a_reply_cut_inside_a_character_is_kept(self):
        """A reply ended by its length may hold half a character, which no text can say."""
        tokenizer = make_tokenizer(CHATML)
        session = ChatSession(tokenizer)
        prompt = session.user("hello")
        half = ids_of(tokenizer, "é")[:1]
        session.assistant(half)
        assert session.user("more")[: len(prompt) + 1] == [*prompt, *half]

    @pytest.mark.parametrize("ending", [[], ["<|im_end|>"], ["<|other|>"]])
    def test_the_end_of_a_turn_stands_in_the_next_prompt_exactly_once(self, ending):
        """A reply ends by length without it, by itself with it, or with another id that the model may end with."""
        tokenizer = make_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>", "<|other|>"))
        other = tokenizer.convert_tokens_to_ids("<|other|>")
        session = ChatSession(tokenizer, end_token_ids=[other])
        prompt = session.user("hello")
        reply = ids_of(tokenizer, "abc")
        session.assistant([*reply, *tokenizer.convert_tokens_to_ids(ending)])
        tail = ids_of(tokenizer, "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
        assert session.user("more") == [*prompt, *reply, *tail]

    def test_the_templates_own_end_mark_counts_even_if_the_tokenizer_names_another(self):
        """Instruct models often keep the base model's end-of-sequence token in the tokenizer."""
        tokenizer = make_tokenizer(CHATML, eos="<|other|>", special=("<|im_start|>", "<|im_end|>", "<|other|>"))
        session = ChatSession(tokenizer)
        prompt = session.user("hello")
        session.assistant([*ids_of(tokenizer, "abc<|im_end|>")])
        assert session.user("more")[len(prompt) :].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
        assert session.messages[1]["content"] == "abc"

    def test_random_replies_are_always_extended(self):
        """Whatever a model with random weights says, end marks in the middle included, nothing before it changes."""
        tokenizer = make_tokenizer(CHATML, merges=[("a", "b"), ("b", "a"), ("Ċ", "Ċ")])
        rng = random.Random(5)
        for _ in range(20):
            session, before = ChatSession(tokenizer, "s"), []
            for _ in range(4):
                prompt = session.user(rng.choice(["ab", "\n", "", "x y"]))
                assert prompt[: len(before)] == before
                reply = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(6))]
                session.assistant(reply)
                is_ended = bool(reply) and reply[-1] == tokenizer.eos_token_id
                assert session.token_ids == [*prompt, *reply]
                before = [*prompt, *(reply[:-1] if is_ended else reply)]


class TestRewritingTemplates:
    REPLY = "<think>hm</think>yes"

    def play(self, template: str, on_rewrite: str):
        """A session with one thinking reply and the next prompt; that prompt; and the ids it should start with."""
        tokenizer = make_tokenizer(template)
        session = ChatSession(tokenizer, "s", on_rewrite=on_rewrite)
        prompt = session.user("a")
        reply = ids_of(tokenizer, self.REPLY)
        session.assistant(reply)
        return tokenizer, session, session.user("b"), [*prompt, *reply]

    @pytest.mark.parametrize("template", [DROPS_THINKING, OPENS_THINKING])
    def test_thinking_stays_by_default_and_the_whole_reply_hits(self, template):
        """C115: the token-id path reuses the reply although the template would drop its thinking."""
        tokenizer, session, prompt, before = self.play(template, "keep")
        assert prompt[: len(before)] == before
        tail = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(prompt[len(before) :]).removesuffix("<think>") == tail
        assert not session.is_exact
        assert session.is_append_only
        assert "thinking" in session.remark

    @pytest.mark.parametrize("template", [DROPS_THINKING, OPENS_THINKING])
    def test_thinking_is_dropped_on_request_and_flagged(self, template):
        """C115: the text path is right, and hits less."""
        tokenizer, session, prompt, _ = self.play(template, "render")
        assert prompt == rendered(session, tokenizer)
        assert "hm" not in tokenizer.decode(prompt)
        assert not session.is_exact
        assert not session.is_append_only
        assert "tokenised again" in session.remark

    def test_a_reply_without_thinking_is_exact_under_a_template_that_drops_it(self):
        """The flag is about what happened, not about what might have."""
        tokenizer = make_tokenizer(DROPS_THINKING)
        session = ChatSession(tokenizer)
        for word in "abc":
            assert session.user(word) == rendered(session, tokenizer)
            session.assistant(ids_of(tokenizer, "yes<|im_end|>"))
        assert session.is_exact
        assert session.is_append_only

    @pytest.mark.parametrize("on_rewrite", ["keep", "render"])
    def test_a_template_that_moves_the_system_prompt_is_rendered_again(self, on_rewrite):
        """Appending would leave the system prompt in the prompt twice."""
        tokenizer, session, prompt, before = self.play(MOVES_SYSTEM, on_rewrite)
        assert prompt == rendered(session, tokenizer)
        assert prompt[: len(before)] != before
        assert not session.is_exact
        assert not session.is_append_only
        assert "another way" in session.remark

    def test_such_a_template_is_appended_to_when_there_is_no_system_prompt_to_move(self):
        """Only what really changes costs hits."""
        tokenizer = make_tokenizer(MOVES_SYSTEM)
        session = ChatSession(tokenizer)
        for word in "abc":
            assert session.user(word) == rendered(session, tokenizer)
            session.assistant_text("yes")
        assert session.is_exact
        assert session.is_append_only

    @pytest.mark.parametrize("template", [REFUSES_SYSTEM, IGNORES_SYSTEM])
    def test_a_system_prompt_that_the_template_does_not_take_goes_to_the_first_user_message(self, template):
        """It must neither raise nor vanish."""
        tokenizer = make_tokenizer(template)
        session = ChatSession(tokenizer, "Be brief.")
        session.user("a")
        session.assistant_text("b")
        session.user("c")
        said = [message["content"] for message in session.messages]
        assert said == ["Be brief.\n\na", "b", "c"]
        assert session.is_exact
        assert session.is_append_only


class TestPlainText:
    def test_without_a_template_a_plain_format_is_used(self):
        """Base models have no template, and a chat should run on them all the same."""
        tokenizer = make_tokenizer(None)
        session = ChatSession(tokenizer, "s")
        first = session.user("a")
        assert tokenizer.decode(first) == "### System:\ns\n\n### User:\na\n\n### Assistant:\n"
        session.assistant(ids_of(tokenizer, "b<|im_end|>"))
        second = session.user("c")
        assert second[: len(first)] == first
        assert tokenizer.decode(second[len(first) :]) == "b\n\n### User:\nc\n\n### Assistant:\n"
        assert session.is_exact
        assert session.is_append_only

    def test_the_plain_format_starts_as_the_tokenizer_starts_any_text(self):
        """Some models need their beginning-of-sequence id, and it must stand there once only."""
        from tokenizers import processors

        tokenizer = make_tokenizer(None)
        start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
        )
        session = ChatSession(tokenizer)
        assert session.user("a")[0] == start
        session.assistant_text("b")
        assert session.user("c").count(start) == 1

    def test_a_tokenizer_that_puts_a_space_before_each_text_gets_no_stray_space_into_the_middle(self):
        """Tokenisers of the SentencePiece family do; the tail of a turn is not the start of a text."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = [chr(code) for code in range(32, 127)] + ["\n", "▁", "yy"]
        backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[("y", "y")]))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        session = ChatSession(tokenizer)
        first = session.user("x")
        reply = [letters.index("y")] * 2  # not as the tokenizer would split it, so that the tail has to be appended
        session.assistant(reply)
        second = session.user("z")
        assert second[: len(first) + 2] == [*first, *reply]
        assert "".join(letters[i] for i in second[len(first) + 2 :]) == "\n\n###▁User:\nz\n\n###▁Assistant:\n"


class TestMisuse:
    def test_turns_must_alternate_and_a_refused_call_changes_nothing(self):
        """A reply to nothing, or two to one prompt, would put words in the wrong mouth."""
        tokenizer = make_tokenizer(CHATML)
        session = ChatSession(tokenizer)
        with pytest.raises(ValueError, match="no prompt to reply to"):
            session.assistant([1])
        session.user("a")
        before = session.token_ids
        with pytest.raises(ValueError, match="no reply yet"):
            session.user("b")
        with pytest.raises(ValueError, match="must not be negative, but -1"):
            session.assistant([1, -1])
        with pytest.raises(TypeError):
            session.assistant(["a"])
        with pytest.raises(TypeError, match="text must be a string, not bytes"):
            session.assistant_text(b"a")
        assert session.token_ids == before
        session.assistant([1])
        with pytest.raises(ValueError, match="has a reply already"):
            session.assistant_text("x")
        with pytest.raises(TypeError, match="text must be a string, not NoneType"):
            session.user(None)
        assert session.token_ids == [*before, 1]

    def test_arguments_are_checked_when_the_session_is_made(self):
        """Not at the first turn, far from the mistake."""
        tokenizer = make_tokenizer(CHATML)
        with pytest.raises(ValueError, match="'drop' is not one of keep, render"):
            ChatSession(tokenizer, on_rewrite="drop")
        with pytest.raises(TypeError, match="system must be a string"):
            ChatSession(tokenizer, system=3)

    def test_given_and_returned_lists_are_not_shared(self):
        """A caller who changes a list must not change what was said."""
        tokenizer = make_tokenizer(CHATML)
        session = ChatSession(tokenizer)
        prompt = session.user("a")
        prompt.append(1)
        session.token_ids.append(1)
        session.messages[0]["content"] = "z"
        assert len(session.token_ids) == len(prompt) - 1
        assert session.messages[0]["content"] == "a"
