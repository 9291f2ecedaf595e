"""A stage's connections to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
"""Messages between stages. The first stage asks, and gets answers. The others get orders from the
first and from the one before."""
StageConnection: TypeAlias = Connection[FromAnyStage, FromAnyStage]

NOBODY = HolderId(-1)
LOADING_TIMEOUT_S = 3600.0  # for reading a stage's weights
LOADING_SILENCE_S = 30.0
"""Silence time-out during that: compiling kernels and reading weights shares a core with the thread
that gives signs of life."""


class StageLinks:
    """Sends to other stages, and keeps their messages until they are taken. A stage that loses
    another one can't continue: then every method raises WorkerError.

    Args:
        connections: By the stages' numbers, in the order in which the hub has them, behind its
            R-workers'.
        is_asked: True if this isn't the first stage: orders may arrive at any time.
    """

    def __init__(self, connections: Mapping[int, StageConnection], *, is_asked: bool) -> None:
        self._connections = dict(connections)
        self.stages = tuple(connections)
        self.is_asked = is_asked
        self.heard: list[tuple[int, FromAnyStage]] = []
        """Messages that were not taken yet, each with its stage."""
        self.gone: set[int] = set()  # stages whose connections are lost
        self.num_columns = 0  # of R-workers
        self._owed: PendingReplies
        self._first: int
        self._done: list[StageDone] = []
        self._welcomes: dict[int, StageWelcome] = {}
        self._num_layers: dict[int, int] = {}  # up to the end of each

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def later(self) -> tuple[int, ...]:
        """The stages at the other ends, but for the first."""
        return tuple(stage for stage in self.stages if stage)

    def join(self, owed: PendingReplies, first: int, num_columns: int) -> None:
        """Make the stages peers number ``first`` and up, behind R-workers. ``owed`` keeps what
        they owe."""
        self._owed, self._first, self.num_columns = owed, first, num_columns

    def _index(self, stage: int) -> int:
        return self._first + self.stages.index(stage)

    def tell(self, stage: int, message: FromAnyStage) -> None:
        """Send a message that needs no answer to a stage."""
        try:
            self._connections[stage].send(message)
        except WorkerError as error:
            raise self.loss(stage, error) from None

    def take(self, index: int, message: FromAnyStage) -> int:
        """Return the stage of a peer that has sent ``message``.

        Raises:
            WorkerError: If it has failed, or sends what was not asked for.
        """
        stage = self.stages[index - self._first]
        if isinstance(message, Failed):
            raise failure(self._connections[stage].peer, message)
        if isinstance(message, OfColumns):
            try:
                message.check(stage, self.num_columns)
            except ProtocolError as lie:
                raise self.loss(stage, lie) from None
        return stage

    def take_heard(self) -> list[tuple[int, FromAnyStage]]:
        """Return the messages that have come since the last call, in order, with their stages."""
        heard, self.heard = self.heard, []
        return heard

    def heard_s(self, stage: int) -> float | None:
        """Return when a stage last gave a sign of life. None if it gives none."""
        return self._connections[stage].heard_s

    def loss(self, stage: int, error: FastDecodeError) -> WorkerError:
        """Return the error to raise when a stage is lost: its own, if it has sent one."""
        name = self._connections[stage].peer
        if not isinstance(error, ProtocolError):  # a stage that breaks the protocol still lives
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

    def greet(
        self, hellos: Mapping[int, StageHello], receive: Callable[[], object]
    ) -> dict[int, StageWelcome]:
        """Send stages what they are to be, and return their answers, which may take long: they
        load their layers. ``receive`` takes in what one peer sends."""
        num_layers, usual = 0, self._owed.deadlines
        with self._owed.within(usual.at_least(LOADING_TIMEOUT_S, LOADING_SILENCE_S)):
            for stage, hello in hellos.items():
                self._owed.ask(self._index(stage), hello, NOBODY)
                self.tell(stage, hello)
                num_layers += hello.num_layers
                self._num_layers[stage] = num_layers
            while not hellos.keys() <= self._welcomes.keys():
                receive()
                self._listen()
        return self._welcomes

    def send(self, message: StagePass) -> None:
        """Send a step to the stages, all of which have to report on it. Each layer of a stage, and
        of those before it, may take its R-workers the time of any answer."""
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
            WorkerError: If a stage sent what it didn't owe.
        """
        for stage, message in self.take_heard():
            if not self._owed.take_any(self._index(stage), message):
                raise self.loss(stage, ProtocolError(f"it {unasked(message)}"))
            if isinstance(message, StageDone):
                self._done.append(message)
            elif isinstance(message, StageWelcome):
                self._welcomes[stage] = message

    def shut_down(self) -> None:
        """End the later stages that are not lost."""
        for stage in self.later:
            if stage not in self.gone:
                with contextlib.suppress(WorkerError):
                    self._connections[stage].send(Shutdown())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
