"""Tool calls in an answer's text, each given once it is complete.

A call that the model leaves incomplete is completed where nothing of its arguments can be
missing. Otherwise it is text. So arguments are always a JSON object.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, TypeAlias

from fastdecode.text.lark import loaded, meant, python_value
from fastdecode.text.reasoning import num_begun
from fastdecode.text.tools import Tags, ToolFormat


@dataclass(frozen=True)
class Call:
    """One call of an answer. ``arguments`` is a JSON object."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class Reasoning:
    text: str


Part: TypeAlias = "str | Reasoning | Call"
ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Names of tools, and JSON schemas of their parameters."""
MOST_HEAD_CHARS: Final = 1024
"""Most characters of a call before its arguments. Longer ones are text."""


def arguments_text(arguments: object) -> str | None:
    """Return a call's arguments as a JSON object, or None if they aren't one."""
    arguments = loaded(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair stays escaped
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return text


class Divider:
    """Divides one answer's text, as it comes, into parts. Calls after ``most_calls`` are left out.

    ``_step`` reads on in ``_text``. It returns False to wait for more, which it can't after the
    last text (``is_final``).
    """

    _step: Callable[[bool], bool]

    def __init__(self, most_calls: int) -> None:
        self.num_calls = 0
        self._most_calls = most_calls
        self._text = ""
        self._parts: list[Part] = []

    @property
    def has_calls(self) -> bool:
        return min(self.num_calls, self._most_calls) > 0

    def feed(self, text: str, *, is_final: bool = False) -> list[Part]:
        """Return the parts that more text completes."""
        self._text += text
        while self._text and self._step(is_final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back. No text follows."""
        return self.feed("", is_final=True)

    def _add_call(self, name: str, arguments: str) -> None:
        if self.num_calls < self._most_calls:
            self._parts.append(Call(self.num_calls, name, arguments))
        self.num_calls += 1


class CallReader(Divider):
    """Divides an answer into text and calls.

    A subclass reads one call: ``_text`` begins with the call's mark, and ``_place`` is where to
    read on.
    """

    _in_call: Callable[[bool], bool]

    @staticmethod
    def of(family: ToolFormat, schemas: ToolSchemas, most_calls: int) -> CallReader:
        """Return the reader of one answer. ``schemas``: the tools that may be called."""
        kind = ObjectCallReader if family.tags is None else TaggedCallReader
        return kind(family, schemas, most_calls)

    def __init__(self, family: ToolFormat, schemas: ToolSchemas, most_calls: int) -> None:
        super().__init__(most_calls)
        self._step = self._in_start if family.begins_bare else self._in_text
        self.begins: Sequence[str] = (family.begin,)
        self._family, self._schemas, self._place = family, schemas, 0
        self._is_bare = self._is_first = False
        """The call has no mark; it is the first one after its mark."""
        self._is_after_call = False
        """Drop blanks that follow a call."""

    def _in_start(self, is_final: bool) -> bool:
        begun = self._text.lstrip()
        if begun.startswith(("{", "[")):
            self._enter(0, is_bare=True)
        elif begun or is_final:
            self._step = self._in_text
        return begun != "" or is_final

    def _in_text(self, is_final: bool) -> bool:
        found = [(self._text.find(mark), mark) for mark in self.begins if mark in self._text]
        if found:
            place, mark = min(found)
            self._say(place)
            is_bare = mark != self._family.begin
            self._enter(0 if is_bare else len(mark), is_bare=is_bare)
            return True
        num_held = 0 if is_final else max(num_begun(self._text, mark) for mark in self.begins)
        self._say(len(self._text) - num_held)
        return False

    def _enter(self, place: int, *, is_bare: bool) -> None:
        self._place, self._is_bare, self._is_first = place, is_bare, True
        self._step = self._in_call

    def _say(self, end: int) -> None:
        text, self._text = self._text[:end], self._text[end:]
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._parts.append(text)
            self._is_after_call = False

    def _call(self, name: str, arguments: str, end: int) -> None:
        self._add_call(name, arguments)
        self._text, self._place = self._text[end:], 0
        self._is_first, self._is_after_call = False, True

    def _end(self, end: int) -> bool:
        """Leave the calls. What stands before ``end`` belongs to them."""
        self._text, self._step = self._text[end:], self._in_text
        return True

    def _no_call(self) -> bool:
        """Treat the call's mark, or its first character, as text. After a call, nothing."""
        if not self._is_first:
            return self._end(self._place)
        self._say(max(self._place, 1))
        return self._end(0)


