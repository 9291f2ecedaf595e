"""Tool calls as model families write them: found in a text as it comes, and as a
grammar where a call is required."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from fastdecode.text.call_text import MOST_HEAD_CHARS, CallText
from fastdecode.text.lark import arguments_rule, marked, quoted
from fastdecode.text.python_calls import python_call_rules
from fastdecode.text.tagged_calls import GLM45, QWEN3_CODER, Tags, tagged_call_rules


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: a mark, then JSON objects, unless it says
    otherwise."""

    name: str
    begin: str
    """Before a call, or before all of them."""
    end: str = ""
    """After a call; empty: its JSON is all."""
    arguments: str = "arguments"
    """The key of the arguments, after ``name``."""
    is_list: bool = False
    """All calls stand in one JSON list."""
    name_end: str = ""
    """The name stands before the arguments' object, and this between them."""
    begins_bare: bool = False
    """An answer that begins with a call's object is a call, without a mark."""
    id_chars: int = 0
    """Ids of calls have this many letters and digits; 0: any number."""
    tags: Tags | None = None
    """Arguments stand in tags."""
    is_python: bool = False
    """Calls are a Python list."""
    has_channels: bool = False
    """Calls are messages of gpt-oss."""


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    row.name: row
    for row in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", begins_bare=True),
        ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, id_chars=9),
        ToolFormat("mistral_args", "[TOOL_CALLS]", name_end="[ARGS]", id_chars=9),
        ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", tags=QWEN3_CODER),
        ToolFormat("glm45", "<tool_call>", "</tool_call>", tags=GLM45),
        ToolFormat(
            "pythonic", "<|python_start|>", "<|python_end|>", begins_bare=True, is_python=True
        ),
        ToolFormat("harmony", "<|channel|>commentary to=functions.", has_channels=True),
    )
}
"""By name: Qwen, Hermes and the models that follow them; Llama 3; Mistral's
tokenizers 3 to 7, and from 11 on; Qwen3-Coder; GLM 4.5; Llama 3.2 and 4; gpt-oss."""

_IN_TEMPLATES: Final = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""What a chat template's source has in it, and the format that it then writes."""


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template's source writes; None: it writes none of them."""
    return next((TOOL_FORMATS[name] for mark, name in _IN_TEMPLATES if mark in template), None)


def calls_rules(
    family: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    most_one: bool,
) -> str:
    """A Lark grammar whose rule ``calls`` is one call of these tools, or several.

    Args:
        tools: each has a ``name``, and ``parameters``, a JSON schema, or none.
        special: the model's special tokens, by name.
        most_one: no more than one call.
    """
    mark = partial(marked, special=special)
    rules: list[str] = []
    for i, tool in enumerate(tools):
        rules += _call_rules(family, tool, mark, f"call_{i}")
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([f"calls: {_calls_rule(family, mark, most_one)}", f"call: {one}", *rules])


def _calls_rule(family: ToolFormat, mark: Callable[[str], str], most_one: bool) -> str:
    begin = mark(family.begin)
    if family.tags is not None:
        whole = f"{begin} call {mark(family.end)}"
        return whole if most_one else rf'{whole} ("\n" {whole})*'
    if family.is_python:
        return '"[" call "]"' if most_one else '"[" call (", " call)* "]"'
    if family.is_list:
        return f'{begin} "[" call "]"' if most_one else f'{begin} "[" call (", " call)* "]"'
    if family.begins_bare:
        return "call" if most_one else 'call ("; " call)*'
    if family.name_end:
        return f"{begin} call" if most_one else f"({begin} call)+"
    whole = rf'{begin} "\n" call "\n" {mark(family.end)}'
    return whole if most_one else rf'{whole} ("\n" {whole})*'


def _call_rules(
    family: ToolFormat, tool: Mapping[str, Any], mark: Callable[[str], str], name: str
) -> Iterable[str]:
    """The rule ``name`` for a call of a tool, and rules that it needs."""
    if family.tags is not None:
        return tagged_call_rules(family.tags, tool, name)
    if family.is_python:
        return python_call_rules(tool, name)
    return [f"{name}: {_call_rule(family, tool, mark)}"]


def _call_rule(family: ToolFormat, tool: Mapping[str, Any], mark: Callable[[str], str]) -> str:
    schema = arguments_rule(tool)
    if family.name_end:
        return f"{quoted(tool['name'])} {mark(family.name_end)} {schema}"
    head = f'{{"name": {json.dumps(tool["name"])}, "{family.arguments}": '
    return f'{quoted(head)} {schema} "}}"'


_OBJECT_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME: Final = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\]\w*)?")
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"|([^"\s]))')
_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "id"})
"""That the object of a call may begin with."""
_BETWEEN: Final = " \t\r\n;,"


