"""A stage's connections to the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pending import PendingReplies
from fastdecode.engine.fleet.pool import failure, last_words
from fastdecode.wire.messages import Failed, Shutdown, ToRWorker
from fastdecode.wire.stages import (
    FromStage,
    OfColumns,
    StageHello,
    StageMessage,
    StagePass,
)
from fastdecode.wire.traits import unasked
from fastdecode.wire.transport import Connection, loss

ToStage: TypeAlias = ToRWorker | StageMessage
FromAnyStage: TypeAlias = FromStage | Failed | ToStage
"""What stages say to each other. The first one asks, and gets answers; the
others get orders, of the first and of the one before."""
StageConnection: TypeAlias = Connection[FromAnyStage, FromAnyStage]

NOBODY = HolderId(-1)
LOADING_TIMEOUT_S = 3600.0  # for a stage's weights to be read, by which it may give signs of life
LOADING_SILENCE_S = 30.0
"""Meanwhile; what compiles kernels and reads weights shares its core with the
thread that gives signs."""


class StageLinks:
    """Sends to other stages, and keeps what they have said until it is asked
    for. Whoever loses one can't go on: then every method raises WorkerError.

    Args:
        connections: by the stages' numbers, in the order in which the hub has
            them, behind its R-workers'.
        is_asked: this isn't the first stage: orders may come at any time.
    """

    def __init__(
        self,
        connections: Mapping[int, StageConnection],
        *,
        is_asked: bool,
    ) -> None:
        self._connections = dict(connections)
        self._stages = tuple(connections)
        self.is_asked = is_asked
        self._heard: deque[tuple[int, FromAnyStage]] = deque()
        self.gone: set[int] = set()
        """Stages that nothing reaches any more."""
        self.num_columns = 0
        """Of R-workers."""
        self._owed: PendingReplies
        self._first: int

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def later(self) -> tuple[int, ...]:
        """The stages at the other ends, but for the first."""
        return tuple(stage for stage in self._stages if stage)

    def join(self, owed: PendingReplies, first: int, num_columns: int) -> None:
        """The stages are peers number ``first`` and up, behind R-workers; ``owed``
        keeps what they owe."""
        self._owed, self._first, self.num_columns = owed, first, num_columns

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """Within, stages may take long to answer: they load their layers."""
        usual = self._owed.deadlines
        return self._owed.within(usual.at_least(LOADING_TIMEOUT_S, LOADING_SILENCE_S))

    def expect(self, stage: int, message: FromAnyStage, num_answers: int = 1) -> None:
        """A stage will get this message, from this stage or from another one, and owes
        the answer, if it is one that a stage answers. ``num_answers``: of
        R-workers, one after the other, that this takes."""
        if isinstance(message, StageHello | StagePass):
            self._owed.ask(self._index(stage), message, NOBODY, num_answers)

    def _index(self, stage: int) -> int:
        """Of a stage, as a peer."""
        return self._first + self._stages.index(stage)

    def _stage(self, index: int) -> int:
        """The peer of this index."""
        return self._stages[index - self._first]

    def send(self, stage: int, message: FromAnyStage) -> None:
        """To a stage, which owes an answer if the message is one that is
        answered."""
        self.expect(stage, message)
        self.tell(stage, message)

    def tell(self, stage: int, message: FromAnyStage) -> None:
        """To a stage, that owes nothing for it."""
        try:
            self._connections[stage].send(message)
        except WorkerError as error:
            raise self.loss(stage, error) from None

    def take(self, index: int, message: FromAnyStage) -> int:
        """The peer of this index has said something; which stage it is.

        Raises:
            WorkerError: it can't go on, or sends what was not asked for.
        """
        stage = self._stage(index)
        if isinstance(message, Failed):
            raise failure(self.name(index), message)
        if isinstance(message, OfColumns):
            try:
                message.check(stage, self.num_columns)
            except ProtocolError as lie:
                raise self.loss(stage, lie) from None
        return stage

    def keep(self, stage: int, message: FromAnyStage) -> None:
        """A stage's words wait to be asked for."""
        self._heard.append((stage, message))

    def heard_s(self, stage: int) -> float | None:
        """When a stage last gave a sign of life; None: it gives none."""
        return self._connections[stage].heard_s

    def answered(self, stage: int, message: FromAnyStage) -> None:
        """What it has said is an answer that it owed.

        Raises:
            WorkerError: it didn't owe one.
        """
        if not self._owed.take_any(self._index(stage), message):
            raise self.loss(stage, ProtocolError(f"it {unasked(message)}"))

    def take_heard(self) -> list[tuple[int, FromAnyStage]]:
        """What stages have said, and which, in its order; told once."""
        heard = list(self._heard)
        self._heard.clear()
        return heard

    @property
    def has_heard(self) -> bool:
        """Whether there is any."""
        return bool(self._heard)

    def name(self, index: int) -> str:
        """What the peer of this index is called."""
        return self._connections[self._stage(index)].peer

    def lost(self, index: int, error: FastDecodeError) -> WorkerError:
        """The peer of this index is lost: the error to raise."""
        return self.loss(self._stage(index), error)

    def loss(self, stage: int, error: FastDecodeError) -> WorkerError:
        """A stage is lost: the error to raise; its own, if it has said one."""
        name = self._connections[stage].peer
        if not isinstance(error, ProtocolError):  # who says what can't be is still there
            self.gone.add(stage)
        if (failed := last_words(self._connections[stage])) is not None:
            return failure(name, failed)
        return WorkerError(
            f"{loss(name, error)}. Without its layers the job can't go on: see its own "
            "output, and start the job again (fastdecode run-batch --resume keeps what is done)",
            code="stage_lost",
        )

    def shut_down(self) -> None:
        """Let the later stages end, those that are still there."""
        for stage in self.later:
            if stage not in self.gone:
                with contextlib.suppress(WorkerError):
                    self._connections[stage].send(Shutdown())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
