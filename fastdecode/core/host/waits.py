"""How soon a thread goes on after a short wait: timer slack and Python's switch
interval."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30
TIMER_SLACK_NS: Final = 1000
"""Linux gives a thread 50,000: a sleep of 20 us then takes 70 to 86, and with
this 34."""
SWITCH_INTERVAL_S: Final = 1e-4
"""Python gives a thread 5 ms. Each call of torch lets other threads run Python,
and may have to wait for so long to go on."""


def shorten_sleeps() -> bool:
    """Have short sleeps of this thread, and of the threads that it starts, end
    in time. False: this system can't."""
    return _prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS) == 0


def timer_slack_ns() -> int:
    """How late a sleep of this thread may end; -1: not known."""
    return _prctl(_PR_GET_TIMERSLACK, 0)


def switch_threads_sooner() -> None:
    """Have any thread of this process that waits for Python's lock get it within
    ``SWITCH_INTERVAL_S``, and not later than it would by now."""
    sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))


def _prctl(option: int, value: int) -> int:
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError, TypeError):  # no Linux
        return -1
    return int(prctl(option, ctypes.c_ulong(value), 0, 0, 0))
