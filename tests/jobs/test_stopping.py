"""Which signals ask a job to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from fastdecode.jobs.stopping import stop_signals

CAUGHT_IN_TIME = """
import signal, sys
from fastdecode.core.host.interrupts import interrupt
signal.signal(signal.SIGTERM, interrupt)
try:
    exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_signal_that_was_ignored_goes_on_being_ignored() -> None:
    """As SIGINT is where a script runs a command in the background."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        with stop_signals(lambda number, _: asked.append(number)):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [signal.SIGTERM, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is on_term


def test_an_interrupt_that_was_caught_is_not_how_the_process_ends(tmp_path: Path) -> None:
    """CPython remembers a KeyboardInterrupt that left an ``exec`` of text, as
    imports have it, and ends a process run by ``-m`` by SIGINT."""
    (tmp_path / "caught.py").write_text(CAUGHT_IN_TIME)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-m", "caught"], env=environ, timeout=60)
    assert ended.returncode == 7
