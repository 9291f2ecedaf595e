"""JSON schemas: what llguidance can follow of them, and what a text means by them."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

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
    """Return a bound that llguidance reads exactly, and that allows no more than this one: none for
    a limit of a type."""
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
