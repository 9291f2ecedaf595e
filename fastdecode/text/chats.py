"""Conversations as chat templates take them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.sequence import Prompt

Message: TypeAlias = Mapping[str, Any]
Probe: TypeAlias = Callable[..., str | None]
"""Returns the text of messages, perhaps with tools; None if the chat template refuses them."""


@dataclass(frozen=True)
class MessageStyle:
    """What a chat template makes of messages, found out by rendering some. Instructions are those
    of ``system`` and ``developer``."""

    id_chars: int = 0  # of a call; 0 allows any number
    parts: frozenset[str] = frozenset()
    """Roles whose contents are lists of parts; those of others are texts."""
    joint: str = "\n"  # between the texts of several parts
    has_developer: bool = False  # else messages of ``developer`` become those of ``system``
    joins_system: bool = False  # several instructions at the beginning become one
    folds: Literal["none", "late", "all"] = "none"
    """Which instructions it leaves out: their texts begin the next user message."""
    lost: frozenset[str] = frozenset()  # roles whose messages it leaves out

    @classmethod
    def of(cls, probe: Probe, id_chars: int = 0, content_format: str = "auto") -> MessageStyle:
        """Return a template's style. Raises RequestError: If ``content_format`` is unknown."""
        if content_format not in CONTENT_FORMATS:
            given, known = Given("chat_template_content_format", content_format), CONTENT_FORMATS
            raise RequestError(given, f" is none of {', '.join(known)}", code="invalid_argument")
        probes = _Probes(probe, content_format)
        lost = {role for role in _PROBES if not probes.writes(role)}
        has_developer = "developer" not in lost and probes.knows_developer()
        instructing = [_PROBES[role][0] for role in _INSTRUCTING[: 1 + has_developer]]
        first = {"role": "system", "content": _OTHER}
        takes_two = all(probes.find(first, each, USER) for each in instructing)
        late = [probes.find(USER, ASSISTANT, each, USER) for each in instructing]
        return cls(
            id_chars,
            frozenset(probes.parts),
            probes.joint(),
            has_developer,
            joins_system=not takes_two,
            folds="all" if "system" in lost else "late" if False in late else "none",
            lost=frozenset(lost.difference(_INSTRUCTING)),
        )


ROLES: Final = ("system", "developer", "user", "assistant", "tool")
CONTENT_FORMATS: Final = ("auto", "string", "openai")
MARK: Final = "8264071935"
_OTHER: Final = "5917360428"
"""Digits, which no template writes in another case."""
_STRANGER: Final = "stranger"
USER: Final = {"role": "user", "content": "Hello"}
ASSISTANT: Final = {"role": "assistant", "content": "Hi"}
_INSTRUCTING: Final = ("system", "developer")
_FUNCTION: Final = {"name": "f", "arguments": {"a": "b"}}
_CALL: Final = {"id": "abcdefghi", "type": "function", "function": _FUNCTION}
_SCHEMA: Final = {"type": "object", "properties": {}}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": _SCHEMA},
}
_PROBES: Final[Mapping[str, Sequence[Message]]] = {
    "user": ({"role": "user", "content": MARK},),
    "assistant": (USER, {"role": "assistant", "content": MARK}, USER),
    "tool": (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": _CALL["id"], "content": MARK},
    ),
    "system": ({"role": "system", "content": MARK}, USER),
    "developer": ({"role": "developer", "content": MARK}, USER),
}
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Ends the last message while it is rendered, as in transformers. Trimming removes its blank."""
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning. Templates read the first or the last."""
_MAY_BE_EMPTY: Final = ("assistant", "tool")
_NO_TEXT: Final = ("image", "input_image", "audio", "input_audio", "video", "file")
"""Types of parts other than text begin with one of these."""


