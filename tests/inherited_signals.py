"""Tests begun in the background of a script."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """Have SIGINT do in this process, and in those that it starts, what it does
    at a terminal. In the background of a script it is ignored, by all that
    inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
