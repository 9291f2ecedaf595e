"""The reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fastdecode.text.begun_stop import num_begun


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks reasoning."""

    name: str
    begin: str
    end: str
    has_special_marks: bool = False
    """The marks are special tokens, which a text has only if it is asked for them."""
    has_channels: bool = False
    """Answers are messages of gpt-oss: see ``text.harmony``."""


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    row.name: row
    for row in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", has_special_marks=True),
        ReasoningFormat(
            "harmony",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            has_special_marks=True,
            has_channels=True,
        ),
    )
}
"""By name: DeepSeek-R1, Qwen3 and the models that follow them; Magistral; gpt-oss."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template's source names; None: it names none."""
    if "<|channel|>" in template:
        return REASONING_FORMATS["harmony"]
    return next((row for row in REASONING_FORMATS.values() if row.end in template), None)


def prompt_state(family: ReasoningFormat, prompt_end: str) -> Literal["before", "inside", "after"]:
    """Where a prompt with this end leaves the model: before its reasoning, inside
    it (the template has written the first mark), or after it (the template has
    written both, so the model does not reason)."""
    end = prompt_end.rstrip()
    if end.endswith(family.begin):
        return "inside"
    return "after" if end.endswith(family.end) else "before"


@dataclass
class ReasoningSplitter:
    """Divides one answer's text, as it comes, into reasoning and answer.

    Args:
        family: the model's marks.
        is_inside: the prompt ends inside the reasoning.
    """

    family: ReasoningFormat
    is_inside: bool = False
    num_chars: int = 0
    """Of the text so far: the reasoning, with its marks and what comes before it."""
    _num_fed: int = 0
    _text: str = ""
    _mode: Literal["start", "reasoning", "blanks", "answer"] = "start"

    def __post_init__(self) -> None:
        if self.is_inside:
            self._mode = "reasoning"

    def feed(self, text: str) -> tuple[str, str]:
        """More text: what it adds to the reasoning, and to the answer."""
        self._text += text
        self._num_fed += len(text)
        if self._mode == "start":
            self._begin()
        reasoning = self._until_end() if self._mode == "reasoning" else ""
        if self._mode == "blanks":
            self._text = self._text.lstrip("\n")
            self._mode = "answer" if self._text else "blanks"
        answer = ""
        if self._mode == "answer":
            answer, self._text = self._text, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """No text follows: what was held back."""
        rest, self._text = self._text, ""
        if self._mode == "blanks":
            return "", ""
        return (rest, "") if self._mode == "reasoning" else ("", rest)

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self.family.begin):
            self._text, self._mode = begun[len(self.family.begin) :], "reasoning"
        elif not self.family.begin.startswith(begun):
            self._mode = "answer"

    def _until_end(self) -> str:
        said, mark, after = self._text.partition(self.family.end)
        self.num_chars = self._num_fed - len(after)
        if mark:
            self._text, self._mode = after, "blanks"
            return said
        num_held = num_begun(said, self.family.end)
        self._text = said[len(said) - num_held :]
        return said[: len(said) - num_held]
