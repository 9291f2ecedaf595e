"""Asking a running job to stop: first gently, then at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

EXIT_INTERRUPTED = 130


class StopNow(Exception):  # noqa: N818  (it isn't an error)
    """Leave the loop."""


class Stopping:
    """What a person at the keyboard wants. A signal handler asks; the job
    looks, between steps.

    Args:
        grace_s: how long what runs may take to finish after the first time.
        clock: in seconds.
        leave: ends the process without ceremony.
    """

    def __init__(
        self,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._leave = leave
        self._asked = 0
        self._since = 0.0

    def ask(self) -> str:
        """Once more. Returns what will happen, for a person."""
        self._asked += 1
        if self._asked == 1:
            self._since = self._clock()
            return f"finishing what runs, for {self._grace_s:g} s at most; again to stop at once"
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
