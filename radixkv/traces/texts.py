"""Chats as traces, without a tokenizer: the bytes of the text are the tokens.

A message is `<|ROLE|>`, a line feed, its body, a line feed, with the role as the file has it. The body is the content,
or nothing where that is null, and where there are tool calls a line feed and the JSON list of [function name,
arguments]. Each assistant message is a request: its prompt is all messages before it and `<|assistant|>` with a line
feed, its output the message's body and a line feed. So a prompt starts with the prompt before it and that one's output.

Formats: `openai` (a list of messages, or an object with one under `messages`), `oasst` (message trees), `mt-bench`
(answers with their questions, or questions alone), `tau-bench` (`traj`), `swe-agent` (`history`). A list without any
assistant message, and a question without an answer, is a request whose output is not known: 0 tokens.

Texts have no times. All requests arrive at 0 s, so their order is that of the file, conversation by conversation;
`Trace.round_robin` gives the other usual one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .errors import BadRow, TraceError
from .rows import Names, Row, as_object, assemble, find, take, text, type_of
from .source import Record, Source, stem
from .trace import Trace

FORMATS = ("openai", "oasst", "mt-bench", "tau-bench", "swe-agent")
SWE_AGENT_SUFFIXES = (".traj",)


class _Message(NamedTuple):
    role: str
    body: str


def read(source: Source, format: str) -> Trace:
    """The trace of one file, or for swe-agent of a folder of trajectories in name order."""
    return assemble(
        source,
        take(source, _rows(source, format)),
        format=format,
        definition=(
            f"{format}: bytes as tokens, each assistant message is a request, in file order without times; "
            "a prompt is all messages before it, framed by <|role|> and line feeds"
        ),
        block_size=1,
        counts_partial=True,
    )


def _rows(source: Source, format: str) -> Iterator[Row]:
    readers: dict[str, Callable[[str, Any], list[Row]]] = {
        "openai": _openai,
        "oasst": _oasst,
        "mt-bench": partial(_mt_bench, _Questions(source)),
        "tau-bench": _tau_bench,
        "swe-agent": _swe_agent,
    }
    names = Names()
    for path in source.files(*SWE_AGENT_SUFFIXES) if format == "swe-agent" else [source.path]:
        for record in source.records(path):
            try:
                # A conversation is taken as a whole or not at all: its later prompts hold its earlier messages.
                rows = readers[format](stem(path) if format == "swe-agent" else str(record.number + 1), record.value)
            except BadRow as error:
                source.skip(path, record.line, str(error))
                continue
            unique = names.unique(rows[0].thread or "")
            for row in rows:
                yield row._replace(thread=unique)


# One conversation of each format ------------------------------------------------------------------------------------


def _openai(name: str, value: Any) -> list[Row]:
    if isinstance(value, list):
        return _chat(name, value)
    return _chat(text(value, ("id", "conversation_id")) or name, _list(as_object(value), "messages"))


def _tau_bench(name: str, value: Any) -> list[Row]:
    task, trial = text(as_object(value), ("task_id",)), text(value, ("trial",))
    return _chat(name if task is None else f"task-{task}-trial-{trial or 0}", _list(value, "traj"))


def _swe_agent(name: str, value: Any) -> list[Row]:
    return _chat(name, _list(as_object(value), "history"))


def _oasst(name: str, value: Any) -> list[Row]:
    """A request for every path from the root to an assistant message, where these stand in the file."""
    tree = as_object(value)
    thread = text(tree, ("message_tree_id",)) or name
    rows: list[Row] = []
    # A stack, not recursion: a tree can be deeper than Python's recursion limit allows.
    stack: list[tuple[Any, array[int], Any]] = [(find(tree, ("prompt",)), array("I"), None)]
    while stack:
        value, said, parent = stack.pop()
        node = as_object(value)
        message = _Message(_text(node, "role"), _text(node, "text"))
        if message.role == "assistant":
            row = _request(thread, said, message.body)._replace(key=(thread, len(rows)), parent_key=parent)
            assert row.units is not None and row.output_units is not None
            said, parent = row.units + row.output_units, row.key
            rows.append(row)
        else:
            said = said + _tokens(f"<|{message.role}|>\n{message.body}\n")
        replies = node.get("replies")
        if replies is not None and not isinstance(replies, list):
            raise BadRow(f"replies must be a list, not {type_of(replies)}")
        stack.extend((reply, said, parent) for reply in reversed(replies or []))
    if not rows:
        raise BadRow("the tree has no assistant message")
    return rows


def _mt_bench(questions: _Questions, name: str, value: Any) -> list[Row]:
    record = as_object(value)
    question_id = text(record, ("question_id",)) or name
    if "choices" not in record:
        return _unanswered(question_id, _turns(record))
    choices = _list(record, "choices")
    if not choices:
        raise BadRow("has no choices")
    answers = _turns(as_object(choices[0]))
    asked = questions.turns(question_id)
    if len(asked) != len(answers):
        raise BadRow(f"has {len(answers)} turns, but question {question_id} has {len(asked)}")
    messages = []
    for question, answer in zip(asked, answers, strict=True):
        messages += [_Message("user", question), _Message("assistant", answer)]
    return _requests(question_id, messages)


def _unanswered(thread: str, turns: list[str]) -> list[Row]:
    """A request for each question, whose prompt has the questions before it; what was answered is not known."""
    asked = [_Message("user", turn) for turn in turns]
    return [row for end in range(1, len(asked) + 1) for row in _requests(thread, asked[:end])]


class _Questions:
    """The questions that answers belong to: a file with `question` in its name, beside theirs or one folder up."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._by_id: dict[str, list[str]] | None = None

    def turns(self, question_id: str) -> list[str]:
        """What was asked, turn by turn; the file is read at the first call."""
        if self._by_id is None:
            self._by_id = self._read(self._file())
        if question_id not in self._by_id:
            raise BadRow(f"question {question_id} is not in the file of questions")
        return self._by_id[question_id]

    def _file(self) -> Path:
        folder = self._source.path.parent
        for place in (folder, folder.resolve().parent):
            for path in sorted(place.glob("*question*.json*")):
                if path != self._source.path:
                    return path
        raise TraceError(self._source.path, None, "the answers need their questions: a *question*.jsonl beside them")

    def _read(self, path: Path) -> dict[str, list[str]]:
        found = {}
        for record in self._source.records(path):
            try:
                found[self._id(record)] = _turns(record.value)
            except BadRow as error:
                self._source.skip(path, record.line, str(error))
        return found

    def _id(self, record: Record) -> str:
        question_id = text(as_object(record.value), ("question_id",))
        if question_id is None:
            raise BadRow("has no question_id")
        return question_id


