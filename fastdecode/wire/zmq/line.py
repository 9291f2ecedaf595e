"""The ZeroMQ sockets below a connection: how frames get to one peer and back,
and how its loss is noticed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from fastdecode.wire.codec import MAX_EPOCH, MAX_HEAD_BYTES
from fastdecode.wire.zmq.access import ClusterKey, name_key

T = TypeVar("T")
Socket: TypeAlias = "zmq.Socket[bytes]"

GOODBYE: Final = b""
ARE_YOU_THERE: Final = b"\0"
LINGER_MS: Final = 2000
MAX_FRAME_BYTES: Final = (4 << 20) + MAX_HEAD_BYTES
"""Of what travels in one piece. More is cut, so that nobody who only connects
can make us take more memory."""
HANDSHAKE_MS: Final = 5000
_SLICE_S: Final = 0.05
"""A wait looks up so often to see whether another thread has closed the connection."""
_NUM_GLANCES: Final = 100
"""At the sockets, before a wait sleeps: to be woken takes longer than a quick
peer's answer. Between them others may have the core, ZeroMQ's own threads for
example."""
_ASK_INTERVAL_S: Final = 1.0
MOST_UNREAD_FRAMES: Final = 1 << 16
MOST_UNREAD_BYTES: Final = 2 << 30
"""Of one peer that we know: twice the longest message."""
_RECONNECT_MS: Final = 100
MORE_FOLLOWS: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
"""Worked out once: pyzmq's flags make an enum's member each time."""

_REFUSED: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is --key the same file on every host?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it doesn't speak our protocol: does only one side have a "
    "--key, or have both another key file?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up while we shook hands: is --key the same on "
    "both sides?",
}
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSED)


class LostError(Exception):
    """The peer is gone, and everything that it sent has been received."""


class Line(Protocol):
    """One side's way to its peer. Used by one thread at a time."""

    epoch: int

    @property
    def is_reached(self) -> bool:
        """Whether the peer is known to be at its end."""

    @property
    def sockets(self) -> Sequence[Socket]:
        """Readable when ``receive`` might have news."""

    def check(self) -> None:
        """Note what has happened. Raises LostError."""

    def send(self, data: Any, *, copy: bool) -> None:
        """Raises LostError."""

    def receive(self) -> zmq.Frame | None:
        """What came next, or None; never waits. Raises LostError."""

    def close(self) -> None: ...


class DealerLine:
    """The S-worker's line to one R-worker: a socket of its own.

    Args:
        context: of the hub.
        address: that the R-worker is bound to. It need not be there yet.
        key: of the cluster.
        silence_s: without a sign of life for so long, the R-worker is lost.
    """

    def __init__(
        self, context: zmq.Context[Socket], address: str, key: ClusterKey | None, silence_s: float
    ) -> None:
        self.epoch = 1 + secrets.randbelow(MAX_EPOCH)
        self._socket = context.socket(zmq.DEALER)
        set_options(self._socket, address, silence_s)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        name_key(self._socket, key)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._readable = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self._connected_s: float | None = None
        self._lost = ""
        self._socket.connect(address)

    @property
    def is_reached(self) -> bool:
        return self._connected_s is not None

    @property
    def sockets(self) -> Sequence[Socket]:
        return self._socket, self._monitor

    def check(self) -> None:
        self._read_events()
        if self._lost:
            raise LostError(self._lost)

    def send(self, data: Any, *, copy: bool) -> None:
        if self._lost:
            raise LostError(self._lost)
        try:
            self._put(data, copy=copy)
        except zmq.ZMQError as error:
            self._read_events()
            raise LostError(self._lost or error.strerror) from None

    def receive(self) -> zmq.Frame | None:
        if zmq.zmq_poll(self._readable, 0):  # a third of what a receive takes that fails
            try:
                return self._get()
            except zmq.Again:
                self._read_events()
        if not self._lost:
            return None
        try:
            return self._get()  # it came just before the end
        except zmq.Again:
            raise LostError(self._lost) from None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)

    def _put(self, data: Any, *, copy: bool) -> None:
        """Raises zmq.ZMQError."""
        self._socket.send(data, zmq.NOBLOCK, copy=copy)

    def _get(self) -> zmq.Frame:
        """Raises zmq.Again; LostError."""
        return self._socket.recv(zmq.NOBLOCK, copy=False)

    def _read_events(self) -> None:
        while zmq.zmq_poll([(self._monitor, zmq.POLLIN)], 0):
            event: int = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected_s = time.monotonic()
            elif event in _REFUSED:
                self._lost = _REFUSED[event]
            elif event == zmq.EVENT_DISCONNECTED and self._connected_s is not None:
                self._lost = (
                    self._lost
                    or "its process has ended, or is silent, or the network to it has failed"
                )


