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
from fastdecode.wire.zmq.keys import ClusterKey, Socket, name_key

T = TypeVar("T")
SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

_GOODBYE: Final = b""
_ARE_YOU_THERE: Final = b"\0"
LINGER_MS: Final = 2000
MAX_FRAME_BYTES: Final = 4 << 20
"""More is cut, so that a peer that only connects can't make us take more memory."""
_HANDSHAKE_MS: Final = 5000
_COPIED_BYTES: Final = 1 << 15
"""ZeroMQ copies frames up to this size: that is quicker than to tell when larger ones have left."""
_SLICE_S: Final = 0.05
"""Between two looks of a wait at whether another thread has closed the connection."""
_NUM_GLANCES: Final = 100
"""At the sockets, before a wait sleeps: to be woken takes longer than a quick peer's answer.
Between them others may have the core, ZeroMQ's own threads for example."""
_ASK_INTERVAL_S: Final = 1.0
_RECONNECT_MS: Final = 100
MORE_FOLLOWS: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
"""Worked out once: pyzmq's flags make an enum's member each time."""
_NOBLOCK: Final = int(zmq.NOBLOCK)
_GONE: Final = "its process has ended, or is silent, or the network to it has failed"
_REFUSED: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is --key the same file on every host?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it doesn't speak our protocol: does only one side have a "
    "--key, or have both another key file?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up while we shook hands: is --key the same on "
    "both sides?",
}
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSED)


class _LostError(Exception):
    """The peer is gone, and everything that it sent has been received."""


