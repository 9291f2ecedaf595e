"""Failovers in one ring of R-workers: which takes over from which, and how a cache that a neighbour
took over is handed to the replacement of the lost one.

A newcomer gives up the empty cache with which it was greeted. The neighbour streams the cache to
it like a replica, behind its answers. Once the copy has caught up, no new step begins, and steps in
flight finish. The newcomer is asked what it has (``TakeOver``), and serves the holder; tokens of
the last step that it lacks run again. Then the neighbour drops the cache. If either is lost before,
the other one serves.

The newcomer also keeps a replica of the R-worker before it. That copy starts when the ring is
closed over the newcomer, right afterwards: both copies share its port, so the first is safe sooner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.fleet.ring import USABLE, LinkFigures, LinkOptions, ReplicaState, Ring
from fastdecode.wire.messages import Welcome

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""Pauses after a copy that failed although both R-workers live. Each is twice the one before."""


@dataclass
class Failover:
    """A lost R-worker that its neighbour has replaced."""

    worker: str
    keeper: str
    noticed_s: float  # when the loss was noticed, by the clock
    drain_s: float = 0.0  # from then until no step was in flight
    resume_s: float = 0.0  # from then until the neighbour had taken over


@dataclass(frozen=True)
class Return:
    """A cache that a neighbour had taken over, and that the lost R-worker's replacement serves."""

    worker: str
    keeper: str  # the neighbour
    copy_s: float
    """From the replacement's arrival until it had caught up. No step waited for it."""
    drain_s: float  # from then until no step was in flight
    resume_s: float  # from then until it served
    went_on_s: float  # when that was, by the clock


@dataclass
class ReplicaFigures(LinkFigures):
    """Counts of what happened to replicas."""

    failovers: list[Failover] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    num_recomputed_holders: int = 0  # lost R-workers without a usable replica

    def lag(self, percent: float) -> int | None:
        """Return how many steps a replica lags behind the last one that has begun, at this
        percentile. None if no replica has reported."""
        left = percent / 100 * self.lags.total()
        for lag, count in sorted(self.lags.items()):
            left -= count
            if left <= 0:
                return lag
        return None


@dataclass
class _Handover:
    """A cache that a neighbour hands to the lost R-worker's replacement."""

    source: HolderId  # the neighbour that serves it
    since_s: float  # when a newcomer had arrived
    is_copying: bool = False
    leaves_s: float | None = None  # when it had caught up
    asked_s: float | None = None
    """When the newcomer was asked what it has: no step was in flight by then."""


