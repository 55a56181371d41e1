"""What was said in a chat, as plain values: messages, turns, conversations.

Knows nothing about files (`formats.py`), tokens (`session.py`) or models. A `Conversation` has the one shape that every
chat template takes once each turn has its reply: an optional system message, then turns, each a user message and at
most one reply. `Conversation.from_messages` brings looser lists (tool results, several messages in a row) into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: `role` is "system", "user" or "assistant"; `content` is text and may be empty."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise TypeError(f"content must be a string, not {type(self.content).__name__}")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said, and the reply on record (None where the record has none)."""

    user: str
    assistant: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A named chat: an optional system message, then turns: a user message, then the reply if one is on record.

    Two user messages in a row are two turns, the first without a recorded reply. Raises ValueError when the messages
    do not have that shape.
    """

    name: str
    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        spoken = self.messages[1:] if self.messages and self.messages[0].role == "system" else self.messages
        if not spoken:
            raise ValueError(f"conversation {self.name!r} has no user message")
        before = "system"
        for i, message in enumerate(spoken):
            if message.role == "system" or (message.role == "assistant" and before != "user"):
                raise ValueError(
                    f"conversation {self.name!r}: message {i + 1} after the system prompt is {message.role!r} and "
                    f"follows {before!r}; allowed are user messages, each followed by at most one assistant message"
                )
            before = message.role

    @classmethod
    def from_messages(cls, name: str, messages: Iterable[Message]) -> Conversation:
        """The conversation that a loose list of messages amounts to.

        Neighbours of one role become one message, joined by an empty line (a run of user and tool messages is one
        turn). System messages before anything is said form the system prompt; later ones are said on the user's side.
        A greeting by the assistant before the first user message goes to the end of the system prompt, marked as such:
        most templates refuse a chat that starts with the assistant. Raises ValueError if there is no user message.
        """
        system: list[str] = []
        merged: list[tuple[str, list[str]]] = []
        for message in messages:
            role = message.role
            if not merged and role == "system":
                system.append(message.content)
                continue
            if not merged and role == "assistant":
                system.append(f"Your opening message, already sent:\n{message.content}")
                continue
            if role == "system":
                role = "user"
            if merged and merged[-1][0] == role:
                merged[-1][1].append(message.content)
            else:
                merged.append((role, [message.content]))
        result = [Message(role, "\n\n".join(parts)) for role, parts in merged]
        if system:
            result.insert(0, Message("system", "\n\n".join(system)))
        return cls(name, tuple(result))

    @property
    def system(self) -> str | None:
        """The system prompt, or None."""
        return self.messages[0].content if self.messages[0].role == "system" else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Each user message with the reply recorded after it."""
        turns: list[Turn] = []
        for message in self.messages:
            if message.role == "user":
                turns.append(Turn(message.content))
            elif message.role == "assistant":
                turns[-1] = Turn(turns[-1].user, message.content)
        return tuple(turns)

    def shortened(self, num_turns: int) -> Conversation:
        """This conversation's first `num_turns` turns (all of it, if it has no more)."""
        if num_turns < 1:
            raise ValueError(f"num_turns must be at least 1, not {num_turns}")
        kept: list[Message] = []
        num_seen = 0
        for message in self.messages:
            num_seen += message.role == "user"
            if num_seen > num_turns:
                break
            kept.append(message)
        return Conversation(self.name, tuple(kept))
