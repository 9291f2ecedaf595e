"""Connections over ZeroMQ, for clusters without MPI and for R-workers that come and go.

Every R-worker has one socket (ROUTER), bound to one address; an S-worker has one (DEALER) for each R-worker. A message
is one ZeroMQ message: head and body in one piece. Two more are known: an empty one, this side has closed; and one of a
single byte, which an R-worker that waits sends now and then to learn whether its S-worker is still there.

**A connection that breaks is over.** ZeroMQ would connect again by itself, but what was under way is lost, and a
connection is lossless or nothing. Whoever connects next begins a new one, under a number of its own (the ``epoch`` of
every head), so that nothing of the old can be taken for the new.

**An R-worker serves one S-worker at a time.** Another one that says Hello is answered ``Failed`` (busy). It is free
again when its S-worker has closed, died (noticed at once), or been silent for ``silence_s``: both sides' ZeroMQ threads
exchange heartbeats whatever Python does, and give the other up without them.

**What isn't for us is dropped**: what doesn't speak ZeroMQ or hasn't the key, by ZeroMQ; what doesn't speak our
protocol, here, with a line in the log. What breaks the protocol within a connection ends that connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final, Generic, TypeVar, cast, get_args

import numpy as np
import zmq

from fastdecode.core.errors import ConfigError, ProtocolError, WorkerError
from fastdecode.wire import codec
from fastdecode.wire.arrays import Array
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import FromRWorker, Message, ToRWorker
from fastdecode.wire.transport import CLOSED, closed_error, timeout_error
from fastdecode.wire.zmq.access import ClusterKey, check_address
from fastdecode.wire.zmq.line import (
    GOODBYE,
    DealerLine,
    Line,
    LostError,
    NoLine,
    Socket,
    wait_for,
)

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)
DEFAULT_SILENCE_S: Final = 5.0
_COPIED_BYTES: Final = 1 << 18
"""ZeroMQ copies messages up to this size: that is quicker than to tell when larger ones have left."""
_ITEM_ALIGNMENT: Final = 8


class ZmqConnection(Generic[SendT, ReceiveT]):
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. Made by a hub or a listener.

    Args:
        line: to the peer.
        peer: its name.
        receives: the messages that it may send.
        lock: held while the line is used.
    """

    def __init__(self, line: Line, peer: str, receives: frozenset[type[Message]], lock: threading.RLock) -> None:
        self._line = line
        self._peer = peer
        self._receives = receives
        self._lock = lock
        self._pool = BufferPool()
        self._closed = False
        self._gone = False
        self._end: WorkerError | None = None
        self.told = False
        """Whether the caller has been told the end."""

    @property
    def peer(self) -> str:
        return self._peer

    heard_s = None
    """ZeroMQ's threads look after silent peers."""

    @property
    def is_open(self) -> bool:
        return not (self._closed or self.told)

    @property
    def is_reached(self) -> bool:
        """Whether the peer's side of the line is known to be there."""
        return self._line.is_reached

    @property
    def sockets(self) -> Sequence[Socket]:
        return self._line.sockets

    def check(self) -> None:
        """Note what has happened to the line; what has arrived stays. Raises WorkerError if the peer is lost."""
        with self._lock:
            try:
                self._line.check()
            except LostError as lost:
                self._gone = True
                raise self._lost(lost) from None

    def send(self, message: SendT) -> None:
        frame = codec.encode(message, epoch=self._line.epoch)
        whole = self._pool.take(frame.num_bytes)
        frame.write(whole.data)
        with self._lock:
            if self._closed or self._gone:
                raise closed_error(self._peer, by_peer=not self._closed)
            try:
                self._line.send(whole, copy=len(whole) <= _COPIED_BYTES)
            except LostError as lost:
                self._gone = True
                raise self._lost(lost) from None

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        received = wait_for(self.poll, lambda: self.sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(self._peer, timeout_s)
        return received

    def poll(self) -> ReceiveT | None:
        with self._lock:
            if self._closed:
                raise closed_error(self._peer, by_peer=False)
            while self._end is None:
                try:
                    frame = self._line.receive()
                    if frame is None:
                        return None
                    message = self._read(frame)
                except LostError as lost:
                    self._gone = True
                    self._end = self._lost(lost)
                except ProtocolError as error:
                    self._end = WorkerError(f"{self._peer} broke the protocol: {error}", code=error.code)
                else:
                    if message is not None:
                        return message
            self.told = True
            raise self._end

    def close(self) -> None:
        self._closed = True  # before the lock is asked for: whoever waits lets it go then
        with self._lock:
            if not isinstance(self._line, NoLine):
                line, self._line = self._line, NoLine()
                if not self._gone:
                    with contextlib.suppress(LostError):
                        line.send(GOODBYE, copy=True)
                line.close()

    def _read(self, frame: zmq.Frame) -> ReceiveT | None:
        """None: it was only a sign of life."""
        data: Array = np.frombuffer(frame, np.uint8)
        if not len(data):
            self._gone = True
            self._end = closed_error(self._peer, by_peer=True)
            return None
        if len(data) == 1:
            return None
        if data.__array_interface__["data"][0] % _ITEM_ALIGNMENT:  # small messages lie where they lay in the stream
            aligned = self._pool.take(len(data))
            aligned[:] = data
            data = aligned
        message, epoch = codec.decode(data)
        if type(message) not in self._receives:
            raise ProtocolError(f"{type(message).__name__} is not for this side")
        if epoch != self._line.epoch:
            raise ProtocolError(f"a message of another connection (epoch {epoch}, not {self._line.epoch})")
        return cast(ReceiveT, message)

    def _lost(self, lost: LostError) -> WorkerError:
        return WorkerError(f"{self._peer} is lost: {lost}", code=CLOSED)


class ZmqHub:
    """The S-worker's connections; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        key: of the cluster; None: R-workers of this host only.
        silence_s: an R-worker that gives no sign of life for so long is lost.
    """

    def __init__(self, key: ClusterKey | None = None, *, silence_s: float = DEFAULT_SILENCE_S) -> None:
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context()
        self._lock = threading.RLock()
        self._connections: list[ZmqConnection[ToRWorker, FromRWorker]] = []
        self._addresses: list[str] = []
        self._knocking: list[ZmqConnection[ToRWorker, FromRWorker]] = []
        self._first = 0

    @property
    def connections(self) -> tuple[ZmqConnection[ToRWorker, FromRWorker], ...]:
        return tuple(self._connections)

    def add(self, address: str) -> ZmqConnection[ToRWorker, FromRWorker]:
        """A connection to the R-worker at an address, at any time. Never waits: the R-worker needn't be there yet, and
        one that can't be reached doesn't answer.

        Raises:
            ConfigError: the address is none, or may not be used without a key.
        """
        self._connections.append(self._connect(address))
        self._addresses.append(address)
        return self._connections[-1]

    def knock(self, index: int) -> ZmqConnection[ToRWorker, FromRWorker]:
        """Another connection to the same address, for whoever is there now; not yet one of the hub's."""
        self._knocking = [x for x in self._knocking if x.is_open]
        self._knocking.append(self._connect(self._addresses[index]))
        return self._knocking[-1]

    def replace(self, index: int, connection: ZmqConnection[ToRWorker, FromRWorker]) -> None:
        """A connection that came of ``knock`` takes the place of the one that it was made after, which is closed."""
        self._knocking.remove(connection)
        self._connections[index].close()
        self._connections[index] = connection

    def _connect(self, address: str) -> ZmqConnection[ToRWorker, FromRWorker]:
        check_address(address, self._key, option="--r-worker")
        try:
            line = DealerLine(self._context, address, self._key, self._silence_s)
        except zmq.ZMQError as error:
            raise ConfigError(f"--r-worker={address!r}: {error.strerror}") from None
        return ZmqConnection(line, f"R-worker {address}", frozenset(get_args(FromRWorker)), self._lock)

    def await_workers(self, timeout_s: float) -> None:
        """Wait until every R-worker has been reached.

        Raises:
            WorkerError: some can't be, named, in that time; or refused our key.
        """
        if wait_for(self._all_reached, self._open_sockets, self._lock, timeout_s) is None:
            missing = [x.peer for x in self._connections if not x.is_reached]
            raise WorkerError(
                f"can't reach {', '.join(missing)} within {timeout_s:g} s: does fastdecode r-worker --bind run there, "
                "and does the network let us through?",
                code="worker_unreachable",
            )

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        received = wait_for(self._poll_any, self._open_sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(" or ".join(x.peer for x in self._connections if x.is_open), timeout_s)
        return received

    def close(self) -> None:
        """Close every connection, and see off what was sent over them, for a few seconds at most."""
        for connection in (*self._connections, *self._knocking):
            connection.close()
        self._context.term()

    def _all_reached(self) -> bool | None:
        for connection in self._connections:
            connection.check()
        return True if all(connection.is_reached for connection in self._connections) else None

    def _open_sockets(self) -> list[Socket]:
        return [socket for connection in self._connections if connection.is_open for socket in connection.sockets]

    def _poll_any(self) -> tuple[int, FromRWorker] | None:
        """Asks every open connection, each call starting behind the one that answered last."""
        any_open = False
        for i in range(len(self._connections)):
            index = (self._first + i) % len(self._connections)
            if self._connections[index].is_open:
                any_open = True
                message = self._connections[index].poll()
                if message is not None:
                    self._first = index + 1
                    return index, message
        if not any_open:
            raise closed_error(", ".join(x.peer for x in self._connections) or "every peer", by_peer=True)
        return None
