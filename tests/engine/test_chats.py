"""Chats: what a conversation may look like, and how the files that public conversations come in are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import ClassVar

import pytest

from engine.chats import ChatFormatError, Conversation, Message, Turn, builtin_chats, read_chats


def say(*pairs: str) -> list[dict[str, str]]:
    """Messages from alternating role and content."""
    return [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]


def write(folder: Path, name: str, content: object) -> Path:
    """A file with text as it is, or anything else as JSON."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


class TestConversation:
    def test_turns_pair_what_the_user_said_with_the_reply(self):
        """The last turn often has no reply on record, and that is not a fault."""
        messages = [Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
        conversation = Conversation("x", tuple(messages))
        assert conversation.system == "s"
        assert conversation.turns == (Turn("a", "b"), Turn("c", None))

    def test_runs_of_one_role_become_one_message(self):
        """Templates want one user message a turn, and tool results come several in a row."""
        loose = [Message("user", "a"), Message("user", "b"), Message("assistant", "c"), Message("assistant", "d")]
        assert Conversation.from_messages("x", loose).turns == (Turn("a\n\nb", "c\n\nd"),)

    def test_a_greeting_and_a_late_system_message_are_kept_in_places_that_every_template_takes(self):
        """Nothing that was said may be lost silently."""
        loose = [Message("assistant", "hi"), Message("user", "a"), Message("assistant", "b"), Message("system", "late")]
        conversation = Conversation.from_messages("x", loose)
        assert conversation.system is not None
        assert conversation.system.endswith("hi")
        assert conversation.turns == (Turn("a", "b"), Turn("late", None))

    def test_two_user_messages_in_a_row_are_two_turns_when_built_directly(self):
        """Questions without recorded answers are turns of their own."""
        assert len(Conversation("x", (Message("user", "a"), Message("user", "b"))).turns) == 2

    @pytest.mark.parametrize("roles", [[], ["system"], ["assistant"], ["user", "assistant", "assistant"]])
    def test_other_shapes_are_refused(self, roles):
        """A session relies on the shape."""
        with pytest.raises(ValueError, match="'x'"):
            Conversation("x", tuple(Message(role, "t") for role in roles))

    def test_a_message_with_an_unknown_role_is_refused(self):
        """A typo in a role must not reach a template."""
        with pytest.raises(ValueError, match="'robot' is not one of"):
            Message("robot", "t")

    def test_shortened_keeps_the_first_turns_with_their_replies(self):
        """`--turns` cuts between turns, and keeps the system prompt."""
        messages = [Message("system", "s"), *(Message(role, "t") for role in ("user", "assistant", "user", "user"))]
        conversation = Conversation("x", tuple(messages))
        assert [len(conversation.shortened(n).turns) for n in (1, 2, 3, 9)] == [1, 2, 3, 3]
        assert conversation.shortened(1).messages == conversation.messages[:3]
        with pytest.raises(ValueError, match="at least 1"):
            conversation.shortened(0)


class TestBuiltin:
    def test_there_are_six_of_four_to_six_turns_under_two_system_prompts(self):
        """The demo shows sharing inside a chat and between chats."""
        chats = builtin_chats()
        assert len(chats) >= 6
        assert all(4 <= len(chat.turns) <= 6 for chat in chats)
        assert all(turn.assistant for chat in chats for turn in chat.turns)
        assert len({chat.system for chat in chats}) == 2
        assert len({chat.name for chat in chats}) == len(chats)


class TestShapesOfFiles:
    CHAT = say("system", "s", "user", "a", "assistant", "b")
    OTHER = say("user", "c")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("list.json", [CHAT, OTHER]),
            ("objects.json", [{"messages": CHAT}, {"messages": OTHER}]),
            ("lines.jsonl", "\n".join(json.dumps(chat) for chat in (CHAT, OTHER))),
            ("objects.jsonl", "\n\n".join(json.dumps({"messages": chat}) for chat in (CHAT, OTHER)) + "\n"),
            ("lines.txt", "\n".join(json.dumps(chat) for chat in (CHAT, OTHER))),
        ],
    )
    def test_openai_chats_load_from_lists_objects_and_lines(self, tmp_path, name, content):
        """The same two conversations, however they are wrapped."""
        path = write(tmp_path, name, content)
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        for each in (path, packed):
            chats = read_chats(each)
            assert [chat.turns for chat in chats] == [(Turn("a", "b"),), (Turn("c"),)]
            assert chats[0].system == "s"
        assert read_chats(path, "openai") == read_chats(path)

    @pytest.mark.parametrize("wrap", [lambda chat: chat, lambda chat: {"messages": chat}])
    def test_a_single_conversation_loads_from_a_list_of_messages_or_an_object(self, tmp_path, wrap):
        """The smallest file that people try first."""
        (chat,) = read_chats(write(tmp_path, "mine.json", wrap(self.CHAT)))
        assert chat.name == "mine"
        assert chat.turns == (Turn("a", "b"),)

    def test_messages_one_a_line_are_one_conversation(self, tmp_path):
        """A log of a chat is often written message by message."""
        (chat,) = read_chats(write(tmp_path, "log.jsonl", "\n".join(map(json.dumps, self.CHAT))))
        assert chat.turns == (Turn("a", "b"),)

    def test_names_come_from_the_file_and_are_made_distinct(self, tmp_path):
        """A row of the report must say which conversation it is."""
        records = [{"id": "x", "messages": self.OTHER}, {"id": "x", "messages": self.OTHER}, {"messages": self.OTHER}]
        assert [chat.name for chat in read_chats(write(tmp_path, "f.json", records))] == ["x", "x#2", "f-3"]

    def test_a_byte_order_mark_and_unusual_line_separators_in_strings_do_no_harm(self, tmp_path):
        """U+2028 is a line end to Python's splitlines, but not to JSON lines."""
        path = tmp_path / "f.jsonl"
        line = json.dumps(say("user", "a\u2028b"), ensure_ascii=False)
        path.write_text("\ufeff" + line + "\n" + line, encoding="utf-8")
        assert [chat.turns[0].user for chat in read_chats(path)] == ["a\u2028b"] * 2


