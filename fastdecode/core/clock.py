"""Time, as what decides by it gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment, of which only differences count; by default ``time.monotonic``.

Code that decides by time (deadlines, controls, time-outs of a fleet) is given its clock, so that
simulations run the same code on a simulated one. Code that only measures reads
``time.perf_counter``: reports of a run are in real time."""