_BEFORE_CALL: Final = re.compile(r"[\s;,\[]*")
_AFTER_CALL: Final = re.compile(r"[\s;,}]*")
_NAMED: Final = (
    re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)"),
    re.compile(r"[\w.-]{1,256}(?:\[CALL_ID\]\w*)?(?:\[[A-Z_]*\]?)?\s*"),
)
"""A name before a call's brackets, and the beginning of one."""
_PYTHON: Final = re.compile(r"([A-Za-z_][\w.-]*)\s*(?=\()"), re.compile(r"[A-Za-z_][\w.-]*\s*")
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"|([^"\s]))')
_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "id"})
"""First keys of a call's object."""


class ObjectCallReader(CallReader):
    """Reads calls that are JSON objects, named JSON objects, or Python calls."""

    _scan: _Brackets | None = None
    _name = ""
    """The name before the brackets. Empty for a JSON object, which names itself."""

    def _in_call(self, is_final: bool) -> bool:
        scan, text = self._scan, self._text
        if scan is None:
            return self._find_call(is_final)
        end = scan.find(text, self._family.end)
        if end is None and not is_final:
            return False
        self._scan, said = None, text[scan.begin : end]
        if end is not None or (scan.missing == "}" and said.rstrip()[-1] == "}"):
            said += scan.missing or ""
        name: Any = self._name
        if said[0] == "{":
            given = loaded(said)
            if not name and isinstance(given, dict):
                name, values = given.get("name"), [given.get("arguments"), given.get("parameters")]
                given = next((value for value in values if value is not None), {})
        else:
            given = _keywords(said)
        arguments = arguments_text(given)
        is_unknown = self._is_bare and self._is_first and name not in self._schemas
        if arguments is None or not isinstance(name, str) or is_unknown:
            return self._no_call()
        self._call(name, arguments, len(text) if end is None else end)
        return True

    def _find_call(self, is_final: bool) -> bool:
        text, end = self._text, self._family.end
        blanks = (_BEFORE_CALL if self._is_first else _AFTER_CALL).match(text, self._place)
        self._place = place = blanks.end() if blanks else self._place
        rest = text[place : place + MOST_HEAD_CHARS]
        is_closed = rest[:1] == "]" and not self._is_first
        after = rest[1:].lstrip() if is_closed else rest
        has_end = end != "" and after.startswith(end)
        if end.startswith(after) and not has_end:
            return is_final and self._end(len(text))
        if is_closed or has_end:
            return self._end(place + len(rest) - len(after) + len(end) * has_end)
        may_wait = not is_final and len(rest) < MOST_HEAD_CHARS
        if rest[0] == "{":
            first = _FIRST_KEY.match(rest)
            if self._is_bare and (first is None or first[1] not in _KEYS):
                return not (first is None and may_wait) and self._no_call()
            self._name, self._scan = "", _Brackets(place, '"')
            return True
        if not (self._family.is_python or self._family.takes_name):
            return self._no_call()
        head, begun = _PYTHON if self._family.is_python else _NAMED
        named = head.match(text, place)
        if named is None or (self._is_bare and named[1] not in self._schemas):
            is_begun = named is None and begun.fullmatch(rest) is not None
            return not (is_begun and may_wait) and self._no_call()
        quotes = "\"'" if self._family.is_python else '"'
        self._name, self._scan = named[1], _Brackets(named.end(), quotes)
        return True


