"""Reads chats from files, in the formats that public conversations come in, into `Conversation` values.

Knows nothing about tokens or models, and needs only the standard library. Formats (`FORMATS`):

- ``openai``: a list of messages ``{"role", "content"}``; or an object with such a list under ``messages``; or a JSON
  list, or JSON lines, of either.
- ``mt-bench``: questions ``{"question_id", "turns": [str, …]}`` and answers ``{"question_id", "choices":
  [{"turns": [str, …]}]}``. Read together, answers become the recorded replies. Answers read alone need their
  questions: a file with ``question`` in its name beside them, or one folder up, is read too.
- ``oasst``: message trees ``{"message_tree_id", "prompt": {"text", "role", "replies": […]}}``. Each root-to-leaf path
  is a conversation, so that siblings share their prefix. ``oasst-best`` takes one path of each tree, through the
  replies of the lowest rank. Messages marked deleted are left out with all below them.
- ``tau-bench``: a list of ``{"task_id", "trial", "traj": [messages]}``.
- ``swe-agent``: a trajectory ``{"history": [messages]}``.

All may be gzip files (known by their content) and all but the last may be JSON or JSON lines; ``auto`` tells the format
of each record by its keys. Rules for messages, the same in every format:

- ``content`` may be null (empty text), a string, or a list of ``{"type": "text", "text"}`` parts, which are joined.
  Other parts (images, sound) are refused.
- Tool calls are written after the content: a line feed and the JSON list of ``[function name, arguments]`` pairs.
- Roles: ``developer`` is system; ``human`` and ``prompter`` are user; ``tool`` and ``function`` are said on the user's
  side as ``Result of NAME:`` (``Tool result:`` without a name), a line feed and the content, because few templates
  take a tool role.
- Runs of one role are joined, late system messages and a greeting are moved as `Conversation.from_messages` says.
- Halves of surrogate pairs, which JSON can hold and no tokenizer takes, become U+FFFD.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from engine.chats.conversation import Conversation, Message

FORMATS = ("auto", "openai", "mt-bench", "oasst", "oasst-best", "tau-bench", "swe-agent")

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "tool": "tool",
    "function": "tool",
    "assistant": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_WHITE = re.compile(r"\s*")


class ChatFormatError(ValueError):
    """A chats file that cannot be used: `path`, `line` (from 1; None where no line is to blame) and `reason`."""

    def __init__(self, path: str, line: int | None, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        super().__init__(f"{path}:{line}: {reason}" if line is not None else f"{path}: {reason}")


class _BadRecordError(Exception):
    """What is wrong with one record; the caller knows which file and line it came from."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One JSON value of a file, and where it came from. `line` is a call because finding it can mean scanning."""

    value: Any
    path: str
    line: Callable[[], int]

    def error(self, reason: str) -> ChatFormatError:
        return ChatFormatError(self.path, self.line(), reason)


@dataclass(slots=True)
class _MtBench:
    """Questions and answers by question_id, until every file has been read and they can be joined."""

    questions: dict[Any, tuple[_Record, list[str]]] = field(default_factory=dict)
    answers: dict[Any, tuple[_Record, list[str]]] = field(default_factory=dict)


def builtin_chats() -> tuple[Conversation, ...]:
    """The conversations that come with the package: six, of four or five turns, under two shared system prompts."""
    text = resources.files("engine.chats").joinpath("builtin.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return tuple(
        Conversation.from_messages(
            entry["name"],
            [
                Message("system", data["systems"][entry["system"]]),
                *(Message(message["role"], message["content"]) for message in entry["messages"]),
            ],
        )
        for entry in data["conversations"]
    )


