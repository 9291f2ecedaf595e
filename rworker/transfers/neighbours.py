"""How an R-worker reaches others, over whatever transport connects them. Messages on one link
are answered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, ProtocolError, WorkerError
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.traits import unasked
from fastdecode.wire.transport import Connection

Take: TypeAlias = Callable[[FromRWorker], None]
"""Takes in an answer."""
ThreadHubs: TypeAlias = dict[str, InprocHub[FromRWorker, ToRWorker]]
REACH_S: Final = 20.0
"""Longest time to reach another R-worker. To answer, it may take longer."""


class NeighbourConnection(Connection[ToRWorker, FromRWorker], Protocol):
    """A connection to another R-worker."""

    @property
    def is_reached(self) -> bool:
        """True if the other end has sent anything."""


class Neighbours(Protocol):
    """How other R-workers are reached over this one's transport."""

    def open(self, address: str) -> NeighbourConnection:
        """Open a new connection to one. Never waits: it needn't be reached yet.

        Raises:
            FastDecodeError: If there is no such address, or it may not be used.
        """


class Neighbourhood(Protocol):
    """Where R-workers that are threads of this process meet others."""

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """Let others reach an R-worker. Return how it reaches them."""

    def address_of(self, name: str) -> str:
        """Return the address at which others reach it."""


class ThreadNeighbours:
    """R-workers that are threads of this process, and others over a transport, if there is one.

    Args:
        hubs: hubs of R-workers here, by name.
    """

    def __init__(self, hubs: ThreadHubs | None = None, others: Neighbours | None = None) -> None:
        self._hubs: ThreadHubs = {} if hubs is None else hubs
        self._others = others

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        self._hubs[name] = hub
        return self

    def address_of(self, name: str) -> str:
        return name

    def open(self, address: str) -> NeighbourConnection:
        if address not in self._hubs and self._others is not None:
            return self._others.open(address)
        if address not in self._hubs:
            raise ConfigError(f"there is no R-worker {address!r} in this process")
        here, _ = connect(InprocHub(), "a neighbour", self._hubs[address], f"R-worker {address}")
        return here


class NoNeighbours:
    """Stands for the neighbours of an R-worker that can't reach others."""

    def open(self, address: str) -> NeighbourConnection:
        raise ConfigError("this R-worker can't reach others: it keeps no replicas")


class PeerLink:
    """A link to one R-worker.

    Args:
        connection: a connection to it, which it need not have reached yet.
        timeout_s: longest silence while it owes an answer.
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
    def num_owed(self) -> int:
        """Answers that it owes."""
        return len(self._due)

    def send(self, message: ToRWorker, take: Take | None = None) -> None:
        """Send a message. ``take`` is called with its answer, if it has one.

        Raises:
            WorkerError: If the other end is lost.
        """
        if take is not None and not self._due:
            self._since_s = self._clock()
        self._connection.send(message)
        if take is not None:
            self._due.append(take)

    def listen(self, most: int | None = None) -> bool:
        """Take in up to ``most`` answers that have arrived. Return True if there were any.

        Raises:
            FastDecodeError: If the other end is lost, refuses to continue, has answered what was
                not asked, or is silent for too long.
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
