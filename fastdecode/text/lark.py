"""JSON schemas and tool calls as Lark grammars, as llguidance reads them."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from fastdecode.core.errors import Given, RequestError
from fastdecode.text.reasoning import ReasoningFormat
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
_MOST_STEPS: Final = 16
"""Most references and branches from a schema to its types."""
_EXACT: Final = 1 << 53
"""llguidance reads numbers as doubles. Integers up to this one are exact."""
_INT64: Final = (1 << 63) - 1
_LIMITS: Final = frozenset({(1 << 64) - 1, 1 << 64, 1.7976931348623157e308})
"""Limits of unsigned integers and doubles, which bound nothing that a model writes."""
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ITEMS: Final = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties"})
_CHOICES: Final = frozenset({"allOf", "anyOf", "oneOf"})
_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "minimum": (-1, 0),
    "exclusiveMinimum": (-1, 1),
    "maximum": (1, 0),
    "exclusiveMaximum": (1, -1),
}
"""Keywords: the sign of infinity on the open side, and what makes the bound inclusive."""


def followable(schema: Any, root: str = "#") -> Any:
    """Return a schema that llguidance follows as the given one is meant.

    Formats that it doesn't know are annotations. ``oneOf`` of schemas that exclude each other is
    ``anyOf``. Bounds beyond 2^53 are rounded inwards, and limits of types are left out. ``root``
    is the JSON pointer that takes the place of ``#``. Raises ValueError: If the schema has a
    number that is not exact as a double, or is too deep.
    """
    try:
        if isinstance(schema, list):
            return [followable(each, root) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, Mapping):
                made[key] = {name: followable(each, root) for name, each in value.items()}
            elif key in _ITEMS | _CHOICES:
                is_any = key == "oneOf" and _exclude_each_other(value)
                made["anyOf" if is_any and "anyOf" not in schema else key] = followable(value, root)
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                made[key] = root + value[1:]
            elif key in _BOUNDS and type(value) in (int, float):
                made |= _bound(key, value, is_integer=schema.get("type") == "integer")
            elif key != "format" or not isinstance(value, str) or value in _FORMATS:
                if key in ("const", "enum", "multipleOf"):
                    _check_exact(value, key)
                made[key] = value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return made


def _check_exact(value: object, where: str) -> None:
    """Raises ValueError: If a number within a value is not exact as a double."""

    def check(digits: str) -> None:
        if abs(int(digits)) > _EXACT:
            what = "which is beyond 2^53 and would be rounded: make it a string"
            raise ValueError(f"{where} has the integer {digits}, {what}")

    json.loads(json.dumps(value), parse_int=check)


def _bound(key: str, value: float, *, is_integer: bool) -> dict[str, float]:
    """Return a bound that llguidance reads exactly, and that allows no more than this one."""
    sign, inclusive = _BOUNDS[key]
    if value * sign in _LIMITS:
        return {}
    if not isinstance(value, int) or abs(value) < _EXACT:
        return {key: value}
    name, exact = "minimum" if sign < 0 else "maximum", value + inclusive
    if is_integer and exact == _INT64:
        return {name: exact}  # it saturates there
    if exact * sign < -_INT64:
        raise ValueError(f"{key} {value} is beyond the integers of 64 bits")
    rounded = float(sign * min(exact * sign, _INT64))
    if int(rounded) * sign > exact * sign:
        rounded = math.nextafter(rounded, -math.inf * sign)
    return {name: sign * min(int(rounded) * sign, _INT64 - 1023)}


def _exclude_each_other(options: object) -> bool:
    """Return True if no value fits two of these schemas, as far as constants and types say."""
    values, kinds, constant_kinds = set[str](), set[str](), set[str]()
    for option in options if isinstance(options, list) else [{}]:
        choices = choices_of(option)
        types = types_of(option, {})
        whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in choices or ()]
        said = {json.dumps(each, sort_keys=True) for each in whole}
        if (choices is None and (not types or types & kinds)) or said & values:
            return False
        values |= said
        kinds |= types if choices is None else set()
        constant_kinds |= {type_of(json.loads(each)) for each in said}
    return not kinds & constant_kinds


def choices_of(schema: object) -> list[Any] | None:
    """Return the values of ``const`` or ``enum``, or None if the schema has neither."""
    given = schema if isinstance(schema, Mapping) else {}
    if "const" in given:
        return [given["const"]]
    return given["enum"] if isinstance(given.get("enum"), list) else None


def resolved(
    schema: object, root: Mapping[str, Any], seen: set[str] | None = None, steps: int = _MOST_STEPS
) -> dict[str, Any]:
    """Return a schema with what ``$ref`` and ``allOf`` add to it. Its own keywords win. References
    in ``seen`` are not followed again. At most ``steps`` levels are looked into."""
    if not isinstance(schema, Mapping) or not steps:
        return {}
    seen = set() if seen is None else seen
    own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    parts, reference = schema.get("allOf"), schema.get("$ref")
    others = [*parts] if isinstance(parts, list) else []
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        others.append(_pointed(root, reference))
    for other in others:
        own = {**resolved(other, root, seen, steps - 1), **own}
    return own


def _pointed(root: Any, reference: str) -> Any:
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def types_of(
    schema: object, root: Mapping[str, Any], seen: set[str] | None = None, steps: int = _MOST_STEPS
) -> set[str]:
    """Return JSON's types that a schema allows: none if it doesn't say, and ``integer`` beside
    ``number``. ``seen`` and ``steps``: as of ``resolved``."""
    seen = set() if seen is None else seen
    schema = resolved(schema, root, seen, steps)
    said = schema.get("type")
    types = {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
    types = types or {type_of(value) for value in choices_of(schema) or ()}
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if not types and isinstance(options, list):
            types = set().union(*(types_of(each, root, seen, steps - 1) for each in options))
    return types | ({"integer"} if "number" in types else set())


def type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object" if isinstance(value, dict) else "null")


def meant(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """Return the value that an argument's text stands for: the text itself, JSON, or Python."""
    types = types_of(schema, root)
    if types == {"string"} or text in (choices_of(resolved(schema, root)) or ()):
        return text
    value = loaded(text)
    if value is None and text.strip() != "null":
        try:
            value = python_value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return text
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return text
    return value if "string" not in types or type_of(value) in types else text


