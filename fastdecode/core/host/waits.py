"""How soon a thread continues after a short wait: timer slack and Python's switch interval."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30
TIMER_SLACK_NS: Final = 1000
"""Linux gives a thread 50,000: a sleep of 20 us then takes 70 to 86, and with this 34."""
SWITCH_INTERVAL_S: Final = 1e-4
"""Python's is 5 ms, for which a call of torch may wait when it returns to Python."""


def shorten_sleeps() -> bool:
    """Let short sleeps of this thread, and of threads that it starts, end in time, if Linux can."""
    return _prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS) == 0


def timer_slack_ns() -> int:
    """Return how late a sleep of this thread may end. -1 if that is unknown."""
    return _prctl(_PR_GET_TIMERSLACK, 0)


def switch_threads_sooner() -> None:
    """Give threads that wait for Python's lock a turn at least each ``SWITCH_INTERVAL_S``."""
    sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))


def _prctl(option: int, value: int) -> int:
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError, TypeError):  # no Linux
        return -1
    return int(prctl(option, ctypes.c_ulong(value), 0, 0, 0))
