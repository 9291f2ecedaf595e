"""Which idle blocks go next, found ahead of need.

To look at all idle blocks takes milliseconds where there are 100,000, and a
start gives up three. So when all are looked at, it is as of a moment to come:
while nothing about a block changes its value never rises, so until then all
that isn't a candidate is worth the **bound** at least. What was added or has
changed since is a candidate, too. Candidates below the bound therefore go in
the order in which they would go if all were looked at each time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.idle.rows import Among, IdleRows
from fastdecode.schedule.cache.idle.worth import Candidate, Worth

_SHARE_AHEAD: Final = 64
"""One in so many idle blocks is found ahead; and it is found for such a part of
the longest time that a block has been idle, in which values hardly change."""


@dataclass(eq=False)
class _Known:
    """What was found when all were looked at."""

    rows: NDArray[np.int64]
    bound: float
    """What any other is worth at least, unless it has changed."""
    from_s: float
    until_s: float
    changed: set[int] = field(default_factory=set)
    """Rows that have."""


@dataclass(frozen=True)
class CandidateHeap:
    """Candidates in the order in which they go: a heap."""

    heap: list[Candidate]
    bound: float
    """What all others are worth at least."""


class EvictionQueue:
    """Of one holder's idle blocks.

    Args:
        rows: all of them.
        worth: what they are.
        fewest: so many are found ahead at least; 0: none are, since what one is
            worth hangs on others.
    """

    def __init__(self, rows: IdleRows, worth: Worth, fewest: int) -> None:
        self._rows = rows
        self._worth = worth
        self._fewest = fewest
        self._known: dict[Among, _Known] = {}

    def changed(self, row: int) -> None:
        """A block was added, or something about it has changed."""
        for known in self._known.values():
            known.changed.add(row)

    def lowest(self, count: int, now_s: float, among: Among) -> CandidateHeap:
        """One of those that go first at least, if there is any, and perhaps as
        many as are asked for."""
        queue = self._ahead(count, now_s, among) if self._fewest else None
        if queue is None:
            heap = self._worth.lowest(self._worth.values(now_s, among), count)
            heapq.heapify(heap)
            queue = CandidateHeap(heap, math.inf)
        return queue

    def _ahead(self, count: int, now_s: float, among: Among) -> CandidateHeap | None:
        """None: they differ by less than they will change until then."""
        known = self._known.get(among)
        if known is not None and self._is_good(known, now_s):
            queue = self._below(known, count, now_s, among)
            if queue.heap:
                return queue
        known = self._known[among] = self._look(count, now_s, among)
        queue = self._below(known, count, now_s, among)
        return queue if queue.heap or math.isinf(known.bound) else None

    def _is_good(self, known: _Known, now_s: float) -> bool:
        most_changed = max(self._fewest, len(self._rows) // _SHARE_AHEAD)
        return known.from_s <= now_s <= known.until_s and len(known.changed) <= most_changed

    def _look(self, count: int, now_s: float, among: Among) -> _Known:
        """At all of them."""
        until_s = now_s + self._rows.longest_idle_s(now_s) / _SHARE_AHEAD
        values = self._worth.values(until_s, among)
        most = max(self._fewest, count + len(values) // _SHARE_AHEAD)
        bound = math.inf
        if most < len(values):
            bound = float(np.partition(values, most)[most])
        return _Known(np.flatnonzero(values < bound), bound, now_s, until_s)

    def _below(self, known: _Known, count: int, now_s: float, among: Among) -> CandidateHeap:
        """Those whose turn comes before anybody else's."""
        rows = known.rows
        if known.changed:
            changed = np.fromiter(known.changed, np.int64, len(known.changed))
            rows = np.concatenate([rows, changed])  # some twice
        heap, bound = self._worth.below(known.bound, rows, now_s, among, 2 * count)
        heapq.heapify(heap)
        return CandidateHeap(heap, bound)
