"""Conversations: what was said (`Conversation`), read from files (`read_chats`), kept as token ids (`ChatSession`).

Needs neither torch nor transformers; a session works on whatever tokenizer it is given.
"""

from engine.chats.conversation import Conversation, Message, Turn
from engine.chats.formats import FORMATS, ChatFormatError, builtin_chats, read_chats
from engine.chats.session import ChatSession

__all__ = [
    "FORMATS",
    "ChatFormatError",
    "ChatSession",
    "Conversation",
    "Message",
    "Turn",
    "builtin_chats",
    "read_chats",
]
