"""Time, as what decides by it gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment, of which only differences count; by default ``time.monotonic``.

Who decides by time (deadlines, give-ups, controls, time-outs of a fleet) is given its clock, so
that simulations run the same code on one of their own. Who only measures reads
``time.perf_counter`` himself: what is told of a run is real time. """
