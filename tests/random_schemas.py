"""JSON schemas and regular expressions drawn at random, small enough that a model
with random weights comes to the end of what they ask."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "date-time", "time", "ipv4", "uuid")
ALPHABETS = ("[a-c]", "[0-9]", r"\d", "x", "é", "[^a-z\\x00-\\x1f]", "(yes|no|maybe)", "(?i:ab)")


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of an object, with nested values down to ``depth``."""
    names = rng.sample(
        ["name", "age", "tags", "x", "a b", "é", 'quo"te', "é/{}"], rng.randint(1, 4)
    )
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if depth == 3:
        made["x-guidance"] = {"whitespace_pattern": " ?"}  # or random weights write blanks
    if depth == 3 and rng.random() < 0.3:
        made["$defs"] = {"shared": _scalar(rng)}
        made["properties"][names[0]] = {"$ref": "#/$defs/shared"}
    return made


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_scalar, _scalar, _choice]
    if depth > 0:
        kinds += [lambda r: schema(r, depth), lambda r: _array(r, depth), lambda r: _any(r, depth)]
    return rng.choice(kinds)(rng)


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice([
        {"type": "string", "maxLength": rng.randint(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": f"^({regex(rng)})$"},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        {"type": "integer", "minimum": 0, "maximum": 10**6, "multipleOf": rng.choice([1, 5, 7])},
        {"type": "number", "minimum": low, "maximum": low + 1},
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"type": "string", "maxLength": 5, "format": "uri-reference"},
        {"oneOf": [{"const": 1, "title": "one"}, {"const": 2.5}, {"type": "null"}]},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
    ])  # fmt: skip


def _choice(rng: random.Random) -> dict[str, Any]:
    values = ["red", 'gr\n"ün', 7, 1.5, None, True, {"a": [1]}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [_value(rng, depth - 1) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    low = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1), _value(rng, depth - 1)]}


def regex(rng: random.Random) -> str:
    """Whose matches are short."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        low = rng.randint(0, 2)
        high = low + rng.randint(1, 3)
        pieces.append(rng.choice(ALPHABETS) + rng.choice(["", "?", f"{{{low},{high}}}"]))
    whole = "".join(pieces)
    return f"{whole}|{rng.choice(ALPHABETS)}" if rng.random() < 0.2 else whole
