"""Stopping a running job: first gently, then at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from fastdecode.core.clock import Clock

EXIT_INTERRUPTED = 130
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what mpirun passes on to its ranks. With the others it kills them."""


class StopNow(Exception):  # noqa: N818  (it isn't an error)
    """Leaves the loop."""


class Stopping:
    """State of a request to stop. A signal handler asks, and the job looks between steps.

    Running requests have ``grace_s`` to finish after the first time. With 0, the first time counts
    as the second. ``leave`` ends the process at once.
    """

    def __init__(
        self,
        grace_s: float,
        clock: Clock = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._leave = leave
        self._asked = 0
        self._asked_at = 0.0

    def ask(self) -> str:
        """Ask once more. Returns what will happen, for a person."""
        self._asked += 1 if self._asked or self._grace_s else 2
        if self._asked == 1:
            self._asked_at = self._clock()
            grace = f"{self._grace_s:g} s at most"
            return f"finishing requests for {grace}; a second signal stops at once"
        if self._asked == 2:
            return "stopping after this step; again to leave it in the middle"
        # Something hangs, maybe for ever. The output takes no harm: every line in it is whole.
        self._leave(EXIT_INTERRUPTED)
        return "leaving"

    @property
    def wanted(self) -> bool:
        return self._asked > 0

    @property
    def now(self) -> bool:
        """True if running requests may not finish either."""
        is_late = self._clock() - self._asked_at >= self._grace_s
        return self._asked > 1 or (self._asked == 1 and is_late)


@contextlib.contextmanager
def stop_signals(act: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, let the signals that stop a process call ``act``, unless the process ignores them: a
    script does that with SIGINT for its commands in the background."""
    handled = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, act) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def asked_by_signals(stopping: Stopping, command: str) -> Iterator[None]:
    """Inside, let signals ask the job to stop, and print what will happen."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{command}: {stopping.ask()}\n".encode())

    with stop_signals(on_signal):
        yield
