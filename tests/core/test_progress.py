"""Progress of long work: whatever the counts are, a line comes of them."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.progress import Progress

counts = st.integers(-5, 1 << 62)


@given(
    st.tuples(counts, counts),
    st.lists(st.tuples(counts, counts, counts, st.integers(0, 2000)), max_size=5),
)
def test_progress_never_raises(
    job: tuple[int, int], updates: list[tuple[int, int, int, int]]
) -> None:
    clock = itertools.count(0.0, 0.7)
    with Progress(io.StringIO(), clock=lambda: float(next(clock))) as progress:
        progress.begin(*job)
        for done, failed, tokens, running in updates:
            progress.update(
                done=done, num_failed=failed, num_tokens=tokens, workers=(0, 2), num_running=running
            )
            assert "ETA" in progress.line()
            assert progress.state["done"] == done


@pytest.mark.parametrize(
    ("done", "running", "eta_s"),
    [
        (50, 40, None),  # those were done before
        (60, 0, 40.0),
        (60, 20, 15.0),
        (60, 400, 20 / 3),  # sequences of a line run apart
        (100, 0, 0.0),
    ],
)
def test_the_eta_counts_what_runs_as_half_done(
    done: int, running: int, eta_s: float | None
) -> None:
    now = [0.0]
    progress = Progress(io.StringIO(), clock=lambda: now[0])
    progress.begin(total=100, done=50)
    now[0] = 10.0
    progress.update(done=done, num_failed=0, num_tokens=9, workers=(1, 1), num_running=running)
    assert progress.remaining_s == (None if eta_s is None else pytest.approx(eta_s))