class _Brackets:
    """Finds the end of brackets in a text that grows. Each character is read once."""

    _ANY: ClassVar = re.compile(r"[{}\[\]()\"'<]")
    _CLOSING: ClassVar = {"{": "}", "[": "]", "(": ")"}
    _IN_STRING: ClassVar = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}

    def __init__(self, begin: int, quotes: str) -> None:
        self.begin = self._place = begin
        self._quotes = quotes
        self._quote = ""
        self._open: list[str] = []

    @property
    def missing(self) -> str | None:
        """The brackets that would close those that are open. None within a string."""
        return None if self._quote else "".join(reversed(self._open))

    def find(self, text: str, end_mark: str) -> int | None:
        """Return the place after the last bracket, or that of an end mark outside of strings.
        None if it needs more text."""
        while True:
            pattern = self._IN_STRING[self._quote] if self._quote else self._ANY
            found = pattern.search(text, self._place)
            if found is None:
                self._place = len(text)
                return None
            char, self._place = found[0], found.end()
            if char == "\\":
                if self._place == len(text):
                    self._place -= 1
                    return None
                self._place += 1
            elif char == self._quote:
                self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in self._CLOSING:
                self._open.append(self._CLOSING[char])
            elif char == "<" and end_mark:
                rest = text[found.start() : found.start() + len(end_mark)]
                if end_mark.startswith(rest):
                    self._place -= 1
                    return self._place if rest == end_mark else None
            elif char in "}])":
                self._open.pop()
                if not self._open:
                    return self._place


