"""When an R-worker fetches, and when it leaves its time to attention."""

from __future__ import annotations

from typing import Final

from fastdecode.core.clock import Clock

LATE_S: Final = 2e-3
SHARE: Final = 0.05
"""Part of the time that fetching may take while something is attended."""
ATTENDING_S: Final = 0.1
"""Time after a layer in which the R-worker expects the next one."""
_MOST_OWED: Final = 4
"""Chunks of a link that are asked for before the first of them is answered."""
_MOST_LATE_S: Final = 0.05
"""Longest time that a pace may catch up."""


class Throttle:
    """Times of one R-worker's units of fetching."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._worked_s = clock()
        self._may_ask_s = clock()
        self._may_work_s = clock()
        self._attended_s: float | None = None

    @property
    def rest_s(self) -> float:
        """Time for which no unit is to be done, while something is attended."""
        return self._may_work_s - self._clock()

    @property
    def is_late(self) -> bool:
        """True if a unit is due, whatever else waits."""
        return self._clock() >= max(self._worked_s + LATE_S, self._may_work_s)

    @property
    def is_attending(self) -> bool:
        """True if something is attended."""
        return self._attended_s is not None and self._clock() - self._attended_s <= ATTENDING_S

    @property
    def may_ask(self) -> bool:
        """True if the pace allows another chunk."""
        return self._clock() >= self._may_ask_s

    def most_owed(self, bytes_per_s: float) -> int:
        """Return how many chunks a link may owe. Without a pace, and while this R-worker attends,
        they come one by one: many at once take the time of a step."""
        return 1 if self.is_attending and not bytes_per_s else _MOST_OWED

    def attended(self) -> None:
        """Note that a layer was attended."""
        self._attended_s = self._clock()

    def worked(self, began_s: float, *, gives_way: bool) -> None:
        """Note the end of a unit. What gives way rests after it, while something is attended."""
        self._worked_s = self._may_work_s = self._clock()
        if gives_way:
            rest_s = (self._worked_s - began_s) * (1 / SHARE - 1)
            self._may_work_s += min(rest_s, ATTENDING_S)

    def asked(self, num_bytes: int, bytes_per_s: float) -> None:
        """Note the request of a chunk. The next one may follow when this one may have come, and at
        once without a pace (0)."""
        if bytes_per_s:
            since_s = max(self._may_ask_s, self._clock() - _MOST_LATE_S)
            self._may_ask_s = since_s + num_bytes / bytes_per_s
