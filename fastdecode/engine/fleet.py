"""The R-workers as the engine sees them: who is alive, who owes an answer, and since when."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.wire.messages import (
    Attend,
    Failed,
    ForkSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import Connection, wait_any

logger = logging.getLogger(__name__)

RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]

_ANSWERED = (Hello, OpenSequence, ForkSequence, Attend)


class Fleet:
    """Sends to R-workers by index, receives from whichever answers first, and notices the dead and the silent.

    A worker is **lost** when its connection breaks, when it says ``Failed``, or when an answer is overdue. What is sent
    to a lost worker goes nowhere; it never comes back.

    Args:
        connections: one a worker.
        timeout_s: how long an answer may take.
    """

    def __init__(self, connections: Sequence[RConnection], timeout_s: float) -> None:
        self._connections = list(connections)
        self._timeout_s = timeout_s
        self._due: list[deque[float]] = [deque() for _ in connections]  # when the oldest unanswered message was sent
        self._index = {id(connection): worker for worker, connection in enumerate(connections)}
        self._lost: dict[int, WorkerError] = {}

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def lost(self) -> dict[int, WorkerError]:
        """The workers that are lost, and why."""
        return self._lost

    def peer(self, worker: int) -> str:
        return self._connections[worker].peer

    def send(self, worker: int, message: ToRWorker) -> None:
        """Send, or do nothing if the worker is lost (finding that out may be this call's doing)."""
        if worker in self._lost:
            return
        if isinstance(message, _ANSWERED):
            self._due[worker].append(time.perf_counter())
        try:
            self._connections[worker].send(message)
        except WorkerError as error:
            self.lose(worker, error)

    def receive(self) -> tuple[int, FromRWorker] | None:
        """The next answer of any worker that owes one. None: a worker was lost meanwhile; look at ``lost``.

        Waits at most until the first answer is overdue. Must not be called when nobody owes anything.
        """
        owing = [worker for worker, due in enumerate(self._due) if due and worker not in self._lost]
        assert owing, "nobody owes an answer"
        oldest = min(owing, key=lambda worker: self._due[worker][0])
        remaining = self._due[oldest][0] + self._timeout_s - time.perf_counter()
        try:
            ready = wait_any([self._connections[worker] for worker in owing], max(0.0, remaining))
        except WorkerError:
            ready = None
        if ready is None:
            self._find_lost(owing, oldest)
            return None
        worker = self._index[id(ready)]
        try:
            answer = ready.poll()
        except WorkerError as error:
            self.lose(worker, error)
            return None
        if answer is None:
            return None
        self._due[worker].popleft()
        if isinstance(answer, Failed):
            text = f"R-worker {answer.worker} failed: {answer.message}"
            self.lose(worker, WorkerError(text, code=answer.code))
            return None
        return worker, answer

    def greet(self, hello: Hello) -> list[Welcome]:
        """Say Hello to every worker and collect their answers.

        Raises:
            WorkerError: a worker refused, was lost, or didn't answer in time.
        """
        for worker in range(len(self)):
            self.send(worker, hello)
        welcomes: dict[int, Welcome] = {}
        while len(welcomes) < len(self):
            received = self.receive() if not self._lost else None
            if self._lost:
                raise next(iter(self._lost.values()))
            if received is not None:
                worker, answer = received
                if not isinstance(answer, Welcome):
                    raise WorkerError(f"R-worker {self.peer(worker)} answered Hello with {type(answer).__name__}")
                welcomes[worker] = answer
        return [welcomes[worker] for worker in range(len(self))]

    def lose(self, worker: int, error: FastDecodeError) -> None:
        """Give a worker up."""
        if worker not in self._lost:
            self._lost[worker] = error if isinstance(error, WorkerError) else WorkerError(str(error), code=error.code)
            self._due[worker].clear()
            logger.error("R-worker %s is lost: %s", self.peer(worker), error)

    def _find_lost(self, owing: list[int], oldest: int) -> None:
        for worker in owing:
            try:
                # A closed connection says so; an answer that is there after all is taken next time.
                self._connections[worker].check()
            except WorkerError as error:
                self.lose(worker, error)
        now = time.perf_counter()
        if oldest not in self._lost and now - self._due[oldest][0] >= self._timeout_s:
            text = f"R-worker {self.peer(oldest)} hasn't answered for {self._timeout_s:g} s (--worker-timeout-s)"
            self.lose(oldest, WorkerError(text, code="worker_timeout"))
