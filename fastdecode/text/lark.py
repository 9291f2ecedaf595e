"""Parts of Lark grammars, as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastdecode.text.schemas import choices_of, followable, resolved

WHITESPACE: Final = r"[ \t\n\r]{0,20}"
"""Between the tokens of JSON. Bounded, because a weak model would write blanks until its limit."""
_IN_CALLS: Final = " ?"
"""The same in tool calls."""
_OPENS: Final = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def quoted(text: str) -> str:
    """Return a literal. The lexer refuses a bare U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def marked(mark: str, special: Mapping[str, int]) -> str:
    """Return a mark: a special token, or its text. ``special``: ids of the model's, by name."""
    return f"<[{special[mark]}]>" if mark in special else quoted(mark)


def text_until(name: str, end: str, special: Mapping[str, int]) -> str:
    """Return a rule ``name``: any text up to a mark, and the mark."""
    if end in special:
        return f"{name}: /(.|\\n)*/ {marked(end, special)}"
    return f"{name}[suffix={quoted(end)}]: /(.|\\n)*/"


def json_rule(schema: Mapping[str, Any], blanks: str = WHITESPACE) -> str:
    """Return the JSON of a schema.

    Raises:
        ValueError: If the schema can't be followed exactly.
    """
    exact = exact_rule(schema)
    return exact or _json(followable(schema), blanks)


def _json(schema: Mapping[str, Any], blanks: str) -> str:
    said = {"x-guidance": {"whitespace_pattern": blanks}, **schema}
    return "%json " + json.dumps(said, ensure_ascii=False)


def exact_rule(schema: Mapping[str, Any]) -> str | None:
    """Return alternatives for constants with great integers, which llguidance would round.
    None if ``schema`` is not only such constants."""
    values = choices_of(schema)
    if not values or not any(type(each) is int and abs(each) > 1 << 53 for each in values):
        return None
    if {*schema} - {"const", "enum", "type", "title", "description", "default", "examples"}:
        return None
    kinds = schema.get("type", ["integer", "number"])
    if not {"integer", "number"} & {*([kinds] if isinstance(kinds, str) else kinds)}:
        return None
    return "(" + " | ".join(quoted(json.dumps(each, ensure_ascii=False)) for each in values) + ")"


def arguments_rule(tool: Mapping[str, Any]) -> str:
    """Return the JSON of a tool's arguments: those that its schema names, and no others, unless
    the schema says more. Raises ValueError: see ``json_rule``."""
    schema = {**(tool.get("parameters") or {}), "type": "object"}
    if not any(name in schema for name in _OPENS):
        schema["additionalProperties"] = False
    return json_rule(schema, _IN_CALLS)


def argument_rule(schema: object, parameters: Mapping[str, Any]) -> str:
    """Return the JSON of one argument. Raises ValueError: see ``json_rule``.

    Args:
        parameters: The tool's schema, which references in ``schema`` refer to.
    """
    if not isinstance(schema, Mapping):
        return json_rule({}, _IN_CALLS)
    exact = exact_rule(resolved(schema, parameters))
    if exact is not None or "$ref" not in json.dumps(schema):
        return exact or json_rule(schema, _IN_CALLS)
    root = "#/$defs/tool"
    named = {"$defs": {"tool": followable(parameters, root)}, **followable(schema, root)}
    return _json(named, _IN_CALLS)
