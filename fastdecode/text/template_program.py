"""Compiles and renders a chat template; runs in a child process.

A template finds what it finds in ``transformers``: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, loop controls, the
``generation`` tag, blocks trimmed. It runs in Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdecode.text.child_words import Answer, Refusal

MAX_TEXT_CHARS = 64 << 20
TRIAL = {
    "messages": [{"role": "user", "content": "Hello"}],
    "now": "2000-01-01T00:00:00",
    "add_generation_prompt": True,
    "variables": {},
    "tools": None,
}


def open_service(opening: dict[str, Any]) -> tuple[None, Answer]:
    """Compile a template, and try it, so that one that never ends is known
    before any work is begun.

    Args:
        opening: ``source``, ``tool_source`` (may be None) and ``special_tokens``.

    Raises:
        Refusal: the source is no Jinja program.
    """
    template = _compiled(opening["source"])
    with_tools = template
    if opening["tool_source"] is not None:
        with_tools = _compiled(opening["tool_source"])

    def render(question: dict[str, Any]) -> str:
        chosen = with_tools if question["tools"] else template
        return _render(chosen, opening["special_tokens"], question)

    with contextlib.suppress(Refusal):  # it may want other messages
        render(TRIAL)
    return None, render


def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except RecursionError:
        raise Refusal("it is nested too deeply") from None


def _render(template: Template, special_tokens: dict[str, str], question: dict[str, Any]) -> str:
    now = datetime.fromisoformat(question["now"])
    try:
        text = template.render(
            {
                **special_tokens,
                **question["variables"],
                "messages": question["messages"],
                "tools": question["tools"],
                "documents": None,
                "add_generation_prompt": question["add_generation_prompt"],
                "strftime_now": now.strftime,
            }
        )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise Refusal(str(error) or type(error).__name__) from None
    if len(text) > MAX_TEXT_CHARS:
        raise MemoryError
    return text


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant said,
    for training; no matter here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        return Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
