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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.ring import LinkOptions, Ring
from fastdecode.schedule.life import events
from fastdecode.schedule.ring import ResumePoint, num_offered
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


@dataclass
class ReplicaFigures:
    """What has become of replicas so far."""

    failovers: list[Failover] = field(default_factory=list)
    num_recomputed_holders: int = 0
    """Lost R-workers of which there was no replica, or not any more."""
    num_rings: int = 0
    """How often the ring was closed again, without a lost one or with one that came."""
    unprotected_s: float = 0.0
    """In which some R-worker had no replica."""
    lags: Counter[int] = field(default_factory=Counter)
    """See ``Ring.lags``."""

    def lag(self, percent: float) -> int | None:
        """Steps that had begun since the one that a neighbour has, in so many of
        a hundred times at most; None: nothing was ever said."""
        left = percent / 100 * self.lags.total()
        for lag, count in sorted(self.lags.items()):
            left -= count
            if left <= 0:
                return lag
        return None


def new_session() -> int:
    """Secret of a run."""
    return 1 + secrets.randbelow(MAX_ID)


def replicate(
    fleet: Fleet,
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
    there = sorted(welcomes)
    again = dict(welcomes)
    if len(there) > 1 or len(fleet) == 1:  # else all others are lost, and it goes on alone
        offered = num_offered([welcomes[holder].num_blocks for holder in there])
        again = fleet.greet(hello, dict(zip(there, offered, strict=True)))
    replicas = Replicas(fleet, options, clock)
    replicas.begin(sorted(again))
    return again, replicas


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


class Replicas:
    """Of holders of a fleet, each an R-worker.

    Args:
        fleet: the holders.
        options: of the links.
        clock: seconds.
    """

    def __init__(self, fleet: Fleet, options: LinkOptions, clock: Clock = time.monotonic) -> None:
        self._fleet = fleet
        self._session = options.session
        self._clock = clock
        self._ring = Ring(fleet, options, clock)
        self._is_broken = False  # somebody has left the ring, or come
        self._failing: dict[HolderId, Failover] = {}
        self._asked: dict[HolderId, TakeOver] = {}
        self.adopted: set[HolderId] = set()
        """Lost holders that neighbours go on for."""
        self.figures = ReplicaFigures(lags=self._ring.lags)
        """What has become of them so far."""

    def begin(self, holders: Sequence[HolderId]) -> None:
        """Have every R-worker that is there keep its neighbour up to date."""
        self._ring.close(holders)

    def take_news(self, last_step: int) -> None:
        """Take in what R-workers have said of their replicas. ``last_step``:
        that has begun."""
        for news in self._fleet.take_told():
            self._ring.take(news, last_step)
        self._ring.count()
        self.figures.unprotected_s = self._ring.unprotected_s

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """A holder is lost, which sequences are on, or not (``is_used``).
        Whether its neighbour can go on for it."""
        self._is_broken = True
        self._failing.pop(holder, None)
        self._asked.pop(holder, None)
        was_adopted = holder in self.adopted
        self.adopted.discard(holder)
        plan = self._ring.plan(holder)
        self._ring.lose(holder)
        if is_used and plan is not None and not was_adopted:
            names = self._fleet.peer(holder), self._fleet.peer(self._ring.beside(holder, 1))
            self._failing[holder] = Failover(*names, plan.resume, self._clock())
            return True
        self._ring.forget(holder)
        if is_used:
            self.figures.num_recomputed_holders += 1
            logger.warning("no replica of %s: recomputed", self._fleet.peer(holder))
        return False

    def take_over(self, order: events.TakeOver) -> bool:
        """Have the neighbour go on for a lost holder. Whether it is there."""
        holder = order.holder
        keeper = self._ring.beside(holder, 1)
        failover = self._failing[holder]
        failover.drain_s = self._clock() - failover.noticed_s
        if keeper in self._fleet.lost:
            del self._failing[holder]
            self.figures.num_recomputed_holders += 1
            return False
        ids = np.array([part.part_id for part in order.parts], np.int64)
        counts = np.array(order.num_tokens, np.int32)
        message = self._asked[holder] = TakeOver(self._session, ids, counts)
        self.adopted.add(holder)
        self._fleet.keepers.move(holder, keeper)
        self._fleet.send(holder, message)
        return True

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver:
        """The neighbour has answered.

        Raises:
            ProtocolError: that can't be.
        """
        self._asked.pop(holder).check(answer)
        failover = self._failing.pop(holder)
        since_s = failover.noticed_s + failover.drain_s
        failover.resume_s = self._clock() - since_s
        self.figures.failovers.append(failover)
        logger.warning(
            "%s goes on for %s, with the replica that it has kept", failover.keeper, failover.worker
        )
        found = answer.num_tokens.tolist()
        return events.TakenOver(holder, tuple(None if x == MISSING else x for x in found))

    def emptied(self, holder: HolderId) -> None:
        """Nothing is left of what was taken over."""
        self.adopted.remove(holder)
        self._ring.forget(holder)
        self._fleet.keepers.give_back(holder)

    def joined(self) -> None:
        """An R-worker has come in the place of a lost one."""
        self._is_broken = True

    def mend(self) -> None:
        """Close the ring again over those that are there, once no neighbour has
        anything of a lost one."""
        if not self._is_broken or self._failing or self.adopted:
            return
        lost = self._fleet.lost
        there = [one for one in self._fleet.keepers if one not in lost]
        if there and self._ring.make_way(there):
            self._is_broken = False
            self.figures.num_rings += 1
            self._ring.close(there)
            if len(there) > 1:
                logger.warning("the ring of replicas is closed over %d R-workers", len(there))
