"""Connections over ZeroMQ, for clusters without MPI and for R-workers that come
and go.

Every R-worker has one socket (ROUTER), bound to one address; an S-worker has
one (DEALER) for each R-worker. A message is one ZeroMQ message, head and body
in one piece, or, where that would be longer than ``MAX_FRAME_BYTES``, several:
its head, then its body in chunks. So nobody, known or not, can make us take
more memory at a time. Two more are known: an empty one, this side has closed;
and one of a single byte, which an R-worker that waits sends now and then to
learn whether its S-worker is still there.

**A connection that breaks is over.** ZeroMQ would connect again by itself, but
what was under way is lost, and a connection is lossless or nothing. Whoever
connects next begins a new one, under a number of its own (the ``epoch`` of
every head), so that nothing of the old can be taken for the new.

**An R-worker has several peers**, which it accepts by role, so many of each;
one too many is answered ``Failed`` (busy). There is room again when a peer has
closed, died (noticed at once), or been silent for ``silence_s``: both sides'
ZeroMQ threads exchange heartbeats whatever Python does, and give the other up
without them.

**What isn't for us is dropped**: what doesn't speak ZeroMQ or hasn't the key,
by ZeroMQ; what doesn't speak our protocol, here, with a line in the log. What
breaks the protocol within a connection ends that connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast, get_args

import numpy as np
import zmq

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.wire import codec
from fastdecode.wire.arrays import Array
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import FromRWorker, Message, ToRWorker
from fastdecode.wire.transport import CLOSED, PeerLostError, closed_error, timeout_error
from fastdecode.wire.zmq.access import ClusterKey, check_address
from fastdecode.wire.zmq.line import (
    GOODBYE,
    MAX_FRAME_BYTES,
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
"""ZeroMQ copies messages up to this size: that is quicker than to tell when
larger ones have left."""
_ITEM_ALIGNMENT: Final = 8


@dataclass(eq=False)
class _Partial:
    """A long message that is coming in."""

    head: codec.Head
    body: Array
    num_filled: int = 0


class ZmqConnection(Generic[SendT, ReceiveT]):
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. Made by
    a hub or a listener.

    Args:
        line: to the peer.
        peer: its name.
        receives: the messages that it may send.
        lock: held while the line is used.
    """

    def __init__(
        self, line: Line, peer: str, receives: frozenset[type[Message]], lock: threading.RLock
    ) -> None:
        self._line = line
        self._peer = peer
        self._receives = receives
        self._lock = lock
        self._pool = BufferPool()
        self._partial: _Partial | None = None  # a message of which some chunks are still to come
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
    def is_closed(self) -> bool:
        """Whether this side has closed it: nobody will use it any more."""
        return self._closed

    @property
    def is_reached(self) -> bool:
        """Whether the peer's side of the line is known to be there."""
        return self._line.is_reached

    @property
    def sockets(self) -> Sequence[Socket]:
        return self._line.sockets

    def check(self) -> None:
        """Note what has happened to the line; what has arrived stays. Raises
        WorkerError if the peer is lost."""
        with self._lock:
            try:
                self._line.check()
            except LostError as lost:
                self._gone = True
                raise self._lost(lost) from None

    def send(self, message: SendT) -> None:
        frame = codec.encode(message, epoch=self._line.epoch)
        num_bytes = frame.num_bytes
        if num_bytes <= MAX_FRAME_BYTES:
            whole = self._pool.take(num_bytes)
            frame.write(whole.data)
            pieces = [whole]
        else:
            body = self._pool.take(frame.body_bytes)
            frame.write_body(body.data)
            chunks = [
                body[at : at + MAX_FRAME_BYTES] for at in range(0, len(body), MAX_FRAME_BYTES)
            ]
            pieces = [np.frombuffer(frame.head, np.uint8), *chunks]
        with self._lock:
            if self._closed or self._gone:
                raise closed_error(self._peer, by_peer=not self._closed)
            try:
                for piece in pieces:
                    self._line.send(piece, copy=len(piece) <= _COPIED_BYTES)
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
                    self._end = WorkerError(
                        f"{self._peer} broke the protocol: {error}", code=error.code
                    )
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
        """None: it was a sign of life, or a chunk that isn't the last."""
        data: Array = np.frombuffer(frame, np.uint8)
        if self._partial is not None:
            return self._read_chunk(self._partial, data)
        if not len(data):
            self._gone = True
            self._end = closed_error(self._peer, by_peer=True)
            return None
        if len(data) == 1:
            return None
        if data.__array_interface__["data"][0] % _ITEM_ALIGNMENT:
            # Small messages lie where they lay in the stream.
            aligned = self._pool.take(len(data))
            aligned[:] = data
            data = aligned
        head = codec.read_head(data.data)
        if head.kind not in self._receives:
            raise ProtocolError(f"{head.kind.__name__} is not for this side")
        if head.epoch != self._line.epoch:
            raise ProtocolError(
                f"a message of another connection (epoch {head.epoch}, not {self._line.epoch})"
            )
        if len(data) == head.num_bytes:
            return cast(ReceiveT, head.message(data[head.body_at :]))
        if len(data) != head.head_bytes:
            raise ProtocolError(
                f"{head.kind.__name__}: {len(data)} bytes came, not {head.num_bytes}"
            )
        self._partial = _Partial(head, self._pool.take(head.body_bytes))
        return None

    def _read_chunk(self, partial: _Partial, data: Array) -> ReceiveT | None:
        end = partial.num_filled + len(data)
        if not len(data) or end > len(partial.body):
            raise ProtocolError(
                f"{partial.head.kind.__name__}: a chunk of {len(data)} bytes doesn't fit"
            )
        partial.body[partial.num_filled : end] = data
        partial.num_filled = end
        if end < len(partial.body):
            return None
        self._partial = None
        return cast(ReceiveT, partial.head.message(partial.body))

    def _lost(self, lost: LostError) -> WorkerError:
        return WorkerError(f"{self._peer} is lost: {lost}", code=CLOSED)


