"""Asking a running job to stop: first gently, then at once."""

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
"""SIGUSR1 is what mpirun passes on to its ranks; with the others it kills them."""


class StopNow(Exception):  # noqa: N818  (it isn't an error)
    """Leave the loop."""


class Stopping:
    """What a person at the keyboard wants. A signal handler asks; the job
    looks, between steps.

    Args:
        grace_s: how long what runs may take to finish after the first time; 0:
            the first time is as good as the second.
        clock: in seconds.
        leave: ends the process without ceremony.
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
        self._since = 0.0

    def ask(self) -> str:
        """Once more. Returns what will happen, for a person."""
        self._asked += 1 if self._asked or self._grace_s else 2
        if self._asked == 1:
            self._since = self._clock()
            grace = f"{self._grace_s:g} s at most"
            return f"finishing requests for {grace}; a second signal stops at once"
        if self._asked == 2:
            return "stopping after this step; again to leave it in the middle"
        # Something hangs, maybe for ever. The output takes no harm: every line in it is whole.
        self._leave(EXIT_INTERRUPTED)
        return "leaving"

    @property
    def wanted(self) -> bool:
        """Start nothing new."""
        return self._asked > 0

    @property
    def now(self) -> bool:
        """Don't finish what runs either."""
        return self._asked > 1 or (
            self._asked == 1 and self._clock() - self._since >= self._grace_s
        )


@contextlib.contextmanager
def stop_signals(act: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, the signals that ask a process to stop do this instead. One that
    it ignores goes on being ignored: whoever started it wanted that, as a
    script does with SIGINT for its commands in the background."""
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, act) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def asked_by_signals(stopping: Stopping, command: str) -> Iterator[None]:
    """Inside, signals ask the job to stop, and say what will happen."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{command}: {stopping.ask()}\n".encode())

    with stop_signals(on_signal):
        yield
