"""Links to other R-workers, over which K and V are transferred. Messages on one link
are answered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.traits import unasked
from rworker.transfers.neighbours import NeighbourConnection

Take: TypeAlias = Callable[[FromRWorker], None]
"""Takes an answer in."""

REACH_S: Final = 20.0
"""How long it may take to reach another R-worker. To answer, it may take longer."""


class PeerLink:
    """To one R-worker.

    Args:
        connection: to it; it needn't be reached yet.
        clock: seconds.
        timeout_s: how long it may stay silent while it owes an answer.
    """

    def __init__(
        self, connection: NeighbourConnection, clock: Clock, timeout_s: float = 0.0
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._due: deque[Take] = deque()
        self._since_s = clock()
        self.timeout_s = timeout_s

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def is_owed(self) -> bool:
        """Whether it owes an answer."""
        return bool(self._due)

    @property
    def num_owed(self) -> int:
        """Answers that it owes."""
        return len(self._due)

    def send(self, message: ToRWorker) -> None:
        """Send what has no answer.

        Raises:
            WorkerError: the other end is gone.
        """
        self._connection.send(message)

    def ask(self, message: ToRWorker, take: Take) -> None:
        """Send a message, and have ``take`` called with the answer.

        Raises:
            WorkerError: the other end is gone.
        """
        if not self._due:
            self._since_s = self._clock()
        self._connection.send(message)
        self._due.append(take)

    def listen(self, most: int | None = None) -> bool:
        """Take in the answers that are here, at most so many. Whether there were any.

        Raises:
            FastDecodeError: the other end is gone, refuses to go on, has answered
                what was not asked, or is silent for too long.
        """
        num_taken = 0
        while num_taken != most and self._take_next():
            num_taken += 1
        if self._due:
            self._check_patience()
        return num_taken > 0

    def close(self) -> None:
        self._due.clear()
        self._connection.close()

    def _take_next(self) -> bool:
        answer = self._connection.poll()
        if answer is None:
            return False
        if isinstance(answer, Failed):
            raise ProtocolError(f"{answer.worker} says: {answer.message}", code=answer.code)
        if not self._due:
            raise ProtocolError(f"{self.peer} {unasked(answer)}")
        self._since_s = self._clock()
        self._due.popleft()(answer)
        return True

    def _check_patience(self) -> None:
        waited_s = self._clock() - self._since_s
        reach_s = min(REACH_S, self.timeout_s)
        if waited_s <= reach_s:
            return
        if not self._connection.is_reached:
            raise WorkerError(f"{self.peer} can't be reached within {reach_s:g} s")
        if waited_s > self.timeout_s:
            raise WorkerError(
                f"{self.peer} has answered nothing for {self.timeout_s:g} s (worker_timeout_s)"
            )
