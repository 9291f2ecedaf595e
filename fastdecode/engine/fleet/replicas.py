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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.schedule.life import events
from fastdecode.schedule.ring import ResumePoint, neighbour, num_offered, plan_recovery
from fastdecode.wire.kv.replicating import Replicate, Replicated
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
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every R-worker offer half of its KV blocks, and keep a replica of
    its neighbour's in the other half.

    Args:
        hello: what all were greeted with.
        welcomes: what they said.
        addresses, link_bytes: see ``Replicas``.

    Raises:
        ConfigError: one isn't there, or hasn't the memory.
        WorkerError: one was lost meanwhile.
    """
    if len(welcomes) < len(fleet):
        raise ConfigError(
            Given("replicas", 1), " needs every R-worker at the start, and some aren't there"
        )
    offered = num_offered([welcomes[holder].num_blocks for holder in sorted(welcomes)])
    welcomes = fleet.greet(hello, offered)
    for error in fleet.lost.values():
        raise error
    replicas = Replicas(fleet, addresses, link_bytes, hello.session)
    replicas.begin()
    return welcomes, replicas


class Replicas:
    """Of all holders of a fleet, each an R-worker.

    Args:
        fleet: the holders.
        addresses: what R-workers call each other, by holder.
        link_bytes: that a link may have under way unanswered.
        session: secret of this run, in which holders were greeted.
        clock: seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        addresses: Sequence[str],
        link_bytes: int,
        session: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._addresses = addresses
        self._link_bytes = link_bytes
        self._session = session
        self._clock = clock
        self._without: set[HolderId] = set()  # those that have no replica (any more)
        self._unprotected_since_s: float | None = None
        self._held: dict[HolderId, dict[int, int]] = {}  # what each one's neighbour has: lane, step
        self._failing: dict[HolderId, Failover] = {}
        self._asked: dict[HolderId, TakeOver] = {}
        self.figures = ReplicaFigures()
        """What has become of them so far."""

    def begin(self) -> None:
        """Have every R-worker keep its neighbour up to date."""
        for holder in self._holders:
            keeper, guest = neighbour(holder, len(self._fleet)), self._before(holder)
            addresses = self._addresses[keeper], self._addresses[guest]
            self._fleet.send(holder, Replicate(*addresses, self._link_bytes))

    def take_news(self) -> None:
        """Take in what R-workers have said of their replicas."""
        self._count_unprotected()
        for news in self._fleet.take_told():
            holder = HolderId(news.holder)
            if isinstance(news, Replicated):
                self._held.setdefault(holder, {})[news.lane] = news.step
            else:
                name = self._fleet.peer(holder)
                logger.warning("%s has no replica any more: %s", name, news.reason)
                self._lack({holder})

    def lose(self, holder: HolderId) -> bool:
        """A holder is lost. Whether its neighbour can go on for it."""
        lost = self._fleet.lost
        acked = self._held.get(holder, {})
        lanes = [acked.get(lane, -1) for lane in range(1 + max(acked, default=0))]
        plan = plan_recovery(len(self._fleet), lost, lanes, self._without)
        before = self._before(holder)
        self._lack({holder, before})
        if before not in lost:
            self._fleet.send(before, Replicate("", "", self._link_bytes))
        keeper = plan.adopted.get(holder)
        if keeper is None:
            self.figures.num_recomputed_holders += 1
            logger.warning("no replica of %s: recomputed", self._fleet.peer(holder))
            return False
        names = self._fleet.peer(holder), self._fleet.peer(keeper)
        self._failing[holder] = Failover(*names, plan.resume, self._clock())
        return True

    def take_over(self, order: events.TakeOver) -> bool:
        """Have the neighbour go on for a lost holder. Whether it is there."""
        holder = order.holder
        keeper = neighbour(holder, len(self._fleet))
        failover = self._failing[holder]
        failover.drain_s = self._clock() - failover.noticed_s
        if keeper in self._fleet.lost:
            self.figures.num_recomputed_holders += 1
            return False
        ids = np.array([part.part_id for part in order.parts], np.int64)
        counts = np.array(order.num_tokens, np.int32)
        message = self._asked[holder] = TakeOver(self._session, ids, counts)
        self._fleet.move(holder, keeper)
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

    @property
    def _holders(self) -> list[HolderId]:
        return [HolderId(index) for index in range(len(self._fleet))]

    def _before(self, holder: HolderId) -> HolderId:
        """Whose replica a holder's R-worker keeps."""
        return HolderId((holder - 1) % len(self._fleet))

    def _lack(self, holders: set[HolderId]) -> None:
        """These have no replica any more."""
        self._count_unprotected()
        self._without |= holders
        self._unprotected_since_s = self._clock()

    def _count_unprotected(self) -> None:
        if self._unprotected_since_s is not None:
            now = self._clock()
            self.figures.unprotected_s += now - self._unprotected_since_s
            self._unprotected_since_s = now
