"""Tools of requests, and the formats in which model families write calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.structured import MAX_CHARS

MAX_TOOLS: Final = 128
CODE: Final = "invalid_tools"
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class Tools:
    """Tools as chat templates take them, and how they may be called."""

    definitions: tuple[Mapping[str, Any], ...]
    """``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    callable_names: tuple[str, ...]
    must_call: bool = False
    """The answer is calls, and nothing else."""
    most_one: bool = False

    @classmethod
    def of(cls, tools: object, tool_choice: object, is_parallel: object) -> Tools | None:
        """Return the tools of a body's ``tools``, ``tool_choice`` and ``parallel_tool_calls``, or
        None if none may be called. Raises RequestError: If one of these is not as OpenAI's."""
        definitions = _definitions(tools)
        if is_parallel is not None and not isinstance(is_parallel, bool):
            raise _refuse("parallel_tool_calls", " must be true or false")
        names = tuple(tool["function"]["name"] for tool in definitions)
        allowed, must_call = _chosen(tool_choice, names)
        if not allowed:
            return None
        return cls(definitions, allowed, must_call, is_parallel is False)

    @property
    def functions(self) -> list[Mapping[str, Any]]:
        every = (tool["function"] for tool in self.definitions)
        return [function for function in every if function["name"] in self.callable_names]


def _refuse(name: str, *words: str) -> RequestError:
    return RequestError(Given(name), *words, code=CODE)


