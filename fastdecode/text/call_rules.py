"""Grammars of tool calls, where a call is required or may stand in place of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from fastdecode.core.errors import Given, RequestError
from fastdecode.text.lark import argument_rule, arguments_rule, marked, quoted, text_until
from fastdecode.text.schemas import choices_of, resolved, types_of
from fastdecode.text.tool_formats import Tags, ToolFormat
from fastdecode.text.tools import CODE

TOOL_MARK: Final = "// tool "
"""Begins a comment before a tool's rules, with its name."""


def calls_rules(
    family: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    most_one: bool,
) -> str:
    """Return a Lark grammar whose rule ``calls`` is one call of these tools, or several.

    Args:
        tools: Each has a ``name``, and may have ``parameters``, a JSON schema.
        special: Ids of the model's special tokens, by name.
        most_one: No more than one call.

    Raises:
        RequestError: If a tool's schema can't be followed exactly.
    """
    mark = partial(marked, special=special)
    one = " | ".join(f"call_{place}" for place in range(len(tools)))
    rules = [f"calls: {_calls_rule(family, mark, most_one)}", f"call: {one}"]
    write = partial(_call_rules, family, mark)
    return "\n".join([*rules, *tool_rules(tools, write)])


def tool_rules(
    tools: Sequence[Mapping[str, Any]],
    write: Callable[[Mapping[str, Any], str], Iterator[str]],
) -> Iterator[str]:
    """Yield the rules of each tool behind a comment that names the tool. The first rule is
    ``call_N``.

    Raises:
        RequestError: If a tool's schema can't be followed exactly.
    """
    for place, tool in enumerate(tools):
        yield f"{TOOL_MARK}{tool['name']}"
        try:
            yield from write(tool, f"call_{place}")
        except ValueError as error:
            raise refuse_tool(tool["name"], str(error)) from None


def refuse_tool(name: str, why: str) -> RequestError:
    """Return the error that a tool's schema can't be followed."""
    return RequestError(
        Given("tools"), f": the parameters of {name!r} can't be followed: {why}", code=CODE
    )


def _calls_rule(family: ToolFormat, mark: Callable[[str], str], most_one: bool) -> str:
    one, before, between, after = "call", "", '"; "', ""
    begin = mark(family.begin)
    if family.is_python or family.is_list:
        before, between, after = f'{begin * family.is_list} "["', '", "', '"]"'
    elif family.end:
        line = "" if family.tags is not None else r'"\n"'
        one, between = f"{begin} {line} call {line} {mark(family.end)}", r'"\n"'
    elif family.name_end:
        one, between = f"{begin} call", ""
    return f"{before} {one} {'' if most_one else f'({between} {one})*'} {after}"


def _call_rules(
    family: ToolFormat, mark: Callable[[str], str], tool: Mapping[str, Any], name: str
) -> Iterator[str]:
    if family.tags is not None:
        yield from _tagged_rules(family.tags, tool, name)
    elif family.is_python:
        yield f"{name}: {_python_rule(tool)}"
    elif family.name_end:
        yield f"{name}: {quoted(tool['name'])} {mark(family.name_end)} {arguments_rule(tool)}"
    else:
        head = f'{{"name": {json.dumps(tool["name"])}, "{family.arguments}": '
        yield f'{name}: {quoted(head)} {arguments_rule(tool)} "}}"'


def _tagged_rules(tags: Tags, tool: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the rules from behind a call's begin mark to before its end mark. A string's pattern
    and length are not followed."""
    head, before, after, end = tags.written
    parameters = tool.get("parameters") or {}
    required = parameters.get("required") or ()
    parts, values = [quoted(head.format(tool["name"]))], []
    for place, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        part = f"{quoted(before.format(key))} {name}_{place}"
        parts.append(part if key in required else f"({part})?")
        values.append(_value_rule(f"{name}_{place}", schema, parameters, after))
    if end:
        parts.append(quoted(end))
    yield f"{name}: {' '.join(parts)}"
    yield from values


def _value_rule(name: str, schema: Any, parameters: Mapping[str, Any], after: str) -> str:
    types, choices = types_of(schema, parameters), choices_of(resolved(schema, parameters))
    if choices and types == {"string"}:
        said = [each for each in choices if isinstance(each, str)]
        return f"{name}: ({' | '.join(map(quoted, said))}) {quoted(after)}"
    if "string" in types or not isinstance(schema, Mapping):
        return text_until(name, after, {})
    return f"{name}: {argument_rule(schema, parameters)} {quoted(after)}"


def _python_rule(tool: Mapping[str, Any]) -> str:
    parameters = tool.get("parameters") or {}
    required = parameters.get("required") or ()
    said = {
        key: f"{quoted(key + '=')} {argument_rule(schema, parameters)}"
        for key, schema in (parameters.get("properties") or {}).items()
    }
    parts = [said[key] for key in said if key in required]
    others = [said[key] for key in said if key not in required]
    first, later = (parts, others) if parts else (others[:1], others[1:])
    rule = ' ", " '.join(first) + "".join(f' (", " {each})?' for each in later)
    rule = rule if parts or not rule else f"({rule})?"
    return f"{quoted(tool['name'] + '(')} {rule} {quoted(')')}"