def read_chats(
    path: str | PathLike[str] | Iterable[str | PathLike[str]], format: str = "auto"
) -> tuple[Conversation, ...]:
    """The conversations in one file, or in several read together, in file order, with distinct names.

    `format` is one of `FORMATS`; the formats and the rules for messages are in the module docstring. Raises
    ChatFormatError (a ValueError) with file, line and reason when a file cannot be read, is empty or malformed, or is
    in no known format; ValueError for an unknown `format`.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    paths = [path] if isinstance(path, (str, PathLike)) else list(path)
    if not paths:
        raise ValueError("no chats file was given")
    found: list[Conversation] = []
    mt_bench = _MtBench()
    for each in paths:
        records = _read_records(fspath(each))
        # A file that is itself one list of messages: its records are the messages of one conversation.
        if format in ("auto", "openai") and all(_is_message(record.value) for record in records):
            merged = _Record([record.value for record in records], records[0].path, records[0].line)
            records = [merged]
        for index, record in enumerate(records):
            try:
                found.extend(_read_record(record, index, len(records), format, mt_bench))
            except _BadRecordError as error:
                raise record.error(str(error)) from None
    found.extend(_join_mt_bench(mt_bench))
    if not found:  # every tree was marked deleted
        raise ChatFormatError(", ".join(fspath(each) for each in paths), None, "holds no conversation")
    return tuple(_with_distinct_names(found))


# Files to records ---------------------------------------------------------------------------------------------------


def _read_records(path: str) -> list[_Record]:
    """The JSON values in a file: elements of a top-level list, lines of a JSON lines file, or the one object."""
    text = _read_text(path)
    if not text.strip():
        raise ChatFormatError(path, None, "the file is empty")
    try:
        value = _loads(text, path, 1)
    except ChatFormatError as whole:
        # More than one value: JSON lines, if the first line stands on its own. Otherwise the file is broken JSON,
        # unless its name says that it is lines.
        if not _first_line_is_json(text) and ".jsonl" not in Path(path).name.lower():
            raise whole from None
        return _read_lines(text, path)
    if not isinstance(value, list):
        return [_Record(value, path, lambda: _line_at(text, _skip_white(text, 0)))]
    if not value:
        raise ChatFormatError(path, 1, "the list is empty: no conversations")
    return [_Record(element, path, partial(_line_of_element, text, i)) for i, element in enumerate(value)]


def _read_lines(text: str, path: str) -> list[_Record]:
    records = []
    # Split at line feeds alone: JSON strings may hold other line separators, such as U+2028, unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            records.append(_Record(_loads(line, path, number), path, partial(int, number)))
    return records


def _read_text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":  # the two bytes that every gzip file starts with, whatever its name
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ChatFormatError(path, None, f"cannot be decompressed: {error}") from error
    except OSError as error:
        raise ChatFormatError(path, None, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise ChatFormatError(path, None, f"cannot be read: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ChatFormatError(path, line, f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _loads(text: str, path: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"is not valid JSON: {error.msg} (column {error.colno})"
        raise ChatFormatError(path, first_line + error.lineno - 1, reason) from None
    except RecursionError:
        raise ChatFormatError(path, first_line, "is nested too deeply to be read") from None
    except ValueError as error:  # a number with more digits than Python converts
        raise ChatFormatError(path, first_line, f"is not usable JSON: {error}") from None


def _first_line_is_json(text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _skip_white(text: str, position: int) -> int:
    match = _WHITE.match(text, position)
    assert match is not None
    return match.end()


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _line_of_element(text: str, index: int) -> int:
    """The line on which element `index` of the top-level list starts; reads the list again, for error messages only."""
    decoder = json.JSONDecoder()
    position = _skip_white(text, _skip_white(text, 0) + 1)
    for _ in range(index):
        _, position = decoder.raw_decode(text, position)
        position = _skip_white(text, _skip_white(text, position) + 1)  # over the comma
    return _line_at(text, position)


# Records to conversations -------------------------------------------------------------------------------------------


def _read_record(
    record: _Record, index: int, num_records: int, format: str, mt_bench: _MtBench
) -> Iterable[Conversation]:
    value = record.value
    kind = _kind_of(value) if format == "auto" else format
    stem = _stem(record.path)
    numbered = stem if num_records == 1 else f"{stem}-{index + 1}"
    if kind == "openai":
        messages = value if isinstance(value, list) else _get(value, "messages", list)
        return [_conversation(_name_of(value, numbered), messages)]
    if kind == "swe-agent":
        return [_conversation(numbered, _get(value, "history", list))]
    if kind == "tau-bench":
        messages = _get(value, "traj", list)
        name = f"task-{value['task_id']}-trial-{value.get('trial', 0)}" if "task_id" in value else numbered
        return [_conversation(name, messages)]
    if kind in ("oasst", "oasst-best"):
        return _read_tree(value, numbered, best_only=kind == "oasst-best")
    assert kind == "mt-bench"
    _add_mt_bench(record, mt_bench)
    return ()


def _kind_of(value: Any) -> str:
    if isinstance(value, list):
        if all(_is_message(element) for element in value):
            return "openai"
        raise _BadRecordError("a list that is not a list of messages with a role each")
    if isinstance(value, dict):
        if "messages" in value:
            return "openai"
        if "traj" in value:
            return "tau-bench"
        if "history" in value:
            return "swe-agent"
        if isinstance(value.get("prompt"), dict):
            return "oasst"
        if "question_id" in value and ("turns" in value or "choices" in value):
            return "mt-bench"
        keys = ", ".join(repr(key) for key in list(value)[:8]) or "none"
        raise _BadRecordError(
            "unknown chat format: expected an object with messages, traj, history, prompt (a message tree), or "
            f"question_id with turns or choices; its keys are: {keys}"
        )
    raise _BadRecordError(f"unknown chat format: expected an object or a list of messages, not {_type_of(value)}")


def _conversation(name: str, raw_messages: list[Any]) -> Conversation:
    if not raw_messages:
        raise _BadRecordError(f"conversation {name!r} has no messages")
    # A tool result names its tool, or only the id of the call that it answers.
    tool_names: dict[Any, str] = {}
    messages = []
    for i, raw in enumerate(raw_messages):
        try:
            messages.append(_message(raw, tool_names))
        except _BadRecordError as error:
            raise _BadRecordError(f"conversation {name!r}, message {i + 1}: {error}") from None
    return _checked(name, messages)


def _checked(name: str, messages: Iterable[Message]) -> Conversation:
    try:
        return Conversation.from_messages(name, messages)
    except ValueError as error:
        raise _BadRecordError(str(error)) from None


def _message(raw: Any, tool_names: dict[Any, str]) -> Message:
    if not isinstance(raw, dict):
        raise _BadRecordError(f"expected an object with role and content, not {_type_of(raw)}")
    given_role = raw.get("role")
    role = _ROLES.get(given_role) if isinstance(given_role, str) else None
    if role is None:
        raise _BadRecordError(f"role {given_role!r} is not one of {', '.join(_ROLES)}")
    content = _text_of(raw.get("content"))
    calls = _tool_calls(raw, tool_names)
    if calls:
        content += "\n" + json.dumps(calls, ensure_ascii=False)
    if role == "tool":
        tool_name = raw.get("name")
        for call_id in [raw.get("tool_call_id"), *_list_or_empty(raw.get("tool_call_ids"))]:
            if not tool_name and isinstance(call_id, str):
                tool_name = tool_names.get(call_id)
        title = f"Result of {tool_name}:" if isinstance(tool_name, str) and tool_name else "Tool result:"
        role, content = "user", f"{title}\n{content}"
    return Message(role, _without_lone_surrogates(content))


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _BadRecordError(f"content must be text, null or a list of text parts, not {_type_of(content)}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _type_of(part)
            raise _BadRecordError(f"content part of type {kind!r} is not text; only text parts can be read")
    return "".join(texts)


def _tool_calls(raw: dict[str, Any], tool_names: dict[Any, str]) -> list[list[Any]]:
    """[name, arguments] of each tool call of a message, the older single `function_call` included."""
    calls = []
    given = raw.get("tool_calls")
    if given is not None and not isinstance(given, list):
        raise _BadRecordError(f"tool_calls must be a list, not {_type_of(given)}")
    for call in given or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _BadRecordError("each tool call needs a function with a name")
        calls.append([function["name"], function.get("arguments")])
        if isinstance(call.get("id"), str):
            tool_names[call["id"]] = function["name"]
    older = raw.get("function_call")
    if isinstance(older, dict) and isinstance(older.get("name"), str):
        calls.append([older["name"], older.get("arguments")])
    return calls


def _read_tree(value: Any, name: str, best_only: bool) -> list[Conversation]:
    """One conversation for each root-to-leaf path, in file order, named by the child numbers along the path."""
    root = _get(value, "prompt", dict)
    tree_name = str(value.get("message_tree_id") or root.get("message_id") or name)[:8]
    if root.get("deleted") is True:
        return []
    found = []
    # A stack, not recursion: a tree can be deeper than Python's recursion limit allows.
    stack: list[tuple[dict[str, Any], tuple[Message, ...], str]] = [(root, (), tree_name)]
    while stack:
        node, before, path = stack.pop()
        try:
            message = _message({"role": node.get("role"), "content": _get(node, "text", str)}, {})
        except _BadRecordError as error:
            raise _BadRecordError(f"tree {tree_name!r}, message {len(before) + 1} of path {path!r}: {error}") from None
        messages = (*before, message)
        replies = _list_or_empty(node.get("replies"))
        if not all(isinstance(reply, dict) for reply in replies):
            raise _BadRecordError(f"tree {tree_name!r}: replies must be a list of messages")
        children = [(i, reply) for i, reply in enumerate(replies) if reply.get("deleted") is not True]
        if best_only and children:
            children = [min(children, key=lambda numbered: (_rank(numbered[1]), numbered[0]))]
        if not children:
            found.append(_checked(path, messages))
        separator = "/" if not before else "."
        stack.extend((reply, messages, f"{path}{separator}{i}") for i, reply in reversed(children))
    return found


def _rank(reply: dict[str, Any]) -> float:
    """Lower is better; replies that nobody ranked come last."""
    rank = reply.get("rank")
    return rank if isinstance(rank, (int, float)) else float("inf")


# MT-bench -----------------------------------------------------------------------------------------------------------


def _add_mt_bench(record: _Record, mt_bench: _MtBench) -> None:
    value = record.value
    if not isinstance(value, dict) or not isinstance(value.get("question_id"), (int, str)):
        raise _BadRecordError("an MT-bench record is an object with a question_id")
    if "choices" in value:
        choices = _get(value, "choices", list)
        if not choices:
            raise _BadRecordError("choices is empty")
        into, turns = mt_bench.answers, _get(choices[0], "turns", list)
    else:
        into, turns = mt_bench.questions, _get(value, "turns", list)
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise _BadRecordError("turns must be a list of at least one string")
    if value["question_id"] in into:
        raise _BadRecordError(f"question_id {value['question_id']!r} was given before")
    into[value["question_id"]] = (record, turns)


def _join_mt_bench(mt_bench: _MtBench) -> Iterator[Conversation]:
    wanted = dict(mt_bench.questions)
    if mt_bench.answers and not mt_bench.questions:
        beside = _questions_beside(mt_bench)
        wanted = {key: question for key, question in beside.items() if key in mt_bench.answers}
    for key, (record, _) in mt_bench.answers.items():
        if key not in wanted:
            raise record.error(f"the answer to question {key!r} has no question: give the file of questions as well")
    for key, (record, turns) in wanted.items():
        answer_record, replies = mt_bench.answers.get(key, (record, []))
        if len(replies) > len(turns):
            raise answer_record.error(f"question {key!r} has {len(turns)} turns, but its answer {len(replies)}")
        messages = []
        for i, turn in enumerate(turns):
            messages.append(Message("user", _without_lone_surrogates(turn)))
            if i < len(replies):
                messages.append(Message("assistant", _without_lone_surrogates(replies[i])))
        # Not from_messages: without answers, each question is a turn of its own and must not be joined to the next.
        yield Conversation(f"mt-bench-{key}", tuple(messages))


def _questions_beside(mt_bench: _MtBench) -> dict[Any, tuple[_Record, list[str]]]:
    """The questions in the first file, beside the answers or one folder up, that is named for questions and fits."""
    answers_path = Path(next(iter(mt_bench.answers.values()))[0].path).absolute()
    for folder in (answers_path.parent, answers_path.parent.parent):
        for candidate in sorted(folder.glob("*question*.json*")):
            if not candidate.is_file():
                continue
            beside = _MtBench()
            try:
                for record in _read_records(str(candidate)):
                    _add_mt_bench(record, beside)
            except (ChatFormatError, _BadRecordError):
                continue  # some other file that happens to have the word in its name
            if beside.questions.keys() & mt_bench.answers.keys():
                return beside.questions
    return {}


# Small helpers ------------------------------------------------------------------------------------------------------


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "replies" not in value


def _get(value: Any, key: str, kind: type) -> Any:
    """value[key], which must be there and of the given type."""
    if not isinstance(value, dict):
        raise _BadRecordError(f"expected an object with {key!r}, not {_type_of(value)}")
    if key not in value:
        raise _BadRecordError(f"expected an object with {key!r}; its keys are: {', '.join(map(repr, list(value)[:8]))}")
    if not isinstance(value[key], kind):
        names: dict[type, str] = {list: "a list", dict: "an object", str: "text"}
        raise _BadRecordError(f"{key!r} must be {names[kind]}, not {_type_of(value[key])}")
    return value[key]


def _name_of(value: Any, default: str) -> str:
    if isinstance(value, dict):
        for key in ("name", "id", "conversation_id"):
            if isinstance(value.get(key), (str, int)) and str(value[key]).strip():
                return str(value[key])
    return default


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _stem(path: str) -> str:
    """The file name without the endings that say how it is stored."""
    name = Path(path).name
    for ending in (".gz", ".jsonl", ".json", ".traj"):
        if name.lower().endswith(ending) and len(name) > len(ending):
            name = name[: -len(ending)]
    return name


def _without_lone_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _with_distinct_names(conversations: list[Conversation]) -> Iterator[Conversation]:
    """The conversations; where a name comes again it gets `#2`, `#3` …, so that a row of a report is unambiguous."""
    seen: dict[str, int] = {}
    taken = {conversation.name for conversation in conversations}
    for conversation in conversations:
        count = seen[conversation.name] = seen.get(conversation.name, 0) + 1
        if count == 1:
            yield conversation
            continue
        name = f"{conversation.name}#{count}"
        while name in taken:
            count += 1
            name = f"{conversation.name}#{count}"
        seen[conversation.name] = count
        taken.add(name)
        yield Conversation(name, conversation.messages)