class ToolCallParser(CallText):
    """Divides an answer whose calls are JSON objects.

    Args:
        family: how calls are written.
        tool_names: of the tools; a call without a mark is one only with one of them.
    """

    first_mode: ClassVar[str] = "start"

    def __init__(self, family: ToolFormat, tool_names: Collection[str]) -> None:
        super().__init__(family.begin)
        self.family = family
        self.tool_names = tool_names
        self._json = _JsonEnd()
        self._num_scanned = 0
        """Characters of a call's object that ``_json`` has seen, before its arguments begin."""

    def _step(self, mode: str) -> bool:
        if mode == "text":
            return self._in_text("call") and self._enter_call()
        if mode == "arguments":
            return self._in_arguments()
        if mode == "close":
            return self._in_close()
        return self._in_start() if mode == "start" else self._in_call()

    def _rest(self) -> str:
        if self._mode == "call" and not self._is_end_begun():
            return self._marked + self._text
        return self._text if self._mode in ("start", "text") else ""

    def _in_start(self) -> bool:
        begun = self._text.lstrip()
        if not begun:
            return False
        self._mode = "call" if self.family.begins_bare and begun[0] == "{" else "text"
        return True

    def _in_call(self) -> bool:
        """Before a call, or before the end of all calls."""
        rest = self._text.lstrip(_BETWEEN + "[" * self.family.is_list)
        if not rest:
            return False
        if self.family.name_end:
            return self._in_name(rest)
        if rest[0] == "{":
            return self._in_head(rest)
        end = self.family.end or ("]" if self.family.is_list else "")
        if end and rest.startswith(end):
            self._text, self._mode = rest[len(end) :], "text"
            return True
        return False if end and end.startswith(rest) else self._no_call()

    def _in_name(self, rest: str) -> bool:
        """Where the name stands before the arguments."""
        name, mark, after = rest.partition(self.family.name_end)
        if not mark and len(name) <= MOST_HEAD_CHARS:
            return False
        head = _NAME.fullmatch(name)
        if head is None:
            return self._no_call()
        self._text = after
        self._begin_call(head[1])
        return True

    def _in_head(self, rest: str) -> bool:
        """Before the arguments in a call's object."""
        self._text = rest
        if self._is_bare and not self._may_be_call(rest):
            return self._no_call()
        head = _OBJECT_HEAD.match(rest) if len(rest) <= MOST_HEAD_CHARS else None
        if head is None:
            return self._in_object()
        name = _loaded(head[1])
        if not isinstance(name, str) or (self._is_bare and name not in self.tool_names):
            return self._no_call()
        self._text = rest[head.end() :]
        self._begin_call(name)
        return True

    def _may_be_call(self, rest: str) -> bool:
        """Whether an object without a mark begins with a call's key. Only its first
        characters are read, so a long object costs no more at each feed."""
        if self._num_scanned > MOST_HEAD_CHARS:
            return True
        first = _FIRST_KEY.match(rest[:MOST_HEAD_CHARS])
        return len(rest) <= MOST_HEAD_CHARS if first is None else first[1] in _KEYS

    def _in_object(self) -> bool:
        """A call's object with its keys in another order: once it is complete."""
        end = self._json.find(self._text[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self._text)
            return False
        end += self._num_scanned
        call = _loaded(self._text[:end])
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._no_call()
        if self._is_bare and call["name"] not in self.tool_names:
            return self._no_call()
        given = [call[key] for key in ("arguments", "parameters") if call.get(key) is not None]
        arguments = given[0] if given else {}
        said = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self._call(call["name"], said)
        self._text = self._text[end:]
        return self._enter_call()

    def _in_arguments(self) -> bool:
        end = self._json.find(self._text)
        piece = self._text if end is None else self._text[:end]
        self._argue(piece)
        self._text = self._text[len(piece) :]
        if end is not None:
            self._mode = "close"
        return end is not None

    def _in_close(self) -> bool:
        """Between the arguments and the end of the call's object."""
        rest = self._text.lstrip()
        if not rest:
            return False
        if self.family.name_end:
            self._mode = "text"
            return True
        if rest[0] == "," and self._json.is_over:
            self._json = _JsonEnd(depth=1)
        if self._json.is_over:  # a model may forget the object's end
            self._text = rest.removeprefix("}")
            return self._enter_call()
        end = self._json.find(rest)
        self._text = "" if end is None else rest[end:]
        return end is not None and self._enter_call()

    @property
    def _is_bare(self) -> bool:
        return self.family.begins_bare and not self._marked

    def _is_end_begun(self) -> bool:
        """Whether the text held after a mark or a call is blank or begins the calls' end."""
        return self.family.end.startswith(self._text.strip(_BETWEEN + "[]"))

    def _begin_call(self, name: str) -> None:
        self._call(name)
        self._mode, self._json = "arguments", _JsonEnd()

    def _enter_call(self) -> bool:
        self._mode, self._json, self._num_scanned = "call", _JsonEnd(), 0
        return True


class _JsonEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    @property
    def is_over(self) -> bool:
        return self._depth <= 0

    def find(self, text: str) -> int | None:
        """The place behind the end, in this piece; None: it goes on."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
