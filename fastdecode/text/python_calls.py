"""Calls that are written as a Python list, as Llama 3.2 and 4 write them:
``[weather(city="Wien", days=2), stop()]``. Each is given once it is complete."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from fastdecode.text.call_text import MOST_HEAD_CHARS, CallText, ToolSchemas
from fastdecode.text.lark import argument_rule, quoted

_HEAD: Final = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]*)\s*\(")
_BEGUN_HEAD: Final = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*\s*)?)?")
_NAME: Final = re.compile(r"([A-Za-z_][\w.-]*)\s*\(")
_BEGUN_NAME: Final = re.compile(r"(?:[A-Za-z_][\w.-]*\s*)?")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_JSON_NAMES: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


class PythonCallParser(CallText):
    """Divides an answer. A list at the beginning of the answer is of calls if its first
    call is of one of the tools; so is any list behind the mark.

    Args:
        begin, end: marks that may stand around the list.
        tools: that may be called.
    """

    first_mode: ClassVar[str] = "start"

    def __init__(self, begin: str, end: str, tools: ToolSchemas) -> None:
        super().__init__(begin)
        self._end = end
        self._tools = tools
        self._end_of_call = _PythonEnd()
        self._held = ""
        """What stands before the list's first call."""

    def _step(self, mode: str) -> bool:
        if mode == "text":
            return self._in_text("list")
        if mode in ("start", "list"):
            return self._in_start(is_bare=mode == "start")
        return self._in_list() if mode == "calls" else self._in_call()

    def _rest(self) -> str:
        if self._mode in ("text", "start", "list"):
            return self._marked + self._text
        return self._held + self._text if self._mode == "call" else ""

    def _in_start(self, *, is_bare: bool) -> bool:
        """Where a list of calls may begin."""
        head = _HEAD.match(self._text)
        if head is None:
            may_be = _BEGUN_HEAD.fullmatch(self._text) and len(self._text) <= MOST_HEAD_CHARS
            if may_be:
                return False
        if head is None or (is_bare and head[1] not in self._tools):
            if not is_bare:
                return self._no_call()
            self._mode = "text"
            return True
        self._held = self._marked + self._text[: head.start(1)]
        self._text = self._text[head.start(1) :]
        self._enter_call()
        return True

    def _enter_call(self) -> None:
        self._mode, self._end_of_call = "call", _PythonEnd()

    def _in_call(self) -> bool:
        end = self._end_of_call.find(self._text)
        if end is None:
            return False
        called = _parsed(self._text[:end])
        if called is None:  # it is no Python: from here on the answer is text
            self._say(self._held)
            self._held, self._mode = "", "text"
            return True
        self._call(called[0], json.dumps(called[1], ensure_ascii=False))
        self._text, self._held, self._mode = self._text[end:], "", "calls"
        return True

    def _in_list(self) -> bool:
        """Behind a call."""
        self._text = rest = self._text.lstrip(" \t\r\n,;")
        if rest and _NAME.match(rest):
            self._enter_call()
            return True
        if _BEGUN_NAME.fullmatch(rest):
            return False
        if rest[0] == "]":
            rest = rest[1:].lstrip()
            if self._end.startswith(rest) and rest != self._end:
                return False
            rest = rest.removeprefix(self._end)
        self._text, self._mode = rest, "text"
        return True


class _PythonEnd:
    """Finds where a call's last bracket is, in a text that grows. Each character is read
    once."""

    def __init__(self) -> None:
        self._num_read = self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The place behind the bracket; None: it is not there yet."""
        for place in range(self._num_read, len(text)):
            char = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    self._num_read = place + 1
                    return place + 1
        self._num_read = len(text)
        return None


def _parsed(call: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and arguments; None: it is none."""
    name, _, arguments = call.partition("(")
    text = "f(" + _ESCAPE.sub(lambda found: found[1] if found[1] == "/" else found[0], arguments)
    try:
        made = ast.parse(text, mode="eval").body
        if not isinstance(made, ast.Call) or made.args:
            return None
        said = {word.arg: _value(word.value) for word in made.keywords if word.arg is not None}
        json.dumps(said, allow_nan=False).encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return name.strip(), said


def _value(node: ast.expr) -> Any:
    """Of an argument. Raises ValueError: it is no literal."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of an object are strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, str):  # JSON writes great characters as pairs
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    return value


def python_call_rules(tool: Mapping[str, Any], name: str) -> Iterator[str]:
    """A Lark rule ``name`` for a call of the tool."""
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
    yield f"{name}: {quoted(tool['name'] + '(')} {rule} {quoted(')')}"
