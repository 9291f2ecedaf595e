"""Chat templates: a conversation to the text that a model was trained to
continue.

A template is a Jinja program that comes with the model. So it runs in a child
process with limits (``template_program`` there, in Jinja's sandbox), and sees
nothing but the messages and the names of the special tokens. It is looked for
where ``transformers`` looks: ``chat_template.jinja``, then ``chat_template`` in
``tokenizer_config.json`` (a string, or several by name, of which "default"
counts, and "tool_use" for conversations with tools).
"""

from __future__ import annotations

import importlib.util
import logging
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
from fastdecode.core.json_file import read_bytes
from fastdecode.core.model.files import read_model_file, read_model_json
from fastdecode.text.chats import with_object_arguments
from fastdecode.text.child import ChildDiedError, ChildFailedError, LimitedChild, Limits, died
from fastdecode.text.rendering import Rendering

logger = logging.getLogger(__name__)
PLAIN: Final = Rendering()
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

MAX_TEMPLATE_BYTES = 1 << 20
LIMITS = Limits(memory_bytes=1 << 30, cpu_s=10, open_cpu_s=10)
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
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


class ChatTemplate:
    """A template, ready to render in a child process. Close it, or leave that
    to the garbage collector.

    Args:
        source: the Jinja program.
        origin: where it comes from, for the log and errors at the start.
        special_tokens: {"bos_token": "<s>", …}, as far as the model has them.
        limits: what compiling and rendering may take.
        tool_source: the program for conversations with tools; None: the same.

    Raises:
        CheckpointError: the source is no Jinja program, or takes more than the
            limits for a word.
        MissingExtraError: the package jinja2 isn't installed.
    """

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
        opening = {
            "source": source,
            "tool_source": tool_source,
            "special_tokens": dict(special_tokens),
        }
        self.source = source if tool_source is None else tool_source
        """The program that conversations with tools are rendered by."""
        self._sources = source + (tool_source or "")
        self._origin = origin
        self._child = LimitedChild("template", opening, limits)
        try:
            self._child.open()
        except ChildFailedError as error:
            what = (
                "is not a Jinja template"
                if error.refused
                else "can't render a conversation of one word"
            )
            raise CheckpointError(f"{origin} {what}: {error}") from None

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a model directory, or of a file in its place; None if
        the model has none.

        Raises:
            CheckpointError, MissingExtraError: as above, or a file of the model
                can't be read.
            ConfigError: ``override`` can't be read.
        """
        config = read_model_json(model_dir / "tokenizer_config.json")
        special_tokens = special_tokens_of(model_dir)
        if override is not None:
            try:
                return cls(_read_override(override), str(override), special_tokens)
            except CheckpointError as error:
                raise ConfigError(Given("chat_template"), f": {error}") from None
        path = model_dir / "chat_template.jinja"
        if path.exists():
            return cls(_read_text(path), str(path), special_tokens)
        source, tool_source = config.get("chat_template"), None
        if isinstance(source, list):
            named = {
                entry.get("name"): entry.get("template")
                for entry in source
                if isinstance(entry, dict)
            }
            source, tool_source = named.get("default"), named.get("tool_use")
        if not isinstance(source, str):
            return None
        origin = f"chat_template in {model_dir / 'tokenizer_config.json'}"
        tool_source = tool_source if isinstance(tool_source, str) else None
        return cls(source, origin, special_tokens, tool_source=tool_source)

    @classmethod
    def of_model(cls, model_dir: Path, source: str, origin: str) -> ChatTemplate:
        """A Jinja program in place of the model's own. Raises as ``load``."""
        try:
            return cls(source, origin, special_tokens_of(model_dir))
        except CheckpointError as error:
            raise ConfigError(Given("chat_template"), f": {error}") from None

    @classmethod
    def chosen(cls, model_dir: Path, given: str | Path | None) -> ChatTemplate | None:
        """The model's own template, or what is given instead: a file, or a Jinja program,
        which is a text with ``{``. Raises as ``load``."""
        if isinstance(given, str) and "{" in given:
            return cls.of_model(model_dir, given, "chat_template")
        return cls.load(model_dir, None if given is None else Path(given))

    @property
    def takes_tools(self) -> bool:
        """Whether tools have a place in what it writes."""
        return "tools" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        how: Rendering = PLAIN,
    ) -> str:
        """The conversation as text, special tokens spelled out.

        Args:
            messages: each has a ``role`` and a ``content``.
            now: the date, for templates that print it. A text must not depend
                on when its turn came.
            how: its options.

        Raises:
            RequestError: (code ``chat_template_failed``) the template refuses
                the messages, fails on them, or takes more than the limits.
                (code ``invalid_messages``) the last message can't be continued.
                (code ``child_died``) the process that renders died twice.
        """
        question = {
            "messages": how.marked(messages),
            "now": now.isoformat(),
            "add_generation_prompt": how.add_generation_prompt,
            "variables": how.variables,
            "tools": list(how.tools) or None,
        }
        try:
            text = self._asked(question)
        except ChildDiedError as error:
            logger.warning("rendering by %s failed twice: %s", self._origin, error)
            raise died(error) from None
        except ChildFailedError as error:
            what = "refuses"
            if not error.refused:
                # Whoever asked may be a server's client: a path is for the log.
                logger.warning("a conversation stopped %s: %s", self._origin, error)
                what = "was stopped on"
            raise RequestError(
                f"the chat template {what} these messages: {error}", code="chat_template_failed"
            ) from None
        self._check_roles(messages, str(text))
        return how.cut(str(text))

    def _asked(self, question: Mapping[str, Any]) -> object:
        """Ask the child; again with objects if the template refuses other arguments of calls."""
        try:
            return self._child.ask(question)
        except ChildFailedError as error:
            messages = with_object_arguments(question["messages"])
            if not error.refused or messages == question["messages"]:
                raise
            return self._child.ask({**question, "messages": messages})

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """Raises RequestError: the template leaves out messages of a role that it does not
        know."""
        for role in {message.get("role") for message in messages}.difference(ROLES):
            if isinstance(role, str) and role not in self._sources and role not in text:
                raise RequestError(
                    f"the chat template leaves out messages of the role {role!r:.80}: use one of "
                    f"{', '.join(ROLES)}",
                    code="invalid_messages",
                )

    def close(self) -> None:
        """End the child process. Safe to call twice."""
        self._child.close()


def special_tokens_of(model_dir: Path) -> dict[str, str]:
    """``{"bos_token": "<s>", …}``, as far as the model's files name them."""
    config = read_model_json(model_dir / "tokenizer_config.json")
    # Where transformers finds added_tokens_decoder, it doesn't read the older file.
    older = (
        {}
        if "added_tokens_decoder" in config
        else read_model_json(model_dir / "special_tokens_map.json")
    )
    return _special_tokens({**config, **older})


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_override(path: Path) -> str:
    """Raises ConfigError: it is somebody's own file, not one of the model's."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(Given("chat_template"), f" {path}: {why}")

    try:
        return read_bytes(path, most_bytes=MAX_TEMPLATE_BYTES, refuse=refuse).decode()
    except UnicodeDecodeError as error:
        raise refuse(f"it is no text: {error}") from None


def _read_text(path: Path) -> str:
    try:
        return read_model_file(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
