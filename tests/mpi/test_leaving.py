"""How a rank leaves whose job hangs."""

from __future__ import annotations

import threading

import pytest

from fastdecode.wire.mpi import launcher_end, leaving


def test_a_deadline_runs_before_the_launcher_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are looked at, or one is started, this one may hang."""
    running: list[bool] = []

    def see_off() -> None:
        running.append(any(isinstance(each, threading.Timer) for each in threading.enumerate()))

    monkeypatch.setattr(launcher_end, "see_off", see_off)
    timer = leaving._exit_later(1, 600.0, end_job=True)
    timer.cancel()
    timer.join()
    assert running == [True]
    leaving._exit_later(1, 600.0).cancel()
    assert running == [True]


@pytest.mark.parametrize("end_job", [False, True])
def test_ranks_that_were_stopped_meanwhile_do_not_keep_the_launcher(
    monkeypatch: pytest.MonkeyPatch, end_job: bool
) -> None:
    """A rank may be stopped after the first rank has looked, and before it has left."""
    ended: list[bool] = []
    has_left = threading.Event()
    monkeypatch.setattr(launcher_end, "see_off", lambda: None)
    monkeypatch.setattr(leaving, "end_siblings", lambda *, stopped: ended.append(stopped))
    monkeypatch.setattr(leaving, "_exit", lambda exit_code: has_left.set())
    leaving._exit_later(1, 0.0, end_job=end_job)
    assert has_left.wait(60.0)
    assert ended == [not end_job], "else all are ended"
