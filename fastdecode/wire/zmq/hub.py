"""Connections over ZeroMQ and their hubs, for clusters without MPI and for R-workers that come and
go.

An R-worker has one socket (ROUTER), bound to one address; an S-worker has one (DEALER) for each
R-worker. A connection that breaks is over: ZeroMQ would connect again by itself, but what was under
way is lost. Both sides' ZeroMQ threads exchange heartbeats whatever Python does, and give a silent
peer up. ZeroMQ drops what doesn't speak its protocol or hasn't the key.

A small message is one frame. Of a larger one, the head is a frame, and each array is one or several
of at most ``MAX_FRAME_BYTES``. An empty frame means that this side has closed. One of a single byte
only asks ZeroMQ if the peer is still there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ENODEV
from socket import gaierror
from typing import Any, ClassVar, Final, TypeVar, get_args

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.blocks import ReadBlocks
from fastdecode.wire.codec import MAX_HEAD_BYTES, NAME, Codec, kind_of, read_prefix
from fastdecode.wire.instances import InstanceHello
from fastdecode.wire.messages import Failed, FromRWorker, Hello, Inspect, Message, ToRWorker
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import CLOSED, PeerLostError, closed_error, timeout_error, unreadable
from fastdecode.wire.zmq.keys import ClusterKey, Socket, check_address, connect_error, secure

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GOODBYE: Final = b""
_ARE_YOU_THERE: Final = b"\0"
MAX_FRAME_BYTES: Final = 4 << 20
"""More is cut, so that a peer that only connects can't make us take more memory."""
_COPIED_BYTES: Final = 1 << 15
"""ZeroMQ copies arrays up to this size: to find out when larger ones have left is slower."""
_SMALL_BYTES: Final = 1 << 18
"""A message whose body has up to this size is one frame: each takes calls of the system on both
sides. It is put together in memory of a pool, since fresh pages take longer than copies."""
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
_HANDSHAKE_S: Final = 5.0
_OPTIONS: Final = {
    zmq.LINGER: _LINGER_MS,
    zmq.SNDHWM: 0,  # sending never waits; the protocol bounds what is under way
    # No limit in libzmq: 4.3 aborts the process when a connection breaks whose frames have reached
    # one before they are read (its heartbeat asserts ``!_io_error``).
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES + MAX_HEAD_BYTES,
    zmq.HANDSHAKE_IVL: int(1000 * _HANDSHAKE_S),
}
_GONE: Final = "its process has ended, or is silent, or the network to it has failed"
_NO_DETAIL: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key: is --key the same file on every host?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it doesn't speak our protocol: does only one side have a "
    "--key, or have both another key file?",
    _NO_DETAIL: "it closed the connection: is --key the same file on both sides?",
}
_SILENT: Final = "it is silent: restart it if it hangs or is stopped, else compare both --key"
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSED)
_PROMPT_S: Final = 0.5  # then a peer that is not reached is asked why, over another TCP connection
_MOST_TAKEN: Final = 100
"""Messages that a listener takes in before it looks at its connections, even in a flood."""
_ROLES: Final[dict[type[Message] | None, Role]] = {
    Inspect: Role.READER,
    ReadBlocks: Role.READER,
    InstanceHello: Role.CONTROLLER,
}
"""Roles of peers, by the kind of their first message. ``Hello`` names its own."""


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
        self._hub, self._codec = hub, Codec(hub.receives)
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
            if 0 < frame.body_bytes <= _SMALL_BYTES:
                parts[-1] = frame.copied(self._codec.pool, whole=True).data
            else:
                for array in frame.arrays:
                    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    if not message.lends:
                        copy = self._codec.pool.take(len(data))
                        copy[:] = data
                        data = copy
                    starts = range(0, len(data), MAX_FRAME_BYTES)
                    parts += [data[start : start + MAX_FRAME_BYTES] for start in starts]
            if not self.loss:
                try:
                    return send_parts(self.socket, parts)
                except zmq.ZMQError:
                    self._hub.take_in(self)
                    self.loss = self.loss or _GONE
            raise self._lost()

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
                if self.inbox:
                    head, *arrays = self.inbox.popleft()
                    if not len(head):
                        self._end = closed_error(self.peer, by_peer=True)
                    elif len(head) > 1:  # or it was asked if it is there
                        try:
                            return self._codec.decode(head.buffer, *arrays)
                        except Exception as error:
                            self._end = unreadable(self.peer, error)
                elif self.loss:
                    self._end = self._lost()
                else:
                    return None
            raise self._end

    def close(self) -> None:
        end, self._end = self._end, closed_error(self.peer, by_peer=False)
        with self._hub.lock:  # a thread that waits sees the end, and releases the lock
            if not self.readable:
                return
            self.readable, self.is_reached = [], False
            if not self.loss and (end is None or end.code != CLOSED):
                with contextlib.suppress(zmq.ZMQError):
                    send_parts(self.socket, [*self.route, _GOODBYE])
            self.inbox.clear()
            self._codec.pool.release()
            if self.monitor is not None:
                self.socket.disable_monitor()
                self.monitor.close(0)
                self.socket.close()

    def ask(self) -> None:
        """Note, now and then, if the peer is gone: ZeroMQ reports it when something is sent."""
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
                if event == _NO_DETAIL and time.monotonic() - self._asked_s >= _HANDSHAKE_S:
                    self.loss = _SILENT
            elif self.is_reached:  # a connection that breaks is over, though ZeroMQ would reconnect
                self.loss = self.loss or f"{_GONE}. If it has ended, start it again at this address"

    def _lost(self) -> WorkerError:
        what = f"{self.peer} is lost" if self.is_reached else f"can't reach {self.peer}"
        return WorkerError(f"{what}: {self.loss}", code=CLOSED)


