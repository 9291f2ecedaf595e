"""Chat templates: a conversation to the text that a model was trained to continue.

A template is a Jinja program that comes with the model, so it runs in Jinja's sandbox, and sees nothing but the
messages and the names of the special tokens. It is looked for where ``transformers`` looks: ``chat_template.jinja``,
then ``chat_template`` in ``tokenizer_config.json`` (a string, or several by name, of which "default" counts), and it
finds what it finds there: ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls, the
``generation`` tag, blocks trimmed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.core.errors import CheckpointError, ConfigError, RequestError, imports_for

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_BYTES = 1 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a template is given anyway, under these names.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja program.
        origin: where it comes from, for messages.
        special_tokens: {"bos_token": "<s>", …}, as far as the model has them.

    Raises:
        CheckpointError: the source is no Jinja program.
        MissingExtraError: the package jinja2 isn't installed.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source, origin)

    @classmethod
    def load(cls, model_dir: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a model directory, or of a file in its place; None if the model has none.

        Raises:
            CheckpointError, MissingExtraError: as above, or a file of the model can't be read.
            ConfigError: ``override`` can't be read.
        """
        config = _read_json(model_dir / "tokenizer_config.json")
        # Where transformers finds added_tokens_decoder, it doesn't read the older file.
        older = {} if "added_tokens_decoder" in config else _read_json(model_dir / "special_tokens_map.json")
        special_tokens = _special_tokens({**config, **older})
        if override is not None:
            try:
                return cls(_read_text(override), str(override), special_tokens)
            except CheckpointError as error:
                raise ConfigError(f"--chat-template: {error}") from None
        path = model_dir / "chat_template.jinja"
        if path.exists():
            return cls(_read_text(path), str(path), special_tokens)
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, f"chat_template in {model_dir / 'tokenizer_config.json'}", special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, special tokens spelled out.

        Args:
            messages: each has a ``role`` and a ``content``.
            now: the date, for templates that print it. A text must not depend on when its turn came.
            add_generation_prompt: end with what begins the assistant's turn.
            variables: more names for the template.

        Raises:
            RequestError: (code ``chat_template_failed``) the template refuses the messages, or fails on them.
        """
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": now.strftime,
                }
            )
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {reason}", code="chat_template_failed"
            ) from None


def _compile(source: str, origin: str) -> Template:
    with imports_for("a chat template"):
        from jinja2 import TemplateError
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"{origin} is not a Jinja template: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """``{% generation %}…{% endgeneration %}`` marks what the assistant said, for training; no matter here."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

        def parse(self, parser: Parser) -> Node | list[Node]:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_TEMPLATE_BYTES} bytes: that is no chat template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}): fetch the file again, or remove it") from None
    return config if isinstance(config, dict) else {}
