"""The tools of a request: what callers define, and which calls an answer may have."""

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
_NULL: Final = type(None)


@dataclass(frozen=True)
class Tools:
    """Tools as chat templates take them, and how they may be called."""

    definitions: tuple[Mapping[str, Any], ...]
    """``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    callable_names: tuple[str, ...]
    """Of the tools that may be called."""
    must_call: bool = False
    """The answer is calls, and nothing else."""
    most_one: bool = False
    """At most one call."""

    @classmethod
    def of(cls, tools: object, tool_choice: object, is_parallel: object) -> Tools | None:
        """Of a body's ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None:
        there are no tools, or none may be called.

        Raises:
            RequestError: one of the three is not as OpenAI's API has it. Its
                message begins with the field's name.
        """
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
        """Of the tools that may be called."""
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


def _definition(tool: object, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise _refuse("tools", f'{where} must have the type "function", not {kind!r:.80}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refuse("tools", f'{where} must have a "function" that is an object')
    where += ".function"
    for field in function:
        if field not in _FUNCTION_FIELDS:
            known = ", ".join(_FUNCTION_FIELDS)
            raise _refuse("tools", f"{where} has an unknown field {field!r:.80}: known are {known}")
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, Mapping) else {}
    name = function.get("name")
    for field, is_right, rule in (
        ("name", isinstance(name, str) and _NAME.fullmatch(name),
         f"1 to 64 of a-z A-Z 0-9 _ -, not {name!r:.80}"),
        ("description", isinstance(function.get("description"), (str, _NULL)), "a string"),
        ("strict", isinstance(function.get("strict"), (bool, _NULL)), "true or false"),
        ("parameters", isinstance(parameters, (Mapping, _NULL)),
         "a JSON schema, which is an object"),
        ("parameters.type", schema.get("type", "object") in ("object", ["object"]), '"object"'),
        ("parameters.properties", isinstance(schema.get("properties") or {}, Mapping), "an object"),
        ("parameters.required", isinstance(schema.get("required") or [], (list, tuple)), "a list"),
    ):  # fmt: skip
        if not is_right:
            raise _refuse("tools", f"{where}.{field} must be {rule}")
    # ``strict`` asks for what a required call does anyway, and is not for the model.
    said = {k: v for k, v in function.items() if k != "strict" and v is not None}
    return {"type": "function", "function": said}


def _chosen(choice: object, names: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the tools that may be called, and True if one must be."""
    if choice is None or choice == "auto":
        return tuple(names), False
    if choice == "none":
        return (), False
    if choice == "required":
        if not names:
            raise _refuse("tool_choice", ' "required" needs tools: give some')
        return tuple(names), True
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return (_named(choice, names),), True
    if kind != "allowed_tools":
        what = "none, auto, required, or name a function"
        raise _refuse("tool_choice", f" must be one of {what}, not {choice!r:.80}")
    said = choice.get("allowed_tools")  # type: ignore[attr-defined]
    mode, tools = (said.get(name) for name in ("mode", "tools")) if isinstance(said, Mapping) else (
        None, None)  # fmt: skip
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        raise _refuse(
            "tool_choice", '.allowed_tools must have a "mode", auto or required, and "tools"'
        )
    return tuple(_named(tool, names) for tool in tools), mode == "required"


def _named(choice: Any, names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        known = ", ".join(names) or "none"
        raise _refuse("tool_choice", f" names {name!r:.80}, but the tools are {known}")
    return name