class ZmqHub:
    """The S-worker's connections; see ``fastdecode.wire.transport.Hub``. Close
    it when done.

    Args:
        key: of the cluster; None: R-workers of this host only.
        silence_s: an R-worker that gives no sign of life for so long is lost.
    """

    def __init__(
        self, key: ClusterKey | None = None, *, silence_s: float = DEFAULT_SILENCE_S
    ) -> None:
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context()
        self._lock = threading.RLock()
        self._connections: list[ZmqConnection[ToRWorker, FromRWorker]] = []
        self._addresses: list[str] = []
        self._candidates: list[ZmqConnection[ToRWorker, FromRWorker]] = []
        self._first = 0

    @property
    def connections(self) -> tuple[ZmqConnection[ToRWorker, FromRWorker], ...]:
        return tuple(self._connections)

    def add(self, address: str) -> ZmqConnection[ToRWorker, FromRWorker]:
        """A connection to the R-worker at an address, at any time. Never waits:
        the R-worker needn't be there yet, and one that can't be reached doesn't
        answer.

        Raises:
            ConfigError: the address is none, or may not be used without a key.
        """
        self._connections.append(self._connect(address))
        self._addresses.append(address)
        return self._connections[-1]

    def reconnect(self, index: int) -> ZmqConnection[ToRWorker, FromRWorker]:
        """Another connection to the same address, for whoever is there now; not
        yet one of the hub's."""
        self._candidates = [x for x in self._candidates if x.is_open]
        self._candidates.append(self._connect(self._addresses[index]))
        return self._candidates[-1]

    def replace(self, index: int, connection: ZmqConnection[ToRWorker, FromRWorker]) -> None:
        """A connection that came of ``reconnect`` takes the place of the one that
        it was made after, which is closed."""
        self._candidates.remove(connection)
        self._connections[index].close()
        self._connections[index] = connection

    def _connect(self, address: str) -> ZmqConnection[ToRWorker, FromRWorker]:
        check_address(address, self._key, parameter="r_worker_addresses")
        try:
            line = DealerLine(self._context, address, self._key, self._silence_s)
        except zmq.ZMQError as error:
            raise ConfigError(Given("r_worker_addresses", address), f": {error.strerror}") from None
        return ZmqConnection(
            line, f"R-worker {address}", frozenset(get_args(FromRWorker)), self._lock
        )

    def reach(self, timeout_s: float) -> dict[int, WorkerError]:
        """Wait until every R-worker has been reached. Those that can't be in
        that time, and why: nobody is there, or they refused our key, which is
        known at once."""
        reasons: dict[int, WorkerError] = {}

        def all_known() -> bool | None:
            for index, connection in enumerate(self._connections):
                try:
                    connection.check()
                except WorkerError as error:
                    reasons[index] = error
            known = [x.is_reached or index in reasons for index, x in enumerate(self._connections)]
            return True if all(known) else None

        wait_for(all_known, self._open_sockets, self._lock, timeout_s)
        for index, connection in enumerate(self._connections):
            if not connection.is_reached:
                reasons.setdefault(index, _unreachable(connection.peer, timeout_s))
        return reasons

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        received = wait_for(self._poll_any, self._open_sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(
                " or ".join(x.peer for x in self._connections if x.is_open), timeout_s
            )
        return received

    def close(self) -> None:
        """Close every connection, and see off what was sent over them, for a
        few seconds at most."""
        for connection in (*self._connections, *self._candidates):
            connection.close()
        self._context.term()

    def _open_sockets(self) -> list[Socket]:
        return [
            socket
            for connection in self._connections
            if connection.is_open
            for socket in connection.sockets
        ]

    def _poll_any(self) -> tuple[int, FromRWorker] | None:
        """Asks every open connection, each call starting behind the one that answered last."""
        any_open = False
        for i in range(len(self._connections)):
            index = (self._first + i) % len(self._connections)
            if self._connections[index].is_open:
                any_open = True
                try:
                    message = self._connections[index].poll()
                except WorkerError as error:
                    raise PeerLostError(index, error) from None
                if message is not None:
                    self._first = index + 1
                    return index, message
        if not any_open:
            raise closed_error(
                ", ".join(x.peer for x in self._connections) or "every peer", by_peer=True
            )
        return None


def _unreachable(peer: str, timeout_s: float) -> WorkerError:
    return WorkerError(
        f"can't reach {peer} within {timeout_s:g} s: does fastdecode r-worker --bind run there, "
        "and does the network let us through?",
        code="worker_unreachable",
    )
