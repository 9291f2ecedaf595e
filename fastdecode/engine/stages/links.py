"""A stage's connections to the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pending import PendingReplies
from fastdecode.wire.messages import Failed, Shutdown, ToRWorker
from fastdecode.wire.stages import (
    FromStage,
    OfColumns,
    StageHello,
    StageMessage,
    StagePass,
)
from fastdecode.wire.transport import Connection, loss

ToStage: TypeAlias = ToRWorker | StageMessage
FromAnyStage: TypeAlias = FromStage | Failed | ToStage
"""What stages say to each other. The first one asks, and gets answers; the
others get orders, of the first and of the one before."""
StageConnection: TypeAlias = Connection[FromAnyStage, FromAnyStage]

NOBODY = HolderId(-1)
MAX_STAGES = 1 << 16
LOADING_TIMEOUT_S = 3600.0
"""For a stage's weights to be read, by which it may give signs of life."""
LOADING_SILENCE_S = 30.0
"""Meanwhile; what compiles kernels and reads weights shares its core with the
thread that gives signs."""


class OwedByStages:
    """The answers that stages owe.

    Args:
        owed: keeps them, by the index of a peer.
        first: of the first of them; the others' follow.
        stages: their numbers, in that order.
    """

    def __init__(self, owed: PendingReplies, first: int, stages: Sequence[int]) -> None:
        self._owed, self._first, self._stages = owed, first, stages

    def stage(self, index: int) -> int:
        """Whose index that is."""
        return self._stages[index - self._first]

    def expect(self, stage: int, message: FromAnyStage, num_answers: int = 1) -> None:
        """A stage will get this message, from us or from another one, and owes
        us the answer, if it is one that is answered. ``num_answers``: of
        R-workers, one after the other, that this takes."""
        kinds = _answers_to(message)
        if kinds:
            self._owed.ask_for(self._index(stage), kinds, NOBODY, num_answers)

    def take(self, stage: int, answer: FromAnyStage) -> bool:
        """A stage has answered. False: it doesn't owe that."""
        return self._owed.take_any(self._index(stage), answer)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Within, stages may take long to answer: they load their layers."""
        usual = self._owed.deadlines
        timeout_s = max(usual.timeout_s, LOADING_TIMEOUT_S)
        silence_s = max(usual.silence_s, LOADING_SILENCE_S)
        self._owed.deadlines = replace(usual, timeout_s=timeout_s, silence_s=silence_s)
        try:
            yield
        finally:
            self._owed.deadlines = usual

    def _index(self, stage: int) -> int:
        return self._first + self._stages.index(stage)


class StageLinks:
    """Sends to other stages, and keeps what they have said until it is asked
    for. Whoever loses one can't go on: then every method raises WorkerError.

    Args:
        connections: by the stages' numbers, in the order in which the hub has
            them, behind its R-workers'.
        is_asked: this isn't the first stage: orders may come at any time.
        first_prompt_stage: stages from this number on run prompts only.
    """

    def __init__(
        self,
        connections: Mapping[int, StageConnection],
        *,
        is_asked: bool,
        first_prompt_stage: int = MAX_STAGES,
    ) -> None:
        self._connections = dict(connections)
        self._stages = tuple(connections)
        self.is_asked = is_asked
        self.first_prompt_stage = first_prompt_stage
        self._heard: deque[tuple[int, FromAnyStage]] = deque()
        self.gone: set[int] = set()
        """Stages that are lost."""
        self.num_columns = 0
        """Of R-workers."""
        self.owed: OwedByStages
        """What they owe, from ``join`` on."""

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def later(self) -> tuple[int, ...]:
        """The stages at the other ends, but for the first."""
        return tuple(stage for stage in self._stages if stage)

    def join(self, owed: PendingReplies, first: int, num_columns: int) -> None:
        """The stages are peers number ``first`` and up, behind R-workers; ``owed``
        keeps what they owe."""
        self.owed = OwedByStages(owed, first, self._stages)
        self.num_columns = num_columns

    def send(self, stage: int, message: FromAnyStage) -> None:
        """To a stage, which owes an answer if the message is one that is
        answered."""
        self.owed.expect(stage, message)
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
            WorkerError: it can't go on, or says what nobody asked for.
        """
        stage = self.owed.stage(index)
        if isinstance(message, Failed):
            raise _failure(self.name(index), message)
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
        if not self.owed.take(stage, message):
            raise self.loss(
                stage, ProtocolError(f"it sent {type(message).__name__}, which nobody asked for")
            )

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
        return self._connections[self.owed.stage(index)].peer

    def lost(self, index: int, error: FastDecodeError) -> WorkerError:
        """The peer of this index is lost: the error to raise."""
        return self.loss(self.owed.stage(index), error)

    def loss(self, stage: int, error: FastDecodeError) -> WorkerError:
        """A stage is lost: the error to raise; its own, if it has said one."""
        name = self._connections[stage].peer
        self.gone.add(stage)
        if (failed := _last_words(self._connections[stage])) is not None:
            return _failure(name, failed)
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


def _last_words(connection: StageConnection) -> Failed | None:
    """Why a stage closed its connection, if it said so before."""
    try:
        while (message := connection.poll()) is not None:
            if isinstance(message, Failed):
                return message
    except WorkerError:
        pass
    return None


def _failure(name: str, failed: Failed) -> WorkerError:
    return WorkerError(f"{name} failed: {failed.message}", code=failed.code)


def _answers_to(message: FromAnyStage) -> tuple[type[Any], ...]:
    """What a stage itself answers."""
    return message.answers if isinstance(message, StageHello | StagePass) else ()
