"""Which signals ask a job to stop."""

from __future__ import annotations

import os
import signal

from fastdecode.jobs.stopping import stop_signals


def test_a_signal_that_was_ignored_goes_on_being_ignored() -> None:
    """As SIGINT is where a script runs a command in the background."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals(lambda number, _: asked.append(number)):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [signal.SIGTERM, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
