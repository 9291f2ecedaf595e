"""Calls whose arguments stand in tags, as Qwen3-Coder and GLM 4.5 write them.

Strings stand there as they are, other values as JSON. So the tool's schema says what a
value is. Each argument is given once it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from fastdecode.text.call_text import MOST_HEAD_CHARS, CallText, ToolSchemas
from fastdecode.text.lark import argument_rule, quoted, text_until

_BEGUN_NAME: Final = re.compile(r"\s*[\w.-]*\s*")


@dataclass(frozen=True)
class Tags:
    """How a family writes a call between the marks of all calls."""

    lead: str
    """Before a call's name."""
    head: str
    """Regular expression: the beginning of a call, up to its arguments; its group is the
    name."""
    key_lead: str
    """Before an argument's name."""
    key: str
    """Regular expression: from there to the value; its group is the argument's name."""
    value_end: str
    end: str
    """After the arguments; empty: nothing."""
    written: tuple[str, str, str, str]
    """As the model writes it: a head, and what stands before and after a value, with ``{}``
    for names; then the end."""
    is_padded: bool
    """Values stand on lines of their own."""


QWEN3_CODER: Final = Tags(
    "<function=",
    r"\s*<function=\s*([\w.-]{1,256})\s*>",
    "<parameter=",
    r"<parameter=\s*([^>\n]{1,256}?)\s*>",
    "</parameter>",
    "</function>",
    ("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    is_padded=True,
)
GLM45: Final = Tags(
    "",
    r"\s*([\w.-]{1,256})\s*(?=<)",
    "<arg_key>",
    r"<arg_key>\s*([^<]{1,256}?)\s*</arg_key>\s*<arg_value>",
    "</arg_value>",
    "",
    ("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    is_padded=False,
)


class TaggedCallParser(CallText):
    """Divides an answer.

    Args:
        begin, end: the marks around a call.
        tags: between them.
        tools: whose schemas say what arguments are.
    """

    def __init__(self, begin: str, end: str, tags: Tags, tools: ToolSchemas) -> None:
        super().__init__(begin)
        self._end = end
        self._tags = tags
        self._tools = tools
        self._name = self._key = ""
        self._num_arguments = 0
        self._num_scanned = 0
        """Characters of a value without its end."""

    def _step(self, mode: str) -> bool:
        if mode == "text":
            return self._in_text("head")
        if mode == "head":
            return self._in_head()
        return self._in_value() if mode == "value" else self._in_call()

    def _rest(self) -> str:
        if self._mode == "head" and self._text.strip():
            return self._marked + self._text
        return self._text if self._mode == "text" else ""

    def _in_head(self) -> bool:
        head = re.match(self._tags.head, self._text)
        if head is None:
            return False if self._may_be_head() else self._no_call()
        self._text = self._text[head.end() :]
        self._name, self._num_arguments, self._mode = head[1], 0, "call"
        self._call(self._name)
        return True

    def _may_be_head(self) -> bool:
        begun, lead = self._text.lstrip(), self._tags.lead
        if not _may_begin(begun, lead):
            return False
        is_name = _BEGUN_NAME.fullmatch(begun[len(lead) :])
        return is_name is not None and len(begun) <= MOST_HEAD_CHARS

    def _in_call(self) -> bool:
        """Before an argument, or at the end. Anything else is dropped."""
        self._text = rest = self._text.lstrip()
        key = re.match(self._tags.key, rest)
        if key is not None:
            self._text = rest[key.end() :]
            self._key, self._num_scanned, self._mode = key[1], 0, "value"
            return True
        for end in filter(None, (self._tags.end, self._end)):
            if rest.startswith(end):
                self._text = rest[len(end) :]
                self._close(is_last=end == self._end)
                return True
        lead = self._tags.lead if self._mode == "closed" else ""
        if lead and rest.startswith(lead):
            self._mode = "head"
            return True
        marks = filter(None, (self._tags.key_lead, self._tags.end, self._end, lead))
        if any(_may_begin(rest, mark) for mark in marks) and len(rest) <= MOST_HEAD_CHARS:
            return False
        self._text = rest[max(1, rest.find("<", 1)) :] if "<" in rest[1:] else ""
        return bool(self._text)

    def _close(self, *, is_last: bool) -> None:
        if self._mode == "call":
            self._argue("}" if self._num_arguments else "{}")
        self._mode = "text" if is_last else "closed"

    def _in_value(self) -> bool:
        tags = self._tags
        place = self._text.find(tags.value_end, max(0, self._num_scanned - len(tags.value_end)))
        if place < 0:
            self._num_scanned = len(self._text)
            return False
        value = self._text[:place]
        if tags.is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        self._text = self._text[place + len(tags.value_end) :]
        before = ", " if self._num_arguments else "{"
        said = json.dumps(self._meant(value), ensure_ascii=False)
        self._argue(f"{before}{json.dumps(self._key, ensure_ascii=False)}: {said}")
        self._num_arguments += 1
        self._mode = "call"
        return True

    def _meant(self, text: str) -> Any:
        """What an argument's text means."""
        properties = self._tools.get(self._name, {}).get("properties") or {}
        schema = properties.get(self._key) if isinstance(properties, Mapping) else None
        types = types_of(schema)
        if types == {"string"}:
            return text
        try:
            value = json.loads(text, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return _PYTHONS.get(text, text)
        is_wanted = "string" not in types or _type_of(value) in types
        return value if is_wanted else text


def _may_begin(text: str, mark: str) -> bool:
    """Whether a text begins with a mark, as far as it has come."""
    return text.startswith(mark) or mark.startswith(text)


_PYTHONS: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
             dict: "object"}  # fmt: skip
    return names.get(type(value), "null")


def types_of(schema: object) -> set[str]:
    """JSON's types that a schema allows, as far as it says so: ``number`` has ``integer``."""
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type")
    types = {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
    if not types and isinstance(schema.get("enum"), list):
        types = {_type_of(value) for value in schema["enum"]}
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for each in choices if isinstance(choices, list) else ():
            types |= types_of(each)
    return types | ({"integer"} if "number" in types else set())


def tagged_call_rules(tags: Tags, tool: Mapping[str, Any], name: str) -> Iterator[str]:
    """Lark rules: the first, ``name``, is a call of the tool, from behind its begin mark
    to before its end mark. A string's pattern and length are not followed."""
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
    types, choices = types_of(schema), schema.get("enum") if isinstance(schema, Mapping) else None
    if choices and types == {"string"}:
        return f"{name}: ({' | '.join(map(quoted, choices))}) {quoted(after)}"
    if "string" in types or not isinstance(schema, Mapping):
        return text_until(name, after, {})
    return f"{name}: {argument_rule(schema, parameters)} {quoted(after)}"