def loaded(text: str) -> Any:
    """Return the value of a JSON text, or None if it is not valid. Strings may have line ends."""
    try:
        return json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not JSON")
    return value


def python_value(node: ast.expr) -> Any:
    """Return a Python literal as a JSON value. Names of JSON's constants are taken, too. Raises
    ValueError: If it isn't a literal, or JSON has no such value."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else python_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of an object are strings")
        return dict(zip(keys, map(python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, str):  # JSON writes great characters as pairs
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    if value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError("JSON has no such value")
    return value


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
    """Return the JSON of a schema. ``blanks`` is the regular expression of what may stand between
    tokens, if not the usual one. If ``is_compact``, nothing may. Raises ValueError: If the schema
    can't be followed exactly."""
    options = _COMPACT if is_compact else {"whitespace_pattern": blanks or _WHITESPACE}
    return _exact_rule(schema) or _json(followable(schema), options)


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": options, **schema}, ensure_ascii=False)


def _exact_rule(schema: Mapping[str, Any]) -> str | None:
    """Return alternatives for constants with integers that llguidance would round, or None."""
    types = types_of({"type": schema.get("type")}, {})
    values = [each for each in choices_of(schema) or () if not types or type_of(each) in types]
    if not any(type(each) is int and abs(each) > 1 << 53 for each in values):
        return None
    if {*schema} - {"const", "enum", "type", "title", "description", "default", "examples"}:
        return None
    return "(" + " | ".join(quoted(json.dumps(each, ensure_ascii=False)) for each in values) + ")"


def _arguments_rule(tool: Mapping[str, Any]) -> str:
    """Return the JSON of a tool's arguments: those in its schema alone, unless it allows more."""
    schema = {**(tool.get("parameters") or {}), "type": "object"}
    if not any(name in schema for name in _OPENS):
        schema["additionalProperties"] = False
    return json_rule(schema, _IN_CALLS)


def _argument_rule(schema: object, parameters: Mapping[str, Any]) -> str:
    """Return the JSON of one argument, whose references are into these parameters."""
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
    """Yield the rules between a call's marks. A string's pattern and length are not followed."""
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
    """Return a Lark grammar of an answer of gpt-oss that may reason, and then is a call. ``answer``
    is a rule of the final message's text, which may stand in place of a call. ``is_inside``: The
    prompt ends inside the reasoning."""
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
