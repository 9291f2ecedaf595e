"""Tool calls as model families write them: found in a text as it comes, and as a
grammar where a call is required."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from fastdecode.text.grammars import json_rule


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: JSON objects between marks."""

    name: str
    begin: str
    """Before a call, or before all."""
    end: str
    """After a call; empty: its JSON is all."""
    arguments: str
    """The object's name of the arguments, beside ``name``."""
    is_list: bool = False
    """All calls stand in one JSON list."""
    begins_bare: bool = False
    """A text that begins with an object is a call, without a mark."""
    has_special_begin: bool = False
    """The mark is a special token, which a text leaves out unless it is asked for."""


FORMATS: Final[Mapping[str, ToolFormat]] = {
    row.name: row
    for row in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
        ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", True, False, True),
        ToolFormat("llama3_json", "<|python_tag|>", "", "parameters", False, True, True),
    )
}
"""By name: Qwen, Hermes and those that follow them; Mistral; Llama 3."""

_IN_TEMPLATES: Final = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""What a chat template has, and whose it then is."""


def format_of(template: str, wanted: str | None = None) -> ToolFormat | None:
    """The format of a model: the one that is wanted, or the one that its chat
    template writes; None: it writes no calls."""
    if wanted is not None:
        return FORMATS[wanted]
    return next((FORMATS[name] for mark, name in _IN_TEMPLATES if mark in template), None)


def calls_grammar(
    family: ToolFormat, tools: Sequence[Mapping[str, Any]], *, most_one: bool
) -> str:
    """A Lark grammar of one call or more of these tools (``name`` and
    ``parameters``, a JSON schema). Marks that are special tokens are left out."""
    rules = [
        f"call_{i}: {_quoted(_head(family, tool['name']))} "
        f'{json_rule(tool.get("parameters") or {"type": "object"})} "}}"'
        for i, tool in enumerate(tools)
    ]
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    if family.is_list:
        start = 'start: "[" call "]"' if most_one else 'start: "[" call (", " call)* "]"'
    elif family.end:
        whole = f'{_quoted(family.begin)} "\\n" call "\\n" {_quoted(family.end)}'
        start = f"start: {whole}" if most_one else f'start: {whole} ("\\n" {whole})*'
    else:
        start = "start: call" if most_one else 'start: call ("; " call)*'
    return "\n".join([start, f"call: {one}", *rules])


def _head(family: ToolFormat, name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{family.arguments}": '


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass
class CallPiece:
    """A piece of one call: its name in the first, then text of its arguments."""

    index: int
    name: str | None
    arguments: str


Piece: TypeAlias = "str | CallPiece"
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BETWEEN: Final = " \t\r\n;,"


@dataclass
class ToolCallParser:
    """Divides one answer's text, as it comes, into text and calls.

    Args:
        family: how calls are written.
        is_forced: the text is nothing but calls (``calls_grammar``).
    """

    family: ToolFormat
    is_forced: bool = False
    num_calls: int = 0
    _text: str = ""
    """That was fed, and isn't divided yet."""
    _mode: Literal["start", "text", "call", "arguments", "close"] = "start"
    _marked: str = ""
    """The mark that began the call; text, if it turns out to be none."""
    _json: _JsonEnd = field(default_factory=lambda: _JsonEnd())

    def __post_init__(self) -> None:
        if self.is_forced and self.family.has_special_begin:
            self._mode = "call"

    def feed(self, text: str) -> list[Piece]:
        """More text; what it gives."""
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """No text follows: what was held back."""
        rest = self._text if self._mode in ("start", "text") else ""
        if self._mode == "call" and self._text.strip(_BETWEEN + "[]"):
            rest = self._marked + self._text
        self._text, self._mode = "", "text"
        return [rest] if rest else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take something off the text; False: more of it must come first."""
        act = getattr(self, f"_in_{self._mode}")
        return bool(act(pieces))

    def _in_start(self, pieces: list[Piece]) -> bool:
        begun = self._text.lstrip()
        if not begun:
            return False
        is_call = self.family.begins_bare and begun[0] == "{"
        self._mode, self._marked = ("call" if is_call else "text"), ""
        return True

    def _in_text(self, pieces: list[Piece]) -> bool:
        before, mark, after = self._text.partition(self.family.begin)
        if mark:
            self._say(pieces, before)
            self._text, self._mode, self._marked = after, "call", mark
            return True
        num_held = _begun(self._text, self.family.begin)
        self._say(pieces, self._text[: len(self._text) - num_held])
        self._text = self._text[len(self._text) - num_held :]
        return False

    def _say(self, pieces: list[Piece], text: str) -> None:
        if text and not (self.num_calls and not text.strip()):  # blanks between calls
            pieces.append(text)

    def _in_call(self, pieces: list[Piece]) -> bool:
        """Before a call's object, or before what ends the calls."""
        rest = self._text.lstrip(_BETWEEN + "[" * self.family.is_list)
        if not rest:
            return False
        if rest[0] == "{":
            return self._begin_call(pieces, rest)
        end = self.family.end or ("]" if self.family.is_list else "")
        if end and rest.startswith(end):
            self._text, self._mode, self._marked = rest[len(end) :], "text", ""
            return True
        if end and end.startswith(rest):
            return False
        self._say(pieces, self._marked + self._text)  # no call after all
        self._text, self._mode = "", "text"
        return True

    def _begin_call(self, pieces: list[Piece], rest: str) -> bool:
        head = _HEAD.match(rest)
        if head is not None:
            pieces.append(CallPiece(self.num_calls, _loaded(head[1]), ""))
            self._text, self._mode, self._json = rest[head.end() :], "arguments", _JsonEnd()
            self.num_calls += 1
            return True
        end = _JsonEnd().find(rest)
        if end is None:
            return False
        call = _loaded(rest[:end])
        self._text = rest[end:]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            self._say(pieces, self._marked + rest[:end])
            self._mode = "text"
            return True
        arguments = call.get("arguments", call.get("parameters", {}))
        said = arguments if isinstance(arguments, str) else json.dumps(arguments)
        pieces.append(CallPiece(self.num_calls, call["name"], said))
        self.num_calls += 1
        self._marked = ""
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        end = self._json.find(self._text)
        piece = self._text if end is None else self._text[:end]
        pieces.append(CallPiece(self.num_calls - 1, None, piece))
        self._text = self._text[len(piece) :]
        if end is not None:
            self._mode = "close"
        return end is not None

    def _in_close(self, pieces: list[Piece]) -> bool:
        """Between the arguments and the end of the call's object."""
        rest = self._text.lstrip()
        if not rest:
            return False
        self._text, self._mode, self._marked = rest.removeprefix("}"), "call", ""
        return True


class _JsonEnd:
    """Finds where a JSON object that comes in pieces ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Behind the end, in this piece; None: it goes on."""
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


def _begun(text: str, mark: str) -> int:
    """Characters at the end of a text that may begin a mark."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
