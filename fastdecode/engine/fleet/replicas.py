"""Replicas as the engine sees them: who keeps whose, which of them can be gone
on with, and how a neighbour takes a lost R-worker's place.

R-workers form a ring (``fastdecode.schedule.ring``). Each keeps a replica of
the one before it, and is told its tokens by that one itself, never by the
S-worker. When one is lost, its neighbour has its cache, and acts for it from
then on. Neither that cache nor the one before it has a second copy from then on,
until the ring is closed again: when nothing is left of what was taken over.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.handovers import Handovers
from fastdecode.engine.fleet.pool import HolderPool, WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements
from fastdecode.engine.fleet.ring import LinkOptions, Ring
from fastdecode.schedule.life import events
from fastdecode.schedule.ring import ResumePoint, num_offered
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import MAX_ID, Hello, Welcome

logger = logging.getLogger(__name__)


@dataclass
class Failover:
    """A lost R-worker whose neighbour goes on for it."""

    worker: str
    keeper: str
    resume: ResumePoint | None
    """The first step that the neighbour hadn't said it has."""
    noticed_s: float
    """When the loss was noticed, by the clock."""
    drain_s: float = 0.0
    """From then until no step was in flight."""
    resume_s: float = 0.0
    """From then until the neighbour had taken over."""


@dataclass(frozen=True)
class Return:
    """A cache that a neighbour went on with, and another R-worker does now, in
    the lost one's place."""

    worker: str
    keeper: str
    """The neighbour."""
    copy_s: float
    """From when it came until it had caught up, in which nobody waited for it."""
    drain_s: float
    """From then until no step was in flight."""
    resume_s: float
    """From then until it went on."""
    went_on_s: float
    """When that was, by the clock."""


@dataclass
class ReplicaFigures:
    """What has become of replicas so far."""

    failovers: list[Failover] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    num_recomputed_holders: int = 0
    """Lost R-workers of which there was no replica, or not any more."""
    num_rings: int = 0
    """How often the ring was closed again, without a lost one or with one that came."""
    unprotected_s: float = 0.0
    """In which some R-worker had no replica."""
    lags: Counter[int] = field(default_factory=Counter)
    """See ``Protection.lags``."""

    def lag(self, percent: float) -> int | None:
        """Steps that had begun since the one that a neighbour has, in so many of
        a hundred times at most; None: nothing was ever said."""
        left = percent / 100 * self.lags.total()
        for lag, count in sorted(self.lags.items()):
            left -= count
            if left <= 0:
                return lag
        return None


