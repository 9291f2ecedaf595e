"""The reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

State: TypeAlias = Literal["before", "inside", "after"]
"""Where a prompt leaves the model: before, inside or after its reasoning."""
MAX_HELD_CHARS: Final = 1 << 16
"""Longer reasoning behind a call's mark has no call."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks reasoning."""

    name: str
    begin: str
    end: str
    has_special_marks: bool = False
    """The marks are special tokens, which a text has only if it is asked for them."""
    has_channels: bool = False  # answers are messages of gpt-oss
    state: State | None = None
    """Where all prompts leave the model. None if their ends say it."""

    @property
    def stop_marks(self) -> tuple[str, str] | None:
        """The marks between which stop strings don't count, for ``SamplingParams``."""
        if self.state == "after":
            return None
        end = "<|channel|>final<|message|>" if self.has_channels else self.end
        begin = "<|channel|>" if self.has_channels else self.begin
        return "" if self.state == "inside" else begin, end

    @classmethod
    def of(cls, template: str) -> ReasoningFormat | None:
        """Return the format that a chat template's source names, if it names one."""
        if "<|channel|>" in template and "<|message|>" in template:
            return REASONING_FORMATS["harmony"]
        rows = (row for row in REASONING_FORMATS.values() if not row.has_channels)
        return next((row for row in rows if row.end in template), None)

    def prompt_state(self, prompt_end: str) -> State:
        """Return where a prompt with this end leaves the model."""
        if self.state is not None:
            return self.state
        end = prompt_end.rstrip()
        if end.endswith(self.begin):
            return "inside"
        return "after" if end.endswith(self.end) else "before"

    def continuing(self, text: str) -> ReasoningFormat:
        """Return the format of an answer whose beginning is ``text``: its last mark counts."""
        begin, end = text.rfind(self.begin), text.rfind(self.end)
        state: State = "inside" if begin > end else "after"
        return replace(self, state=None if begin == end else state)


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    row.name: row
    for row in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", True),
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", True, True),
    )
}
"""By name: DeepSeek-R1, Qwen3 and the models that follow them; Magistral; gpt-oss."""


def num_begun(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark, which isn't complete."""
    place = max(0, len(text) - len(mark) + 1)
    while (place := text.find(mark[:1], place)) >= 0 and not mark.startswith(text[place:]):
        place += 1
    return len(text) - place if place >= 0 else 0


@dataclass
class ReasoningSplitter:
    """Divides one answer's text, as it comes, into reasoning and answer."""

    family: ReasoningFormat
    state: State | Literal["blanks"] = "before"
    """Where the text so far ends, at first the prompt: ``blanks`` may follow the end mark."""
    call: str = ""
    """The mark of a call, behind which reasoning is held back. Empty if there are none."""
    num_chars: int = 0
    """Characters so far that are reasoning, its marks, and what comes before it."""
    num_fed: int = 0
    open_call: str = ""
    """After ``finish``: the rest of reasoning without an end, from a call's mark on."""
    _text: str = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Take more text. Return what it adds to the reasoning, and to the answer."""
        self._text += text
        self.num_fed += len(text)
        if self.state == "before":
            begun = self._text.lstrip()
            if begun.startswith(self.family.begin):
                self._text, self.state = begun[len(self.family.begin) :], "inside"
            elif not self.family.begin.startswith(begun):
                self.state = "after"
        reasoning = self._until_end() if self.state == "inside" else ""
        if self.state == "blanks":
            self._text = self._text.lstrip("\n")
            self.state = "after" if self._text else "blanks"
        answer = ""
        if self.state == "after":
            answer, self._text = self._text, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Return what was held back: no text follows."""
        rest, self._text = self._text, ""
        if self.state == "blanks":
            return "", ""
        if self.state != "inside":
            return "", rest
        if self.call and self.call in rest:
            rest, mark, after = rest.partition(self.call)
            self.open_call = mark + after
        return rest, ""

    def _until_end(self) -> str:
        said, mark, after = self._text.partition(self.family.end)
        self.num_chars = self.num_fed - len(after)
        if mark:
            self._text, self.state = after, "blanks"
            return said
        place = said.find(self.call) if self.call else -1
        if len(said) - place > MAX_HELD_CHARS:
            self.call, place = "", -1
        if place < 0:
            place = len(said) - max(num_begun(said, each) for each in (self.family.end, self.call))
        self._text = said[place:]
        return said[:place]
