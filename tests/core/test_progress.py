"""Progress of long work: whatever the counts are, a line comes of them."""

from __future__ import annotations

import io
import itertools

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


def test_progress_whose_tokens_are_behind_its_ended_answers() -> None:
    """As where a full disk ends the job between an answer's end and the sum."""

    def run() -> None:
        with make_progress() as progress:
            progress.begin(8)
            progress.update(done=0, num_failed=0, num_tokens=9, workers=(1, 1), num_running=4)
            progress.update(done=2, num_failed=0, num_tokens=10, workers=(1, 1), num_running=2,
                            ended=ended(40, 2000))  # fmt: skip
            assert progress.state["total"] == 8
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run()


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


@pytest.mark.parametrize("error", [IndexError, ZeroDivisionError, OverflowError, ValueError])
def test_progress_without_an_estimate(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise error("no")

    monkeypatch.setattr(module, "remaining_s", fail)
    progress = make_progress()
    progress.begin(3)
    assert progress.state["eta_s"] is None
    assert "ETA -" in progress.line()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1.0])
def test_progress_of_an_estimate_that_is_no_time(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "remaining_s", lambda *_: seconds)
    progress = make_progress()
    progress.begin(3)
    assert "ETA -" in progress.line()
