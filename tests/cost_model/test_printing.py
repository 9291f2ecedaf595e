"""The printer of answers: columns line up, text is wrapped, JSON has no infinity."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from cost_model.printing import WIDTH, json_text, labelled, paragraph, table, times_text
from cost_model.stages import Provenance


def test_columns_line_up_and_a_short_row_ends_early() -> None:
    lines = table(("kind", "tokens/s"), [("a", "1,200"), ("longer",)])
    assert lines == ["  kind    tokens/s", "  a          1,200", "  longer"]
    assert table(("a", "b"), [("x", "yy")], left=(1,), indent=0) == ["a  b", "x  yy"]


def test_text_is_wrapped_under_its_label() -> None:
    lines = labelled([("Verdict", "word " * 40), ("", "more")])
    assert lines[0].startswith("  Verdict      word") and lines[1].startswith(" " * 15 + "word")
    assert lines[-1] == " " * 15 + "more"
    assert max(map(len, lines + paragraph("word " * 40, " " * 6))) <= WIDTH


@dataclass(frozen=True)
class Answer:
    best: float
    share: float
    origin: Provenance


def test_json_of_an_answer() -> None:
    text = json_text({"answer": Answer(math.inf, 0.25, Provenance.GIVEN), 3: (1, None)})
    assert json.loads(text) == {
        "answer": {"best": None, "share": 0.25, "origin": "given"},
        "3": [1, None],
    }


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((0.0123, 0.5, 0.98765), "12.3/500/988 ms"),
        ((0.2, 1.0, 34.56), "0.2/1/34.6 s"),
        ((None, None), "-/- ms"),
        ((None, 2.0), "-/2 s"),
    ],
)
def test_times_share_a_unit(times: tuple[float | None, ...], text: str) -> None:
    assert times_text(times) == text