class TestMessages:
    def read(self, tmp_path: Path, *messages: dict) -> Conversation:
        (chat,) = read_chats(write(tmp_path, "f.json", list(messages)))
        return chat

    def test_content_may_be_null_or_text_parts(self, tmp_path):
        """Both are in OpenAI's format."""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat = self.read(tmp_path, {"role": "user", "content": parts}, {"role": "assistant", "content": None})
        assert chat.turns == (Turn("ab", ""),)

    def test_tool_calls_and_results_become_text(self, tmp_path):
        """Few templates take tool roles; the text is the one that the definitions of the data sets give."""
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}
        chat = self.read(
            tmp_path,
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "function", "name": "old", "content": "x"},
            {"role": "tool", "content": "y"},
        )
        assert chat.turns == (
            Turn("go", '\n[["find", "{\\"q\\": \\"é\\"}"]]'),
            Turn("Result of find:\nfound\n\nResult of old:\nx\n\nTool result:\ny"),
        )

    def test_half_a_surrogate_pair_becomes_the_replacement_character(self, tmp_path):
        """JSON can hold it, but no tokenizer takes it."""
        path = write(tmp_path, "f.json", '[{"role": "user", "content": "a\\ud83d \\ud83d\\ude00"}]')
        assert read_chats(path)[0].turns[0].user == "a\ufffd \U0001f600"


