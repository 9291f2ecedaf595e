"""Connections between threads of one process. A message is handed over as it
is: nothing is encoded or copied.

All connections of a hub share one queue of arrivals, so that waiting for one
peer and waiting for any is the same blocking ``get``, and nothing is polled.
What arrives for a connection that isn't asked for is **pending** until it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import WorkerError
from fastdecode.wire.transport import (
    PeerLostError,
    ReceiveT,
    SendT,
    SendT_contra,
    closed_error,
    timeout_error,
)


class _End(Enum):
    """Queued behind a connection's last message: no more will come."""

    CLOSED_BY_PEER = "closed by peer"
    CLOSED_HERE = "closed here"


class _Remote(Protocol[SendT_contra]):
    """The other side, as far as this side needs it."""

    def deliver(self, message: SendT_contra | _End) -> bool: ...


class InprocConnection(Generic[SendT, ReceiveT]):
    """One side of a pair; see ``fastdecode.wire.transport.Connection``. Made by ``connect``."""

    def __init__(self, peer: str, hub: InprocHub[SendT, ReceiveT]) -> None:
        self.peer: Final = peer
        self._hub = hub
        self.index = -1
        """Its place among the hub's; given by that."""
        self._remote: _Remote[SendT] | None = None
        self._closed = False
        self._ended = False  # the end has been taken from the queue

    heard_s = None
    """A thread ends with its process."""
    is_reached = True

    def send(self, message: SendT) -> None:
        assert self._remote is not None
        if self._closed:
            raise closed_error(self.peer, by_peer=False)
        if not self._remote.deliver(message):
            raise closed_error(self.peer, by_peer=True)

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._hub.receive_from(self, timeout_s)

    def poll(self) -> ReceiveT | None:
        return self._hub.poll(self)

    def close(self) -> None:
        if self._closed or self._remote is None:  # ``connect`` closes it if its hub is closed
            return
        self._closed = True
        self._remote.deliver(_End.CLOSED_BY_PEER)
        self._hub.arrive(self, _End.CLOSED_HERE)

    def deliver(self, message: ReceiveT | _End) -> bool:
        """The peer's side of ``send``: queue a message here. False if this side is closed."""
        if self._closed:
            return False
        self._hub.arrive(self, message)
        return True

    def take(self, arrival: ReceiveT | _End) -> ReceiveT:
        """What arrived here, if it is a message; the end is noted, and raised."""
        if isinstance(arrival, _End):
            self._ended = True
            raise closed_error(self.peer, by_peer=arrival is _End.CLOSED_BY_PEER)
        return arrival

    def check_open(self) -> None:
        """Raises WorkerError if this side is closed, or nothing more will come from the peer."""
        if self._closed or self._ended:
            raise closed_error(self.peer, by_peer=not self._closed)

    @property
    def is_open(self) -> bool:
        return not (self._closed or self._ended)

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed it."""
        return self._closed


_Arrival: TypeAlias = "tuple[InprocConnection[SendT, ReceiveT], ReceiveT | _End]"


class InprocHub(Generic[SendT, ReceiveT]):
    """Connections of one thread; see ``fastdecode.wire.transport.Hub``.

    Args:
        clock: seconds, for deadlines.
        keeps_places: a connection that this side has closed keeps its index;
            else that is another's then, as it is at a listener where others
            come and go.
    """

    def __init__(self, clock: Clock = time.monotonic, *, keeps_places: bool = True) -> None:
        self._clock = clock
        self._keeps_places = keeps_places
        self._adding = threading.Lock()
        self.connections: Final[list[InprocConnection[SendT, ReceiveT]]] = []
        self._arrivals: SimpleQueue[_Arrival[SendT, ReceiveT] | None] = SimpleQueue()
        """None: ``wake`` was called."""
        self._is_woken = False
        self._pending: deque[_Arrival[SendT, ReceiveT]] = deque()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether its thread has ended: connections that are made from now on are closed."""
        return self._is_closed

    def close(self) -> None:
        """Its thread ends: close all connections, and later ones at once."""
        with self._adding:
            self._is_closed = True
            connections = list(self.connections)
        for connection in connections:
            connection.close()

    def add(self, peer: str) -> InprocConnection[SendT, ReceiveT]:
        """This hub's side of a new pair; ``connect`` joins it to the other. From
        any thread."""
        connection = InprocConnection(peer, self)
        with self._adding:
            connection.index = self._free_place()
            self.connections[connection.index : connection.index + 1] = [connection]
        return connection

    def _free_place(self) -> int:
        over = [] if self._keeps_places else [x.index for x in self.connections if x.is_closed]
        return over[0] if over else len(self.connections)

    def arrive(
        self, connection: InprocConnection[SendT, ReceiveT], message: ReceiveT | _End
    ) -> None:
        """Queue what comes for a connection; from any thread."""
        self._arrivals.put((connection, message))

    def wake(self) -> None:
        """Have whoever waits in ``receive_any`` look up, as if its time were over, or who
        does so next; any thread. Of a hub that waits for one connection alone, nobody may."""
        if not self._is_woken:
            self._is_woken = True
            self._arrivals.put(None)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        deadline = self._deadline(timeout_s)
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
            if message is not _End.CLOSED_HERE and connection.is_open:
                try:
                    return connection.index, connection.take(message)
                except WorkerError as error:
                    raise PeerLostError(connection.index, error) from None

    def receive_from(
        self, wanted: InprocConnection[SendT, ReceiveT], timeout_s: float | None
    ) -> ReceiveT:
        """The next message of one connection; see ``Connection.receive``."""
        deadline = self._deadline(timeout_s)
        pending = self._take_pending(wanted)
        if pending is not None:
            return wanted.take(pending[1])
        while True:
            try:
                arrival = self._next_arrival(deadline)
            except Empty:
                assert timeout_s is not None
                raise timeout_error(wanted.peer, timeout_s) from None
            if arrival[0] is wanted:
                return wanted.take(arrival[1])
            self._pending.append(arrival)

    def poll(self, wanted: InprocConnection[SendT, ReceiveT]) -> ReceiveT | None:
        """The next message of one connection, if it is here; see ``Connection.poll``."""
        for _ in range(self._arrivals.qsize()):  # nobody else takes from it
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
        wanted.check_open()
        for i, arrival in enumerate(self._pending):
            if arrival[0] is wanted:
                del self._pending[i]
                return arrival
        return None

    def _deadline(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._clock() + timeout_s

    def _next_arrival(self, deadline: float | None) -> _Arrival[SendT, ReceiveT]:
        """Raises queue.Empty when the deadline passes, or ``wake`` was called."""
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
    """A new connection between the threads of two hubs, ``one_name`` and
    ``other_name``: one's side, and other's. With a closed hub it is closed from
    the beginning, as one to a process that has ended is."""
    here, there = one.add(other_name), other.add(one_name)
    here._remote, there._remote = there, here
    if one.is_closed:
        here.close()
    if other.is_closed:
        there.close()
    return here, there
