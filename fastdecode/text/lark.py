"""Rules of Lark grammars, as llguidance reads them: of marks, of JSON, and of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from fastdecode.core.errors import Given, RequestError
from fastdecode.text.reasoning import ReasoningFormat
from fastdecode.text.schemas import choices_of, followable, resolved, type_of, types_of
from fastdecode.text.tools import CODE, TOOL_FORMATS, Tags, ToolFormat

Functions: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools. Each has a ``name``, and may have ``parameters``, a JSON schema."""
Special: TypeAlias = Mapping[str, int]
"""Ids of a model's special tokens, by name."""
_WHITESPACE: Final = r"[ \t\n\r]{0,20}"
"""Between the tokens of JSON. Bounded, because a weak model would write blanks until its limit."""
_IN_CALLS: Final = " ?"
"""The same in tool calls."""
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_TOOL_MARK: Final = "// tool "
"""Begins a comment before a tool's rules, with its name."""
_OPENS: Final = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def quoted(text: str) -> str:
    """Return a literal. The lexer refuses a bare U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def marked(mark: str, special: Special) -> str:
    """Return a mark: a special token, or its text."""
    return f"<[{special[mark]}]>" if mark in special else quoted(mark)


def text_until(name: str, end: str, special: Special) -> str:
    """Return a rule ``name``: any text up to a mark, and the mark."""
    if end in special:
        return f"{name}: /(.|\\n)*/ {marked(end, special)}"
    return f"{name}[suffix={quoted(end)}]: /(.|\\n)*/"


def json_rule(
    schema: Mapping[str, Any], blanks: str | None = None, *, is_compact: bool = False
) -> str:
    """Return the JSON of a schema. Raises ValueError: If it can't be followed exactly.

    ``blanks`` is the regular expression of what may stand between tokens, if not the usual one.
    If ``is_compact``, nothing may.
    """
    options = _COMPACT if is_compact else {"whitespace_pattern": blanks or _WHITESPACE}
    return _exact_rule(schema) or _json(followable(schema), options)


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": options, **schema}, ensure_ascii=False)


def _exact_rule(schema: Mapping[str, Any]) -> str | None:
    """Return alternatives for constants with great integers, which llguidance would round.
    None if ``schema`` is not only such constants."""
    types = types_of({"type": schema.get("type")}, {})
    values = [each for each in choices_of(schema) or () if not types or type_of(each) in types]
    if not any(type(each) is int and abs(each) > 1 << 53 for each in values):
        return None
    if {*schema} - {"const", "enum", "type", "title", "description", "default", "examples"}:
        return None
    return "(" + " | ".join(quoted(json.dumps(each, ensure_ascii=False)) for each in values) + ")"


def _arguments_rule(tool: Mapping[str, Any]) -> str:
    """Return the JSON of a tool's arguments: those that its schema names, and no others, unless
    the schema says more."""
    schema = {**(tool.get("parameters") or {}), "type": "object"}
    if not any(name in schema for name in _OPENS):
        schema["additionalProperties"] = False
    return json_rule(schema, _IN_CALLS)


def _argument_rule(schema: object, parameters: Mapping[str, Any]) -> str:
    """Return the JSON of one argument of a tool with these parameters, to which its references
    refer."""
    if not isinstance(schema, Mapping):
        return json_rule({}, _IN_CALLS)
    exact = _exact_rule(resolved(schema, parameters))
    if exact is not None or "$ref" not in json.dumps(schema):
        return exact or json_rule(schema, _IN_CALLS)
    root = "#/$defs/tool"
    named = {"$defs": {"tool": followable(parameters, root)}, **followable(schema, root)}
    return _json(named, {"whitespace_pattern": _IN_CALLS})


def calls_rules(family: ToolFormat, tools: Functions, special: Special, *, most_one: bool) -> str:
    """Return a Lark grammar whose rule ``calls`` is one call of these tools, or several unless
    ``most_one``. Raises RequestError: If a tool's schema can't be followed exactly."""
    mark = partial(marked, special=special)
    one, before, between, after = "call", "", '"; "', ""
    begin = mark(family.begin)
    if family.is_python or family.is_list:
        before, between, after = f'{begin * family.is_list} "["', '", "', '"]"'
    elif family.end:
        line = "" if family.tags is not None else r'"\n"'
        one, between = f"{begin} {line} call {line} {mark(family.end)}", r'"\n"'
    elif family.name_end:
        one, between = f"{begin} call", ""
    more = "" if most_one else f"({between} {one})*"
    names = [f"call_{place}" for place in range(len(tools))]
    rules = [f"calls: {before} {one} {more} {after}", f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        rules.append(f"{_TOOL_MARK}{tool['name']}")
        try:
            rules += _call_rules(family, mark, tool, name)
        except ValueError as error:
            raise refuse_tool(tool["name"], str(error)) from None
    return "\n".join(rules)


def tool_grammars(grammar: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each tool in a grammar, and a grammar of its rules alone."""
    for section in grammar.split(f"\n{_TOOL_MARK}")[1:]:
        name, _, rules = section.partition("\n")
        yield name, f"start: {rules.partition(':')[0]}\n{rules}"


