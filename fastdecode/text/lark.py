"""Parts of Lark grammars, as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

WHITESPACE: Final = r"[ \t\n\r]{0,20}"
"""Between the tokens of JSON. Bounded: a model that has nothing to say would
write blanks until its limit."""
_OPENS: Final = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def quoted(text: str) -> str:
    """A text, literally."""
    return json.dumps(text, ensure_ascii=False)


def marked(mark: str, special: Mapping[str, int]) -> str:
    """A mark: a special token, or its text. ``special``: the model's, by name."""
    return f"<[{special[mark]}]>" if mark in special else quoted(mark)


def text_until(name: str, end: str, special: Mapping[str, int]) -> str:
    """A rule ``name``: any text up to a mark, and the mark."""
    if end in special:
        return f"{name}: /(.|\\n)*/ {marked(end, special)}"
    return f"{name}[suffix={quoted(end)}]: /(.|\\n)*/"


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON of a schema."""
    options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({"x-guidance": options, **schema}, ensure_ascii=False)


def arguments_rule(tool: Mapping[str, Any]) -> str:
    """JSON of a tool's arguments: the ones that its schema names, and no others, unless
    the schema says more."""
    schema = tool.get("parameters") or {"type": "object"}
    if schema.get("properties") and not any(name in schema for name in _OPENS):
        schema = {**schema, "additionalProperties": False}
    return json_rule(schema)


def argument_rule(schema: object, parameters: Mapping[str, Any]) -> str:
    """JSON of one argument. ``parameters``: the tool's, with the definitions that the
    argument's schema may name."""
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return json_rule({**shared, **schema} if isinstance(schema, Mapping) else {})
