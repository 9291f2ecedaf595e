"""Connections over ZeroMQ, from the end that connects and the end that listens.

A message is one multipart message: its head, then its arrays as frames of at most
``MAX_FRAME_BYTES``. Two more are known: an empty one, this side has closed; and one of a single
byte, which an R-worker that waits sends now and then to learn whether its S-worker is still there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import MAX_HEAD_BYTES, Codec
from fastdecode.wire.messages import Message
from fastdecode.wire.traits import Role
from fastdecode.wire.transport import CLOSED, closed_error, timeout_error, unreadable
from fastdecode.wire.zmq.keys import Socket

T = TypeVar("T")
SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

_GOODBYE: Final = b""
_ARE_YOU_THERE: Final = b"\0"
LINGER_MS: Final = 2000
MAX_FRAME_BYTES: Final = 4 << 20
"""More is cut, so that a peer that only connects can't make us take more memory."""
_COPIED_BYTES: Final = 1 << 15
"""ZeroMQ copies frames up to this size: that is quicker than to tell when larger ones have left."""
_SLICE_S: Final = 0.05
"""Between two looks of a wait at whether another thread has closed the connection."""
_NUM_GLANCES: Final = 100
"""At the sockets, before a wait sleeps: to be woken takes longer than a quick peer's answer.
Between them others may have the core, ZeroMQ's own threads for example."""
_ASK_INTERVAL_S: Final = 1.0
_MORE_FOLLOWS: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
"""Worked out once: pyzmq's flags make an enum's member each time."""
_NOBLOCK: Final = int(zmq.NOBLOCK)
OPTIONS: Final = {
    zmq.LINGER: LINGER_MS,
    zmq.SNDHWM: 0,  # sending never waits; the protocol bounds what is under way
    # No limit in libzmq: 4.3 aborts the process when a connection breaks whose frames have reached
    # one before they are read (its heartbeat asserts ``!_io_error``).
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES + MAX_HEAD_BYTES,
    zmq.HANDSHAKE_IVL: 5000,
}
"""Options of every socket."""
_GONE: Final = "its process has ended, or is silent, or the network to it has failed"
_REFUSED: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is --key the same file on every host?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it doesn't speak our protocol: does only one side have a "
    "--key, or have both another key file?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up while we shook hands: is --key the same on "
    "both sides?",
}
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSED)


