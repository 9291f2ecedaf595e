"""Polling what does not call back, politely."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

_NUM_LOOKS: Final = 30
_NUM_YIELDS: Final = 200
_FIRST_SLEEP_S: Final = 20e-6
_SLEEP_GROWTH: Final = 1.02
_LONGEST_SLEEP_S: Final = 1e-3
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NS: Final = 1000


def look_until_found(
    look: Callable[[], T | None], timeout_s: float | None, woken: threading.Event | None = None
) -> T | None:
    """Call ``look`` until its result is not None, and return that. None after ``timeout_s``.

    The first looks come back to back, since a quick peer's answer is near. Then others may have
    the core between two looks. Then it sleeps, for about 2 % of the time it has waited.

    Args:
        woken: An event that ends the wait, too. With it a look comes once a millisecond.
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
        if woken is not None:
            if woken.wait(_LONGEST_SLEEP_S):
                woken.clear()
                return None
        elif num_looks > _NUM_LOOKS + _NUM_YIELDS:
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * _SLEEP_GROWTH, _LONGEST_SLEEP_S)
        elif num_looks > _NUM_LOOKS:
            os.sched_yield()


def sleep_precisely() -> None:
    """End sleeps of this thread in time. Linux makes each 50 us longer by default."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
