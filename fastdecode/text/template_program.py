"""Chat templates in Jinja's sandbox, within a child process.

A template finds what it finds in ``transformers``: ``raise_exception``, ``strftime_now``,
``tojson`` without HTML escapes, loop controls, the ``generation`` tag, blocks trimmed.
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

from fastdecode.text.child_main import Answer, Refusal

MAX_TEXT_CHARS = 64 << 20
TRIAL = {
    "now": "2000-01-01T00:00:00",
    "variables": {
        "messages": [{"role": "user", "content": "Hello"}], "tools": None, "documents": None,
        "add_generation_prompt": True,
    },
}  # fmt: skip


def open_template(source: str, tool_source: str | None, special_tokens: dict[str, str]) -> Answer:
    """Compile a template, and try it, so that an endless one is known before work starts.

    Raises:
        Refusal: If the source is no Jinja program.
    """
    template = _compiled(source)
    with_tools = template if tool_source is None else _compiled(tool_source)

    def render(question: dict[str, Any]) -> str:
        variables = {**special_tokens, **question["variables"]}
        variables["strftime_now"] = datetime.fromisoformat(question["now"]).strftime
        return _render(with_tools if variables["tools"] else template, variables)

    with contextlib.suppress(Refusal):  # it may want other messages
        render(TRIAL)
    return render


def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except RecursionError:
        raise Refusal("it is nested too deeply") from None


def _render(template: Template, variables: dict[str, Any]) -> str:
    try:
        text = template.render(variables)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise Refusal(str(error) or type(error).__name__) from None
    if len(text) > MAX_TEXT_CHARS:
        raise MemoryError
    return text


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training only."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


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
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
