"""Caches that neighbours go on with, on their way to whoever has come in the
lost R-workers' places.

One that comes (``fastdecode.engine.fleet.replacements``) gives up the empty
cache with which it was greeted. The neighbour keeps it up to date from then on,
as it would a replica, behind its answers. When that has caught up, no new step
begins; those in flight end and count; and the newcomer is asked what it has
(``TakeOver``), and goes on with it. What it hasn't got of the very last step is
run again with the next. Only then the neighbour drops the cache: if the newcomer
is lost before, the neighbour goes on, and if the neighbour is, the newcomer does,
with what has come.

The other cache, the replica that the newcomer keeps of the one before it, comes
when the ring is closed over it, right afterwards: both travel through its port,
and so the first is soonest safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.fleet.ring import Ring
from fastdecode.wire.messages import Welcome

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""After a copy that came to nothing, though both R-workers live; twice as long
every time."""


@dataclass
class Handover:
    """One cache on its way."""

    source: HolderId
    """The neighbour that goes on with it."""
    since_s: float
    """When a newcomer was there."""
    is_copying: bool = False
    leaves_s: float | None = None
    """When it had caught up."""
    asked_s: float | None = None
    """When no step was in flight any more, and the newcomer was asked."""


class Handovers:
    """Those under way, by the lost holder.

    Args:
        fleet: the holders.
        ring: their replicas.
        replacements: who may come.
        clock: seconds.
    """

    def __init__(
        self, fleet: WorkerPool, ring: Ring, replacements: HubReplacements[Any], clock: Clock
    ) -> None:
        self._fleet = fleet
        self._ring = ring
        self._replacements = replacements
        self._clock = clock
        self._under_way: dict[HolderId, Handover] = {}
        self._pauses: dict[HolderId, tuple[float, float]] = {}  # until when, and how long

    def __contains__(self, holder: HolderId) -> bool:
        return holder in self._under_way

    def advance(
        self,
        adopted: Collection[HolderId],
        found: Mapping[int, Welcome],
        is_used: Callable[[HolderId], bool],
    ) -> list[HolderId]:
        """Go on with each. Those that are to leave their neighbours now.

        Args:
            adopted: holders that neighbours go on for.
            found: who waits in whose place.
            is_used: whether any sequence is on a holder.
        """
        return [holder for holder in adopted if self._advance(holder, found, is_used)]

    def _advance(
        self,
        holder: HolderId,
        found: Mapping[int, Welcome],
        is_used: Callable[[HolderId], bool],
    ) -> bool:
        handover = self._under_way.get(holder)
        if handover is None:
            if holder in found and self._may_begin(holder, found[holder]):
                self._begin(holder)
        elif handover.leaves_s is not None:
            pass
        elif holder not in found:
            self.cancel(holder)
        elif not handover.is_copying:
            if self._replacements.has_made_way(holder):
                handover.is_copying = True
                self._ring.copy(holder)
        elif self._ring.protection.is_cut(holder):
            self._try_later(holder)
        elif holder not in self._ring.protection.bare and (
            self._ring.protection.has_caught_up(holder) or not is_used(holder)
        ):
            handover.leaves_s = self._clock()
            return True
        return False

    def is_ready(self, holder: HolderId) -> bool:
        """Whether a copy has caught up, and nobody has been asked what is in it."""
        handover = self._under_way.get(holder)
        return handover is not None and handover.leaves_s is not None and handover.asked_s is None

    def may_go_on(self, holder: HolderId) -> bool:
        """Whether a newcomer is there with a copy, complete or not."""
        handover = self._under_way.get(holder)
        if handover is None or not handover.is_copying or handover.asked_s is not None:
            return False
        return holder not in self._ring.protection.bare and self._replacements.has_made_way(holder)

    def has_second_copy(self, holder: HolderId) -> bool:
        """Whether anybody goes on for a holder that a neighbour went on for, or
        had just handed over."""
        source = self.source(holder)
        if source is not None:  # whoever came is lost, and the neighbour has it all
            self._fleet.placement.move(holder, source)
        if source is not None or not self.may_go_on(holder):
            self.cancel(holder)
            return source is not None
        return True

    def let_in(self, holder: HolderId) -> None:
        """The newcomer keeps the holder from now on; it is to be asked at once
        what it has."""
        self._under_way[holder].asked_s = self._clock()
        self._replacements.admit(holder)
        self._fleet.revive(holder, has_cache=False)

    def source(self, holder: HolderId) -> HolderId | None:
        """The neighbour that has all of it still, while the newcomer hasn't
        answered; None: there is none."""
        handover = self._under_way.get(holder)
        if handover is None or handover.asked_s is None or handover.source in self._fleet.gone:
            return None
        return handover.source

    def cancel(self, holder: HolderId) -> None:
        """The newcomer is lost, or not wanted: the neighbour has the cache as before."""
        handover = self._under_way.pop(holder, None)
        if handover is None:
            return
        if handover.is_copying:
            self._ring.stop_copying(holder, handover.source)
        if handover.asked_s is None:
            self._replacements.greet_again(holder)

    def end(self, holder: HolderId) -> Handover:
        """The newcomer goes on with the cache."""
        self._pauses.pop(holder, None)
        handover = self._under_way.pop(holder)
        self._ring.moved(holder, handover.source)
        for message in self._fleet.told_first:
            self._fleet.send(holder, message)
        return handover

    def _may_begin(self, holder: HolderId, welcome: Welcome) -> bool:
        if not self._replacements.is_whole(holder, welcome):
            return False  # it joins with an empty cache, once nothing is left of this one
        return self._clock() >= self._pauses.get(holder, (0.0, 0.0))[0]

    def _begin(self, holder: HolderId) -> None:
        source = HolderId(self._fleet.placement[holder])
        self._under_way[holder] = Handover(source, self._clock())
        self._replacements.make_way(holder)

    def _try_later(self, holder: HolderId) -> None:
        """The two R-workers don't get to each other."""
        pause_s = self._pauses.get(holder, (0.0, _FIRST_PAUSE_S / 2))[1]
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._pauses[holder] = self._clock() + pause_s, pause_s
        self.cancel(holder)