# Messages to requests -----------------------------------------------------------------------------------------------


def _chat(thread: str, values: list[Any]) -> list[Row]:
    messages = []
    for number, value in enumerate(values, start=1):
        try:
            messages.append(_message(as_object(value)))
        except BadRow as error:
            raise BadRow(f"message {number}: {error}") from None
    return _requests(thread, messages)


def _requests(thread: str, messages: list[_Message]) -> list[Row]:
    """A request for each assistant message, or one for a chat that has none. O(bytes of all prompts)."""
    if not messages:
        raise BadRow("has no messages")
    rows = []
    said = array("I")
    for message in messages:
        if message.role == "assistant":
            row = _request(thread, said, message.body)
            assert row.units is not None and row.output_units is not None
            said = row.units + row.output_units
            rows.append(row)
        else:
            said += _tokens(f"<|{message.role}|>\n{message.body}\n")
    return rows or [_request(thread, said, None)]


def _request(thread: str, said: array[int], body: str | None) -> Row:
    """The request that an assistant message answers; `body` is None where there is no answer."""
    prompt = said + _tokens("<|assistant|>\n")
    output = None if body is None else _tokens(f"{body}\n")
    return Row(0.0, len(prompt), 0 if output is None else len(output), prompt, output, thread)


def _message(value: dict[str, Any]) -> _Message:
    body = _content(value.get("content"))
    calls = _tool_calls(value)
    if calls:
        body += "\n" + json.dumps(calls, ensure_ascii=False)
    return _Message(_text(value, "role"), body)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"content must be a text, null or a list of text parts, not {type_of(content)}")
    parts = []
    for part in content:
        part_text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(part_text, str):
            raise BadRow("content may only have parts of text")
        parts.append(part_text)
    return "".join(parts)


def _tool_calls(value: dict[str, Any]) -> list[list[Any]]:
    """[function name, arguments] of each tool call."""
    calls = []
    for call in [] if value.get("tool_calls") is None else _list(value, "tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("each tool call needs a function with a name")
        calls.append([function["name"], function.get("arguments")])
    return calls


def _tokens(string: str) -> array[int]:
    """One token a byte. Halves of surrogate pairs, which JSON can hold, are encoded like any other character."""
    tokens = array("I")
    tokens.extend(string.encode("utf-8", "surrogatepass"))
    return tokens


def _turns(record: dict[str, Any]) -> list[str]:
    turns = _list(as_object(record), "turns")
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("turns must be a list of texts, with at least one")
    return turns


def _list(holder: dict[str, Any], name: str) -> list[Any]:
    value = find(holder, (name,))
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list, not {type_of(value)}")
    return value


def _text(holder: dict[str, Any], name: str) -> str:
    value = find(holder, (name,))
    if not isinstance(value, str):
        raise BadRow(f"{name} must be a text, not {type_of(value)}")
    return value