class SocketHub:
    """What the hubs of both ends have in common; see ``fastdecode.wire.transport.Hub``.

    Args:
        key: The cluster's. None for peers of this host only.
        silence_s: A peer without a sign of life for this long is lost.
        num_io_threads: Threads that encrypt and copy.
    """

    receives: ClassVar[frozenset[type[Message]]]  # messages that peers may send
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
        self._key, self._silence_s = key, silence_s
        self._context: zmq.Context[Socket] = zmq.Context(num_io_threads)
        self._authenticator: ThreadAuthenticator | None = None
        self._first, self._bell = 0, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)  # threads may wake a closed hub

    def take_in(self, connection: ZmqConnection) -> None:
        """Put what has arrived into its inbox, or note that the peer is reached or lost."""
        raise NotImplementedError

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        """Wait for any peer's next message; ``wake`` ends it like a deadline."""
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
        """End the current or next wait in ``receive_any``. Thread-safe."""
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
        is_lent = isinstance(part, np.ndarray) and len(part) > _COPIED_BYTES
        socket.send(part, flags, copy=not is_lent)


def receive_parts(socket: Socket) -> list[zmq.Frame]:
    """Return the parts of the next message, or nothing."""
    try:
        parts = [socket.recv(_NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while parts[-1].more:  # recv_multipart asks the socket, which takes longer
        parts.append(socket.recv(copy=False))
    return parts


def io_threads_for(num_peers: int, num_cores: int) -> int:
    """Return the I/O threads of an S-worker: one for each R-worker, but no more than a quarter of
    the cores. They copy what travels and encrypt it; connections are dealt out to them."""
    return max(1, min(num_peers, num_cores // 4))


class ZmqHub(SocketHub):
    """Connections to R-workers at addresses, each over a socket of its own."""

    receives = frozenset(get_args(FromRWorker))
    peer_kind = "R-worker"
    command = "fastdecode r-worker --bind"  # that is to run there
    parameter = "r_worker_addresses"  # that gave the addresses

    def add(self, address: str) -> ZmqConnection:
        """Connect. The connection keeps its index, closed or not, until it is replaced."""
        self.connections.append(self.open(address))
        return self.connections[-1]

    def reconnect(self, index: int) -> ZmqConnection:
        """Connect to the same address without an index, which ``replace`` gives."""
        return self.open(self.connections[index].address)

    def replace(self, index: int, connection: ZmqConnection) -> None:
        """Give a connection of ``reconnect`` the index of the one before it, which is closed."""
        self.connections[index].close()
        self.connections[index] = connection

    def open(self, address: str) -> ZmqConnection:
        """Connect without an index: ``receive_any`` doesn't read it. The peer needn't be there yet.

        Raises:
            ConfigError: If the address is not one, or may not be used without a key.
        """
        check_address(address, self._key, parameter=self.parameter)
        try:
            socket = self._make_socket(zmq.DEALER, address)
            secure(socket, self._key, is_server=False)
            connection = ZmqConnection(self, f"{self.peer_kind} {address}", socket, [])
            connection.address = address
            socket.connect(address)
        except zmq.ZMQError as error:
            raise _unusable(self.parameter, address, error) from None
        return connection

    def take_in(self, connection: ZmqConnection) -> None:
        if not zmq.zmq_poll(connection.readable, 0):  # a third of what a receive takes that fails
            return
        frames = receive_parts(connection.socket)
        if not frames:
            connection.read_events()
            # What came just before the end is read first.
            frames = receive_parts(connection.socket) if connection.loss else []
        if frames:
            connection.inbox.append(frames)

    def reach(self, timeout_s: float, *, retries: bool = True) -> dict[int, WorkerError]:
        """Wait until every peer has been reached, and log what keeps one from it. Return why each
        of the others could not be, by index: for an unknown host or a refused key, at once. Without
        ``retries`` also for a refused connection."""
        reasons: dict[int, WorkerError] = {}

        def missing() -> dict[int, ZmqConnection]:
            for index, connection in enumerate(self.connections):
                try:
                    connection.poll()  # nothing comes before it is greeted
                except WorkerError as error:
                    reasons[index] = error
            places = enumerate(self.connections)
            return {i: x for i, x in places if not (x.is_reached or i in reasons)}

        prompt_s = min(_PROMPT_S, timeout_s)
        rest_s = timeout_s - prompt_s
        for wait_s, left_s in ((prompt_s, rest_s), (rest_s, 0.0)):
            self.wait(lambda: not missing() or None, self._readable, wait_s)
            asked = missing()
            with ThreadPoolExecutor(len(asked) or 1) as pool:
                errors = pool.map(lambda x: connect_error(x.address), asked.values())
            for (index, connection), error in zip(asked.items(), errors, strict=True):
                what = f"can't reach {connection.peer}"
                why = f"does {self.command} run there, and is the network open?"
                why = explained(error) if error else why
                is_final = isinstance(error, gaierror if retries else OSError)
                if is_final or not left_s:
                    what += "" if is_final else f" within {timeout_s:g} s"
                    reasons[index] = WorkerError(f"{what}: {why}", code="worker_unreachable")
                elif error:
                    logger.warning("%s yet, trying for %g s more: %s", what, left_s, why)
        return reasons


class ZmqListener(SocketHub):
    """An R-worker's socket. The index of a peer that this side has closed goes to the next.

    Args:
        address: tcp://HOST:PORT; the port may be * for any that is free.
        name: Of its owner, for peers that are refused.
        most_peers: Of each role; one that is missing isn't accepted.

    Raises:
        ConfigError: If the address is not one, is in use, or may not be used without a key.
    """

    receives = frozenset(get_args(ToRWorker))
    may_grow = True

    def __init__(
        self,
        address: str,
        name: str,
        *,
        key: ClusterKey | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
        most_peers: Mapping[Role, int] = MOST_PEERS,
    ) -> None:
        check_address(address, key, parameter="bind")
        super().__init__(key, silence_s=silence_s)
        self._name, self._most_peers = name, most_peers
        self._codec = Codec((Hello,))
        self._peers: dict[bytes, ZmqConnection] = {}  # by identity
        self._most_taken = _MOST_TAKEN
        self._socket = self._make_socket(zmq.ROUTER, address)
        self._items: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._bell, zmq.POLLIN)]
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = secure(self._socket, key, is_server=True)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise _unusable("bind", address, error) from None
        # With the port that was chosen.
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def take_in(self, connection: ZmqConnection) -> None:
        for _ in range(self._most_taken):
            if connection.inbox or not self._take_in_next():
                break
        if not connection.inbox:
            connection.ask()

    def _readable(self) -> list[tuple[Any, int]]:
        return self._items  # peers may come at any time

    def _poll_any(self) -> tuple[int, Any] | None:
        with self.lock:
            self._take_in_next()
            self._most_taken = 0  # one a look: a flood of one peer holds up none
            try:
                return super()._poll_any()
            finally:
                self._most_taken = _MOST_TAKEN

    def _take_in_next(self) -> bool:
        """Take in messages up to one of a connection, which a greeting makes. Return False if none
        came."""
        for _ in range(_MOST_TAKEN):
            # To poll takes a third of what a receive takes that fails.
            if not zmq.zmq_poll(self._items[:1], 0) or not (parts := receive_parts(self._socket)):
                break
            identity, frames = parts[0].bytes, parts[1:]
            peer = self._peers.get(identity)
            if peer is None or not peer.is_open:
                peer = self._greet(identity, frames)
            if peer is not None:
                peer.inbox.append(frames)
                return True
        return False

    def _greet(self, identity: bytes, frames: Sequence[zmq.Frame]) -> ZmqConnection | None:
        """Return a new connection if a peer sends its role, and there is room for that."""
        head = frames[0].buffer
        try:
            read_prefix(head)
            kind = kind_of(head)
            hello: Any = self._codec.decode(head, *frames[1:]) if kind is Hello else None
            role = _ROLES.get(kind) if hello is None else hello.role
            if role is None:
                return None  # a lost peer still sends
            taken = [x.peer for x in self.connections if x.is_open and x.role is role]
            if len(taken) >= self._most_peers.get(role, 0):
                others = f"serves another {role.value} ({', '.join(taken)})"
                why = f"it {others}" if taken else f"it takes no {role.value}"
                raise ProtocolError(why, code="busy")
        except Exception as error:  # of a peer that is not a member, perhaps
            self._refuse(identity, head, error)
            return None
        who = "doctor" if kind is Inspect else role.value
        peer = f"the {who} at {frames[0].get('Peer-Address')}"
        connection = ZmqConnection(self, peer, self._socket, [identity])
        connection.role = role
        closed = (index for index, other in enumerate(self.connections) if not other.readable)
        index = next(closed, len(self.connections))
        self.connections[index : index + 1] = [connection]
        self._peers = {x.route[0]: x for x in self.connections if x.is_open}
        return connection

    def _refuse(self, identity: bytes, head: memoryview, error: Exception) -> None:
        """Send the reason to a peer that speaks our protocol."""
        if not isinstance(error, ProtocolError) or bytes(head[:3]) != NAME:
            logger.debug("%s: what a stranger sent is dropped: %s", self.address, error)
            return
        logger.warning("%s: a peer is refused: %s", self.address, error)
        answer = self._codec.encode(Failed(self._name, error.code, error.message))
        with contextlib.suppress(zmq.ZMQError):
            send_parts(self._socket, [identity, answer.head])


def _unusable(parameter: str, address: str, error: zmq.ZMQError) -> ConfigError:
    reason = explained(OSError(error.errno, error.strerror))
    if error.errno == ENODEV:
        reason = "no host or network interface has this name: name an address of this host"
    return ConfigError(Given(parameter, address), f": {reason}")
