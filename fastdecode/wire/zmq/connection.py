"""A connection over ZeroMQ, and what the hubs of both ends have in common.

A message is one multipart message: its head, then its arrays as frames of at most
``MAX_FRAME_BYTES``. An empty one says that this side has closed. One of a single byte only asks
ZeroMQ if the peer is still there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import MAX_HEAD_BYTES, Codec
from fastdecode.wire.messages import Message
from fastdecode.wire.traits import Role
from fastdecode.wire.transport import CLOSED, PeerLostError, closed_error, timeout_error, unreadable
from fastdecode.wire.zmq.keys import ClusterKey, Socket

T = TypeVar("T")

_GOODBYE: Final = b""
_ARE_YOU_THERE: Final = b"\0"
MAX_FRAME_BYTES: Final = 4 << 20
"""More is cut, so that a peer that only connects can't make us take more memory."""
_COPIED_BYTES: Final = 1 << 15
"""ZeroMQ copies frames up to this size: that is quicker than to tell when larger ones have left."""
_ASK_INTERVAL_S: Final = 1.0
_SLICE_S: Final = 0.05
"""Between two looks of a wait at whether another thread has closed the connection."""
_NUM_GLANCES: Final = 100
"""At the sockets, before a wait sleeps: to be woken takes longer than a quick peer's answer.
Between them others may have the core, ZeroMQ's own threads for example."""
# Worked out once: pyzmq's flags make an enum's member each time.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE_FOLLOWS: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
DEFAULT_SILENCE_S: Final = 5.0
_LINGER_MS: Final = 2000
_OPTIONS: Final = {
    zmq.LINGER: _LINGER_MS,
    zmq.SNDHWM: 0,  # sending never waits; the protocol bounds what is under way
    # No limit in libzmq: 4.3 aborts the process when a connection breaks whose frames have reached
    # one before they are read (its heartbeat asserts ``!_io_error``).
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES + MAX_HEAD_BYTES,
    zmq.HANDSHAKE_IVL: 5000,
}
_GONE: Final = "its process has ended, or is silent, or the network to it has failed"
_REFUSED: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is --key the same file on every host?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it doesn't speak our protocol: does only one side have a "
    "--key, or have both another key file?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up while we shook hands: is --key the same on "
    "both sides?",
}
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSED)