def _keywords(arguments: str) -> dict[str, Any] | None:
    text = "f" + re.sub(r"(?s)\\(.)", lambda found: "/" if found[1] == "/" else found[0], arguments)
    try:
        made = ast.parse(text, mode="eval").body
        if not isinstance(made, ast.Call) or made.args:
            return None
        values = {word.arg: python_value(word.value) for word in made.keywords}
        return None if None in values else {str(key): value for key, value in values.items()}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class TaggedCallReader(CallReader):
    """Reads calls whose arguments stand in tags. The tool's schema says what a value is."""

    def __init__(self, family: ToolFormat, schemas: ToolSchemas, most_calls: int) -> None:
        super().__init__(family, schemas, most_calls)
        tags = family.tags
        assert tags is not None
        self.begins = tuple(filter(None, (family.begin, tags.lead)))
        self._tags = tags
        self._name = self._key = ""
        self._arguments: dict[str, Any] = {}
        self._num_scanned = 0
        """Where in ``_text`` to look for the value's end."""
        self._ends = tuple(filter(None, (tags.end, family.end)))
        self._marks = tuple(filter(None, (*self._ends, family.begin, tags.lead)))
        """What may follow the last argument."""

    def _in_call(self, is_final: bool) -> bool:
        tags, text, end = self._tags, self._text, self._family.end
        rest = text[self._place : self._place + MOST_HEAD_CHARS].lstrip()
        if rest.startswith(end):
            return self._end(text.index(end, self._place) + len(end))
        if end.startswith(rest):
            return is_final and self._end(len(text))
        head = re.compile(tags.head).match(text, self._place)
        if head is None:
            begun = re.fullmatch(r"\s*[\w.-]*\s*(?:<[/a-z_]*)?", rest[len(tags.lead) :])
            is_begun = begun is not None and _may_begin(rest, (tags.lead,))
        else:
            after, marks = text[head.end() :].lstrip(), (tags.key_lead, tags.end)
            is_known = head[1] in self._schemas
            if not self._is_bare or (is_known and after.startswith(marks)):
                self._name, self._arguments, self._place = head[1], {}, head.end()
                self._step = self._in_arguments
                return True
            is_begun = is_known and _may_begin(after, marks)
        may_wait = not is_final and len(rest) < MOST_HEAD_CHARS
        return not (is_begun and may_wait) and self._no_call()

    def _in_arguments(self, is_final: bool) -> bool:
        """Read on before an argument, or at the end. Anything else is dropped."""
        tags, text, family = self._tags, self._text, self._family
        place = self._place = len(text) - len(text[self._place :].lstrip())
        rest = text[place : place + MOST_HEAD_CHARS]
        names = tuple(name for name in self._properties if tags.key_end in name)
        keys = (f"{tags.key_lead}{name}{tags.key_end}" for name in names)
        begun = (tags.key_lead, *self._marks, *keys)
        if not is_final and any(mark.startswith(rest) and mark != rest for mark in begun):
            return False
        key = _key_pattern(tags, names).match(text, place)
        if key is not None:
            self._key, self._place, self._num_scanned = key[1], key.end(), key.end()
            self._step = self._in_value
            return True
        if rest.startswith(tags.key_lead) and not is_final and len(rest) < MOST_HEAD_CHARS:
            return False
        mark = next((mark for mark in self._marks if rest.startswith(mark)), None)
        if mark is not None:
            self._give(place)
            if mark == tags.end:
                self._place = len(mark)
            return mark in (tags.end, tags.lead) or self._end(len(mark) * (mark == family.end))
        found = text.find("<", place + 1)
        self._place = len(text) if found < 0 else found
        if found < 0 and is_final:
            self._give(len(text))
        return found >= 0

    def _give(self, end: int) -> None:
        arguments = arguments_text(self._arguments)
        if arguments is None:  # too deep
            self._say(end)
            self._place = 0
        else:
            self._call(self._name, arguments, end)
        self._step = self._in_call

    def _in_value(self, is_final: bool) -> bool:
        end = self._value_end(is_final)
        if end is None:
            if is_final:
                self._say(len(self._text))
            return False
        value = self._text[self._place : end]
        if self._tags.is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._name, {})
        self._arguments[self._key] = meant(value, self._properties.get(self._key), schema)
        has_end = self._text.startswith(self._tags.value_end, end)
        self._place = end + len(self._tags.value_end) * has_end
        self._step = self._in_arguments
        return True

    def _value_end(self, is_final: bool) -> int | None:
        """Return where a value ends: before an end tag that another tag follows. Where the
        model forgot it, before the tag that should follow. None if it needs more text."""
        tags, ends, text, place = self._tags, self._ends, self._text, self._place
        after = (tags.key_lead, *self._marks)
        end = text.find(tags.value_end, self._num_scanned)
        while end >= 0:
            rest = text[end + len(tags.value_end) :].lstrip()
            if rest.startswith(after) or (is_final and not rest):
                break
            if not is_final and any(mark.startswith(rest) for mark in after):
                self._num_scanned = end
                return None
            end = text.find(tags.value_end, end + 1)
        if end < 0:
            self._num_scanned = max(place, len(text) - len(tags.value_end))
            found = [text.find(each, place) for each in (tags.value_end, *ends)]
            return min((each for each in found if each >= 0), default=None) if is_final else None
        # Before another call's begin, or another argument, the model forgot the end tag.
        last = text.rfind(self._family.begin, place, end)
        found = [text.find(each, place, max(last, place)) for each in ends]
        for name in {*self._properties} - {self._key, *self._arguments}:
            found.append(text.find(f"\n{tags.key_lead}{name}{tags.key_end}", place, end))
        return min((each for each in found if each >= 0), default=end)

    @property
    def _properties(self) -> Mapping[str, Any]:
        properties = self._schemas.get(self._name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


@lru_cache(256)
def _key_pattern(tags: Tags, names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern from an argument's name to its value. ``names`` contain a name's end."""
    lead, end = re.escape(tags.key_lead), re.escape(tags.key_end)
    known = map(re.escape, sorted(names, key=len, reverse=True))
    name = "|".join([*known, rf"(?:(?!{end})[^\n]){{1,256}}?"])
    return re.compile(rf"{lead}\s*({name})\s*{end}{tags.value_lead}")


def _may_begin(text: str, marks: tuple[str, ...]) -> bool:
    return text.startswith(marks) or any(mark.startswith(text) for mark in marks)


_BEGINS: Final = ("<|channel|>", "<|start|>", " to=")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END_MARK: Final = re.compile("|".join(map(re.escape, _ENDS)))
_CALLED: Final = re.compile(r"to=functions\.([\w.-]{1,256})")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(Divider):
    """Divides an answer of gpt-oss into reasoning, text and calls.

    Its messages stand in channels (OpenAI's harmony format): ``<|channel|>analysis<|message|>``
    begins reasoning, ``final`` the answer, and ``commentary to=functions.NAME`` the arguments of a
    call. ``<|end|>`` ends a message, and ``<|start|>assistant`` begins the next one. An answer
    without channels is text. ``is_inside``: the prompt ends inside the reasoning.
    """

    def __init__(self, most_calls: int, splits_reasoning: bool, *, is_inside: bool = False) -> None:
        super().__init__(most_calls)
        self._step = self._in_body if is_inside else self._in_start
        self.num_reasoning_chars = self._num_read = 0
        self._splits_reasoning = splits_reasoning
        self._called = ""
        self._kind: Literal["reasoning", "text", "call"] = "reasoning" if is_inside else "text"
        self._has_text = self._is_first_of_text = False
        self._num_scanned = 0

    def _in_start(self, is_final: bool) -> bool:
        is_head = self._text.startswith(_BEGINS)
        if not (is_head or is_final) and any(mark.startswith(self._text) for mark in _BEGINS):
            return False
        self._step = self._in_head if is_head else self._in_body
        return True

    def _in_head(self, is_final: bool) -> bool:
        head, mark, _ = self._text.partition("<|message|>")
        if not mark and len(head) <= MOST_HEAD_CHARS:
            return False
        self._drop(len(head + mark) if mark else 0)
        called, channel = _CALLED.search(head) if mark else None, _CHANNEL.search(head)
        self._step, self._kind = self._in_body, "text"
        if called is not None and self._most_calls:
            self._kind, self._called, self._num_scanned = "call", called[1], 0
        elif channel is not None and channel[1] == "analysis" and self._splits_reasoning:
            self._kind = "reasoning"
        self._is_first_of_text = self._kind == "text"
        return True

    def _drop(self, num_chars: int) -> None:
        self._num_read += num_chars
        self._text = self._text[num_chars:]

    def _in_body(self, is_final: bool) -> bool:
        is_call, end = self._kind == "call", len(self._text)
        found = _END_MARK.search(self._text, self._num_scanned if is_call else 0)
        if found is not None:
            end = found.start()
        elif is_call and not is_final:
            self._num_scanned = max(0, end - max(map(len, _ENDS)))
            return False
        elif not is_final:
            end -= max(num_begun(self._text, mark) for mark in _ENDS)
        self._say(end)
        if found is not None:
            self._step = self._in_head
            self._drop(0 if found[0] == "<|start|>" else len(found[0]))
        if self._kind == "reasoning" and not (self._has_text or self.num_calls):
            self.num_reasoning_chars = self._num_read
        return found is not None

    def _say(self, end: int) -> None:
        text = self._text[:end]
        self._drop(end)
        if not text:
            return
        if self._kind == "reasoning":
            self._parts.append(Reasoning(text))
        elif self._kind == "call" and (arguments := arguments_text(text)) is not None:
            self._add_call(self._called, arguments)
        else:
            self._parts.append("\n" * (self._is_first_of_text and self._has_text) + text)
            self._has_text, self._is_first_of_text = True, False
