"""A chat that keeps the token ids of what was said, so that the next prompt extends the last one id by id.

A prefix cache finds what has the same *ids*. Decoding a reply and tokenising the whole chat again may give other ids
for the same text (a reply cut off in the middle of a word, or an unusual split that the model sampled), and the hit
ends there. So the session never tokenises a reply of the model again: the next prompt is

    last prompt | reply, as generated | end of the reply, new user turn, start of the next reply
    \\____________ kept ids ___________/ \\______ the only new ids, cut out of the chat template's own rendering ______/

Owns the ids and the messages of one chat; knows nothing about the cache or the engine, and works with any Hugging Face
tokenizer. Invariant: as long as `is_append_only`, each prompt starts with the whole prompt and reply before it (a
reply's end-of-sequence id excepted, which stands once, where the template puts it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from operator import index
from typing import Any

ON_REWRITE = ("keep", "render")


class ChatSession:
    """One chat, as token ids.

        session = ChatSession(tokenizer, system="Be brief.")
        prompt = session.user("What is a cactus?")         # ids of the whole prompt
        session.assistant(generated_ids)                   # the model's reply, as it was generated
        prompt = session.user("Can I eat one?")            # starts with the last prompt and the reply, id by id

    How the new ids are found: the template renders the chat with a marker in place of the last reply, and what comes
    after the marker is what has to be appended. Where tokenising the whole rendered text gives an extension of the ids
    that are kept, those ids are taken, so a session of recorded text gives what `apply_chat_template` gives.

    Some templates would write the past in another way than it happened:

    - The words of a reply change (thinking text is dropped from all but the last reply). With `on_rewrite="keep"`, the
      default, the reply stays in the prompt as it was generated and the cache hits all of it. With
      `on_rewrite="render"` the session does what the template says, and the hit ends where the texts part.
    - The frame around the messages changes (a system prompt that moves to the last user message). Then appending would
      be wrong, so the chat is rendered and tokenised again from the text, whatever `on_rewrite` says.

    `is_exact` says whether every prompt so far had the text that the template gives for it, `is_append_only` whether
    each prompt continued the one before it, and `remark` why not.

    Without a chat template, a plain text format is used: `### System:`, `### User:` and `### Assistant:`, each followed
    by a line feed and the text, with an empty line between messages, after the tokenizer's own beginning-of-sequence
    ids if it adds any. Where a template refuses or ignores a system prompt, the prompt is put in front of the first
    user message, with an empty line between.

    `end_token_ids`: further ids that end a reply (from a generation config), besides the tokenizer's end-of-sequence
    id and the one that the template itself writes after a reply.

    Cost of a turn: the template rendered a few times and the whole text tokenised once, some milliseconds for
    thousands of tokens. Raises TypeError or ValueError for bad arguments, and then changes nothing.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None = None,
        *,
        on_rewrite: str = "keep",
        end_token_ids: Iterable[int] = (),
    ) -> None:
        if on_rewrite not in ON_REWRITE:
            raise ValueError(f"on_rewrite {on_rewrite!r} is not one of {', '.join(ON_REWRITE)}")
        if system is not None:
            _check_text("system", system)
        self._tokenizer = tokenizer
        self._on_rewrite = on_rewrite
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._given_end_ids = frozenset(index(token_id) for token_id in end_token_ids)
        # The chat so far, as the template takes it. The last one is a user message while a reply is awaited.
        self._messages: list[dict[str, str]] = []
        self._folded_system: str | None = None
        if system is not None:
            if self._takes_system():
                self._messages.append({"role": "system", "content": system})
            else:
                self._folded_system = system
        self._prompt_ids: list[int] = []
        self._prompt_text = ""
        self._reply_ids: list[int] | None = None  # None while there is no reply to the last prompt
        self._num_spoken = 0  # ids of the reply without the one that ended it
        self._is_reply_recorded = False
        self._is_exact = True
        self._is_append_only = True
        self._remark: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The ids of everything said so far: the last prompt and, if there is one, the reply to it (a copy)."""
        return [*self._prompt_ids, *(self._reply_ids or [])]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat as text, as `apply_chat_template` takes it (copies)."""
        return [dict(message) for message in self._messages]

    @property
    def is_exact(self) -> bool:
        """Whether every prompt so far had the text that the template gives for the chat at that point.

        White space at the ends of a reply does not count: many templates trim it, and the model's ids keep it.
        """
        return self._is_exact

    @property
    def is_append_only(self) -> bool:
        """Whether every prompt so far started with all the ids before it (an end-of-sequence id excepted)."""
        return self._is_append_only

    @property
    def remark(self) -> str | None:
        """Why `is_exact` or `is_append_only` is False, as a sentence; None while both are True."""
        return self._remark

    # What is said ---------------------------------------------------------------------------------------------------

    def user(self, text: str) -> list[int]:
        """The ids of the next prompt, after the user said `text`.

        Raises ValueError if the last prompt has no reply yet.
        """
        _check_text("text", text)
        if not self._prompt_ids:
            if self._folded_system is not None:
                text = f"{self._folded_system}\n\n{text}"
            messages = [*self._messages, {"role": "user", "content": text}]
            prompt_text = self._render(messages, add_generation_prompt=True)
            prompt_ids = self._encode(prompt_text)
        elif self._reply_ids is None:
            raise ValueError("the last prompt has no reply yet: record one with assistant() or assistant_text()")
        else:
            messages = [*self._messages, {"role": "user", "content": text}]
            prompt_text, prompt_ids = self._next_prompt(messages)
        self._messages, self._prompt_text, self._prompt_ids, self._reply_ids = messages, prompt_text, prompt_ids, None
        return list(prompt_ids)

    def assistant(self, token_ids: Sequence[int]) -> None:
        """Records the model's own reply as its ids, with or without the end-of-sequence id at the end."""
        ids = [index(token_id) for token_id in token_ids]
        if any(token_id < 0 for token_id in ids):
            raise ValueError(f"token ids must not be negative, but {min(ids)} is")
        self._check_reply_is_awaited()
        # The end id has no KV yet (it was sampled last), so taking the template's in its place later costs no hit.
        spoken = ids[:-1] if ids and ids[-1] in self._end_ids() else ids
        text = self._tokenizer.decode(spoken, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._messages.append({"role": "assistant", "content": text})
        self._reply_ids, self._num_spoken, self._is_reply_recorded = ids, len(spoken), False

    def assistant_text(self, text: str) -> None:
        """Records a reply that is known as text only.

        Its ids may still change at their end when the next user turn shows how the tokenizer joins the two.
        """
        _check_text("text", text)
        self._check_reply_is_awaited()
        # Templates often trim a reply; then the trimmed one is what was said.
        probe = [*self._messages, {"role": "assistant", "content": text}, {"role": "user", "content": "."}]
        rendered = self._render(probe, add_generation_prompt=True)
        if not rendered.startswith(self._prompt_text + text) and rendered.startswith(self._prompt_text + text.strip()):
            text = text.strip()
        whole = self._encode(self._prompt_text + text)
        reply_ids = _after(self._prompt_ids, whole)
        if reply_ids is None:
            reply_ids = self._encode_continuation(text)
        self._messages.append({"role": "assistant", "content": text})
        self._reply_ids, self._num_spoken, self._is_reply_recorded = reply_ids, len(reply_ids), True

    # How the next prompt is made ------------------------------------------------------------------------------------

    def _next_prompt(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        """Text and ids of the prompt for `messages`, whose last two are the reply on record and the new user turn.

        1. `wanted`: what the template makes of the chat, reply included.
        2. `tail`: what it puts after the reply; None where it changes the frame, so that nothing can be appended.
        3. Append, if it can be done and either gives the wanted text or is asked for. Otherwise start again from text.
        """
        reply_text = messages[-2]["content"]
        wanted = self._render(messages, add_generation_prompt=True)  # 1
        tail = self._tail(messages)  # 2
        if tail is not None:  # 3
            text = self._prompt_text + reply_text + tail
            is_same = text == wanted or self._prompt_text + reply_text.strip() + tail == wanted
            if is_same or self._on_rewrite == "keep":
                if not is_same:
                    self._is_exact = False
                    self._remark = self._remark or (
                        "the chat template would change what was said (such as dropping thinking text); "
                        "the prompts keep it as it was"
                    )
                return text, self._append(text, tail)
            reason = "the chat template changes what was said (such as dropping thinking text)"
        else:
            reason = "the chat template writes earlier messages in another way once a new one follows"
        ids = self._encode(wanted)
        self._is_exact = False
        if _after([*self._prompt_ids, *(self._reply_ids or [])[: self._num_spoken]], ids) is None:
            self._is_append_only = False
        self._remark = self._remark or f"{reason}; the chat is tokenised again each turn, and hits end at the change"
        return wanted, ids

    def _tail(self, messages: list[dict[str, str]]) -> str | None:
        """What the template writes after the reply: its end, the new user turn and the start of the next reply.

        None if the reply is not framed as it was when it was generated: everything up to the last user turn must be
        rendered the same with and without what follows (an opening that only a generation prompt has, such as one for
        thinking, may differ).
        """
        marker = _marker_not_in(message["content"] for message in messages)
        marked = self._render([*messages[:-2], {"role": "assistant", "content": marker}, messages[-1]], True)
        if marked.count(marker) != 1:
            return None
        before_reply, tail = marked.split(marker)
        until_user = self._render(messages[:-2], add_generation_prompt=False)
        until_reply = self._render(messages[:-2], add_generation_prompt=True)
        if not (before_reply.startswith(until_user) and until_reply.startswith(until_user)):
            return None
        return tail

    def _append(self, text: str, tail: str) -> list[int]:
        """The kept ids, and those of `tail` after them, with the end of the reply there exactly once."""
        assert self._reply_ids is not None
        said = [*self._prompt_ids, *self._reply_ids[: self._num_spoken]]
        # A recorded reply was in no prompt yet, so its ids are free to be what the whole text gives.
        kept = self._prompt_ids if self._is_reply_recorded else said
        whole = self._encode(text)
        if _after(kept, whole) is not None:
            return whole
        return [*said, *self._encode_continuation(tail)]

    def _end_ids(self) -> set[int]:
        """The ids that end a reply: those given, the tokenizer's own, and what the template writes after a reply.

        The last counts if it is an added token of the tokenizer, such as an end-of-turn mark, and not a line feed.
        """
        ends = {*self._given_end_ids}
        if self._tokenizer.eos_token_id is not None:
            ends.add(self._tokenizer.eos_token_id)
        marker = _marker_not_in(message["content"] for message in self._messages)
        probe = [*self._messages, {"role": "assistant", "content": marker}, {"role": "user", "content": "."}]
        after_reply = self._render(probe, add_generation_prompt=False).rpartition(marker)[2]
        first = self._encode_continuation(after_reply)[:1]
        return ends | (set(first) & set(self._tokenizer.get_added_vocab().values()))

    # Template and tokenizer -----------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if not self._has_template:
            return _render_plainly(messages, add_generation_prompt)
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    def _takes_system(self) -> bool:
        """Whether a system prompt gets into the template's text; some raise at it, some pass over it."""
        if not self._has_template:
            return True
        from jinja2 import TemplateError

        marker = _marker_not_in([])
        messages = [{"role": "system", "content": marker}, {"role": "user", "content": "."}]
        try:
            return marker in self._render(messages, add_generation_prompt=True)
        except TemplateError:
            return False

    def _encode(self, text: str) -> list[int]:
        """The ids of a text from the start of the chat. A template writes the beginning-of-sequence token itself."""
        ids = self._ids_of(text)
        return ids if self._has_template else [*self._beginning_ids(), *ids]

    def _ids_of(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def _beginning_ids(self) -> list[int]:
        """The ids that the tokenizer puts in front of any text by itself."""
        bare, dressed = self._ids_of("."), self._ids_of(".", add_special_tokens=True)
        for start in range(len(dressed) - len(bare) + 1):
            if dressed[start : start + len(bare)] == bare:
                return dressed[:start]
        return []

    def _encode_continuation(self, text: str) -> list[int]:
        """The ids of `text` as the continuation of another.

        Some tokenizers put a space before the first word of whatever they are given. So `text` is tokenised after a
        short anchor, whose ids are then taken off; the first anchor that stays whole is used.
        """
        for anchor in ("a", "0", "."):
            ids = _after(self._ids_of(anchor), self._ids_of(anchor + text))
            if ids is not None:
                return ids
        return self._ids_of(text)

    def _check_reply_is_awaited(self) -> None:
        if not self._prompt_ids:
            raise ValueError("there is no prompt to reply to yet: call user() first")
        if self._reply_ids is not None:
            raise ValueError("the last prompt has a reply already: call user() first")


def _render_plainly(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    parts = [f"### {message['role'].capitalize()}:\n{message['content']}\n\n" for message in messages]
    return "".join(parts) + ("### Assistant:\n" if add_generation_prompt else "")


def _after(prefix: list[int], ids: list[int]) -> list[int] | None:
    """What follows `prefix` in `ids`; None if `ids` does not start with it."""
    return ids[len(prefix) :] if ids[: len(prefix)] == prefix else None


def _marker_not_in(texts: Iterable[str]) -> str:
    """A word that is in none of the texts."""
    everything = "\n".join(texts)
    return next(marker for number in count() if (marker := f"ReplyMarker{number}End") not in everything)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, not {type(text).__name__}")
