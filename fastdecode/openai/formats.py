"""What a body says its answer must look like: ``response_format``, vLLM's
``structured_outputs``, and the ``guided_…`` fields of older clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdecode.core.structured import StructuredOutputs
from fastdecode.openai.body_errors import blaming, refuse, refuse_unknown

FORMAT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_SCHEMA_FIELDS = ("schema", "name", "description", "strict")
FORMAT_TYPES = ("text", "json_object", "json_schema")


def read_format(body: Mapping[str, Any]) -> tuple[StructuredOutputs | None, str | None]:
    """Return what the answer must be, and the field that says so. Raises BodyError."""
    given = [name for name in FORMAT_FIELDS if body.get(name) is not None]
    if "response_format" in given and _format_type(body["response_format"]) == "text":
        given.remove("response_format")
    if not given:
        return None, None
    if len(given) > 1:
        refuse(given[1], f"and {given[0]} say both what the answer must be: give one of them")
    (name,) = given
    wanted = body[name]
    if name == "response_format":
        wanted = _of_response_format(wanted)
    elif name != "structured_outputs":
        wanted = {name.removeprefix("guided_"): wanted}
    with blaming(otherwise=name):
        return StructuredOutputs.of(wanted), name


def _of_response_format(value: Any) -> dict[str, Any]:
    """Return a format as ``StructuredOutputs.of`` takes it."""
    if _format_type(value) == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, (dict, bool, str)):
        refuse("response_format.json_schema", 'must be an object with a "schema", a JSON schema')
    refuse_unknown(described, _SCHEMA_FIELDS, (), "response_format.json_schema")
    return {"json": schema}


def _format_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMAT_TYPES:
        refuse("response_format.type", f"must be one of {', '.join(FORMAT_TYPES)}")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    given = {name: each for name, each in value.items() if each is not None}
    refuse_unknown(given, known, (), f"response_format of the type {kind}")
    return str(kind)
