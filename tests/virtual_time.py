"""A clock that only moves when somebody waits, and what is to happen when."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_EVENTS = 1_000_000
"""More than any test needs."""


@dataclass(order=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class VirtualTime:
    """A clock, and what is to happen when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[_Event] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        assert math.isfinite(at_s)
        heapq.heappush(self._events, _Event(max(at_s, self.now_s), next(self._numbers), act))

    def next(self, until_s: float) -> bool:
        """Go on to what happens next. False: nothing does by then, and the
        clock is there."""
        if self._events and self._events[0].at_s <= until_s:
            event = heapq.heappop(self._events)
            self.now_s = event.at_s
            assert event.number < MOST_EVENTS, "it doesn't come to an end"
            event.act()
            return True
        assert until_s < math.inf, "it would wait for ever"
        self.now_s = max(self.now_s, until_s)
        return False

    def pass_by(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.next(until_s):
            pass
