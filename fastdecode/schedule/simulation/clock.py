"""A virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class VirtualClock:
    """Makes calls at times, in the caller's unit, those of one time in the order in which they were
    set. It is a ``Clock``.

    Args:
        most_events: a run with more events is taken to be endless (AssertionError).
    """

    def __init__(self, most_events: float = math.inf) -> None:
        self.now = 0.0
        self._most_events = most_events
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Make a call at a time, or at once if that is past."""
        assert time < math.inf
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), call))

    def next(self, until: float = math.inf) -> bool:
        """Make the next call. Return False if there is none by then: the time is ``until``, if that
        is finite."""
        if self._heap and self._heap[0][0] <= until:
            self.now, number, call = heapq.heappop(self._heap)
            assert number < self._most_events, "the simulation does not come to an end"
            call()
            return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False

    def run(self, until: float = math.inf) -> None:
        """Make all calls up to that time."""
        while self.next(until):
            pass

    def pass_by(self, span: float) -> None:
        """Make all calls within this span."""
        self.run(self.now + span)