class _Probes:
    def __init__(self, probe: Probe, content_format: str) -> None:
        self._probe = probe
        self._is_auto = content_format == "auto"
        self.parts = set(ROLES) if content_format == "openai" else set()
        """Roles that need parts, as far as they are known."""

    def writes(self, role: str) -> bool:
        """Return False if the template leaves out messages of this role, as texts and as parts."""
        found = self.find(*_PROBES[role])
        if self._is_auto and not found:
            self.parts.add(role)
            if self.find(*_PROBES[role]):
                return True
            self.parts.remove(role)
        return found is not False

    def find(self, *messages: Message) -> bool | None:
        """Return True if all marks come out, or None if the template refuses the messages."""
        marks = [each for each in (MARK, _OTHER) if any(each == m["content"] for m in messages)]
        texts = self._text(messages), self._text(messages, _TOOL)
        said = [text for text in texts if text is not None]
        return any(all(mark in text for mark in marks) for text in said) if said else None

    def joint(self) -> str:
        """Return what the template writes between parts, where it takes a text as well."""
        parts = [{"type": "text", "text": text} for text in (MARK, _OTHER)]
        text = self._probe([{"role": "user", "content": parts}])
        if text is not None and MARK in text and "user" not in self.parts:
            between = text.partition(MARK)[2].partition(_OTHER)[0]
            whole = {"role": "user", "content": MARK + between + _OTHER}
            if self._probe([whole]) == text:
                return between
        return "\n"

    def knows_developer(self) -> bool:
        """Return whether developers' messages come out, and not as any role's would."""
        roles = "developer", _STRANGER
        texts = (self._text([{"role": each, "content": MARK}, USER]) for each in roles)
        known, other = (text or "" for text in texts)
        return MARK in known and other.replace(_STRANGER, "developer") != known

    def _text(self, messages: Sequence[Message], *tools: Mapping[str, Any]) -> str | None:
        style = MessageStyle(parts=frozenset(self.parts))
        made = [{**m, "content": _content(m["content"], style, m["role"])} for m in messages]
        return self._probe(made, tools)


def check_content(message: Message, where: str, *, is_strict: bool) -> None:
    """Check that a message's content is text. As in OpenAI's API, only messages of the assistant
    and of tools may have none. Unless ``is_strict``, there may be parts that only a template
    knows. Raises RequestError: If the content is anything else."""
    content, name = message.get("content"), f"{where}.content"
    is_list = isinstance(content, (list, tuple))
    is_empty = content is None or (is_list and not content)
    if isinstance(content, str) or (is_empty and message["role"] in _MAY_BE_EMPTY):
        return
    if not is_list or is_empty:
        why = f"{name} must be a string, or a list of parts"
        raise RequestError(why, code="invalid_messages")
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind in ("text", "refusal")
        if str(kind).startswith(_NO_TEXT) or (is_strict and not is_text):
            why = f"{name} has a part of type {kind!r:.80}, which is not supported: only text is"
            raise RequestError(why, code="unsupported_field")
        if isinstance(part, Mapping):
            part = part.get(kind) if is_text else part.get("text", "")
        if not isinstance(part, str):
            why = f'{name} has a part without text: each is {{"type": "text", "text": "…"}}'
            raise RequestError(why, code="invalid_messages")


def for_template(messages: Sequence[Message], style: MessageStyle) -> list[Message]:
    """Return messages as a template takes them. Arguments of calls become objects. Ids that are
    too long lose their beginning. Instructions are joined, or begin the next user message."""
    leading: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    for each in (_message(message, style) for message in messages):
        is_instruction = each["role"] in _INSTRUCTING
        if is_instruction and (style.folds == "all" or (style.folds == "late" and made)):
            waiting.append(each)
        elif is_instruction and not made:
            leading.append(each)
        elif each["role"] == "user" and waiting:
            made.append({**each, "content": _joined([*waiting, each])})
            waiting = []
        else:
            made.append(each)
    if style.joins_system and leading:
        leading = [{**leading[0], "content": _joined(leading)}]
    if waiting:
        made.append({"role": "user", "content": _joined(waiting)})
    made = leading + made
    return [{**each, "content": _content(each["content"], style, each["role"])} for each in made]


def _joined(messages: Sequence[Message]) -> object:
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [part for content in contents for part in _as_parts(content)]


def _message(message: Message, style: MessageStyle) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value not in (None, [])}
    refusal = made.pop("refusal", "")
    made["content"] = made.get("content") or refusal
    reasoning = next((made[name] for name in _REASONING if name in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    if made["role"] == "developer" and not style.has_developer:
        made["role"] = "system"
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, style.id_chars) for call in made["tool_calls"]]
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = made["tool_call_id"][-style.id_chars :]
    return made


