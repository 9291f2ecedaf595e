"""R-workers of token stages as a prompt stage sees them: those of one column are
one, which keeps all of the prompt stage's layers.

A prompt stage's layers may be several token stages', and a token stage's several
prompt stages': who keeps a layer is looked up with each. What a pipeline says as
to an R-worker of its own, ``BeginStep`` and a layer's ``Attend`` without queries,
goes out as ``StorePrompt`` (``fastdecode.wire.kv.attending``), and what is answered
comes back in the order of layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.messages import (
    Attend,
    AttendResult,
    BeginStep,
    FromRWorker,
    StorePrompt,
    ToRWorker,
)
from fastdecode.wire.transport import Connection, Hub, PeerLostError

RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]


@dataclass(frozen=True)
class LayerHome:
    """Where a prompt stage's layer is kept."""

    stage: int
    """The token stage."""
    layer: int
    """What its R-workers call it."""


def homes_of(layers: range, stages: Sequence[range]) -> tuple[LayerHome, ...]:
    """Where each of a prompt stage's layers is kept, if token stages have these."""
    return tuple(
        LayerHome(stage, layer - each.start)
        for layer in layers
        for stage, each in enumerate(stages)
        if layer in each
    )


def stages_of(homes: Sequence[LayerHome]) -> list[int]:
    """The token stages that keep any of these layers."""
    return sorted({home.stage for home in homes})


@dataclass(eq=False)
class _Due:
    """A layer that an R-worker was sent."""

    layer: int
    answer: AttendResult | None = None


class ColumnConnection:
    """To the R-workers of a column; see ``Connection``.

    Args:
        number: the column's.
        homes: of the prompt stage's layers.
        ways: to its R-workers, by token stage.
        sessions: by token stage, in whose name R-workers take prompts.
    """

    def __init__(
        self,
        number: int,
        homes: Sequence[LayerHome],
        ways: dict[int, RConnection],
        sessions: Sequence[int],
    ) -> None:
        self._number = number
        self._homes = homes
        self._ways = ways
        self._sessions = sessions
        self._begun: dict[int, BeginStep] = {}  # by lane
        self._due: deque[_Due] = deque()

    @property
    def peer(self) -> str:
        return " and ".join(way.peer for way in self._ways.values())

    @property
    def heard_s(self) -> float | None:
        """Of whoever is to answer next."""
        stage = self._homes[self._due[0].layer].stage if self._due else next(iter(self._ways))
        return self._ways[stage].heard_s

    def send(self, message: ToRWorker) -> None:
        """See ``Connection``. A layer goes to whoever keeps it."""
        if isinstance(message, BeginStep):
            self._begun[message.lane] = message
            return
        assert isinstance(message, Attend), f"{type(message).__name__} isn't for columns"
        assert not len(message.q), "prompts are attended where they run"
        home, begin = self._homes[message.layer], self._begun[message.lane]
        self._due.append(_Due(message.layer))
        self._ways[home.stage].send(
            StorePrompt(
                self._sessions[home.stage],
                message.step,
                message.lane,
                home.layer,
                begin.sequence_ids,
                begin.num_past,
                begin.num_new,
                message.k,
                message.v,
                self._number,
            )
        )

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        """See ``Connection``."""
        raise AssertionError("who waits, waits for all columns")

    def poll(self) -> FromRWorker | None:
        """See ``Connection``."""
        for stage, way in self._ways.items():
            while (answer := way.poll()) is not None:
                if (told := self.take(stage, answer)) is not None:
                    return told
        return self.next_answer()

    def take(self, stage: int, answer: FromRWorker) -> FromRWorker | None:
        """The R-worker of a token stage has said something. What is to be made
        of it; None: nothing yet.

        Raises:
            WorkerError: nobody asked it for that.
        """
        if not isinstance(answer, AttendResult):
            return answer
        due = next(
            (x for x in self._due if x.answer is None and self._homes[x.layer].stage == stage), None
        )
        if due is None or self._homes[due.layer].layer != answer.layer:
            text = f"{self._ways[stage].peer} answered for layer {answer.layer}, which isn't due"
            raise WorkerError(text, code=ProtocolError.default_code)
        due.answer = replace(answer, layer=due.layer)
        return self.next_answer()

    @property
    def is_owed(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._due)

    def next_answer(self) -> AttendResult | None:
        """The answer for the next layer, if it is here."""
        if not self._due or self._due[0].answer is None:
            return None
        return self._due.popleft().answer

    def close(self) -> None:
        for way in self._ways.values():
            way.close()


class LayerHub:
    """The columns as connections of a hub, and behind them those to other
    stages; see ``fastdecode.wire.transport.Hub``.

    Args:
        hub: its first connections are to the R-workers of each column of the
            first token stage that keeps any of the layers, then of the next.
        homes: of the prompt stage's layers.
        num_columns: of every stage.
    """

    def __init__(self, hub: Hub[Any, Any], homes: Sequence[LayerHome], num_columns: int) -> None:
        self._hub = hub
        self._stages = stages_of(homes)
        self._num_r_workers = len(self._stages) * num_columns
        self.sessions: list[int] = []
        """By token stage, in whose name R-workers take prompts; known before the
        first step."""
        self._columns = [
            ColumnConnection(
                column,
                homes,
                {
                    stage: hub.connections[place * num_columns + column]
                    for place, stage in enumerate(self._stages)
                },
                self.sessions,
            )
            for column in range(num_columns)
        ]
        self._lost: set[int] = set()

    @property
    def connections(self) -> Sequence[Connection[Any, Any]]:
        return [*self._columns, *self._hub.connections[self._num_r_workers :]]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for number, column in enumerate(self._columns):
                if number not in self._lost and (answer := column.next_answer()) is not None:
                    return number, answer
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            try:
                index, message = self._hub.receive_any(left_s)
            except PeerLostError as lost:
                if self._is_missed(lost.index):
                    raise self._loss(lost.index, lost) from None
                continue  # whoever sends to it hears of it
            if index >= self._num_r_workers:
                return self._number(index), message
            try:
                stage, number = self._stages[index // len(self._columns)], self._number(index)
                told = self._columns[number].take(stage, message)
            except WorkerError as lie:
                raise self._loss(index, lie) from None
            if told is not None:
                return number, told

    def _is_missed(self, index: int) -> bool:
        """Whether somebody waits for who is lost: a stage, or an R-worker that
        owes something. At the end of a job others let R-workers go."""
        if index >= self._num_r_workers:
            return True
        number = self._number(index)
        return number not in self._lost and self._columns[number].is_owed

    def _number(self, index: int) -> int:
        """What a connection of the hub behind this one is here."""
        if index < self._num_r_workers:
            return index % len(self._columns)
        return index - self._num_r_workers + len(self._columns)

    def _loss(self, index: int, error: WorkerError) -> PeerLostError:
        number = self._number(index)
        self._lost.add(number)
        return PeerLostError(number, error)
