"""Signals that tests and campaigns begin with, and those that end them."""

from __future__ import annotations

import signal
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)


def hear_interrupts() -> None:
    """Have SIGINT do in this process, and in those that it starts, what it does at a terminal. In
    the background of a script it is ignored, by all that inherit that. Whoever ends this process
    (``timeout`` does, too) interrupts it: it has processes to kill, and directories to remove."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: ``timeout`` sends it twice."""
    for each in _ENDS:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, lambda number, frame: None)
    raise KeyboardInterrupt
