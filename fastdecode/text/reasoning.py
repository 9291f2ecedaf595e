"""The reasoning that a model writes before its answer, between ``<think>`` and
``</think>``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BEGIN: Final = "<think>"
END: Final = "</think>"


@dataclass
class ReasoningSplitter:
    """Divides one answer's text, as it comes.

    Args:
        has_begun: the prompt ends with the mark that begins it.
    """

    has_begun: bool = False
    _text: str = ""
    _mode: Literal["start", "reasoning", "blanks", "answer"] = "start"

    def __post_init__(self) -> None:
        if self.has_begun:
            self._mode = "reasoning"

    def feed(self, text: str) -> tuple[str, str]:
        """More text: what it adds to the reasoning, and to the answer."""
        self._text += text
        reasoning = answer = ""
        if self._mode == "start":
            begun = self._text.lstrip()
            if begun.startswith(BEGIN):
                self._text, self._mode = begun[len(BEGIN) :].lstrip("\n"), "reasoning"
            elif not BEGIN.startswith(begun):
                self._mode = "answer"
        if self._mode == "reasoning":
            reasoning = self._until_end()
        if self._mode == "blanks":
            self._text = self._text.lstrip("\n")
            self._mode = "answer" if self._text else "blanks"
        if self._mode == "answer":
            answer, self._text = self._text, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """No text follows: what was held back."""
        rest, self._text = self._text, ""
        return (rest, "") if self._mode == "reasoning" else ("", rest)

    def _until_end(self) -> str:
        said, mark, after = self._text.partition(END)
        if mark:
            self._text, self._mode = after, "blanks"
            return said
        most = min(len(said), len(END) - 1)
        num_held = next((n for n in range(most, 0, -1) if END.startswith(said[-n:])), 0)
        self._text = said[len(said) - num_held :]
        return said[: len(said) - num_held]