class ZmqConnection:
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. Its hub takes in what
    arrives. ``route``: in front of each message, if the socket isn't this connection's own."""

    heard_s: ClassVar = None  # ZeroMQ's threads look after silent peers
    address = ""  # where the peer listens, if it does
    role: Role | None = None  # what the peer is, if it has connected

    def __init__(self, hub: SocketHub, peer: str, socket: Socket, route: Sequence[bytes]) -> None:
        self.peer: Final = peer
        self.socket, self.route = socket, route
        self.monitor = None if route else socket.get_monitor_socket(_EVENTS)
        own = [socket] if self.monitor is None else [socket, self.monitor]
        self.readable: list[tuple[Any, int]] = [(each, zmq.POLLIN) for each in own]
        """There may be news; empty once this side has closed it."""
        self.is_reached = self.monitor is None  # true once the peer is known to be at its end
        self.inbox: deque[Sequence[zmq.Frame]] = deque()
        self.loss = ""  # why the peer is lost
        self._asked_s = time.monotonic()
        self._end: WorkerError | None = None
        self._hub = hub
        self.pool = BufferPool()
        self._codec = Codec(hub.receives, self.pool.take)
        hub.made.add(self)

    @property
    def is_open(self) -> bool:
        """True until this side has closed it, or reported its end."""
        return self._end is None

    def send(self, message: Message) -> None:
        with self._hub.lock:
            if self._end is not None and self._end.code == CLOSED:
                raise self._end
            frame = self._codec.encode(message)
            parts: list[Any] = [*self.route, frame.head]
            for array in frame.arrays:
                data = np.ascontiguousarray(array)
                if data.nbytes > _COPIED_BYTES and not message.lends:
                    copy = self.pool.take(data.nbytes)
                    copy[:] = data.reshape(-1).view(np.uint8)
                    data = copy
                if data.nbytes > MAX_FRAME_BYTES:
                    data = data.reshape(-1).view(np.uint8)
                    starts = range(0, len(data), MAX_FRAME_BYTES)
                    parts += [data[start : start + MAX_FRAME_BYTES] for start in starts]
                elif data.nbytes:
                    parts.append(data)
            if not self.loss:
                try:
                    return send_parts(self.socket, parts)
                except zmq.ZMQError:
                    self._hub.take_in(self)
                    self.loss = self.loss or _GONE
            raise WorkerError(f"{self.peer} is lost: {self.loss}", code=CLOSED)

    def receive(self, timeout_s: float | None = None) -> Any:
        received = self._hub.wait(self.poll, lambda: self.readable, timeout_s)
        if received is None:
            raise timeout_error(self.peer, timeout_s or 0.0)
        return received

    def poll(self) -> Any:
        with self._hub.lock:
            while self._end is None:
                if not self.inbox:
                    self._hub.take_in(self)
                if not self.inbox:
                    if not self.loss:
                        return None
                    self._end = WorkerError(f"{self.peer} is lost: {self.loss}", code=CLOSED)
                    break
                head, *arrays = self.inbox.popleft()
                if not len(head):
                    self._end = closed_error(self.peer, by_peer=True)
                elif len(head) > 1:  # or it was asked if it is there
                    try:
                        return self._codec.decode(head.buffer, frames=arrays)
                    except ProtocolError as error:
                        broken = f"{self.peer} broke the protocol: {error}"
                        self._end = WorkerError(broken, code=error.code)
                    except Exception as error:
                        self._end = unreadable(self.peer, error)
            raise self._end

    def close(self) -> None:
        end, self._end = self._end, closed_error(self.peer, by_peer=False)
        with self._hub.lock:  # a thread that waits sees the end, and lets go of the lock
            if not self.readable:
                return
            self.readable, self.is_reached = [], False
            if not self.loss and (end is None or end.code != CLOSED):
                with contextlib.suppress(zmq.ZMQError):
                    send_parts(self.socket, [*self.route, _GOODBYE])
            self.inbox.clear()
            self.pool.release()
            if self.monitor is not None:
                self.socket.disable_monitor()
                self.monitor.close(0)
                self.socket.close()

    def ask(self) -> None:
        """Note, now and then, if the peer is gone: ZeroMQ says so when something is sent."""
        now = time.monotonic()
        if now - self._asked_s >= _ASK_INTERVAL_S:
            self._asked_s = now
            try:
                send_parts(self.socket, [*self.route, _ARE_YOU_THERE])
            except zmq.ZMQError:
                self.loss = _GONE

    def read_events(self) -> None:
        """Note if the peer is reached, or lost."""
        while self.monitor and zmq.zmq_poll(self.readable[1:], 0):
            event: int = parse_monitor_message(self.monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_reached = True
            elif event in _REFUSED:
                self.loss = _REFUSED[event]
            elif self.is_reached:  # a connection that breaks is over, though ZeroMQ would reconnect
                self.loss = self.loss or _GONE


class SocketHub:
    """What the hubs of both ends have in common; see ``fastdecode.wire.transport.Hub``.

    Args:
        key: The cluster's. None for peers of this host only.
        silence_s: A peer without a sign of life for this long is lost.
        num_io_threads: Threads that encrypt and copy.
    """

    receives: ClassVar[frozenset[type[Message]]]
    """Kinds of messages that peers may send."""
    may_grow = False  # true if peers may connect at any time

    def __init__(
        self,
        key: ClusterKey | None = None,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
        num_io_threads: int = 1,
    ) -> None:
        self.connections: list[ZmqConnection] = []
        self.made: weakref.WeakSet[ZmqConnection] = weakref.WeakSet()  # those without an index, too
        self.lock: Final = threading.RLock()  # held while a socket is used
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context(num_io_threads)
        self._authenticator: ThreadAuthenticator | None = None
        self._first = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)  # threads may wake a closed hub

    def take_in(self, connection: ZmqConnection) -> None:
        """Put what has arrived into its inbox, or note that the peer is reached or lost."""
        raise NotImplementedError

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        """See ``Hub``; ``wake`` ends it like a deadline."""
        received = self.wait(self._poll_any, self._readable, timeout_s)
        if received is None:
            names = " or ".join(x.peer for x in self.connections if x.is_open)
            raise timeout_error(names or "every peer", timeout_s or 0.0)
        return received

    def wait(
        self,
        look: Callable[[], T | None],
        readable: Callable[[], list[tuple[Any, int]]],
        timeout_s: float | None,
    ) -> T | None:
        """Return what ``look`` gives once it isn't None, or None after ``timeout_s``. Look whenever
        one of ``readable`` is."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        num_glances = _NUM_GLANCES
        while True:
            found = look()
            remaining_s = _SLICE_S if deadline is None else deadline - time.monotonic()
            if found is not None or remaining_s <= 0:
                return found
            with self.lock:
                items = readable()
                while num_glances and not zmq.zmq_poll(items, 0):
                    num_glances -= 1
                    os.sched_yield()
                if not num_glances:
                    zmq.zmq_poll(items, max(1, int(1000 * min(remaining_s, _SLICE_S))))

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up; any thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        for connection in list(self.made):
            connection.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(_LINGER_MS)

    def _readable(self) -> list[tuple[Any, int]]:
        """Return what is readable when there may be news."""
        items = [item for x in self.connections if x.is_open for item in x.readable]
        return [*items, (self._bell, zmq.POLLIN)]

    def _poll_any(self) -> tuple[int, Any] | None:
        """Ask every open connection, each call starting behind the one that answered last."""
        is_over = not self.may_grow
        for i in range(len(self.connections)):
            index = (self._first + i) % len(self.connections)
            if self.connections[index].is_open:
                is_over = False
                try:
                    message = self.connections[index].poll()
                except WorkerError as error:
                    raise PeerLostError(index, error) from None
                if message is not None:
                    self._first = index + 1
                    return index, message
        if is_over:
            peers = ", ".join(x.peer for x in self.connections)
            raise closed_error(peers or "every peer", by_peer=True)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
            raise timeout_error("every peer", 0.0)
        return None

    def _make_socket(self, kind: int, address: str) -> Socket:
        socket = self._context.socket(kind)
        socket.copy_threshold = 0  # pyzmq's own would copy lent arrays up to 64 KiB
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * self._silence_s / 4)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * self._silence_s * 3 / 4)))
        return socket


def send_parts(socket: Socket, parts: Sequence[Any]) -> None:
    """Send one message. Raises zmq.ZMQError: If the peer is gone."""
    last = len(parts) - 1
    for number, part in enumerate(parts):
        flags = _NOBLOCK if number == last else _MORE_FOLLOWS
        is_copied = (part.nbytes if isinstance(part, np.ndarray) else 0) <= _COPIED_BYTES
        socket.send(part, flags, copy=is_copied)


def receive_parts(socket: Socket) -> list[zmq.Frame]:
    """Return the parts of the next message, or nothing."""
    try:
        parts = [socket.recv(_NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while parts[-1].more:  # recv_multipart asks the socket, which takes longer
        parts.append(socket.recv(copy=False))
    return parts