class Failovers:
    """Which R-worker takes over from which, of the holders in one ring.

    Args:
        fleet: the holders.
        options: of the links.
        clock: seconds.
        circle: the ring's holders; None: all.
        figures: what is counted; None: by this ring alone.
    """

    def __init__(
        self,
        fleet: WorkerPool,
        options: LinkOptions,
        clock: Clock = time.monotonic,
        circle: Sequence[HolderId] | None = None,
        figures: ReplicaFigures | None = None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._ring = Ring(fleet, options, clock, fleet.pending.deadlines)
        self.circle = fleet.holders if circle is None else list(circle)
        """The ring's holders, lost ones included."""
        self._is_broken = False  # somebody has left the ring, or come
        self.failing: dict[HolderId, Failover] = {}
        """Lost holders that others can go on for, and don't yet."""
        self.adopted: set[HolderId] = set()
        """Lost holders that neighbours go on for."""
        self._handovers: Handovers | None = None
        self._counts_links = figures is None
        self.figures = figures or ReplicaFigures(lags=self._ring.protection.lags)
        """What has become of them so far."""

    def hand_over_to(self, replacements: Replacements | None) -> None:
        """From now on, what neighbours go on with is given to those that come in
        the lost ones' places, if any do."""
        if isinstance(replacements, HubReplacements):
            self._handovers = Handovers(self._fleet, self._ring, replacements, self._clock)

    def begin(self, holders: Sequence[HolderId]) -> None:
        """Have every R-worker that is there keep its neighbour up to date."""
        self._ring.close(holders)

    def take_news(self, last_step: int, heard: Sequence[ReplicationNews] | None = None) -> None:
        """Take in what R-workers have reported of their replicas. ``last_step``:
        that has begun. ``heard``: None: all of the fleet's."""
        for news in self._fleet.events.take_replicas() if heard is None else heard:
            self._ring.take(news, last_step)
        self._ring.protection.count()
        if self._counts_links:
            self.figures.unprotected_s = self._ring.protection.unprotected_s

    def leaving(
        self, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> list[HolderId]:
        """Holders that are to leave the neighbours that go on for them, since
        those that have come in their places have caught up.

        Args:
            found: who waits in whose place.
            is_used: whether any sequence is on a holder.
        """
        if self._handovers is None:
            return []
        return self._handovers.advance(self.adopted, found, is_used)

    def is_leaving(self, holder: HolderId) -> bool:
        """Whether a holder is on its way back to its own place."""
        return self._handovers is not None and holder in self._handovers

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """A holder is lost, which sequences are on, or not (``is_used``).
        Whether another R-worker can go on for it."""
        self._is_broken = True
        self.failing.pop(holder, None)
        if holder in self.adopted:
            name = self._fleet.peer(holder)
            if self._handovers is not None and self._handovers.has_second_copy(holder):
                self.failing[holder] = Failover(name, "", None, self._clock())
                return True
        was_adopted = holder in self.adopted
        self.adopted.discard(holder)
        plan = self._ring.plan(holder)
        self._ring.lose(holder)
        if is_used and plan is not None and not was_adopted:
            names = self._fleet.peer(holder), self._fleet.peer(self._ring.beside(holder, 1))
            self.failing[holder] = Failover(*names, plan.resume, self._clock())
            return True
        self._ring.forget(holder)
        if is_used:
            self.figures.num_recomputed_holders += 1
            logger.warning("no replica of %s: recomputed", self._fleet.peer(holder))
        return False

    def go_on(self, holder: HolderId) -> bool:
        """Another R-worker goes on for a holder that is lost, or leaves the
        neighbour that went on for it. Whether it is there."""
        failover = self.failing.get(holder)
        if failover is not None:
            failover.drain_s = self._clock() - failover.noticed_s
        if self._handovers is not None and self._handovers.may_go_on(holder):
            self._handovers.let_in(holder)
        elif not self._stay(holder):
            self.failing.pop(holder, None)
            self.adopted.discard(holder)
            self._ring.forget(holder)
            self.figures.num_recomputed_holders += 1
            return False
        self.adopted.add(holder)
        return True

    def _stay(self, holder: HolderId) -> bool:
        """The neighbour goes on for a holder, as it may have before. Whether it is
        there."""
        if holder in self.adopted:
            if self._handovers is not None:
                self._handovers.cancel(holder)
            return self._fleet.placement[holder] not in self._fleet.gone
        keeper = self._ring.beside(holder, 1)
        if keeper in self._fleet.gone:
            return False
        self._fleet.placement.move(holder, keeper)
        return True

    def went_on(self, holder: HolderId) -> bool:
        """Whoever goes on for a holder has said what it has. Whether the holder
        is in its own place again."""
        failover = self.failing.pop(holder, None)
        is_home = self.is_leaving(holder)
        if failover is not None:
            since_s = failover.noticed_s + failover.drain_s
            failover.resume_s = self._clock() - since_s
            failover.keeper = self._fleet.peer(holder)
            self.figures.failovers.append(failover)
            logger.warning(
                "%s goes on for %s, with the replica that it has kept",
                failover.keeper,
                failover.worker,
            )
        if is_home:
            self._return(holder, is_planned=failover is None)
        return is_home

    def _return(self, holder: HolderId, *, is_planned: bool) -> None:
        """A holder is in its own place again."""
        assert self._handovers is not None
        handover = self._handovers.end(holder)
        self.adopted.discard(holder)
        self._is_broken = True
        if not is_planned:
            return
        assert handover.leaves_s is not None and handover.asked_s is not None
        names = self._fleet.peer(holder), self._fleet.peer(handover.source)
        copy_s = handover.leaves_s - handover.since_s
        drain_s = handover.asked_s - handover.leaves_s
        now = self._clock()
        spans = copy_s, drain_s, now - handover.asked_s
        self.figures.returns.append(Return(*names, *spans, now))
        logger.warning("%s goes on in the place of one that was lost, in place of %s", *names)

    def emptied(self, holder: HolderId) -> None:
        """Nothing is left of what was taken over."""
        self.adopted.remove(holder)
        self._ring.forget(holder)
        self._fleet.placement.give_back(holder)

    def give_up(self, holder: HolderId) -> None:
        """Nothing is left of a holder, lost or not: nobody need take it over."""
        self.failing.pop(holder, None)
        if holder in self.adopted:
            self.emptied(holder)
        elif self._fleet.placement[holder] in self._fleet.gone:
            self._ring.forget(holder)

    def end_all(self) -> bool:
        """Nobody goes on for anybody any more, and nobody keeps a replica.
        Whether all of that is over; if not, ask again."""
        for holder in self.adopted | self.failing.keys():
            if self._handovers is not None:
                self._handovers.cancel(holder)
            self._fleet.placement.give_back(holder)
        self.adopted.clear()
        self.failing.clear()
        self._is_broken = True
        return self._ring.make_way(())

    def joined(self) -> None:
        """An R-worker has come in the place of a lost one."""
        self._is_broken = True

    def mend(self) -> None:
        """Close the ring again over those that are there, once no neighbour has
        anything of a lost one."""
        if not self._is_broken or self.failing or self.adopted:
            return
        lost = self._fleet.lost
        there = [one for one in self.circle if one not in lost]
        if there and self._ring.make_way(there):
            self._is_broken = False
            self.figures.num_rings += self._counts_links
            self._ring.close(there)
            if len(there) > 1:
                logger.warning("the ring of replicas is closed over %d R-workers", len(there))


class Replicas(Failovers):
    """As the engine uses them.

    Args:
        fleet, options, clock: see ``Failovers``.
    """

    def __init__(
        self, fleet: WorkerPool, options: LinkOptions, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(fleet, options, clock)
        self._session = options.session
        self._asked: dict[HolderId, TakeOver] = {}

    def reopened(self) -> list[HolderId]:
        """Holders that others may start on, though a neighbour keeps them: none, as
        there are others."""
        return []

    def take_over(self, order: events.TakeOver) -> bool:
        """Have another R-worker go on for a holder, and ask it what it has.
        Whether it is there."""
        holder = order.holder
        if not self.go_on(holder):
            return False
        ids = np.array([part.part_id for part in order.parts], np.int64)
        counts = np.array(order.num_tokens, np.int32)
        message = self._asked[holder] = TakeOver(self._session, ids, counts)
        self._fleet.send(holder, message)
        return True

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver:
        """Whoever goes on for a holder has answered.

        Raises:
            ProtocolError: that can't be.
        """
        self._asked.pop(holder).check(answer)
        is_home = self.went_on(holder)
        found = answer.num_tokens.tolist()
        counts = tuple(None if x == MISSING else x for x in found)
        return events.TakenOver(holder, counts, is_home=is_home)


def new_session() -> int:
    """Secret of a run."""
    return 1 + secrets.randbelow(MAX_ID)


def replicate(
    fleet: WorkerPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    options: LinkOptions,
    clock: Clock = time.monotonic,
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every R-worker that is there offer half of its KV blocks, and keep a
    replica of its neighbour's in the other half.

    Args:
        hello: what all were greeted with.
        welcomes: what they said.
        options: of the links.
        clock: seconds.

    Raises:
        ConfigError: there is to be a single one, or one hasn't the memory.
    """
    again = offer_halves(fleet, hello, welcomes)
    replicas = Replicas(fleet, options, clock)
    replicas.begin(sorted(again))
    return again, replicas


def offer_halves(
    fleet: HolderPool, hello: Hello, welcomes: Mapping[HolderId, Welcome]
) -> dict[HolderId, Welcome]:
    """Have every R-worker that is there offer half of its KV blocks; see
    ``replicate``."""
    there = sorted(welcomes)
    if len(there) == 1 < len(fleet):
        return dict(welcomes)  # all others are lost, and it goes on alone
    offered = num_offered([welcomes[holder].num_blocks for holder in there])
    return greet(fleet, hello, dict(zip(there, offered, strict=True)))


def limits(welcomes: Mapping[HolderId, Welcome], num_holders: int) -> dict[int, int]:
    """The KV blocks that each R-worker may offer when it comes later: as many as
    the one in whose place it is did, or else as any; of none there is nothing to
    go by."""
    if not welcomes:
        return {}
    least = min(welcome.num_blocks for welcome in welcomes.values())
    return {
        index: welcomes[holder].num_blocks if (holder := HolderId(index)) in welcomes else least
        for index in range(num_holders)
    }
