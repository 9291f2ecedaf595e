"""Messages of a body, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastdecode.openai.body_errors import blaming, refuse
from fastdecode.text.chats import Message, check_content

MAX_MESSAGES: Final = 100_000
_CODE: Final = "invalid_messages"
_TEXT_FIELDS: Final = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
_KNOWN: Final = ("role", "content", *_TEXT_FIELDS, "tool_calls")
_EMPTY_FIELDS: Final = ("function_call", "audio", "annotations")
"""A message may have them, as long as they are null or empty."""


def read_messages(messages: object) -> list[Message]:
    """Return a chat's messages, checked. Raises BodyError."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        refuse("messages", "must be a list with at least one message", _CODE)
    return [_message(each, f"messages[{place}]") for place, each in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(where, "must be an object", _CODE)
    _check_fields(message, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        refuse(f"{where}.role", "must be a string", _CODE)
    if role == "function":
        refuse(f"{where}.role", "'function' is not supported: use 'tool'", "unsupported_field")
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        refuse(f"{where}.tool_calls", "belongs to messages of the assistant", _CODE)
    with blaming(otherwise=f"{where}.content"):
        check_content(message, where, is_strict=True)
    names = ("role", "content", *_TEXT_FIELDS)
    given = {name: message[name] for name in names if message.get(name) is not None}
    plain: dict[str, Any] = {"content": "", **given}
    if role == "tool":
        plain["tool_call_id"] = _call_id(message.get("tool_call_id"), f"{where}.tool_call_id")
    if calls and not isinstance(calls, list):
        refuse(f"{where}.tool_calls", "must be a list", _CODE)
    if calls:
        places = (f"{where}.tool_calls[{place}]" for place in range(len(calls)))
        plain["tool_calls"] = [_call(*each) for each in zip(calls, places, strict=True)]
    return plain


def _check_fields(message: Mapping[str, Any], where: str) -> None:
    for name, value in message.items():
        if name in _EMPTY_FIELDS:
            if value:
                refuse(f"{where}.{name}", "is not supported: leave it out", "unsupported_field")
        elif name not in _KNOWN and value is not None:
            known = ", ".join(_KNOWN)
            refuse(f"{where}.{name}", f"is unknown: a message has {known}", "unknown_field")
    for name in _TEXT_FIELDS:
        if not isinstance(message.get(name), (str, type(None))):
            refuse(f"{where}.{name}", "must be a string", _CODE)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        refuse(where, 'must be an object with a "function"', _CODE)
    if call.get("type") not in ("function", None):
        refuse(f"{where}.type", 'must be "function"', "unsupported_field")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{where}.function.name", "must be a string", _CODE)
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        refuse(f"{where}.function.arguments", "must be a JSON object, as text", _CODE)
    return {
        "id": _call_id(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_id(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(where, "must be a string, the call's id", _CODE)
    return value