class ZmqConnection(Generic[SendT, ReceiveT]):
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. A hub makes it.

    Args:
        receives: Kinds of messages that the peer may send.
        lock: Held while the connection is used.
        route: Frames in front of each message.
    """

    address = ""
    """Where the peer listens, if it does."""
    heard_s: ClassVar = None
    """ZeroMQ's threads look after silent peers."""
    is_reached = True
    """True once the peer is known to be at its end."""

    def __init__(
        self,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        socket: Socket,
        route: Sequence[bytes] = (),
    ) -> None:
        self.peer: Final = peer
        self.sockets: Sequence[Socket] = (socket,)
        """Readable when there may be news."""
        self.is_closed = False
        """True once this side has closed it."""
        self._codec = Codec(receives)
        self._lock = lock
        self._socket = socket
        self._route = route
        self._pool = BufferPool()
        self._loss = ""
        """Why the peer is lost. What it sent before may be unread."""
        self._end: WorkerError | None = None
        """What each ``poll`` raises."""

    @property
    def is_open(self) -> bool:
        """True until this side has closed it, or reported its end."""
        return self._end is None

    def _look(self) -> None:
        """Note in ``_loss`` what has happened to the peer."""
        raise NotImplementedError

    def _get(self) -> Sequence[zmq.Frame]:
        """Return the next message, or nothing; never wait. A loss is noted once all is read."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what belongs to this connection alone."""
        raise NotImplementedError

    def check(self) -> None:
        """Note what has happened to the peer; what has arrived stays.

        Raises:
            WorkerError: If the peer is lost.
        """
        with self._lock:
            if not self.is_closed:
                self._look()
            if self._loss:
                raise self._lost_error()

    def send(self, message: SendT) -> None:
        with self._lock:
            if self._end is not None and self._end.code == CLOSED:
                raise self._end
            frame = self._codec.encode(message)
            parts: list[Any] = [*self._route, frame.head]
            for array in frame.arrays:
                if not array.flags.c_contiguous:
                    array = np.ascontiguousarray(array)
                if array.nbytes > _COPIED_BYTES and not message.lends:
                    copy = self._pool.take(array.nbytes)
                    copy[:] = array.reshape(-1).view(np.uint8)
                    array = copy
                if array.nbytes > MAX_FRAME_BYTES:
                    data = array.reshape(-1).view(np.uint8)
                    parts += np.split(data, range(MAX_FRAME_BYTES, len(data), MAX_FRAME_BYTES))
                elif array.nbytes:
                    parts.append(array)
            if not self._loss:
                try:
                    send_parts(self._socket, parts)
                except zmq.ZMQError:
                    self._look()
                    self._loss = self._loss or _GONE
                else:
                    return
            raise self._lost_error()

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        received = wait_for(self.poll, lambda: self.sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(self.peer, timeout_s)
        return received

    def poll(self) -> ReceiveT | None:
        with self._lock:
            while self._end is None:
                frames = self._get()
                if not frames:
                    if not self._loss:
                        return None
                    self._end = self._lost_error()
                elif not (head := frames[0].buffer):
                    self._end = closed_error(self.peer, by_peer=True)
                elif len(head) > 1:
                    try:
                        take = self._pool.take
                        received: Any = self._codec.decode_frames(head, frames[1:], take)
                        return received  # type: ignore[no-any-return]
                    except ProtocolError as error:
                        broken = f"{self.peer} broke the protocol: {error}"
                        self._end = WorkerError(broken, code=error.code)
                    except Exception as error:
                        self._end = unreadable(self.peer, error)
            raise self._end

    def close(self) -> None:
        end, self._end = self._end, closed_error(self.peer, by_peer=False)
        with self._lock:  # a thread that waits sees the end, and lets go of the lock
            if self.is_closed:
                return
            self.is_closed = True
            if not self._loss and (end is None or end.code != CLOSED):
                with contextlib.suppress(zmq.ZMQError):
                    send_parts(self._socket, [*self._route, _GOODBYE])
            self._release()
            self._pool.release()

    def _lost_error(self) -> WorkerError:
        return WorkerError(f"{self.peer} is lost: {self._loss}", code=CLOSED)


class DealerConnection(ZmqConnection[SendT, ReceiveT]):
    """Of the end that connects, over a socket of its own. The peer need not be there yet."""

    is_reached = False

    def __init__(
        self,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        socket: Socket,
        address: str,
    ) -> None:
        super().__init__(peer, receives, lock, socket)
        self.address = address
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._readable = [(socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self.sockets = socket, self._monitor
        socket.connect(address)

    def _look(self) -> None:
        while zmq.zmq_poll(self._readable[1:], 0):
            event: int = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_reached = True
            elif event in _REFUSED:
                self._loss = _REFUSED[event]
            elif self.is_reached:  # a connection that breaks is over, though ZeroMQ would reconnect
                self._loss = self._loss or _GONE

    def _get(self) -> Sequence[zmq.Frame]:
        if zmq.zmq_poll(self._readable, 0):  # a third of what a receive takes that fails
            if frames := receive_parts(self._socket):
                return frames
            self._look()
        # What came just before the end is read first.
        return receive_parts(self._socket) if self._loss else ()

    def _release(self) -> None:
        self.is_reached, self.sockets = False, ()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)


class RouterConnection(ZmqConnection[SendT, ReceiveT]):
    """Of the end that listens, to one peer of its socket.

    Args:
        role: What the peer is.
        take_in: Takes what has arrived from the socket and gives each connection its own, until
            this one has something.
    """

    def __init__(
        self,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        socket: Socket,
        identity: bytes,
        role: Role,
        take_in: Callable[[RouterConnection[SendT, ReceiveT]], None],
    ) -> None:
        super().__init__(peer, receives, lock, socket, [identity])
        self.role = role
        self.inbox: deque[Sequence[zmq.Frame]] = deque()
        self._take_in = take_in
        self._asked_s = time.monotonic()

    def _look(self) -> None:
        """ZeroMQ says that a peer is gone when something is sent."""
        now = time.monotonic()
        if now - self._asked_s >= _ASK_INTERVAL_S:
            self._asked_s = now
            try:
                send_parts(self._socket, [*self._route, _ARE_YOU_THERE])
            except zmq.ZMQError:
                self._loss = _GONE

    def _get(self) -> Sequence[zmq.Frame]:
        if not self.inbox:
            self._take_in(self)
        if self.inbox:
            return self.inbox.popleft()
        self._look()
        return ()

    def _release(self) -> None:
        self.inbox.clear()


def send_parts(socket: Socket, parts: Sequence[Any]) -> None:
    """Send one message. Raises zmq.ZMQError: If the peer is gone."""
    last = len(parts) - 1
    for number, part in enumerate(parts):
        flags = _NOBLOCK if number == last else _MORE_FOLLOWS
        is_copied = (part.nbytes if isinstance(part, np.ndarray) else 0) <= _COPIED_BYTES
        socket.send(part, flags, copy=is_copied)


def receive_parts(socket: Socket, most_parts: int = 1 << 16) -> list[zmq.Frame]:
    """Return the parts of the next message, or nothing. Of more than ``most_parts`` the last one
    stands for the others: it is refused then."""
    try:
        parts = [socket.recv(_NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while parts[-1].more:  # recv_multipart asks the socket, which takes longer
        part = socket.recv(copy=False)
        if len(parts) > most_parts:
            parts.pop()
        parts.append(part)
    return parts


def wait_for(
    look: Callable[[], T | None],
    sockets: Callable[[], Iterable[Socket]],
    lock: threading.RLock,
    timeout_s: float | None,
    bell: int | None = None,
) -> T | None:
    """Return what ``look`` gives once it isn't None. None after ``timeout_s``, or once ``bell``, an
    eventfd, has rung. It looks whenever a socket is readable."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    num_glances = _NUM_GLANCES
    while True:
        found = look()
        remaining_s = _SLICE_S if deadline is None else deadline - time.monotonic()
        if found is not None or remaining_s <= 0:
            return found
        items: list[tuple[Any, int]] = []
        if bell is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(bell)
                return None
            items.append((bell, zmq.POLLIN))
        with lock:
            items += [(socket, zmq.POLLIN) for socket in sockets()]
            while num_glances and not zmq.zmq_poll(items, 0):
                num_glances -= 1
                os.sched_yield()
            if not num_glances:
                zmq.zmq_poll(items, max(1, int(1000 * min(remaining_s, _SLICE_S))))
