"""Conversations as callers give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.core.errors import RequestError

Message = Mapping[str, Any]


def as_chats(messages: object) -> list[Sequence[Message]]:
    """One conversation, or several, as several.

    Raises:
        RequestError: they are neither.
    """
    chats: list[Any] = list(messages) if isinstance(messages, Sequence) else [messages]
    if chats and all(isinstance(message, Mapping) for message in chats):
        chats = [chats]
    if not all(_is_chat(chat) for chat in chats):
        raise RequestError(
            "messages must be a conversation or a list of them: each a list of "
            '{"role": "…", "content": "…"}',
            code="invalid_messages",
        )
    return chats


def _is_chat(chat: object) -> bool:
    if not isinstance(chat, Sequence) or not chat:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in chat
    )