class ZmqConnection(Generic[SendT, ReceiveT]):
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. A hub or listener makes it.

    Args:
        peer: Its name.
        receives: Messages that it may send.
        lock: Held while the connection is used.
        on_close: Called with the connection when this side closes it.
    """

    heard_s: ClassVar = None
    """ZeroMQ's threads look after silent peers."""
    is_reached: bool
    """Whether the peer is known to be at its end."""
    sockets: Sequence[Socket]
    """Readable when there may be news."""

    def __init__(
        self,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        on_close: Callable[[Any], None] = lambda connection: None,
    ) -> None:
        self.peer: Final = peer
        self._codec = Codec(receives)
        self._lock = lock
        self._on_close = on_close
        self._pool = BufferPool()
        self._is_gone = False
        self._end: WorkerError | None = None
        self.is_closed = False
        """Whether this side has closed it: it is not used any more."""
        self.is_open = True
        """Whether this side has not closed it, nor reported its end."""

    def _look(self) -> None:
        """Note what has happened to the peer. Raises _LostError."""
        raise NotImplementedError

    def _put(self, parts: Sequence[Any]) -> None:
        """Send one message. Raises zmq.ZMQError."""
        raise NotImplementedError

    def _get(self) -> Sequence[zmq.Frame]:
        """Return the next message, or nothing; never waits. Raises _LostError."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what belongs to this connection alone."""

    @property
    def buffer_bytes(self) -> int:
        """Memory of its buffers; 0 once it is closed."""
        return self._pool.num_bytes

    def check(self) -> None:
        """Note what has happened to the peer; what has arrived stays.

        Raises:
            WorkerError: If the peer is lost.
        """
        with self._lock:
            try:
                if not self.is_closed:
                    self._look()
            except _LostError as lost:
                raise self._lost(lost) from None

    def send(self, message: SendT) -> None:
        if self.is_closed:
            raise closed_error(self.peer, by_peer=False)
        frame = self._codec.encode(message)
        parts: list[Any] = [frame.head]
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
        with self._lock:
            if self.is_closed or self._is_gone:
                raise closed_error(self.peer, by_peer=not self.is_closed)
            try:
                self._put(parts)
            except zmq.ZMQError as error:
                raise self._lost(self._why(error)) from None

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        sockets: Callable[[], Sequence[Socket]] = lambda: () if self.is_closed else self.sockets  # noqa: E731
        received = wait_for(self.poll, sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(self.peer, timeout_s)
        return received

    def poll(self) -> ReceiveT | None:
        with self._lock:
            if self.is_closed:
                raise closed_error(self.peer, by_peer=False)
            while self._end is None:
                try:
                    frames = self._get()
                    if not frames:
                        return None
                    head = frames[0].buffer
                    if len(head) > 1:
                        take = self._pool.take
                        received: Any = self._codec.decode(head, frames=frames[1:], take=take)
                        return received  # type: ignore[no-any-return]
                    if not head:
                        self._is_gone = True
                        self._end = closed_error(self.peer, by_peer=True)
                except _LostError as lost:
                    self._end = self._lost(lost)
                except ProtocolError as error:
                    self._end = WorkerError(
                        f"{self.peer} broke the protocol: {error}", code=error.code
                    )
                except Exception as error:
                    self._end = unreadable(self.peer, error)
            self.is_open = False
            raise self._end

    def close(self) -> None:
        """See ``Connection``. Its buffers are given back, and its hub forgets it."""
        self.is_open = False
        was_closed, self.is_closed = self.is_closed, True  # before a thread that waits lets go
        with self._lock:
            if not was_closed:
                if not self._is_gone:
                    with contextlib.suppress(zmq.ZMQError):
                        self._put([_GOODBYE])
                self._release()
            self._pool.release()
        self._on_close(self)

    def _why(self, error: zmq.ZMQError) -> object:
        return error.strerror

    def _lost(self, why: object) -> WorkerError:
        self._is_gone = True
        return WorkerError(f"{self.peer} is lost: {why}", code=CLOSED)


class DealerConnection(ZmqConnection[SendT, ReceiveT]):
    """Of the end that connects, over a socket of its own.

    Args:
        address: Where the peer listens. It need not be there yet.
        silence_s: A peer without a sign of life for this long is lost.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        key: ClusterKey | None,
        silence_s: float,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        on_close: Callable[[Any], None],
    ) -> None:
        super().__init__(peer, receives, lock, on_close)
        self._socket = context.socket(zmq.DEALER)
        set_options(self._socket, address, silence_s)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        name_key(self._socket, key)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._readable = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self.sockets = self._socket, self._monitor
        self.is_reached = False
        self._reason = ""
        """Why the peer is lost."""
        self._socket.connect(address)

    def _look(self) -> None:
        self._read_events()
        if self._reason:
            raise _LostError(self._reason)

    def _put(self, parts: Sequence[Any]) -> None:
        if self._reason:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        _send(self._socket, parts)

    def _get(self) -> Sequence[zmq.Frame]:
        if zmq.zmq_poll(self._readable, 0):  # a third of what a receive takes that fails
            if frames := receive_parts(self._socket):
                return frames
            self._read_events()
        if not self._reason:
            return ()
        if frames := receive_parts(self._socket):
            return frames  # it came just before the end
        raise _LostError(self._reason)

    def _release(self) -> None:
        self.is_reached = False
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)

    def _why(self, error: zmq.ZMQError) -> object:
        self._read_events()
        return self._reason or error.strerror

    def _read_events(self) -> None:
        while zmq.zmq_poll([(self._monitor, zmq.POLLIN)], 0):
            event: int = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_reached = True
            elif event in _REFUSED:
                self._reason = _REFUSED[event]
            elif self.is_reached:  # a connection that breaks is over, though ZeroMQ would reconnect
                self._reason = self._reason or _GONE


class RouterConnection(ZmqConnection[SendT, ReceiveT]):
    """Of the end that listens, to one peer of its socket.

    Args:
        role: What the peer is.
        take_in: Takes what has arrived from the socket and gives each connection its own, until
            this one has something.
    """

    is_reached = True

    def __init__(
        self,
        socket: Socket,
        identity: bytes,
        role: Role,
        take_in: Callable[[RouterConnection[SendT, ReceiveT]], None],
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
    ) -> None:
        super().__init__(peer, receives, lock)
        self.identity, self.role = identity, role
        self.inbox: deque[Sequence[zmq.Frame]] = deque()
        self.sockets = (socket,)
        self._socket = socket
        self._take_in = take_in
        self._asked_s = time.monotonic()

    def _look(self) -> None:
        """ZeroMQ says that a peer is gone when something is sent."""
        now = time.monotonic()
        if now - self._asked_s >= _ASK_INTERVAL_S:
            self._asked_s = now
            try:
                self._put([_ARE_YOU_THERE])
            except zmq.ZMQError:
                raise _LostError(_GONE) from None

    def _put(self, parts: Sequence[Any]) -> None:
        self._socket.send(self.identity, MORE_FOLLOWS)
        _send(self._socket, parts)

    def _get(self) -> Sequence[zmq.Frame]:
        if not self.inbox:
            self._take_in(self)
        if self.inbox:
            return self.inbox.popleft()
        self._look()
        return ()

    def _release(self) -> None:
        self.inbox.clear()

    def _why(self, error: zmq.ZMQError) -> object:
        return _GONE


def _send(socket: Socket, parts: Sequence[Any]) -> None:
    """Raises zmq.ZMQError."""
    last = len(parts) - 1
    for number, part in enumerate(parts):
        flags = _NOBLOCK if number == last else MORE_FOLLOWS
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


def set_options(socket: Socket, address: str, silence_s: float) -> None:
    """Set what both ends have in common."""
    socket.copy_threshold = 0  # pyzmq's own would copy lent arrays up to 64 KiB
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # sending never waits; the protocol bounds what is under way
    # No limit in libzmq: 4.3 aborts the process when a connection breaks whose frames have reached
    # one before they are read (its heartbeat asserts ``!_io_error``).
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + MAX_HEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * silence_s / 4)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * silence_s * 3 / 4)))


class Bell:
    """Wakes the thread that waits for sockets. Any thread may ring it, also after ``close``."""

    def __init__(self) -> None:
        self.ear: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_open = True

    def ring(self) -> None:
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.ear, 1)

    def hush(self) -> bool:
        """Return True if it has rung since the last call."""
        with self._lock, contextlib.suppress(BlockingIOError):
            return self._is_open and bool(os.eventfd_read(self.ear))
        return False

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.ear)


def wait_for(
    look: Callable[[], T | None],
    sockets: Callable[[], Iterable[Socket]],
    lock: threading.RLock,
    timeout_s: float | None,
    bell: Bell | None = None,
) -> T | None:
    """Return what ``look`` gives once it isn't None. None after ``timeout_s``, or once ``bell`` has
    rung. It looks whenever a socket is readable."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    num_glances = _NUM_GLANCES
    while True:
        found = look()
        remaining_s = _SLICE_S if deadline is None else deadline - time.monotonic()
        if found is not None or remaining_s <= 0 or (bell is not None and bell.hush()):
            return found
        with lock:
            items: list[tuple[Any, int]] = [(socket, zmq.POLLIN) for socket in sockets()]
            if bell is not None:
                items.append((bell.ear, zmq.POLLIN))
            while num_glances and not zmq.zmq_poll(items, 0):
                num_glances -= 1
                os.sched_yield()
            if not num_glances:
                zmq.zmq_poll(items, max(1, int(1000 * min(remaining_s, _SLICE_S))))
