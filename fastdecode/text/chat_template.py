"""Chat templates: a conversation to the text that a model was trained to continue.

A template is a Jinja program that comes with the model. It runs in a child process. It is looked
for where ``transformers`` looks: ``chat_template.jinja``, then ``chat_template`` in
``tokenizer_config.json`` (a string, or several by name, of which "default" counts, and "tool_use"
for conversations with tools).
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fastdecode.core.errors import (
    CheckpointError,
    ConfigError,
    Given,
    MissingExtraError,
    RequestError,
)
from fastdecode.core.json_file import Refuse, read_bytes
from fastdecode.core.model.files import read_model_json
from fastdecode.text.chats import (
    MARK,
    PLAIN,
    ROLES,
    USER,
    Message,
    Rendering,
    for_template,
    with_objects,
)
from fastdecode.text.child import ChildDiedError, ChildFailedError, LimitedChild, Limits
from fastdecode.text.tokenizer_files import SPECIAL_TOKENS, TokenizerFiles

logger = logging.getLogger(__name__)
MAX_TEMPLATE_BYTES = 1 << 20
LIMITS = Limits(memory_bytes=1 << 30, cpu_s=10, open_cpu_s=10)
# What a template is given anyway, under these names.
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
    *SPECIAL_TOKENS,
)
_MAX_KNOWN_ROLES: Final = 64
_PROBED_AT: Final = datetime(2000, 1, 1)


class ChatTemplate:
    """A template, ready to render in a child process. ``origin`` is for the log and for errors at
    the start. ``tool_source`` is the program for conversations with tools; None for the same one.
    Raises CheckpointError: If the source isn't a Jinja program, or hits a limit on a word.
    MissingExtraError: If the package jinja2 isn't installed."""

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        limits: Limits = LIMITS,
        tool_source: str | None = None,
    ) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise MissingExtraError("jinja2", "sworker", "a chat template")
        self.source = re.sub(r"\{#.*?#\}", "", tool_source or source, flags=re.DOTALL)
        """The program that renders conversations with tools, without its comments."""
        self._origin = origin
        self._is_stopped = False
        self._known_roles: dict[str, bool] = dict.fromkeys(ROLES, True)
        given = {"source": source, "tool_source": tool_source, "special_tokens": special_tokens}
        self._child = LimitedChild("template", given, limits)
        try:
            self._child.open()
        except ChildFailedError as error:
            is_none = "is not a Jinja template"
            what = is_none if error.refused else "can't render a conversation of one word"
            raise CheckpointError(f"{origin} {what}: {error}") from None

    @classmethod
    def load(cls, model_dir: Path, given: str | Path | None = None) -> ChatTemplate | None:
        """Return the template of a model directory, or ``given`` in its place: a file, or a Jinja
        program, which is a text with ``{``. None if the model has none. Raises ConfigError: If
        ``given`` can't be read, or isn't a template. CheckpointError: If a file can't be read."""
        special_tokens = TokenizerFiles.read(model_dir).names
        if given is not None:
            what, source, origin = Given("chat_template"), str(given), "chat_template"
            if isinstance(given, Path) or "{" not in given:
                origin = str(given)
                source = _source(Path(given), lambda why: ConfigError(what, f" {given}: {why}"))
            try:
                return cls(source, origin, special_tokens)
            except CheckpointError as error:
                raise ConfigError(what, f": {error}") from None
        path = model_dir / "chat_template.jinja"
        if path.exists():
            text = _source(path, lambda why: CheckpointError(f"{path}: {why}. Fetch it again"))
            return cls(text, str(path), special_tokens)
        path = model_dir / "tokenizer_config.json"
        found, tool_source = read_model_json(path).get("chat_template"), None
        if isinstance(found, list):
            rows = [each for each in found if isinstance(each, dict)]
            named = {str(each.get("name")): each.get("template") for each in rows}
            found, tool_source = named.get("default"), named.get("tool_use")
        if not isinstance(found, str):
            return None
        tool_source = tool_source if isinstance(tool_source, str) else None
        return cls(found, f"chat_template in {path}", special_tokens, tool_source=tool_source)

    def render(self, messages: Sequence[Message], now: datetime, how: Rendering = PLAIN) -> str:
        """Return the conversation as text, special tokens spelled out. Templates may print ``now``.
        Raises RequestError: (code ``chat_template_failed``) If the template refuses the messages,
        fails on them, or takes more than the limits. (``invalid_messages``) If it leaves out
        messages of a role, or the last message can't be continued. (``child_died``) If the child
        was ended from outside."""
        lost = frozenset[str]() if how.style is None else how.style.lost
        messages = messages if how.style is None else for_template(messages, how.style)
        for role in dict.fromkeys(str(message.get("role")) for message in messages):
            if role in lost or not self._writes(role):
                known = ", ".join(each for each in ROLES if each not in lost)
                raise RequestError(
                    f"the chat template leaves out messages of the role {role!r:.80}: use one of "
                    f"{known}, or give another chat_template",
                    code="invalid_messages",
                )
        try:
            text = self._render(how.marked(messages), now, how)
        except ChildDiedError as error:
            raise error.as_request_error() from None
        except ChildFailedError as error:
            what = "refuses" if error.refused else "was stopped on"
            if not error.refused:  # a path is for the log: who asked may be a server's client
                logger.warning("a conversation stopped %s: %s", self._origin, error)
            raise RequestError(
                f"the chat template {what} these messages: {error}", code="chat_template_failed"
            ) from None
        return how.cut(text)

    def _render(self, messages: Sequence[Message], now: datetime, how: Rendering) -> str:
        """Ask the child; again with objects if the template refuses other arguments of calls."""
        try:
            return self._ask(messages, now, how)
        except ChildFailedError as error:
            again = with_objects(messages)
            if not error.refused or again == list(messages):
                raise
            return self._ask(again, now, how)

    def probe(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str | None:
        """Return the text of a conversation that is only tried; None if the template refuses it.
        A template that was stopped once is not tried again."""
        if self._is_stopped:
            return None
        try:
            return self._ask(messages, _PROBED_AT, Rendering(tools=tools))
        except ChildFailedError as error:
            self._is_stopped = not error.refused
            return None

    def close(self) -> None:
        self._child.close()

    def _ask(self, messages: Sequence[Message], now: datetime, how: Rendering) -> str:
        variables = {
            **how.variables,
            "messages": messages,
            "tools": list(how.tools) or None,
            "documents": None,
            "add_generation_prompt": how.add_generation_prompt,
        }
        return str(self._child.ask({"now": now.isoformat(), "variables": variables}))

    def _writes(self, role: str) -> bool:
        """Return False if the template leaves out a message of a role that isn't in ``ROLES``."""
        if role in self._known_roles:
            return self._known_roles[role]
        message = {"role": role, "content": MARK}
        texts = self.probe([message, USER]), self.probe([USER, message])
        said = [text for text in texts if text is not None]
        writes = not said or any(MARK in text for text in said)
        if len(self._known_roles) <= _MAX_KNOWN_ROLES:
            self._known_roles[role] = writes
        return writes


def _source(path: Path, refuse: Refuse) -> str:
    try:
        return read_bytes(path, most_bytes=MAX_TEMPLATE_BYTES, refuse=refuse).decode()
    except UnicodeDecodeError as error:
        raise refuse(f"it is no text: {error}") from None
