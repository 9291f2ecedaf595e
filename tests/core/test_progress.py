"""Progress of long work: whatever the counts are, a line comes of them."""

from __future__ import annotations

import io
import itertools
import math
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core import progress as module
from fastdecode.core.answer_lengths import EndedAnswers
from fastdecode.core.progress import Progress


def make_progress() -> Progress:
    clock = itertools.count(0.0, 0.7)
    return Progress(io.StringIO(), clock=lambda: float(next(clock)))


def ended(*lengths: int) -> EndedAnswers:
    answers = EndedAnswers()
    for length in lengths:
        answers.add(length, is_cut=False)
    return answers


counts = st.integers(-5, 1 << 40)


@given(
    st.tuples(counts, counts),
    st.lists(st.tuples(counts, counts, counts, st.integers(0, 2000), counts), max_size=5),
    st.lists(st.integers(0, 1 << 24), max_size=4),
)
def test_progress_never_raises(
    job: tuple[int, int], updates: list[tuple[int, int, int, int, int]], lengths: list[int]
) -> None:
    with make_progress() as progress:
        progress.begin(*job)
        for done, failed, tokens, running, prompts in updates:
            progress.update(
                done=done, num_failed=failed, num_tokens=tokens, workers=(0, 2),
                num_running=running, num_prompt_tokens=prompts, ended=ended(*lengths),
            )  # fmt: skip
            assert "ETA" in progress.line()
            assert progress.state["done"] == done


@pytest.mark.parametrize("estimate", [ValueError("no"), math.inf, math.nan, 1e300, -1.0], ids=str)
def test_progress_without_an_estimate(
    estimate: Exception | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "remaining_s", Mock(side_effect=[estimate, estimate]))
    progress = make_progress()
    progress.begin(3)
    assert progress.state["eta_s"] is None or not isinstance(estimate, Exception)
    assert "ETA -" in progress.line()
