"""Which replicas are there, and how far each is, by what R-workers have said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import Enum
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import NO_STEP, Replicated

MOST_LAG: Final = 1000  # steps; a replica that is further behind counts as that far


class _Replica(Enum):
    """Of a holder."""

    NEW = "new"
    """To be kept; its keeper has reported nothing yet."""
    KEPT = "kept"
    CAUGHT_UP = "caught up"
    """It has had all that was cached at the end of some step."""
    ENDED = "ended"
    """There is none, or it isn't kept up to date any more."""


class Protection:
    """Of holders' replicas.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[HolderId, _Replica] = {}
        self._unprotected_since_s: float | None = None
        self.unprotected_s = 0.0
        """In which some R-worker had no replica, up to the last ``count``."""
        self.lags: Counter[int] = Counter()
        """Steps that had begun since the one that a neighbour has, at most
        ``MOST_LAG``: how often it was said."""

    @property
    def bare(self) -> set[HolderId]:
        """Those that have no replica that could be gone on with."""
        kept = _Replica.KEPT, _Replica.CAUGHT_UP
        return {holder for holder, state in self._states.items() if state not in kept}

    @property
    def members(self) -> set[HolderId]:
        """Holders that are to have replicas, or had until they were lost."""
        return set(self._states)

    def begin(self, holder: HolderId) -> None:
        """A new replica is to be kept, of which nothing was heard yet."""
        self._states[holder] = _Replica.NEW

    def end(self, holder: HolderId) -> None:
        """Its replica isn't kept up to date any more."""
        self._states[holder] = _Replica.ENDED

    def only(self, kept: Collection[HolderId], members: Collection[HolderId]) -> None:
        """Of the ring's members, replicas are kept of these; others don't count any more."""
        self._states = dict.fromkeys(members, _Replica.ENDED) | {
            holder: self._states.get(holder, _Replica.KEPT) for holder in kept
        }

    def hear(self, news: Replicated, last_step: int) -> None:
        """How far a replica is. ``last_step``: that has begun."""
        holder = HolderId(news.holder)
        has_caught_up = news.step != NO_STEP
        if self._states.get(holder) in (_Replica.NEW, _Replica.KEPT):
            self._states[holder] = _Replica.CAUGHT_UP if has_caught_up else _Replica.KEPT
        if has_caught_up:
            self.lags[min(max(0, last_step - news.step), MOST_LAG)] += 1

    def is_cut(self, holder: HolderId) -> bool:
        """Whether there is no replica, or it isn't kept up to date any more."""
        return self._states.get(holder) is _Replica.ENDED

    def has_caught_up(self, holder: HolderId) -> bool:
        return self._states.get(holder) is _Replica.CAUGHT_UP

    def count(self) -> None:
        """Count the time in which some R-worker has no replica, up to now."""
        now = self._clock()
        if self._unprotected_since_s is not None:
            self.unprotected_s += now - self._unprotected_since_s
        self._unprotected_since_s = now if self.bare else None