class RouterLine:
    """An R-worker's line to one peer of the socket that it is bound to.

    Args:
        socket: the listener's.
        send: sends the peer a frame, or raises zmq.ZMQError.
        epoch: that it began the connection with.
        take_in: takes what has arrived from the socket and gives each line its
            own, until this one has something.
    """

    def __init__(
        self,
        socket: Socket,
        send: Callable[..., None],
        epoch: int,
        take_in: Callable[[RouterLine], None],
    ) -> None:
        self.epoch = epoch
        self.inbox: deque[zmq.Frame] = deque()
        self._num_unread_bytes = 0
        self._refused = ""
        """Why nothing more is taken from the peer."""
        self._socket = socket
        self._send = send
        self._take_in = take_in
        self._asked_s = time.monotonic()

    is_reached = True

    @property
    def sockets(self) -> Sequence[Socket]:
        return (self._socket,)

    @property
    def has_news(self) -> bool:
        return bool(self.inbox) or bool(self._refused)

    def arrive(self, frame: zmq.Frame) -> None:
        """What the peer has sent. More than any protocol has under way at a time ends the line."""
        if self._refused:
            return
        self.inbox.append(frame)
        self._num_unread_bytes += len(frame)
        if len(self.inbox) > MOST_UNREAD_FRAMES or self._num_unread_bytes > MOST_UNREAD_BYTES:
            self.refuse("it sent more than anybody could read")

    def refuse(self, reason: str) -> None:
        """End the line: what hasn't been read of it isn't read any more."""
        self._refused = self._refused or reason
        self.inbox.clear()

    def check(self) -> None:
        self.ask_now_and_then()

    def send(self, data: Any, *, copy: bool) -> None:
        try:
            self._send(data, copy=copy)
        except zmq.ZMQError:
            raise LostError(
                "its process has ended, or is silent, or the network to it has failed"
            ) from None

    def receive(self) -> zmq.Frame | None:
        if not self.has_news:
            self._take_in(self)
        if self.inbox:
            frame = self.inbox.popleft()
            self._num_unread_bytes -= len(frame)
            return frame
        if self._refused:
            raise LostError(self._refused)
        self.ask_now_and_then()
        return None

    def ask_now_and_then(self) -> None:
        """Whether the peer is still there: ZeroMQ says so when something is
        sent. Raises LostError."""
        now = time.monotonic()
        if now - self._asked_s >= _ASK_INTERVAL_S:
            self._asked_s = now
            self.send(ARE_YOU_THERE, copy=True)

    def close(self) -> None:
        self.inbox.clear()  # the socket is the listener's


class NoLine:
    """What is left of a line that has been closed."""

    epoch = 0
    is_reached = False
    sockets: Sequence[Socket] = ()

    def check(self) -> None:
        raise LostError("closed")

    def send(self, data: Any, *, copy: bool) -> None:
        raise LostError("closed")

    def receive(self) -> zmq.Frame | None:
        raise LostError("closed")

    def close(self) -> None:
        pass


def set_options(socket: Socket, address: str, silence_s: float) -> None:
    """What both ends have in common."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # sending never waits; the protocol bounds what is under way
    # No limit in libzmq: 4.3 aborts the process when a connection breaks whose
    # frames have reached one before they are read (its heartbeat asserts
    # ``!_io_error``). We bound what is unread ourselves.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * silence_s / 4)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * silence_s * 3 / 4)))


class Bell:
    """Has the thread that waits for sockets look up. Any thread may ring it."""

    def __init__(self) -> None:
        self._ear, self._rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def ear(self) -> int:
        """Readable when it has rung."""
        return self._ear

    def ring(self) -> None:
        """Safe after ``close``, too."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._is_open:
                os.write(self._rope, b"!")

    def hush(self) -> bool:
        """Whether it has rung since the last time."""
        with self._lock, contextlib.suppress(BlockingIOError):
            return self._is_open and bool(os.read(self._ear, 1 << 12))
        return False

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._ear)
                os.close(self._rope)


def wait_for(
    look: Callable[[], T | None],
    sockets: Callable[[], Iterable[Socket]],
    lock: threading.RLock,
    timeout_s: float | None,
    bell: Bell | None = None,
) -> T | None:
    """What ``look`` gives once it isn't None; None when the time is over, or
    ``bell`` has rung. It looks whenever a socket is readable."""
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
