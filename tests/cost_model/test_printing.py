"""The printer of answers: JSON has no infinity, and times share a unit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from cost_model.printing import json_text, times_text
from cost_model.stages import Provenance


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
