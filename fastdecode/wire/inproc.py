"""Connections between threads of one process. Messages are neither encoded nor copied.

All connections of a hub share one queue of arrivals, so that waiting for one peer and waiting for
any is the same blocking ``get``. Arrivals for other connections are **pending** until asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from copy import copy
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import WorkerError
from fastdecode.wire.transport import PeerLostError, ReceiveT, SendT, closed_error, timeout_error


class InprocConnection(Generic[SendT, ReceiveT]):
    """One side of a pair that ``connect`` makes."""

    def __init__(self, peer: str, hub: InprocHub[SendT, ReceiveT]) -> None:
        self.peer: Final = peer
        self._hub = hub
        self.index = -1  # its place in the hub's connections
        self._remote: InprocConnection[Any, SendT] | None = None
        self.is_closed = False  # true if this side has closed it
        self._ended = False  # the end has been taken from the queue

    heard_s = None  # a thread ends with its process
    is_reached = True

    @property
    def is_open(self) -> bool:
        return not (self.is_closed or self._ended)

    def send(self, message: SendT) -> None:
        assert self._remote is not None
        if self.is_closed:
            raise closed_error(self.peer, by_peer=False)
        if not self._remote.deliver(message):
            raise closed_error(self.peer, by_peer=True)

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._hub.receive_from(self, timeout_s)

    def poll(self) -> ReceiveT | None:
        return self._hub.poll(self)

    def close(self) -> None:
        if not self.is_closed and self._remote is not None:  # ``connect`` may close it again
            self.is_closed = True
            self._remote.deliver(closed_error(self._remote.peer, by_peer=True))
            self._hub.arrive(self, closed_error(self.peer, by_peer=False))

    def deliver(self, message: ReceiveT | WorkerError) -> bool:
        """Queue a message of the peer, or why none follows. Return False if this side is closed."""
        if not self.is_closed:
            self._hub.arrive(self, message)
        return not self.is_closed

    def take(self, arrival: ReceiveT | WorkerError) -> ReceiveT:
        """Return what arrived here. Raises WorkerError: If it is the end."""
        if isinstance(arrival, WorkerError):
            self._ended = True
            raise copy(arrival)  # or this frame and the error would keep each other
        return arrival


_Arrival: TypeAlias = "tuple[InprocConnection[SendT, ReceiveT], ReceiveT | WorkerError]"


class InprocHub(Generic[SendT, ReceiveT]):
    """Connections of one thread.

    Args:
        keeps_places: A connection that this side has closed keeps its index. If False, the index
            goes to the next peer, as at a listener.
    """

    def __init__(self, clock: Clock = time.monotonic, *, keeps_places: bool = True) -> None:
        self._clock, self._keeps_places = clock, keeps_places
        self._adding = threading.Lock()
        self.connections: Final[list[InprocConnection[SendT, ReceiveT]]] = []
        # None stands for a call of ``wake``.
        self._arrivals: SimpleQueue[_Arrival[SendT, ReceiveT] | None] = SimpleQueue()
        self._is_woken = False
        self._pending: deque[_Arrival[SendT, ReceiveT]] = deque()
        self.is_closed = False
        """True once its thread has ended: further connections are closed at once."""

    def close(self) -> None:
        """Close all connections, and further ones at once."""
        with self._adding:
            self.is_closed, connections = True, list(self.connections)
        for connection in connections:
            connection.close()

    def add(self, peer: str) -> InprocConnection[SendT, ReceiveT]:
        """Return this hub's side of a new pair. Thread-safe."""
        connection = InprocConnection(peer, self)
        with self._adding:
            free = [] if self._keeps_places else [x.index for x in self.connections if x.is_closed]
            connection.index = free[0] if free else len(self.connections)
            self.connections[connection.index : connection.index + 1] = [connection]
        return connection

    def arrive(
        self, connection: InprocConnection[SendT, ReceiveT], message: ReceiveT | WorkerError
    ) -> None:
        """Queue a message for a connection. Thread-safe."""
        self._arrivals.put((connection, message))

    def wake(self) -> None:
        """End the current or next wait in ``receive_any`` as if its time were over. Thread-safe;
        not for a hub that waits for one connection alone."""
        if not self._is_woken:
            self._is_woken = True
            self._arrivals.put(None)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            if self._pending:
                connection, message = self._pending.popleft()
            else:
                still_open = [x.peer for x in self.connections if x.is_open]
                if not still_open:
                    raise closed_error(
                        ", ".join(x.peer for x in self.connections) or "every peer", by_peer=True
                    )
                try:
                    connection, message = self._next_arrival(deadline)
                except Empty:
                    raise timeout_error(" or ".join(still_open), timeout_s or 0.0) from None
            if connection.is_open:
                try:
                    return connection.index, connection.take(message)
                except WorkerError as error:
                    raise PeerLostError(connection.index, error) from None

    def receive_from(
        self, wanted: InprocConnection[SendT, ReceiveT], timeout_s: float | None
    ) -> ReceiveT:
        """Return the next message of one connection, as ``Connection.receive`` does."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while (pending := self._take_pending(wanted)) is None:
            try:
                self._pending.append(self._next_arrival(deadline))
            except Empty:
                raise timeout_error(wanted.peer, timeout_s or 0.0) from None
        return wanted.take(pending[1])

    def poll(self, wanted: InprocConnection[SendT, ReceiveT]) -> ReceiveT | None:
        """Return the next message of one connection, or None."""
        for _ in range(self._arrivals.qsize()):  # only this thread takes from it
            arrival = self._arrivals.get()
            if arrival is None:  # for the next caller of ``receive_any``
                self._arrivals.put(None)
            else:
                self._pending.append(arrival)
        pending = self._take_pending(wanted)
        return None if pending is None else wanted.take(pending[1])

    def _take_pending(
        self, wanted: InprocConnection[SendT, ReceiveT]
    ) -> _Arrival[SendT, ReceiveT] | None:
        if not wanted.is_open:
            raise closed_error(wanted.peer, by_peer=not wanted.is_closed)
        for i, arrival in enumerate(self._pending):
            if arrival[0] is wanted:
                del self._pending[i]
                return arrival
        return None

    def _next_arrival(self, deadline: float | None) -> _Arrival[SendT, ReceiveT]:
        """Raises Empty: If the deadline passes, or ``wake`` was called."""
        left_s = None if deadline is None else max(0.0, deadline - self._clock())
        arrival = self._arrivals.get(timeout=left_s)
        if arrival is None:
            self._is_woken = False
            raise Empty
        return arrival


def connect(
    one: InprocHub[SendT, ReceiveT],
    one_name: str,
    other: InprocHub[ReceiveT, SendT],
    other_name: str,
) -> tuple[InprocConnection[SendT, ReceiveT], InprocConnection[ReceiveT, SendT]]:
    """Connect two hubs' threads, ``one_name`` and ``other_name``, and return both sides. With a
    closed hub they are closed, as those to a process that has ended."""
    here, there = one.add(other_name), other.add(one_name)
    here._remote, there._remote = there, here
    if one.is_closed:
        here.close()
    if other.is_closed:
        there.close()
    return here, there
