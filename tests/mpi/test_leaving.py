"""How a rank leaves whose job hangs."""

from __future__ import annotations

import threading

import pytest

from fastdecode.wire.mpi import launcher_end, leaving


def test_a_deadline_runs_before_the_launcher_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
