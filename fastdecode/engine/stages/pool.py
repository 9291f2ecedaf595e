"""The R-workers of one stage of a pipeline, and the other stages beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import cast

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import RConnection, RHub, WorkerPool
from fastdecode.engine.stages.later import LaterStages
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.tiers import ColumnTiers
from fastdecode.wire.kv.tiers import UseTier
from fastdecode.wire.messages import Answer, FromRWorker, ToRWorker


class StagePool(WorkerPool):
    """Of a stage. Losing another stage raises WorkerError at once.

    Args:
        hub, timeout_s, silence_s, clock, absent: see ``WorkerPool``.
        stages: the other stages, which the hub's last connections are to.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Clock = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
        *,
        stages: StageLinks,
    ) -> None:
        super().__init__(hub, timeout_s, silence_s, clock, absent, num_others=len(stages))
        self._stages = stages
        stages.join(self.pending, self.num_workers)
        self._begin()

    def _begin(self) -> None:
        """The other stages are known."""

    def _lose(self, index: int, error: FastDecodeError) -> None:
        if index >= self.num_workers:
            raise self._stages.lost(index, error)
        super()._lose(index, error)

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if index < self.num_workers:
            return super()._taken(index, message)
        self._stages.take(index, cast(FromAnyStage, message))
        return None


class ColumnPool(StagePool):
    """Of the first stage, to which a holder is a column: an R-worker here, and one
    in every later stage.

    Args:
        hub, timeout_s, silence_s, clock, absent, stages: see ``StagePool``.
    """

    def _begin(self) -> None:
        self.later = LaterStages(self._stages, super().send, self.events)
        """The stages behind this one."""

    @property
    def moves(self) -> ColumnTiers:
        """Reports of columns: once all of their R-workers have reported."""
        return self.later.tiers

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        """See ``WorkerPool``."""
        return {**self.later.losses.void, **super().lost}

    @property
    def is_owed(self) -> bool:
        """See ``WorkerPool``."""
        return super().is_owed or self.later.rooms.has_answers

    @property
    def lost_workers(self) -> list[WorkerError]:
        """See ``WorkerPool``."""
        own = {(0, column): error for column, error in self.gone.items()}
        later = self.later.losses.of_r_workers(own, self.later.token_stages)
        return list({**own, **later}.values())

    def tier_of(self, holder: HolderId, message: UseTier) -> UseTier:
        """See ``WorkerPool``."""
        return message.of_column(holder)

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """See ``WorkerPool``."""
        self.later.losses.lose_own(super().take_losses())
        return self.later.take_lost()

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """See ``WorkerPool``."""
        if not message.in_every_stage:
            super().send(holder, message)
        elif holder not in self.later.losses.over:
            super().send(holder, message)
            self.later.tell(holder, message)

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        """See ``WorkerPool``."""
        if self.later.rooms.has_answers:
            return self.later.rooms.next_answer()
        return self.later.joined(super().receive(most_s=most_s))

    def look(self) -> list[tuple[HolderId, Answer]]:
        """See ``WorkerPool``."""
        found = super().look()
        self.later.listen()
        return found


def pool_of(
    hub: RHub,
    timeout_s: float,
    silence_s: float,
    absent: Mapping[int, WorkerError],
    device: RConnection | None,
    stages: StageLinks | None,
) -> WorkerPool:
    """Of an engine; with other stages, of the first one."""
    if stages is None:
        return WorkerPool(hub, timeout_s, silence_s, absent=absent, device=device)
    assert device is None
    return ColumnPool(hub, timeout_s, silence_s, absent=absent, stages=stages)
