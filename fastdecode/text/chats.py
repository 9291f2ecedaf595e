"""Conversations as callers give them."""

from __future__ import annotations

import json
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


def with_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of their calls as objects, which templates expect;
    callers may give them as JSON text, as OpenAI's API does."""
    return [
        {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}


def arguments_of(said: object) -> object:
    """A call's arguments: an object, also where they are its JSON text. A model may
    have written text that is no object: that stays."""
    if not isinstance(said, (str, type(None))):
        return said
    try:
        arguments = json.loads(said or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else said


def _is_chat(chat: object) -> bool:
    if not isinstance(chat, Sequence) or not chat:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in chat
    )