class TestOtherFormats:
    TREE: ClassVar = {
        "message_tree_id": "0123456789",
        "prompt": {
            "role": "prompter",
            "text": "q",
            "replies": [
                {"role": "assistant", "text": "a", "rank": 1, "replies": []},
                {
                    "role": "assistant",
                    "text": "b",
                    "rank": 0,
                    "replies": [
                        {"role": "prompter", "text": "r", "replies": []},
                        {"role": "prompter", "text": "gone", "deleted": True, "replies": []},
                    ],
                },
            ],
        },
    }

    def test_every_path_of_a_message_tree_is_a_conversation(self, tmp_path):
        """Siblings share their prefix, so the paths together are a prefix tree."""
        chats = read_chats(write(tmp_path, "trees.jsonl", self.TREE))
        assert [(chat.name, chat.turns) for chat in chats] == [
            ("01234567/0", (Turn("q", "a"),)),
            ("01234567/1.0", (Turn("q", "b"), Turn("r"))),
        ]

    def test_the_best_path_of_a_message_tree_follows_the_lowest_rank(self, tmp_path):
        """One thread a tree, for those who want conversations and not a tree."""
        (chat,) = read_chats(write(tmp_path, "trees.jsonl", self.TREE), "oasst-best")
        assert chat.name == "01234567/1.0"

    def test_a_file_of_deleted_trees_is_refused(self, tmp_path):
        """An empty result would look like success."""
        tree = {"prompt": {"role": "prompter", "text": "q", "deleted": True, "replies": []}}
        with pytest.raises(ChatFormatError, match="holds no conversation"):
            read_chats(write(tmp_path, "trees.jsonl", tree))

    def test_mt_bench_questions_are_turns_of_their_own(self, tmp_path):
        """They come without replies and must not be merged into one turn."""
        path = write(tmp_path, "q.jsonl", {"question_id": 7, "category": "c", "turns": ["a", "b"]})
        (chat,) = read_chats(path)
        assert (chat.name, chat.turns) == ("mt-bench-7", (Turn("a"), Turn("b")))

    def test_mt_bench_answers_join_their_questions_given_or_found_beside_them(self, tmp_path):
        """Answers hold no questions; both files together are conversations."""
        questions = [{"question_id": i, "turns": ["a", "b"]} for i in (7, 8)]
        question_file = write(tmp_path, "question.jsonl", "\n".join(map(json.dumps, questions)))
        folder = tmp_path / "reference_answer"
        folder.mkdir()
        answer_file = write(folder, "gpt.jsonl", {"question_id": 8, "choices": [{"index": 0, "turns": ["x", "y"]}]})
        joined = (Turn("a", "x"), Turn("b", "y"))
        assert [chat.turns for chat in read_chats([question_file, answer_file])] == [(Turn("a"), Turn("b")), joined]
        assert [(chat.name, chat.turns) for chat in read_chats(answer_file)] == [("mt-bench-8", joined)]

    def test_mt_bench_answers_without_questions_say_what_is_missing(self, tmp_path):
        """The other file is needed, and the message says so."""
        path = write(tmp_path, "gpt.jsonl", {"question_id": 8, "choices": [{"turns": ["x"]}]})
        with pytest.raises(ChatFormatError, match=r"gpt\.jsonl:1: .*give the file of questions as well"):
            read_chats(path)

    def test_agent_trajectories_load(self, tmp_path):
        """Both carry OpenAI messages under a key of their own."""
        tau = write(tmp_path, "tau.json", [{"task_id": 3, "trial": 1, "traj": say("user", "a", "assistant", "b")}])
        swe = write(tmp_path, "s.traj", {"trajectory": [], "history": say("user", "a", "assistant", "b")})
        assert [(chat.name, chat.turns) for chat in read_chats([tau, swe])] == [
            ("task-3-trial-1", (Turn("a", "b"),)),
            ("s", (Turn("a", "b"),)),
        ]