class Failovers:
    """Which R-worker takes over from which, of the holders in one ring (``circle``). ``figures``:
    Counts that all rings share."""

    def __init__(
        self,
        fleet: WorkerPool,
        options: LinkOptions,
        clock: Clock,
        circle: Sequence[HolderId],
        figures: ReplicaFigures,
        link_figures: LinkFigures,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self.ring = Ring(fleet, options, clock, link_figures)
        self.circle = list(circle)  # the ring's holders, lost ones included
        self.failing: dict[HolderId, Failover] = {}
        """Lost holders that other R-workers are about to take over."""
        self.replacements: HubReplacements
        """R-workers that get what neighbours took over, if any may come."""
        self.handovers: dict[HolderId, _Handover] = {}  # under way, by the lost holder
        self._pauses: dict[HolderId, tuple[float, float]] = {}  # until when, and how long
        self._figures = figures

    @property
    def adopted(self) -> set[HolderId]:
        """Lost holders that neighbours serve, or newcomers that have not answered yet."""
        placement = self._fleet.placement
        return {x for x in self.circle if placement[x] != x or x in self.handovers}

    @property
    def present(self) -> list[HolderId]:
        lost = self._fleet.lost
        return [holder for holder in self.circle if holder not in lost]

    def leaving(
        self, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> list[HolderId]:
        """Advance handovers. Return holders that are to leave the neighbours that serve them,
        since those that wait in their places (``found``) have caught up. ``is_used``: Returns True
        if any sequence is on a holder."""
        return [holder for holder in self.adopted if self._advance(holder, found, is_used)]

    def _advance(
        self, holder: HolderId, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> bool:
        handover, state = self.handovers.get(holder), self.ring.states.get(holder)
        if handover is None:
            # One without the room joins with an empty cache, once nothing is left of this one.
            least = self.replacements.most_blocks.get(holder, 0)
            is_whole = holder in found and found[holder].num_blocks >= least
            if is_whole and self._clock() >= self._pauses.get(holder, (0.0, 0.0))[0]:
                source = HolderId(self._fleet.placement[holder])
                self.handovers[holder] = _Handover(source, self._clock())
                self.replacements.make_way(holder)
        elif handover.leaves_s is not None:
            pass
        elif holder not in found:
            self._cancel(holder)
        elif not handover.is_copying:
            if self.replacements.has_made_way(holder):
                handover.is_copying = True
                self.ring.copy(holder)
        elif state is ReplicaState.ENDED:  # the two R-workers don't get to each other
            pause_s = self._pauses.get(holder, (0.0, _FIRST_PAUSE_S / 2))[1]
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._pauses[holder] = self._clock() + pause_s, pause_s
            self._cancel(holder)
        elif state is ReplicaState.CAUGHT_UP or (state in USABLE and not is_used(holder)):
            handover.leaves_s = self._clock()
            return True
        return False

    def is_moving(self, holder: HolderId) -> bool:
        """Return True if another R-worker is to serve a holder, as soon as no step is in
        flight."""
        handover = self.handovers.get(holder)
        is_ready = (
            handover is not None and handover.leaves_s is not None and handover.asked_s is None
        )
        return is_ready or holder in self.failing

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """Record the loss of a holder. Return True if another R-worker can take over. ``is_used``:
        True if sequences are on it."""
        self.failing.pop(holder, None)
        failover = Failover(self._fleet.peer(holder), "", self._clock())
        if not self._has_second_copy(holder):
            is_kept = self.ring.states.get(holder) in USABLE
            is_kept = is_kept and self.ring.keeper_of(holder) is not None
            self.ring.lose(holder)
            if not (is_used and is_kept):
                self.ring.forget(holder)
                if is_used:
                    self._figures.num_recomputed_holders += 1
                    logger.warning("no replica of %s: recomputed", failover.worker)
                return False
        self.failing[holder] = failover
        return True

    def _has_second_copy(self, holder: HolderId) -> bool:
        """Return True if any R-worker has a copy of a holder that a neighbour served, or
        had just handed over."""
        if self._is_copied(holder):
            return True
        handover, has_copy = self.handovers.get(holder), False
        if handover is not None and handover.asked_s is not None:
            # The newcomer is lost before it has answered, and the neighbour has it all.
            has_copy = handover.source not in self._fleet.gone
            if has_copy:
                self._fleet.placement.move(holder, handover.source)
        self._cancel(holder)
        return has_copy

    def _is_copied(self, holder: HolderId) -> bool:
        """Return True if a newcomer is connected and has a copy, complete or not."""
        handover = self.handovers.get(holder)
        if handover is None or not handover.is_copying or handover.asked_s is not None:
            return False
        is_kept = self.ring.states.get(holder) in USABLE
        return is_kept and self.replacements.has_made_way(holder)

    def _cancel(self, holder: HolderId) -> None:
        """End a handover whose newcomer is lost or of no use: the neighbour keeps the cache."""
        handover = self.handovers.pop(holder, None)
        if handover is None:
            return
        if handover.is_copying:
            self.ring.stop_copying(holder, handover.source)
        if handover.asked_s is None:
            self.replacements.greet_again(holder)

    def take_over(self, holder: HolderId) -> bool:
        """Move a holder that is lost, or leaves the neighbour that served it, to the R-worker that
        takes over. Return False if no R-worker can."""
        failover = self.failing.get(holder)
        if failover is not None:
            failover.drain_s = self._clock() - failover.noticed_s
        if self._is_copied(holder):
            # The newcomer keeps the holder now, and the caller asks it what it has.
            self.handovers[holder].asked_s = self._clock()
            self.replacements.admit(holder)
            self._fleet.revive(holder, has_cache=False)
        elif not self._stay(holder):
            self.failing.pop(holder, None)
            self.ring.forget(holder)
            self._figures.num_recomputed_holders += 1
            return False
        return True

    def _stay(self, holder: HolderId) -> bool:
        """Leave a holder at the neighbour, or move it there. Return False if the neighbour is
        lost."""
        if holder in self.adopted:
            self._cancel(holder)
            return not self._fleet.is_lost(holder)
        keeper = self.ring.keeper_of(holder)
        if keeper is None:
            return False
        self._fleet.placement.move(holder, keeper)
        return True

    def taken_over(self, holder: HolderId, *, is_empty: bool) -> None:
        """Take in that the R-worker that replaces a holder has reported what it has."""
        failover = self.failing.pop(holder, None)
        handover = self.handovers.pop(holder, None)
        if handover is None and not is_empty:
            self.ring.keep_again(holder)
        if failover is not None:
            since_s = failover.noticed_s + failover.drain_s
            failover.resume_s = self._clock() - since_s
            failover.keeper = self._fleet.peer(holder)
            self._figures.failovers.append(failover)
            logger.warning("%s took over for %s from its replica", failover.keeper, failover.worker)
        if handover is not None:
            self._return(holder, handover, is_planned=failover is None)

    def _return(self, holder: HolderId, handover: _Handover, *, is_planned: bool) -> None:
        """Take in that a holder is in its own place again."""
        self._pauses.pop(holder, None)
        self.ring.moved(holder, handover.source)
        self._fleet.open_tier(holder)
        if not is_planned:
            return
        assert handover.leaves_s is not None and handover.asked_s is not None
        names = self._fleet.peer(holder), self._fleet.peer(handover.source)
        copy_s = handover.leaves_s - handover.since_s
        drain_s = handover.asked_s - handover.leaves_s
        now = self._clock()
        spans = copy_s, drain_s, now - handover.asked_s
        self._figures.returns.append(Return(*names, *spans, now))
        logger.warning("%s continues with the cache that %s had taken over", *names)

    def give_up(self, holder: HolderId) -> None:
        """Abandon the failover of a holder of which nothing is left, lost or not."""
        self.failing.pop(holder, None)
        if holder in self.adopted or self._fleet.is_lost(holder):
            self.ring.forget(holder)
            self._fleet.placement.give_back(holder)

    def end_all(self) -> bool:
        """End all failovers and replicas. Return True once every R-worker has confirmed; until
        then, call again."""
        for holder in self.adopted | self.failing.keys():
            self._cancel(holder)
            self._fleet.placement.give_back(holder)
        self.failing.clear()
        return self.ring.make_way(())

    def mend(self, without: Collection[HolderId] = ()) -> None:
        """Close the ring again over the present members, but for ``without``, once no
        neighbour has anything of a lost one."""
        if self.failing or self.adopted:
            return
        present = self.present
        members = [one for one in present if one not in without]
        if present and not self.ring.is_closed_over(members) and self.ring.make_way(members):
            self.ring.close(members)
            self.ring.figures.num_rings += 1
            if len(members) > 1:
                logger.warning("the ring of replicas is closed over %d R-workers", len(members))