def _as_parts(content: Any) -> list[Any]:
    is_list = isinstance(content, Sequence) and not isinstance(content, str)
    return list(content) if is_list else [{"type": "text", "text": content}]


def _content(content: object, style: MessageStyle, role: str) -> object:
    """Return a content as the template takes it. A refusal is a text."""
    if isinstance(content, str):
        return _as_parts(content) if role in style.parts else content
    if not isinstance(content, Sequence):
        return content
    parts: list[Any] = list(content)
    texts: list[Any] = []
    for place, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == "refusal":
            part = parts[place] = {"type": "text", "text": part.get("refusal")}
        texts.append(part.get("text") if isinstance(part, Mapping) else part)
    if role in style.parts or not all(isinstance(text, str) for text in texts):
        return parts
    return style.joint.join(texts)


def _call(call: Mapping[str, Any], id_chars: int) -> dict[str, Any]:
    """Return a call with its arguments as an object; as they are, if they are other text."""
    made = dict(call)
    if isinstance(function := made.get("function"), Mapping):
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                loaded = json.loads((arguments or "").strip() or "{}")
                arguments = loaded if isinstance(loaded, dict) else arguments
        made["function"] = {**function, "arguments": arguments}
    if isinstance(made.get("id"), str):
        made["id"] = made["id"][-id_chars:]
    return made


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have objects. Other text becomes the value of ``arguments``."""
    made = []
    for message in messages:
        calls = [dict(call) for call in message.get("tool_calls") or ()]
        for call in calls:
            function = call.get("function")
            if isinstance(function, Mapping):
                arguments = function.get("arguments")
                if not isinstance(arguments, Mapping):
                    call["function"] = {**function, "arguments": {"arguments": arguments}}
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


@dataclass(frozen=True)
class Rendering:
    """How a chat template writes a conversation."""

    add_generation_prompt: bool = True  # end with what begins the assistant's turn
    continue_final_message: bool = False  # end where the last message's text ends
    variables: Mapping[str, Any] = field(default_factory=dict)  # more names for the template
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, as OpenAI's API has them."""
    style: MessageStyle | None = None
    """What the template makes of messages. None to give them as they are."""

    @classmethod
    def of(
        cls,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> Rendering:
        """Return a caller's options. ``add_generation_prompt`` None: unless the last message is
        continued. Raises RequestError: If both are true."""
        if continue_final_message and add_generation_prompt:
            raise _refusal(" and add_generation_prompt exclude each other: leave one of them out")
        begins_turn = not continue_final_message and add_generation_prompt is not False
        return cls(begins_turn, continue_final_message, variables or {}, tools)

    def continued(self, messages: Sequence[Message]) -> str:
        """Return the text that the answer continues. It is empty if it continues none."""
        content = messages[-1].get("content") if self.continue_final_message and messages else ""
        parts = _as_parts(content or "")
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))

    def marked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages for the template. Raises RequestError: If the last one has no text."""
        if not self.continue_final_message:
            return messages
        last = messages[-1] if messages else {}
        content = last.get("content")
        if isinstance(content, str):
            return [*messages[:-1], {**last, "content": content + _CONTINUED}]
        parts = list(content) if isinstance(content, Sequence) else []
        for place, part in reversed(list(enumerate(parts))):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts[place] = {**part, "text": part["text"] + _CONTINUED}
                return [*messages[:-1], {**last, "content": parts}]
        raise _refusal(" needs a last message with text: give its content as a string")

    def cut(self, text: str) -> str:
        """Return the text of marked messages, up to the mark. Raises RequestError: If it's lost."""
        if not self.continue_final_message:
            return text
        place = text.rfind(_CONTINUED.strip())
        if place < 0:
            raise _refusal(": the chat template does not write the last message: give another role")
        is_trimmed = not text.startswith(_CONTINUED, place)
        return text[:place].rstrip() if is_trimmed else text[:place]


def _refusal(why: str) -> RequestError:
    return RequestError(Given("continue_final_message"), why, code="invalid_messages")


PLAIN: Final = Rendering()


@dataclass(frozen=True)
class Chat:
    """A conversation, to become a prompt by the model's chat template."""

    messages: Sequence[Message]
    how: Rendering = PLAIN


PromptOrChat: TypeAlias = "Prompt | Chat"
