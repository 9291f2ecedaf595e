"""A virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Calls at times, in whatever unit; those of the same time in the order in
    which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        assert time >= self.now
        heapq.heappush(self._heap, (time, next(self._order), call))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()