class TestBadFiles:
    """Each error names the file, the line where there is one, and the reason."""

    @pytest.mark.parametrize(
        ("name", "content", "line", "reason"),
        [
            ("f.json", "", None, "empty"),
            ("f.json", "[]", 1, "no conversations"),
            ("f.json", '[\n{"role": "user",\n}]', 3, "not valid JSON"),
            ("f.json", "hello", 1, "not valid JSON"),
            ("f.json", "3", 1, "expected an object or a list of messages, not a number"),
            ("f.json", '{"a": 1}', 1, "unknown chat format.*'a'"),
            ("f.json", '[[{"role": "user", "content": "a"}],\n\n [{"role": "user", "content": 3}]]', 3, "a number"),
            ("f.json", '{"messages": []}', 1, "no messages"),
            ("f.json", '{"messages": 3}', 1, "'messages' must be a list"),
            ("f.json", '{"messages": [3]}', 1, "message 1: expected an object"),
            ("f.json", '[{"role": "robot", "content": "a"}]', 1, "role 'robot'"),
            ("f.json", '[{"role": "system", "content": "a"}]', 1, "no user message"),
            ("f.json", '[{"role": "user", "content": [{"type": "image_url"}]}]', 1, "'image_url' is not text"),
            ("f.json", '[{"role": "user", "content": "a", "tool_calls": [{}]}]', 1, "function with a name"),
            ("f.json", "[" * 100_000, 1, "nested too deeply|not valid JSON"),
            ("f.jsonl", '[{"role": "user", "content": "a"}]\n\n[{"role"', 3, "not valid JSON"),
            ("f.jsonl", '{"role"\n[]', 1, "not valid JSON"),
            ("f.jsonl", '{"messages": [{"role": "user"}]}\n{"messages": 1}', 2, "must be a list"),
            ("f.json", '{"question_id": 1, "turns": []}', 1, "at least one string"),
            ("f.json", '{"question_id": 1, "choices": []}', 1, "choices is empty"),
            ("f.jsonl", '{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["a"]}', 2, "given before"),
            ("f.json", '{"prompt": {"role": "prompter", "replies": []}}', 1, "'text'"),
            ("f.json", '{"prompt": {"role": "prompter", "text": "a", "replies": [1]}}', 1, "list of messages"),
            ("f.json", '{"traj": null}', 1, "'traj' must be a list, not null"),
        ],
    )
    def test_malformed_content_is_refused_with_its_line(self, tmp_path, name, content, line, reason):
        """A person with a long file needs to know where to look."""
        path = write(tmp_path, name, content)
        with pytest.raises(ChatFormatError, match=reason) as caught:
            read_chats(path)
        assert caught.value.path == str(path)
        assert caught.value.line == line
        assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
        assert isinstance(caught.value, ValueError)

    def test_a_file_that_is_missing_or_a_folder_cannot_be_read(self, tmp_path):
        """One class of error for all that is wrong with a file."""
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(ChatFormatError, match="cannot be read"):
                read_chats(path)

    def test_bytes_that_are_no_text_and_a_cut_gzip_file_are_refused(self, tmp_path):
        """A cut download must not load in part."""
        path = tmp_path / "f.jsonl"
        path.write_bytes(b"\n\xff\xfe")
        with pytest.raises(ChatFormatError, match=":2: is not UTF-8"):
            read_chats(path)
        path.write_bytes(gzip.compress(b'[{"role": "user", "content": "abc"}]')[:-9])
        with pytest.raises(ChatFormatError, match="cannot be decompressed"):
            read_chats(path)

    def test_an_unknown_format_is_refused_by_name(self, tmp_path):
        """The message lists what is allowed."""
        with pytest.raises(ValueError, match="'xml' is not one of auto, openai"):
            read_chats(tmp_path / "f", "xml")

    def test_a_named_format_is_not_guessed_around(self, tmp_path):
        """Who says tau-bench wants to hear that it is something else."""
        path = write(tmp_path, "f.json", [say("user", "a")])
        with pytest.raises(ChatFormatError, match="expected an object with 'traj'"):
            read_chats(path, "tau-bench")


class TestSharedData:
    """The public data sets load whole, with the counts that their description gives."""

    @pytest.mark.parametrize(
        ("name", "num_conversations", "num_recorded"),
        [
            ("chat/mt_bench_question.jsonl", 80, 0),
            ("chat/mt_bench_reference_gpt-4.jsonl", 30, 60),
            ("agent/tau_bench_gpt-4o-airline.json.gz", 200, 2454),
            ("agent/swe_agent/marshmallow-1867__function_calling.traj.gz", 1, 11),
            ("agent/swe_agent/marshmallow-1867__function_calling_replace.traj.gz", 1, 11),
            ("agent/swe_agent/marshmallow-1867__function_calling_replace_from_source.traj.gz", 1, 13),
            ("agent/swe_agent/pydicom-1458__default.traj.gz", 1, 12),
        ],
    )
    def test_it_loads(self, shared_data, name, num_conversations, num_recorded):
        """2,454 is the number of assistant messages that the trajectories hold; none is lost or merged."""
        chats = read_chats(shared_data / name)
        assert len(chats) == num_conversations
        assert sum(turn.assistant is not None for chat in chats for turn in chat.turns) == num_recorded

    def test_the_message_trees_load_as_all_their_paths(self, shared_data):
        """As many conversations as there are messages without a reply, under 100 prompts."""
        path = shared_data / "chat/oasst_en_100_tree.jsonl.gz"
        num_leaves = 0
        lines = gzip.decompress(path.read_bytes()).decode().strip().split("\n")
        stack = [json.loads(line)["prompt"] for line in lines]
        while stack:
            message = stack.pop()
            num_leaves += not message["replies"]
            stack.extend(message["replies"])
        chats = read_chats(path)
        assert len(chats) == num_leaves
        assert len({chat.turns[0].user for chat in chats}) <= 100
        assert len(read_chats(path, "oasst-best")) == 100
