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
        RequestError: they are neither, or a message's calls are no list of objects.
    """
    chats: list[Any] = list(messages) if isinstance(messages, Sequence) else [messages]
    is_one = bool(chats) and all(isinstance(message, Mapping) for message in chats)
    if is_one:
        chats = [chats]
    if not all(_is_chat(chat) for chat in chats):
        raise RequestError(
            "messages must be a conversation or a list of them: each a list of "
            '{"role": "…", "content": "…"}',
            code="invalid_messages",
        )
    for place, chat in enumerate(chats):
        _check_calls(chat, "messages" if is_one else f"messages[{place}]")
    return chats


def _check_calls(chat: Sequence[Message], where: str) -> None:
    for place, message in enumerate(chat):
        calls = message.get("tool_calls") or []
        is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
        if not is_list or not all(isinstance(call, Mapping) for call in calls):
            raise RequestError(
                f"{where}[{place}].tool_calls must be a list of calls, each "
                '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "…"}}',
                code="invalid_messages",
            )


def for_template(messages: Sequence[Message], id_chars: int) -> list[Message]:
    """Messages as templates take them: the arguments of calls are objects, where callers
    give JSON text as OpenAI's API does, and ids of calls are short enough.

    Args:
        id_chars: the template takes ids of calls of so many characters: longer ones
            lose their beginning; 0: of any number.
    """
    return [_message(message, id_chars) for message in messages]


def _message(message: Message, id_chars: int) -> Message:
    if not message.get("tool_calls") and message.get("tool_call_id") is None:
        return message
    made = dict(message)
    if made.get("tool_calls"):
        made["tool_calls"] = [_call(call, id_chars) for call in made["tool_calls"]]
    _shorten(made, "tool_call_id", id_chars)
    return made


def _call(call: Mapping[str, Any], id_chars: int) -> dict[str, Any]:
    made = dict(call)
    function = made.get("function")
    if isinstance(function, Mapping):
        arguments = _arguments_of(function.get("arguments"))
        made["function"] = {**function, "arguments": arguments}
    _shorten(made, "id", id_chars)
    return made


def _shorten(made: dict[str, Any], name: str, id_chars: int) -> None:
    if isinstance(made.get(name), str):
        made[name] = made[name][-id_chars:]


def _arguments_of(said: object) -> object:
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
