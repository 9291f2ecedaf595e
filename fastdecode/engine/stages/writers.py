"""A prompt stage's view of the cache groups: it writes K and V of prompts to the members
that keep its layers, and reads what is cached before a prompt.

A prompt stage's layers may be kept by several token stages' R-workers, and several
prompt stages may write one R-worker's layers. What a pipeline sends a holder,
``BeginStep`` and a layer's ``Attend`` without queries, becomes ``StorePrompt``
(``fastdecode.wire.blocks``) to the group's members that keep the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import HeadShare, Shard
from fastdecode.engine.fleet.groups import CacheGroup, GroupPool
from fastdecode.engine.fleet.pool import RHub
from fastdecode.engine.fleet.replacements import Places
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.pool import StagePool
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.wire.blocks import FetchChunk
from fastdecode.wire.messages import Attend, BeginStep, StorePrompt, ToRWorker
from fastdecode.wire.stages import FIRST_STAGE, ColumnLost, MemberField


def members_of(layers: range, stages: Iterable[range]) -> dict[int, range]:
    """The token stages that keep any of a prompt stage's layers, and all layers of each,
    as the prompt stage counts them: from its own first one."""
    return {
        stage: range(each.start - layers.start, each.stop - layers.start)
        for stage, each in enumerate(stages)
        if range(max(each.start, layers.start), min(each.stop, layers.stop))
    }


class WriterMembers(StagePool):
    """The R-workers that a prompt stage writes to.

    Args:
        hub: connections to the R-workers of the first of ``written``, standby ones
            last, then of the next; and behind them the connections to other stages.
        timeout_s, silence_s: see ``WorkerPool``.
        stages: the other stages.
        written: the token stages that keep its layers.
        num_columns, absent: see ``StagePool``.
        at_addresses: connects again to the address of a lost one; None: no address has
            another process.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float,
        *,
        stages: StageLinks,
        written: Iterable[int],
        num_columns: int,
        absent: Mapping[int, WorkerError] | None = None,
        at_addresses: Places[Any] | None = None,
    ) -> None:
        self._written = tuple(written)
        num_r_workers = len(hub.connections) - len(stages)
        self.num_each: Final = num_r_workers // len(self._written)
        """R-workers of each stage."""
        super().__init__(
            hub, timeout_s, silence_s, absent=absent, stages=stages, num_columns=num_columns
        )
        self._at_addresses = at_addresses
        self.sessions: tuple[int, ...] = ()
        """By token stage: of its R-workers' caches; known before the first step."""

    def member(self, stage: int, column: int) -> HolderId:
        """See ``StagePool``."""
        return HolderId(self._written.index(stage) * self.num_each + column)

    def origin(self, index: int) -> tuple[int, int]:
        """See ``StagePool``."""
        place, number = divmod(index, self.num_each)
        return self._written[place], number

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """See ``WorkerPool``."""
        assert isinstance(message, StorePrompt | FetchChunk), type(message).__name__
        stage, name = self.origin(holder)
        super().send(holder, replace(message, session=self.sessions[stage], holder=name))

    def meet(self, index: int, num_replaced: int) -> None:
        """So often an R-worker was replaced by now: write to the one that is there."""
        if num_replaced == self.num_replaced[index]:
            return
        self.num_replaced[index] = num_replaced
        if (places := self._at_addresses) is not None:
            places.replace(index, places.reconnect(index))
            self._forget_loss(index)

    def _lose(self, index: int, error: FastDecodeError) -> None:
        # At the end of a job token stages let R-workers go before this one ends. What is
        # sent to one that has gone is owed, and so its loss is noticed then.
        is_idle = index < self._num_own and not self.pending.is_owed_by(index)
        if index not in self.gone and (not is_idle or isinstance(error, ProtocolError)):
            super()._lose(index, error)
            self.report_lost(index)

    def report_lost(self, index: int) -> None:
        """The first stage is to give up an R-worker that is lost here."""
        (stage, number), error = self.origin(index), self.gone[index]
        lost = ColumnLost(number, error.code, error.message, stage, self.num_replaced[index])
        self._stages.tell(FIRST_STAGE, lost)


