"""A later stage's R-workers, as the columns that the first stage speaks of."""

from __future__ import annotations

from collections import deque

import numpy as np

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.replicas import StageReplicas, order_of
from fastdecode.engine.stages.rooms import FIRST
from fastdecode.engine.stages.tiers import StageMoved
from fastdecode.wire.kv.reserving import Accepted, Refused, Reserving
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import Room
from fastdecode.wire.stages import (
    ColumnInterrupted,
    ColumnLost,
    ColumnTakenOver,
    DropColumn,
    StageAnswer,
)

_LOST = "column_lost"


class OwnColumns:
    """Tells R-workers what the first stage wants of them, and that one what they
    say.

    Args:
        fleet: the R-workers, one a column.
        links: to the first stage.
        replicas: that they keep of each other; None: they keep none.
    """

    def __init__(
        self, fleet: WorkerPool, links: StageLinks, replicas: StageReplicas | None
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._replicas = replicas
        self._asked: dict[HolderId, deque[int]] = {}  # sequences that rooms are asked for
        self._taking: dict[HolderId, deque[TakeOver]] = {}

    def obey(self, message: Room | TakeOver | DropColumn) -> None:
        """
        Raises:
            ProtocolError: there is no such column, or nobody who could do that.
        """
        column = HolderId(message.column if isinstance(message, DropColumn) else message.holder)
        if not 0 <= column < len(self._fleet):
            raise ProtocolError(f"there is no column {column}: there are {len(self._fleet)}")
        if isinstance(message, (TakeOver, DropColumn)):
            self._recover(column, message)
            return
        self._fleet.send(column, message)
        if not isinstance(message, Reserving):
            return
        error = self._fleet.lost.get(column)
        if error is None:
            self._asked.setdefault(column, deque()).append(message.sequence_id)
        else:
            self._answer(column, message.sequence_id, _LOST, error.message)

    def take_in(self, column: HolderId, news: Accepted | Refused | TakenOver | WorkerError) -> None:
        """What an R-worker has answered, or why it is lost."""
        if isinstance(news, WorkerError):
            self._lose(column, news)
        elif isinstance(news, TakenOver):
            self._taken_over(column, news)
        elif news.sequence_id not in self._asked.get(column, ()):
            name = self._fleet.peer(column)
            text = f"{name} sent {type(news).__name__}, which nobody asked for"
            self._fleet.lose(column, ProtocolError(text))
        else:
            self._asked[column].remove(news.sequence_id)
            self._answer(column, news.sequence_id, *_told(news))

    def tell_moved(self) -> None:
        """What R-workers have said of their lower tiers."""
        for news in self._fleet.events.take_tiers():
            if isinstance(news, StageMoved):
                self._links.tell(FIRST, news)

    def keep_up(self, last_step: int) -> None:
        """Take in what R-workers say of replicas, and close their ring again
        where it is broken. ``last_step``: that has begun."""
        if self._replicas is not None:
            self._replicas.take_news(last_step)
            self._replicas.mend()

    def _lose(self, column: HolderId, error: WorkerError) -> None:
        is_kept = self._replicas is not None and self._replicas.lose(column, is_used=True)
        kind = ColumnInterrupted if is_kept else ColumnLost
        self._links.tell(FIRST, kind(column, error.code, error.message))
        for sequence_id in self._asked.pop(column, ()):
            self._answer(column, sequence_id, _LOST, error.message)
        for message in self._taking.pop(column, ()):
            self._tell_missing(column, message)

    def _recover(self, column: HolderId, message: TakeOver | DropColumn) -> None:
        if self._replicas is None:
            raise ProtocolError(f"{type(message).__name__}: this stage keeps no replicas")
        if isinstance(message, DropColumn):
            self._replicas.give_up(column)
        elif self._replicas.take_over(order_of(column, message)):
            self._taking.setdefault(column, deque()).append(message)
        else:
            error = self._fleet.lost[column]
            self._links.tell(FIRST, ColumnLost(column, error.code, error.message))
            self._tell_missing(column, message)

    def _taken_over(self, column: HolderId, news: TakenOver) -> None:
        assert self._replicas is not None and self._taking[column], "nobody else is asked"
        try:
            self._replicas.taken_over(column, news)
        except ProtocolError as lie:
            name = self._fleet.peer(column)
            self._fleet.lose(column, ProtocolError(f"{name} {lie.message}"))
        else:
            self._taking[column].popleft()
            self._links.tell(FIRST, ColumnTakenOver(column, news.num_tokens))

    def _tell_missing(self, column: HolderId, message: TakeOver) -> None:
        """Nobody goes on for the column: nothing of it is there."""
        missing = np.full(len(message.sequence_ids), MISSING, np.int32)
        self._links.tell(FIRST, ColumnTakenOver(column, missing))

    def _answer(self, column: HolderId, sequence_id: int, code: str, message: str) -> None:
        self._links.tell(FIRST, StageAnswer(column, sequence_id, code, message))


def _told(answer: Accepted | Refused) -> tuple[str, str]:
    return (answer.code, answer.message) if isinstance(answer, Refused) else ("", "")