def refuse_tool(name: str, why: str) -> RequestError:
    what = f": the parameters of {name!r} can't be followed: {why}"
    return RequestError(Given("tools"), what, code=CODE)


def _call_rules(
    family: ToolFormat, mark: Callable[[str], str], tool: Mapping[str, Any], name: str
) -> Iterator[str]:
    if family.tags is not None:
        yield from _tagged_rules(family.tags, tool, name)
    elif family.is_python:
        yield f"{name}: {_python_rule(tool)}"
    elif family.has_channels:
        channel, constrain, message = map(mark, ("<|channel|>", "<|constrain|>", "<|message|>"))
        head = quoted(f"commentary to=functions.{tool['name']} ")
        yield f'{name}: {channel} {head} {constrain} "json" {message} {_arguments_rule(tool)}'
    elif family.name_end:
        yield f"{name}: {quoted(tool['name'])} {mark(family.name_end)} {_arguments_rule(tool)}"
    else:
        head = f'{{"name": {json.dumps(tool["name"])}, "{family.arguments}": '
        yield f'{name}: {quoted(head)} {_arguments_rule(tool)} "}}"'


def _tagged_rules(tags: Tags, tool: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the rules from behind a call's begin mark to before its end mark. A string's pattern
    and length are not followed."""
    head, before, after, end = tags.written
    parameters = tool.get("parameters") or {}
    required = parameters.get("required") or ()
    parts, values = [quoted(head.format(tool["name"]))], []
    for place, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        value = f"{name}_{place}"
        part = f"{quoted(before.format(key))} {value}"
        parts.append(part if key in required else f"({part})?")
        types, choices = types_of(schema, parameters), choices_of(resolved(schema, parameters))
        if choices and types == {"string"}:
            said = [quoted(each) for each in choices if isinstance(each, str)]
            values.append(f"{value}: ({' | '.join(said)}) {quoted(after)}")
        elif "string" in types or not isinstance(schema, Mapping):
            values.append(text_until(value, after, {}))
        else:
            values.append(f"{value}: {_argument_rule(schema, parameters)} {quoted(after)}")
    if end:
        parts.append(quoted(end))
    yield f"{name}: {' '.join(parts)}"
    yield from values


def _python_rule(tool: Mapping[str, Any]) -> str:
    parameters = tool.get("parameters") or {}
    names = parameters.get("required") or ()
    required, others = list[str](), list[str]()
    for key, schema in (parameters.get("properties") or {}).items():
        rule = f"{quoted(key + '=')} {_argument_rule(schema, parameters)}"
        (required if key in names else others).append(rule)
    first, later = (required, others) if required else (others[:1], others[1:])
    rule = ' ", " '.join(first) + "".join(f' (", " {each})?' for each in later)
    rule = rule if required or not rule else f"({rule})?"
    return f"{quoted(tool['name'] + '(')} {rule} {quoted(')')}"


def reasoning_grammar(family: ReasoningFormat, special: Special, *, is_inside: bool) -> str:
    """Return a Lark grammar of reasoning, any text, and the rule ``@answer``, which need not follow
    any. ``is_inside``: The prompt ends inside the reasoning."""
    if family.has_channels:
        return harmony_grammar((), special, "@answer", is_inside=is_inside)
    is_begun = is_inside or (family.end in special and family.begin not in special)
    begin = "" if is_begun else marked(family.begin, special)
    either = "" if is_inside else " | @answer"
    thoughts = text_until("thoughts", family.end, special)
    return f"start: {begin} thoughts /\\n*/ @answer{either}\n{thoughts}"


def harmony_grammar(
    tools: Functions, special: Special, answer: str | None, *, is_inside: bool = False
) -> str:
    """Return a Lark grammar of an answer of gpt-oss that may reason, and then is a call.

    Args:
        answer: A rule of the final message's text, which may stand in place of a call.
        is_inside: The prompt ends inside the reasoning.
    """
    names = ("<|channel|>", "<|message|>", "<|start|>")
    channel, message, start = (marked(name, special) for name in names)
    head = "" if is_inside else f'{channel} "analysis" {message}'
    kinds = ["calls"] * bool(tools) + ["final"] * (answer is not None)
    rules = [
        f"start: thoughts{'' if is_inside else '?'} ({' | '.join(kinds)})",
        f'thoughts: {head} thought {start} "assistant"',
        text_until("thought", "<|end|>", special),
    ]
    if answer is not None:
        rules += [f'final: {channel} "final" {message} text', f"text: {answer}"]
    if tools:
        rules.append(calls_rules(TOOL_FORMATS["harmony"], tools, special, most_one=True))
    return "\n".join(rules)
