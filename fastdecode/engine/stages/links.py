"""A stage's connections to the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping
from typing import TypeAlias

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pending import PendingReplies
from fastdecode.engine.fleet.pool import failure, last_words
from fastdecode.wire.messages import Failed, Shutdown, ToRWorker
from fastdecode.wire.stages import (
    FromStage,
    OfColumns,
    StageDone,
    StageHello,
    StageMessage,
    StagePass,
    StageWelcome,
)
from fastdecode.wire.traits import unasked
from fastdecode.wire.transport import Connection, loss

FromAnyStage: TypeAlias = FromStage | Failed | ToRWorker | StageMessage
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
    for. A stage that loses another one can't go on: then every method raises WorkerError.

    Args:
        connections: By the stages' numbers, in the order in which the hub has
            them, behind its R-workers'.
        is_asked: This isn't the first stage: orders may come at any time.
    """

    def __init__(self, connections: Mapping[int, StageConnection], *, is_asked: bool) -> None:
        self._connections = dict(connections)
        self._stages = tuple(connections)
        self.is_asked = is_asked
        self._heard: deque[tuple[int, FromAnyStage]] = deque()
        self.gone: set[int] = set()  # stages that nothing reaches any more
        self.num_columns = 0  # of R-workers
        self._owed: PendingReplies
        self._first: int
        self._done: list[StageDone] = []
        self._welcomes: dict[int, StageWelcome] = {}
        self._num_layers: dict[int, int] = {}  # up to the end of each

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def later(self) -> tuple[int, ...]:
        """The stages at the other ends, but for the first."""
        return tuple(stage for stage in self._stages if stage)

    def join(self, owed: PendingReplies, first: int, num_columns: int) -> None:
        """Make the stages peers number ``first`` and up, behind R-workers. ``owed``
        keeps what they owe."""
        self._owed, self._first, self.num_columns = owed, first, num_columns

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """Inside, stages may take long to answer: they load their layers."""
        usual = self._owed.deadlines
        return self._owed.within(usual.at_least(LOADING_TIMEOUT_S, LOADING_SILENCE_S))

    def _index(self, stage: int) -> int:
        return self._first + self._stages.index(stage)

    def _stage(self, index: int) -> int:
        return self._stages[index - self._first]

    def tell(self, stage: int, message: FromAnyStage) -> None:
        """Send to a stage, that owes nothing for it."""
        try:
            self._connections[stage].send(message)
        except WorkerError as error:
            raise self.loss(stage, error) from None

    def take(self, index: int, message: FromAnyStage) -> int:
        """Return the stage of a peer that has said something.

        Raises:
            WorkerError: If it can't go on, or sends what was not asked for.
        """
        stage = self._stage(index)
        if isinstance(message, Failed):
            raise failure(self._connections[stage].peer, message)
        if isinstance(message, OfColumns):
            try:
                message.check(stage, self.num_columns)
            except ProtocolError as lie:
                raise self.loss(stage, lie) from None
        return stage

    def keep(self, stage: int, message: FromAnyStage) -> None:
        """Keep a stage's words until they are asked for."""
        self._heard.append((stage, message))

    def take_heard(self) -> list[tuple[int, FromAnyStage]]:
        """Return what stages have said, and which, in its order. Each is taken once."""
        heard = list(self._heard)
        self._heard.clear()
        return heard

    @property
    def has_heard(self) -> bool:
        return bool(self._heard)

    def heard_s(self, stage: int) -> float | None:
        """Return when a stage last gave a sign of life. None: it gives none."""
        return self._connections[stage].heard_s

    def lost(self, index: int, error: FastDecodeError) -> WorkerError:
        """Return the error to raise when the peer of this index is lost."""
        return self.loss(self._stage(index), error)

    def loss(self, stage: int, error: FastDecodeError) -> WorkerError:
        """Return the error to raise when a stage is lost: its own, if it has said one."""
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

    # The first stage's end.

    @property
    def are_welcome(self) -> bool:
        return bool(self._welcomes)

    def greet(self, hellos: Mapping[int, StageHello]) -> None:
        """Tell stages what they are to be; ``welcomes`` are due."""
        num_layers = 0
        for stage, hello in hellos.items():
            self._owed.ask(self._index(stage), hello, NOBODY)
            self.tell(stage, hello)
            num_layers += hello.num_layers
            self._num_layers[stage] = num_layers

    def welcomes(self, stages: Collection[int]) -> dict[int, StageWelcome] | None:
        """Return the answers by stage, once all of these have answered."""
        self._listen()
        answered = {stage: told for stage, told in self._welcomes.items() if stage in stages}
        return answered if len(answered) == len(stages) else None

    def send(self, message: StagePass) -> None:
        """Send a step to the stages, all of which have to report on it. Each layer of theirs,
        and of those before them, may take its R-workers as long as any answer may."""
        for stage in self.later:
            num_answers = self._num_layers.get(stage, 1)
            self._owed.ask(self._index(stage), message, NOBODY, num_answers)
        self.tell(self.later[0], message)

    def take_done(self) -> list[StageDone]:
        """Return what stages have reported of steps. Each report is taken once."""
        self._listen()
        done, self._done = self._done, []
        return done

    def _listen(self) -> None:
        """
        Raises:
            WorkerError: If a stage said what it may not say, or what it didn't owe.
        """
        for stage, message in self.take_heard():
            if not self._owed.take_any(self._index(stage), message):
                raise self.loss(stage, ProtocolError(f"it {unasked(message)}"))
            if isinstance(message, StageDone):
                self._done.append(message)
            elif isinstance(message, StageWelcome):
                self._welcomes[stage] = message

    def shut_down(self) -> None:
        """Let the later stages end, those that are still there."""
        for stage in self.later:
            if stage not in self.gone:
                with contextlib.suppress(WorkerError):
                    self._connections[stage].send(Shutdown())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