class WriterPool(GroupPool):
    """The columns as a prompt stage sees them. Each step says who keeps them (``regroup``).

    Args:
        members: their R-workers.
        layers: see ``members_of``.
    """

    def __init__(self, members: WriterMembers, layers: Mapping[int, range]) -> None:
        super().__init__(members, [{}] * members.num_columns)
        self.writers: Final = members
        self._layers = layers
        self._rows = np.zeros((0, len(MemberField)), np.int32)
        self._begun: dict[tuple[HolderId, int], BeginStep] = {}  # by holder and lane

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """See ``WorkerPool``."""
        if isinstance(message, BeginStep):
            self._begun[holder, message.lane] = message
        elif isinstance(message, FetchChunk):
            super().send(holder, message)
        else:
            assert isinstance(message, Attend) and not len(message.q), "prompts are attended here"
            super().send(holder, _stored(message, self._begun[holder, message.lane]))

    def regroup(self, rows: NDArray[np.int32]) -> list[HolderId]:
        """These are the members from now on; see ``StagePass.members``. A group whose
        members are others than before goes on with the new ones.

        Returns:
            Such groups.

        Raises:
            ProtocolError: there can't be any like that.
        """
        if np.array_equal(rows, self._rows):
            return []
        self._check(rows)
        before, self._rows = self._rows, rows
        changed = []
        for group in self.groups:
            own, old = (x[x[:, MemberField.COLUMN] == group.holder] for x in (rows, before))
            if not np.array_equal(own, old):
                changed.append(group.holder)
                is_written = np.isin(own[:, MemberField.STAGE], list(self._layers))
                group.begin(dict(map(self._member, own[is_written].tolist())))
                self.revive(group.holder)
        return changed

    @property
    def is_written(self) -> bool:
        """Whether a member of a lost group still stores what it was sent before."""
        owed, members = self.pending.is_owed_by, self.members
        lost = (group for group in self.groups if group.holder in self.lost)
        kept = (member for group in lost for member in group.shards)
        return any(not members.is_lost(x) and owed(members.placement[x]) for x in kept)

    def _group_of(self, member: HolderId) -> CacheGroup | None:
        return next((group for group in self.groups if member in group.shards), None)

    def _member(self, row: Sequence[int]) -> tuple[HolderId, Shard]:
        """Place a member, which keeps this."""
        _, stage, name, worker, num_replaced, first, num = row
        member, index = (self.writers.member(stage, number) for number in (name, worker))
        self.writers.meet(index, num_replaced)
        self.writers.placement.place(member, index)
        heads = slice(first, first + num)
        shared = HeadShare(heads, heads) if num else None  # nothing is queried
        return member, Shard(shared, self._layers[stage])

    def _check(self, rows: NDArray[np.int32]) -> None:
        """Raises ProtocolError."""
        num_each = self.writers.num_each
        is_sane = rows.ndim == 2 and rows.shape[1] == len(MemberField) and (rows >= 0).all()
        if not is_sane or (rows[:, [MemberField.NAME, MemberField.WORKER]] >= num_each).any():
            raise ProtocolError(f"the first stage names members that can't be: {rows.tolist()[:9]}")


class WriterRelay:
    """Between the first stage and the R-workers that a prompt stage writes to; see
    ``Relay``.

    Args:
        pool: they.
    """

    forgets_answers = awaits_replacements = False

    def __init__(self, pool: WriterPool) -> None:
        self.regroup: Final = pool.regroup
        """See ``Relay``."""
        self._pool = pool
        for index in pool.writers.gone:  # since the beginning
            pool.writers.report_lost(index)

    def is_stored(self, step: LaneStep) -> bool:
        """Whether R-workers have stored all of a step. What is left of a lost group may
        be greeted again then, and must have stored what it was sent before."""
        return step.settled and not self._pool.is_written

    def obey(self, message: FromAnyStage) -> None:
        """Raises ProtocolError: the first stage has nothing else to say."""
        raise ProtocolError(f"the first stage sent {type(message).__name__}")

    def pass_on(self, news: object) -> None:
        """Nothing: losses were reported when they were noticed."""


def _stored(attend: Attend, begin: BeginStep) -> StorePrompt:
    counts: tuple[Any, Any, Any] = (begin.sequence_ids, begin.num_past, begin.num_new)
    at = attend.step, attend.lane, attend.layer
    return StorePrompt(0, *at, *counts, attend.k, attend.v, attend.holder)
