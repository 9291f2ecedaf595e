"""Polling what does not call back: politely in the thread that waits, and in the background."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_LOOKS: Final = 30
_NUM_YIELDS: Final = 50
_FIRST_SLEEP_S: Final = 20e-6
_SLEEP_GROWTH: Final = 1.02
_LONGEST_SLEEP_S: Final = 1e-3


def look_until_found(look: Callable[[], T | None], timeout_s: float | None) -> T | None:
    """Call ``look`` until its result is not None, and return that. None after ``timeout_s``.

    The first looks come back to back, since a quick peer's answer is near. Then others may have
    the core between two looks. Then it sleeps, for about 2 % of the time it has waited.
    """
    started = time.monotonic()
    num_looks, sleep_s = 0, _FIRST_SLEEP_S
    while True:
        found = look()
        if found is not None:
            return found
        if timeout_s is not None and time.monotonic() - started >= timeout_s:
            return None
        num_looks += 1
        if num_looks > _NUM_LOOKS + _NUM_YIELDS:
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * _SLEEP_GROWTH, _LONGEST_SLEEP_S)
        elif num_looks > _NUM_LOOKS:
            os.sched_yield()


class Pump(threading.Thread):
    """Calls ``work`` every ``interval_s`` until it returns False, then rests until ``wake``."""

    def __init__(self, work: Callable[[], bool], interval_s: float) -> None:
        super().__init__(name="pump", daemon=True)
        self._work = work
        self._interval_s = interval_s
        self._wanted = threading.Event()
        self.is_wanted = False
        """True if it was woken, and has not begun to work since."""
        self._stopped = False
        self._has_failed = False
        self.start()

    def wake(self) -> None:
        self.is_wanted = True
        self._wanted.set()

    def stop(self) -> None:
        """Stop it, and wait until it has ended."""
        self._stopped = True
        self._wanted.set()
        self.join()

    def run(self) -> None:
        while not self._stopped:
            self._wanted.wait()
            self._wanted.clear()
            self.is_wanted = False  # calls of `wake` until here are served: it works now
            while not self._stopped and self._works():
                time.sleep(self._interval_s)

    def _works(self) -> bool:
        try:
            return self._work()
        except Exception:  # others rely on this thread
            if not self._has_failed:
                logger.exception("work in the background failed, and continues")
            self._has_failed = True
            return True
