"""An answer that is text with calls in it, divided as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from fastdecode.text.begun_stop import num_begun


@dataclass(frozen=True)
class CallPiece:
    """A piece of one call: only the first has its name; all may have text of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


Piece: TypeAlias = "str | CallPiece"
Part: TypeAlias = "str | Reasoning | CallPiece"
ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Names of tools, and JSON schemas of their parameters."""
MOST_HEAD_CHARS: Final = 1024
"""Of a call, up to its arguments. Longer ones are text."""


class CallText(ABC):
    """Divides one answer's text, as it comes, into text and calls.

    A subclass has a method for each mode that follows ``text``. It takes something off
    ``_text`` and returns True, or returns False: more text is needed first.

    Args:
        begin: the mark before a call.
    """

    first_mode: ClassVar[str] = "text"

    def __init__(self, begin: str) -> None:
        self.num_calls = 0
        self._begin = begin
        self._mode = self.first_mode
        self._text = ""
        """Was fed, and is not divided yet."""
        self._marked = ""
        """The mark of a call that may turn out to be text."""
        self._pieces: list[Piece] = []
        self._is_after_call = False
        """Blanks that follow a call are no text."""

    def feed(self, text: str) -> list[Piece]:
        """More text: what it adds."""
        self._text += text
        while self._text and self._step(self._mode):
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """No text follows: what was held back."""
        rest = self._rest()
        self._text = self._marked = ""
        self._mode = "text"
        self._say(rest)
        return self._taken()

    @abstractmethod
    def _step(self, mode: str) -> bool:
        """One step in a mode. ``text`` is ``_in_text``."""

    @abstractmethod
    def _rest(self) -> str:
        """What of the text that was held back is text of the answer."""

    def _in_text(self, next_mode: str) -> bool:
        said, mark, after = self._text.partition(self._begin)
        if mark:
            self._say(said)
            self._text, self._marked, self._mode = after, mark, next_mode
            return True
        num_held = num_begun(said, self._begin)
        self._say(said[: len(said) - num_held])
        self._text = said[len(said) - num_held :]
        return False

    def _no_call(self) -> bool:
        """What should be a call is text: its mark, or its first character."""
        if not self._marked:
            self._marked, self._text = self._text[:1], self._text[1:]
        self._say(self._marked)
        self._marked, self._mode = "", "text"
        return True

    def _say(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._pieces.append(text)
            self._is_after_call = False

    def _call(self, name: str, arguments: str = "") -> None:
        """A call begins."""
        self._pieces.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self._is_after_call, self._marked = True, ""

    def _argue(self, arguments: str) -> None:
        """The last call's arguments go on."""
        if arguments:
            self._pieces.append(CallPiece(self.num_calls - 1, None, arguments))

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces
