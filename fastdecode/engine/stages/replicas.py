"""Replicas in a pipeline of stages: each stage's R-workers are a ring of their
own, and a lost one is gone on for inside its stage.

A column goes on once it does in every stage that has lost its R-worker of it:
with the tokens that all of them have. The others, which may have more, of steps
that didn't count, forget that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replicas import Failover, ReplicaFigures, Replicas
from fastdecode.engine.stages.later import LaterStages
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.stages.rooms import FIRST
from fastdecode.schedule.life import events
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import Welcome


def is_gone(fleet: WorkerPool, holder: HolderId) -> bool:
    """Whether the R-worker is lost that keeps a holder; of a column, the one in
    this stage."""
    return fleet.placement[holder] in fleet.gone


class StageReplicas(Replicas):
    """Of one stage's R-workers."""

    def give_up(self, holder: HolderId) -> None:
        """Nobody need go on for a holder: nothing is left of it, or of its
        column elsewhere."""
        self.failing.pop(holder, None)
        self._asked.pop(holder, None)
        if holder in self.adopted:
            self.emptied(holder)
        elif is_gone(self._fleet, holder):
            self._ring.forget(holder)


def order_of(column: HolderId, message: TakeOver) -> events.TakeOver:
    """What the first stage wants of a later one."""
    counts = message.num_tokens.tolist()
    ids = message.sequence_ids.tolist()
    parts = [Part(PartId(i), column, 0, n) for i, n in zip(ids, counts, strict=True)]
    return events.TakeOver(column, tuple(parts), tuple(counts))


class ColumnReplicas:
    """What the first stage knows of all stages' replicas; in the place of
    ``Replicas``.

    Args:
        own: of its own R-workers.
        fleet: columns.
        clock: seconds.
    """

    def __init__(self, own: StageReplicas, fleet: WorkerPool, clock: Clock) -> None:
        assert isinstance(fleet, ColumnPool)
        self._own = own
        self._fleet = fleet
        self._later: LaterStages = fleet.later
        self._later.losses.may_recover = True
        self._clock = clock
        self._lost_here: set[HolderId] = set()  # and not gone on for yet
        self._asked: dict[HolderId, set[int]] = {}  # which stages
        self._stages: dict[HolderId, set[int]] = {}  # later ones that have gone on for it
        self._failing: dict[HolderId, Failover] = {}  # lost in later stages alone
        self._reopened: set[HolderId] = set()

    @property
    def figures(self) -> ReplicaFigures:
        """What has become of them so far; links and rings are the first stage's."""
        return self._own.figures

    @property
    def adopted(self) -> set[HolderId]:
        """Columns of which some R-worker's neighbour goes on for it, until they
        are empty; none, where there are no others."""
        return self._adopted if self._has_others else set()

    @property
    def _adopted(self) -> set[HolderId]:
        return self._own.adopted | self._stages.keys()

    @property
    def _has_others(self) -> bool:
        """Whether there is a column of which nobody has been lost."""
        lost, adopted = self._fleet.lost, self._adopted
        return any(one not in lost and one not in adopted for one in self._fleet.placement)

    def reopened(self) -> list[HolderId]:
        """Columns on which others may start, though a neighbour goes on for some
        R-worker of theirs: there are no others. Told once each."""
        if self._has_others:
            return []
        found = self._adopted - self._reopened - self._asked.keys()
        self._reopened |= found
        return sorted(found)

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """See ``Replicas.lose``."""
        self._reopened.discard(holder)
        stages = self._later.losses.stages_of(holder)
        is_kept = is_used and all(stages.values())
        if is_gone(self._fleet, holder) and holder not in self._lost_here:
            self._lost_here.add(holder)
            is_kept = self._own.lose(holder, is_used=is_kept) and is_kept
        elif is_kept and holder not in self._lost_here:
            name = f"stage {min(stages)}'s R-worker of column {holder}"
            self._failing[holder] = Failover(name, "its neighbour", None, self._clock())
        if not is_kept:
            self.figures.num_recomputed_holders += is_used and not is_gone(self._fleet, holder)
            self._give_up(holder)
        return is_kept

    def take_over(self, order: events.TakeOver) -> bool:
        """See ``Replicas.take_over``."""
        column, later = order.holder, self._later
        unsettled = later.takings.unsettled(column)
        stages = {*later.losses.stages_of(column), *(unsettled - {FIRST})}
        own = FIRST in unsettled or is_gone(self._fleet, column)
        failover = self._failing.get(column)
        if failover is not None:
            failover.drain_s = self._clock() - failover.noticed_s
        if own and not self._own.take_over(order):
            self._give_up(column)
            return False
        self._lost_here.discard(column)
        ids = np.array([part.part_id for part in order.parts], np.int64)
        message = TakeOver(0, ids, np.array(order.num_tokens, np.int32))
        asked = self._asked[column] = stages | ({FIRST} if own else set())
        later.take_over(column, message, asked)
        self._stages.setdefault(column, set()).update(stages)
        return True

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver:
        """All that were asked have answered.

        Raises:
            ProtocolError: that can't be.
        """
        failover = self._failing.pop(holder, None)
        if failover is not None:
            since_s = failover.noticed_s + failover.drain_s
            failover.resume_s = self._clock() - since_s
            self.figures.failovers.append(failover)
        if FIRST in self._asked.pop(holder):
            return replace(self._own.taken_over(holder, answer), is_uneven=True)
        counts = tuple(None if x == MISSING else x for x in answer.num_tokens.tolist())
        return events.TakenOver(holder, counts, is_uneven=True)

    def emptied(self, holder: HolderId) -> None:
        """See ``Replicas.emptied``."""
        self._give_up(holder)

    def hand_over_to(self, replacements: object) -> None:
        """See ``Replicas``: a column has no replacement."""

    def leaving(
        self, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> list[HolderId]:
        """See ``Replicas``: a column has no replacement."""
        return []

    def is_leaving(self, holder: HolderId) -> bool:
        """See ``Replicas``: a column has no replacement."""
        return False

    def joined(self) -> None:
        """See ``Replicas``: a column has no replacement."""

    def take_news(self, last_step: int) -> None:
        """See ``Replicas.take_news``."""
        self._own.take_news(last_step)

    def mend(self) -> None:
        """See ``Replicas.mend``; later stages mend theirs."""
        self._own.mend()

    def _give_up(self, column: HolderId) -> None:
        """It is lost for good."""
        self._failing.pop(column, None)
        self._asked.pop(column, None)
        self._own.give_up(column)
        losses = self._later.losses
        kept = {stage for stage, is_kept in losses.stages_of(column).items() if is_kept}
        self._later.drop(column, kept | self._stages.pop(column, set()))
        losses.give_up(column)
