"""A later stage between the first one and the R-workers of its own: what the first
stage sends them, and what they answer and report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.step.arrivals import News
from fastdecode.wire.kv.replicating import Replicate
from fastdecode.wire.kv.reserving import Accepted, Refused
from fastdecode.wire.kv.taking_over import DropCache, TakenOver, TakeOver
from fastdecode.wire.kv.tiers import Moved, Stocked
from fastdecode.wire.messages import Room
from fastdecode.wire.stages import ColumnLost, ColumnTakenOver, PlaceColumn, StageAnswer

_FIRST: Final = 0


class Relay:
    """Passes messages on, in their order.

    Args:
        pool: the R-workers, one a column.
        links: to the first stage.
        session: of their caches.
    """

    def __init__(self, pool: WorkerPool, links: StageLinks, session: int) -> None:
        self._pool = pool
        self._links = links
        self._session = session
        self._reported: set[int] = set()  # lost R-workers

    def obey(self, message: FromAnyStage) -> None:
        """The first stage has sent this.

        Raises:
            ProtocolError: it may not, or there is no such column.
        """
        match message:
            case PlaceColumn():
                holder, worker = self._checked(message.column), self._checked(message.worker)
                self._pool.placement.place(holder, worker)
            case ColumnLost():
                error = WorkerError(message.message, code=message.code)
                worker = self._checked(message.column)
                if self._pool.placement[worker] == worker:
                    self._pool.lose(worker, error)
            case TakeOver() | DropCache():
                own = replace(message, session=self._session)
                self._pool.send(self._checked(message.holder), own)
            case _ if isinstance(message, Room | Replicate):
                self._pool.send(self._checked(message.holder), message)
            case _:
                raise ProtocolError(f"the first stage sent {type(message).__name__}")

    def pass_on(self, news: Iterable[News]) -> None:
        """Send the first stage what R-workers have answered and reported, and which
        are lost."""
        for column, answer in news:
            if isinstance(answer, Accepted | Refused):
                self._links.tell(_FIRST, _answer(column, answer))
            elif isinstance(answer, TakenOver):
                self._links.tell(_FIRST, ColumnTakenOver(column, answer.num_tokens))
        for moved in self._pool.events.take_tiers():
            if isinstance(moved, Moved | Stocked):
                self._links.tell(_FIRST, moved)
        for replicated in self._pool.events.take_replicas():
            self._links.tell(_FIRST, replicated)
        for worker in self._pool.gone.keys() - self._reported:
            self._reported.add(worker)
            error = self._pool.gone[worker]
            self._links.tell(_FIRST, ColumnLost(worker, error.code, error.message))

    def _checked(self, column: int) -> HolderId:
        if not 0 <= column < len(self._pool):
            raise ProtocolError(f"there is no column {column}: there are {len(self._pool)}")
        return HolderId(column)


def _answer(column: HolderId, answer: Accepted | Refused) -> StageAnswer:
    if isinstance(answer, Refused):
        return StageAnswer(column, answer.sequence_id, answer.code, answer.message)
    return StageAnswer(column, answer.sequence_id, "", "")