def _definitions(tools: object) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MAX_TOOLS:
        raise _refuse("tools", f" must be a list of at most {MAX_TOOLS} tools")
    checked = tuple(_definition(tool, f"[{place}]") for place, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise _refuse("tools", f" has two tools named {name!r}: give each a name of its own")
    try:
        text = json.dumps(checked)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refuse("tools", f" is not JSON: {error}") from None
    if len(text) > MAX_CHARS:
        raise _refuse("tools", f" may have {MAX_CHARS} characters in all, as JSON")
    return checked


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _definition(tool: object, where: str) -> Mapping[str, Any]:
    kind = _object(tool).get("type")
    if kind != "function":
        kind = kind if isinstance(tool, Mapping) else type(tool).__name__
        raise _refuse("tools", f'{where} must have the type "function", not {kind!r:.80}')
    function = _object(tool).get("function")
    if not isinstance(function, Mapping):
        raise _refuse("tools", f'{where} must have a "function" that is an object')
    where += ".function"
    for field in function:
        if field not in _FUNCTION_FIELDS:
            known = ", ".join(_FUNCTION_FIELDS)
            raise _refuse("tools", f"{where} has an unknown field {field!r:.80}: known are {known}")
    name, parameters = function.get("name"), function.get("parameters")
    schema = _object(parameters)
    is_named = isinstance(name, str) and _NAME.fullmatch(name)
    rules = {
        "name": (is_named, f"1 to 64 of a-z A-Z 0-9 _ -, not {name!r:.80}"),
        "description": (isinstance(function.get("description"), str | None), "a string"),
        "strict": (isinstance(function.get("strict"), bool | None), "true or false"),
        "parameters": (isinstance(parameters, Mapping | None), "a JSON schema, which is an object"),
        "parameters.type": (schema.get("type", "object") in ("object", ["object"]), '"object"'),
        "parameters.properties": (isinstance(schema.get("properties") or {}, Mapping), "an object"),
        "parameters.required": (isinstance(schema.get("required") or [], list | tuple), "a list"),
    }
    for field, (is_right, rule) in rules.items():
        if not is_right:
            raise _refuse("tools", f"{where}.{field} must be {rule}")
    # ``strict`` asks for what a required call does anyway, and is not for the model.
    said = {k: v for k, v in function.items() if k != "strict" and v is not None}
    return {"type": "function", "function": said}


def _chosen(choice: object, names: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the tools that may be called, and True if one must be."""
    if choice in (None, "auto"):
        return tuple(names), False
    if choice == "none":
        return (), False
    if choice == "required":
        if not names:
            raise _refuse("tool_choice", ' "required" needs tools: give some')
        return tuple(names), True
    kind = _object(choice).get("type")
    if kind == "function":
        return (_named(choice, names),), True
    if kind != "allowed_tools":
        what = "none, auto, required, or name a function"
        raise _refuse("tool_choice", f" must be one of {what}, not {choice!r:.80}")
    allowed = _object(_object(choice).get("allowed_tools"))
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        rule = '.allowed_tools must have a "mode", auto or required, and "tools"'
        raise _refuse("tool_choice", rule)
    return tuple(_named(tool, names) for tool in tools), mode == "required"


def _named(choice: object, names: Sequence[str]) -> str:
    name = _object(_object(choice).get("function")).get("name")
    if not isinstance(name, str) or name not in names:
        known = ", ".join(names) or "none"
        raise _refuse("tool_choice", f" names {name!r:.80}, but the tools are {known}")
    return name


@dataclass(frozen=True)
class Tags:
    """Calls whose arguments stand in tags: strings as they are, other values as JSON."""

    lead: str
    """What stands before a call's name."""
    head: str
    """Regular expression from the begin mark to the first argument. Its group is the name."""
    key_lead: str
    key_end: str
    """What stands after an argument's name, which may contain it."""
    value_lead: str
    """Regular expression between ``key_end`` and the value."""
    value_end: str
    end: str
    """What stands after the arguments. May be empty."""
    written: tuple[str, str, str, str]
    """What the model writes: a head, what stands before and after a value, and the end. ``{}``
    stands for names."""
    is_padded: bool
    """Values stand on lines of their own."""


QWEN3_CODER: Final = Tags(
    lead="<function=",
    head=r"\s*<function=\s*([\w.-]{1,256})\s*>",
    key_lead="<parameter=",
    key_end=">",
    value_lead="",
    value_end="</parameter>",
    end="</function>",
    written=("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    is_padded=True,
)
GLM45: Final = Tags(
    lead="",
    head=r"\s*([\w.-]{1,256})\s*(?=<arg_key>|</tool_call>)",
    key_lead="<arg_key>",
    key_end="</arg_key>",
    value_lead=r"\s*<arg_value>",
    value_end="</arg_value>",
    end="",
    written=("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    is_padded=False,
)


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: JSON objects after a mark by default."""

    name: str
    begin: str  # before a call, or before all of them
    end: str = ""
    arguments: str = "arguments"  # the key of the arguments, after ``name``
    is_list: bool = False  # all calls are one JSON list
    name_end: str = ""
    """If set, the name precedes the arguments' object, with this mark between them."""
    takes_name: bool = False
    """A name before the arguments' object is read, with or without ``[ARGS]``."""
    begins_bare: bool = False  # an answer may begin with a call that has no mark
    id_chars: int = 0  # letters and digits in a call's id; 0 allows any number
    tags: Tags | None = None
    is_python: bool = False  # calls are a Python list, but JSON objects are read, too
    has_channels: bool = False  # calls are messages of gpt-oss


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    row.name: row
    for row in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", begins_bare=True),
        ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, takes_name=True, id_chars=9),
        ToolFormat("mistral_args", "[TOOL_CALLS]", name_end="[ARGS]", takes_name=True, id_chars=9),
        ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", tags=QWEN3_CODER),
        ToolFormat("glm45", "<tool_call>", "</tool_call>", tags=GLM45),
        ToolFormat(
            "pythonic", "<|python_start|>", "<|python_end|>", begins_bare=True, is_python=True
        ),
        ToolFormat("harmony", "<|channel|>commentary to=functions.", has_channels=True),
    )
}
"""Qwen, Hermes and the models that follow them; Llama 3; Mistral's tokenizers 3 to 7, and from
11 on; Qwen3-Coder; GLM 4.5; Llama 3.2 and 4; gpt-oss."""

_IN_TEMPLATES: Final = (
    ("harmony", "<|channel|>"),
    ("qwen3_coder", "<tool_call>", "<function="),
    ("glm45", "<arg_key>"),
    ("hermes", "<tool_call>"),
    ("mistral_args", "[ARGS]"),
    ("mistral", "[TOOL_CALLS]"),
    ("pythonic", "[func_name1("),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "Environment: ipython"),
)
"""The format of a chat template whose source has these marks: the first one counts."""


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template's source writes, or None if it is unknown."""
    for name, *marks in _IN_TEMPLATES:
        if all(mark in template for mark in marks):
            return TOOL_FORMATS[name]
    return None
