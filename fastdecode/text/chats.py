"""Conversations as callers give them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastdecode.core.errors import Given, RequestError

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
        where = "messages" if is_one else f"messages[{place}]"
        _check_calls(chat, where)
        _check_parts(chat, where)
    return chats


def _check_parts(chat: Sequence[Message], where: str) -> None:
    for place, message in enumerate(chat):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind.startswith(_NO_TEXT):
                raise RequestError(
                    f"{where}[{place}].content has a part of type {kind!r:.80}, which is not "
                    "supported: only text is",
                    code="unsupported_field",
                )


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


@dataclass(frozen=True)
class MessageStyle:
    """Which messages a chat template takes."""

    id_chars: int = 0
    """Ids of calls have this many characters; 0: any number."""
    content: Literal["string", "openai", "either"] = "string"
    """Contents are texts, lists of parts, or either."""
    has_developer: bool = False
    """It knows the role ``developer``; else such messages are of ``system``."""

    @classmethod
    def of(cls, source: str, id_chars: int, content_format: str = "auto") -> MessageStyle:
        """Of a template's source. ``content_format``: one of ``CONTENT_FORMATS``, as in
        vLLM. Raises RequestError: it is another."""
        if content_format not in CONTENT_FORMATS:
            raise RequestError(
                Given("chat_template_content_format", content_format),
                f" is none of {', '.join(CONTENT_FORMATS)}",
                code="invalid_argument",
            )
        content: Any = content_format
        if content_format == "auto":
            content = "either" if _TAKES_TEXT in source else "openai"
            content = content if _PARTS.search(source) else "string"
        return cls(id_chars, content, "developer" in source)


CONTENT_FORMATS: Final = ("auto", "string", "openai")
CONTENT_FORMAT_HELP: Final = (
    "what the chat template takes as a message's content: a string, or OpenAI's list of parts; "
    "auto: as it is written"
)
_PARTS: Final = re.compile(
    r"for\s+\w+\s+in\s+(?:content\b|\w+\.content\b|\w+\[['\"]content['\"]\])"
)
"""A template's loop over the parts of a message."""
_NO_TEXT: Final = ("image", "input_image", "audio", "input_audio", "video", "file")
"""What types of parts that are no text begin with."""
_TAKES_TEXT: Final = "is string"
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning. Templates read the first or the last."""


def for_template(messages: Sequence[Message], style: MessageStyle) -> list[Message]:
    """Messages as a template takes them. The arguments of calls are objects, where callers
    give JSON text as OpenAI's API does. Ids of calls that are too long lose their
    beginning."""
    return [_message(message, style) for message in messages]


def _message(message: Message, style: MessageStyle) -> Message:
    made = {name: value for name, value in message.items() if value not in (None, [])}
    content, refused = made.get("content") or "", made.pop("refusal", "")
    made["content"] = _content(content or refused, style)
    reasoning = next((made[name] for name in _REASONING if made.get(name) is not None), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    if made["role"] == "developer" and not style.has_developer:
        made["role"] = "system"
    if made.get("tool_calls"):
        made["tool_calls"] = [_call(call, style.id_chars) for call in made["tool_calls"]]
    _shorten(made, "tool_call_id", style.id_chars)
    return made


def _content(content: object, style: MessageStyle) -> object:
    """Texts of several parts stand on lines of their own, where the template takes a text.
    Refusals are texts. Other parts stay as they are."""
    if style.content == "openai" and isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        content = [_as_text(part) for part in content]
    if style.content != "string" or isinstance(content, str) or not isinstance(content, Sequence):
        return content
    texts = [_text_of(part) for part in content]
    return content if None in texts else "\n".join(map(str, texts))


def _as_text(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _text_of(part: object) -> str | None:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


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
        arguments = json.loads((said or "").strip() or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else said


def with_object_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the arguments of every call are an object. Others, which a
    model wrote or a client changed, become its only value, ``arguments``."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function.get("arguments")}}}


def _is_chat(chat: object) -> bool:
    if not isinstance(chat, Sequence) or not chat:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in chat
    )
