"""Links to other R-workers. Messages on one link are answered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.kv.exporting import DescribeExport, ReadExport
from fastdecode.wire.messages import Failed, FromRWorker
from rworker.stream.replica_links import REACH_S, NeighbourConnection

Take: TypeAlias = Callable[[FromRWorker], None]
"""Takes an answer in."""

MOST_AHEAD: Final = 4
"""Reads that a way is asked for before the first of them is answered."""


class TransferLink:
    """To one R-worker.

    Args:
        connection: to it; it needn't be reached yet.
        clock: seconds.
    """

    def __init__(self, connection: NeighbourConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._due: deque[Take] = deque()
        self._since_s = clock()
        self._is_reached = False
        self.timeout_s = 0.0
        """How long it may say nothing, though it owes an answer."""

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def is_owed(self) -> bool:
        """Whether it owes an answer."""
        return bool(self._due)

    @property
    def has_credit(self) -> bool:
        """Whether it may be asked for more."""
        return len(self._due) < MOST_AHEAD

    def ask(self, message: DescribeExport | ReadExport, take: Take) -> None:
        """Have something asked, and ``take`` called with the answer.

        Raises:
            WorkerError: the other end is gone.
        """
        if not self._due:
            self._since_s = self._clock()
        self._connection.send(message)
        self._due.append(take)

    def take_next(self) -> bool:
        """Take in an answer, if one is here.

        Raises:
            FastDecodeError: the other end is gone, has refused to go on, or
                says what nobody asked for.
        """
        answer = self._connection.poll()
        if answer is None:
            return False
        if isinstance(answer, Failed):
            raise ProtocolError(f"{answer.worker} says: {answer.message}", code=answer.code)
        if not self._due:
            raise ProtocolError(f"{self.peer} sent {type(answer).__name__}, unasked")
        self._since_s, self._is_reached = self._clock(), True
        self._due.popleft()(answer)
        return True

    def check_patience(self) -> None:
        """Raises WorkerError: it has kept us waiting for too long."""
        if not self._due:
            return
        waited_s = self._clock() - self._since_s
        is_reached = self._is_reached or self._connection.is_reached
        reach_s = min(REACH_S, self.timeout_s)
        if not is_reached and waited_s > reach_s:
            raise WorkerError(f"{self.peer} can't be reached within {reach_s:g} s")
        if waited_s > self.timeout_s:
            raise WorkerError(f"{self.peer} has answered nothing for {self.timeout_s:g} s")

    def close(self) -> None:
        self._due.clear()
        self._connection.close()
