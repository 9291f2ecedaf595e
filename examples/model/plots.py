"""The stories of ``stories.txt`` (its head says how it is written) and the
sentences about nothing between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plot:
    """A row of beats, each told in one of several ways, and what can be asked afterwards."""

    name: str
    cast: tuple[str, ...]
    """One letter a person."""
    slots: dict[str, str]
    """Slot → what is drawn for it."""
    beats: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str, str], ...]
    """Topic, question, answer."""


def _paragraphs(text: str) -> list[list[str]]:
    return [
        paragraph.strip().split("\n")
        for paragraph in text.strip().split("\n\n")
        if paragraph.strip()
    ]


def read_plots(text: str) -> tuple[Plot, ...]:
    """Parse the stories; the text before the first ``= name`` line is a comment."""
    plots = []
    for section in text.split("\n= ")[1:]:
        head, *beats, questions = _paragraphs(section)
        name, cast, slots = head
        plots.append(
            Plot(
                name=name,
                cast=tuple(cast.split()[1:]),
                slots=dict(word.split("=", 1) for word in slots.split()[1:]),
                beats=tuple(tuple(beat) for beat in beats),
                questions=tuple(_question(line) for line in questions),
            )
        )
    return tuple(plots)


def _question(line: str) -> tuple[str, str, str]:
    topic, question, answer = (part.strip() for part in line.removeprefix("Q ").split("|"))
    return topic, question, answer


_HERE = Path(__file__).parent
PLOTS = read_plots((_HERE / "stories.txt").read_text(encoding="utf-8"))
SCENERY = tuple((_HERE / "scenery.txt").read_text(encoding="utf-8").splitlines())
