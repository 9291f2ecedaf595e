"""Replicas as the engine sees them: who keeps whose, which of them can be gone
on with, and how a neighbour takes a lost R-worker's place.

R-workers form a ring (``fastdecode.schedule.ring``). Each keeps a replica of
the one before it, and is told its tokens by that one itself, never by the
S-worker. When one is lost, its neighbour has its cache, and acts for it from
then on. Neither that cache nor the one before it has a second copy any more.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.schedule.life import events
from fastdecode.schedule.ring import RecoveryPlan, ResumePoint, num_offered, plan_recovery
from fastdecode.wire.kv.replicating import NO_STEP, Replicate, Replicated
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import MAX_ID, MAX_LANES, Hello, Welcome

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


@dataclass
class ReplicaFigures:
    """What has become of replicas so far."""

    failovers: list[Failover] = field(default_factory=list)
    num_recomputed_holders: int = 0
    """Lost R-workers of which there was no replica, or not any more."""
    unprotected_s: float = 0.0
    """In which some R-worker that isn't lost had no replica."""


def new_session() -> int:
    """Secret of a run."""
    return 1 + secrets.randbelow(MAX_ID)


def replicate(
    fleet: Fleet,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    addresses: Sequence[str],
    link_bytes: int,
    clock: Clock = time.monotonic,
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every R-worker that is there offer half of its KV blocks, and keep a
    replica of its neighbour's in the other half.

    Args:
        hello: what all were greeted with.
        welcomes: what they said.
        addresses, link_bytes, clock: see ``Replicas``.

    Raises:
        ConfigError: there is to be a single one, or one hasn't the memory.
    """
    there = sorted(welcomes)
    again = dict(welcomes)
    if len(there) > 1 or len(fleet) == 1:  # else all others are lost, and it goes on alone
        offered = num_offered([welcomes[holder].num_blocks for holder in there])
        again = fleet.greet(hello, dict(zip(there, offered, strict=True)))
    replicas = Replicas(fleet, sorted(again), addresses, link_bytes, hello.session, clock)
    replicas.begin()
    return again, replicas


class Replicas:
    """Of holders of a fleet, each an R-worker.

    Args:
        fleet: the holders.
        ring: those that are there; the next of each keeps its replica.
        addresses: what R-workers call each other, by holder.
        link_bytes: that a link may have under way unanswered.
        session: secret of this run, in which holders were greeted.
        clock: seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        ring: Sequence[HolderId],
        addresses: Sequence[str],
        link_bytes: int,
        session: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._ring = tuple(ring)
        self._addresses = addresses
        self._link_bytes = link_bytes
        self._session = session
        self._clock = clock
        self._starting = set(ring)  # those of whose replica nobody has heard yet
        self._without: set[HolderId] = set()  # those that have none, or not any more
        self._unprotected_since_s: float | None = None
        self._held: dict[HolderId, dict[int, int]] = {}  # what each one's neighbour has: lane, step
        self._failing: dict[HolderId, Failover] = {}
        self._asked: dict[HolderId, TakeOver] = {}
        self.figures = ReplicaFigures()
        """What has become of them so far."""

    def begin(self) -> None:
        """Have every R-worker keep its neighbour up to date."""
        if len(self._ring) < 2:
            logger.warning("no replicas: all R-workers but one are lost")
            self._lack(set(self._ring))
            return
        for holder in self._ring:
            keeper, guest = (self._addresses[self._beside(holder, step)] for step in (1, -1))
            self._fleet.send(holder, Replicate(keeper, guest, self._link_bytes))
        self._count_unprotected()

    def take_news(self) -> None:
        """Take in what R-workers have said of their replicas."""
        self._count_unprotected()
        for news in self._fleet.take_told():
            holder = HolderId(news.holder)
            if isinstance(news, Replicated):
                self._take_held(holder, news)
            else:
                name = self._fleet.peer(holder)
                logger.warning("%s has no replica any more: %s", name, news.reason)
                self._lack({holder})

    def lose(self, holder: HolderId) -> bool:
        """A holder is lost. Whether its neighbour can go on for it."""
        if holder not in self._ring or len(self._ring) < 2:
            return False
        plan = self._plan(holder)
        before = self._beside(holder, -1)
        self._lack({holder, before})
        if before not in self._fleet.lost:
            self._fleet.send(before, Replicate("", "", self._link_bytes))
        if HolderId(self._ring.index(holder)) not in plan.adopted:
            self.figures.num_recomputed_holders += 1
            logger.warning("no replica of %s: recomputed", self._fleet.peer(holder))
            return False
        names = self._fleet.peer(holder), self._fleet.peer(self._beside(holder, 1))
        self._failing[holder] = Failover(*names, plan.resume, self._clock())
        return True

    def take_over(self, order: events.TakeOver) -> bool:
        """Have the neighbour go on for a lost holder. Whether it is there."""
        holder = order.holder
        keeper = self._beside(holder, 1)
        failover = self._failing[holder]
        failover.drain_s = self._clock() - failover.noticed_s
        if keeper in self._fleet.lost:
            self.figures.num_recomputed_holders += 1
            return False
        ids = np.array([part.part_id for part in order.parts], np.int64)
        counts = np.array(order.num_tokens, np.int32)
        message = self._asked[holder] = TakeOver(self._session, ids, counts)
        self._fleet.keepers.move(holder, keeper)
        self._fleet.send(holder, message)
        return True

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver:
        """The neighbour has answered.

        Raises:
            ProtocolError: that can't be.
        """
        self._asked[holder].check(answer)
        failover = self._failing.pop(holder)
        since_s = failover.noticed_s + failover.drain_s
        failover.resume_s = self._clock() - since_s
        self.figures.failovers.append(failover)
        logger.warning(
            "%s goes on for %s, with the replica that it has kept", failover.keeper, failover.worker
        )
        found = answer.num_tokens.tolist()
        return events.TakenOver(holder, tuple(None if x == MISSING else x for x in found))

    def _beside(self, holder: HolderId, step: int) -> HolderId:
        """Who keeps a holder's replica (1), or whose is kept there (-1)."""
        return self._ring[(self._ring.index(holder) + step) % len(self._ring)]

    def _take_held(self, holder: HolderId, news: Replicated) -> None:
        """So far its neighbour has its cache."""
        if not (0 <= news.lane < MAX_LANES and NO_STEP <= news.step <= MAX_ID):
            text = f"{self._fleet.peer(holder)} speaks of step {news.step} of lane {news.lane}"
            self._fleet.lose(holder, ProtocolError(text))
            return
        self._held.setdefault(holder, {})[news.lane] = news.step
        if holder in self._starting:
            self._starting.remove(holder)
            self._count_unprotected()

    def _plan(self, holder: HolderId) -> RecoveryPlan:
        """What becomes of the holders that are lost, by their places in the ring."""
        bare = self._without | self._starting
        lost, acked = self._fleet.lost, self._held.get(holder, {})
        lanes = [acked.get(lane, -1) for lane in range(1 + max(acked, default=0))]
        failed = [HolderId(place) for place, one in enumerate(self._ring) if one in lost]
        without = [HolderId(place) for place, one in enumerate(self._ring) if one in bare]
        return plan_recovery(len(self._ring), failed, lanes, without)

    def _lack(self, holders: set[HolderId]) -> None:
        """These have no replica any more."""
        self._without |= holders
        self._count_unprotected()

    def _count_unprotected(self) -> None:
        now = self._clock()
        if self._unprotected_since_s is not None:
            self.figures.unprotected_s += now - self._unprotected_since_s
        self._unprotected_since_s = now if self._without | self._starting else None
