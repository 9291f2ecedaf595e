"""How a chat template writes a conversation: with the next turn begun, with tools, or
with the last message left open, for the answer to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastdecode.core.errors import Given, RequestError
from fastdecode.text.chats import MessageStyle

_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Ends the last message while it is rendered, as in transformers. A template that trims
messages removes its blank."""


@dataclass(frozen=True)
class Rendering:
    """Options of one conversation's text."""

    add_generation_prompt: bool = True
    """End with what begins the assistant's turn."""
    continue_final_message: bool = False
    """End where the last message's text ends."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More names for the template."""
    tools: Sequence[Mapping[str, Any]] = ()
    """That the model may call, as OpenAI's API has them."""
    style: MessageStyle | None = None
    """What the template makes of messages; None: it gets them as they are."""

    @classmethod
    def of(
        cls,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> Rendering:
        """Of a caller's options. ``add_generation_prompt`` None: unless the last message
        is continued. Raises RequestError: both are true."""
        if continue_final_message and add_generation_prompt:
            raise _refusal(" and add_generation_prompt exclude each other: leave one of them out")
        begins_turn = not continue_final_message and add_generation_prompt is not False
        return cls(begins_turn, continue_final_message, variables or {}, tools)

    def continued(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the answer continues; empty if it continues none."""
        content = messages[-1].get("content") if self.continue_final_message and messages else ""
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, Sequence) else ()
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages for the template. Raises RequestError: the last one has no text to
        continue."""
        if not self.continue_final_message:
            return messages
        last = messages[-1] if messages else {}
        return [*messages[:-1], {**last, "content": _marked(last.get("content"))}]

    def cut(self, text: str) -> str:
        """The text of marked messages, up to the mark. Raises RequestError: the template
        has left the last message out."""
        if not self.continue_final_message:
            return text
        place = text.rfind(_MARK.strip())
        if place < 0:
            raise _refusal(": the chat template does not write the last message: give another role")
        is_trimmed = not text.startswith(_MARK, place)
        return text[:place].rstrip() if is_trimmed else text[:place]


def _marked(content: object) -> object:
    if isinstance(content, str):
        return content + _MARK
    parts = list(content) if isinstance(content, Sequence) else []
    for place in reversed(range(len(parts))):
        if isinstance(parts[place], Mapping) and isinstance(parts[place].get("text"), str):
            parts[place] = {**parts[place], "text": parts[place]["text"] + _MARK}
            return parts
    raise _refusal(" needs a last message with text: give its content as a string")


def _refusal(why: str) -> RequestError:
    return RequestError(Given("continue_final_message"), why, code="invalid_messages")
