"""Hubs over ZeroMQ, for clusters without MPI and for R-workers that come and go.

Every R-worker has one socket (ROUTER), bound to one address; an S-worker has one (DEALER) for each
R-worker.

**A connection that breaks is over.** ZeroMQ would connect again by itself, but what was under way
is lost, and a connection is lossless or nothing. A peer that connects next begins a new one.

**An R-worker has several peers**, which it accepts by role, so many of each; one too many is
answered ``Failed`` (busy). There is room again when a peer has closed, died (noticed at once), or
been silent for ``silence_s``: both sides' ZeroMQ threads exchange heartbeats whatever Python does,
and give the other up without them.

**What isn't for us is dropped**: what doesn't speak ZeroMQ or hasn't the key, by ZeroMQ; what
doesn't speak our protocol, here, with a line in the log. What breaks the protocol within a
connection ends that connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from socket import gaierror
from typing import ClassVar, Final, Generic, get_args

import zmq

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.codec import NAME, Codec, Prefix, kind_of
from fastdecode.wire.instances.messages import InstanceHello
from fastdecode.wire.kv.chunks import FetchChunk
from fastdecode.wire.messages import (
    Failed,
    FromRWorker,
    Greeting,
    Hello,
    Message,
    StorePrompt,
    ToRWorker,
)
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError, closed_error, timeout_error
from fastdecode.wire.zmq.connection import (
    LINGER_MS,
    OPTIONS,
    DealerConnection,
    ReceiveT,
    RouterConnection,
    SendT,
    ZmqConnection,
    receive_parts,
    send_parts,
    wait_for,
)
from fastdecode.wire.zmq.keys import ClusterKey, Socket, check_address, connect_error, secure

logger = logging.getLogger(__name__)

DEFAULT_SILENCE_S: Final = 5.0
_PROMPT_S: Final = 0.5
"""A peer that is not reached within this is asked why, over a TCP connection of its own."""
_PROBE_S: Final = 0.25
_MOST_PARTS: Final = 320
"""Of a message: its sender's identity, its head, and arrays in frames of at most 4 MiB."""
_OF_PROMPT_STAGES: Final = StorePrompt, FetchChunk
_GREETINGS: Final = (*get_args(Greeting), InstanceHello, *_OF_PROMPT_STAGES)


def io_threads_for(num_peers: int, num_cores: int) -> int:
    """Return the I/O threads of an S-worker: one for each R-worker, but no more than a quarter of
    the cores. They copy what travels and encrypt it; connections are dealt out to them."""
    return max(1, min(num_peers, num_cores // 4))


def io_cpu_s() -> float:
    """Return the CPU seconds of this process's I/O threads so far; 0 where the system has no figure
    (no Linux)."""
    total_ns = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


class _Hub(Generic[SendT, ReceiveT]):
    """What the hubs of both ends have in common; see ``fastdecode.wire.transport.Hub``. Close it
    when done.

    Args:
        key: The cluster's. None for peers of this host only.
        silence_s: A peer without a sign of life for this long is lost.
        num_io_threads: Threads that encrypt and copy.
    """

    receives: ClassVar[frozenset[type[Message]]]

    def __init__(
        self,
        key: ClusterKey | None = None,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
        num_io_threads: int = 1,
    ) -> None:
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context(num_io_threads)
        self._lock = threading.RLock()
        self._connections: list[ZmqConnection[SendT, ReceiveT]] = []
        self._outside: list[ZmqConnection[SendT, ReceiveT]] = []
        """Without an index: candidates, and what ``connect`` made."""
        self._first = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)  # threads may wake a closed hub

    @property
    def connections(self) -> Sequence[ZmqConnection[SendT, ReceiveT]]:
        return self._connections  # itself: it is asked for with every message

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        """See ``Hub``; ``wake`` ends it like a deadline."""
        waiting = self._poll_any, self._open_sockets, self._lock, timeout_s, self._bell
        received = wait_for(*waiting)
        if received is None:
            names = " or ".join(x.peer for x in self._connections if x.is_open)
            raise timeout_error(names or "every peer", timeout_s or 0.0)
        return received

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up; any thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        for connection in (*self._connections, *self._outside):
            connection.close()
        self._context.term()

    def _open_sockets(self) -> Iterable[Socket]:
        """Return what is readable when there may be news."""
        return [socket for x in self._connections if x.is_open for socket in x.sockets]

    def _poll_any(self) -> tuple[int, ReceiveT] | None:
        """Ask every open connection, each call starting behind the one that answered last."""
        for i in range(len(self._connections)):
            index = (self._first + i) % len(self._connections)
            if self._connections[index].is_open:
                try:
                    message = self._connections[index].poll()
                except WorkerError as error:
                    raise PeerLostError(index, error) from None
                if message is not None:
                    self._first = index + 1
                    return index, message
        return None

    def _make_socket(self, kind: int, address: str) -> Socket:
        socket = self._context.socket(kind)
        socket.copy_threshold = 0  # pyzmq's own would copy lent arrays up to 64 KiB
        for option, value in OPTIONS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * self._silence_s / 4)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * self._silence_s * 3 / 4)))
        return socket


class DealerHub(_Hub[SendT, ReceiveT]):
    """Connections to peers at addresses."""

    peer_kind: ClassVar[str]
    """In front of peers' addresses."""
    command: ClassVar[str]
    """That is to run there."""
    parameter: ClassVar[str]
    """That gave the addresses."""

    def add(self, address: str) -> ZmqConnection[SendT, ReceiveT]:
        """Connect to an address. Never waits: the peer needn't be there yet, and one that can't be
        reached doesn't answer. The connection keeps its index, closed or not, until it is replaced.

        Raises:
            ConfigError: If the address is none, or may not be used without a key.
        """
        self._connections.append(self._connect(address))
        return self._connections[-1]

    def reconnect(self, index: int) -> ZmqConnection[SendT, ReceiveT]:
        """Connect to the same address, for the process that is there now. The connection has no
        index before ``replace``."""
        return self.connect(self._connections[index].address)

    def connect(self, address: str, line: int = 0) -> ZmqConnection[SendT, ReceiveT]:
        """Connect without an index: ``receive_any`` doesn't read it.

        Raises:
            ConfigError: See ``add``.
        """
        connection = self._connect(address)
        self._outside = [*(other for other in self._outside if other.is_open), connection]
        return connection

    def replace(self, index: int, connection: ZmqConnection[SendT, ReceiveT]) -> None:
        """Give a connection of ``reconnect`` the index of the one before it, which is closed."""
        self._outside.remove(connection)
        self._connections[index].close()
        self._connections[index] = connection

    def _connect(self, address: str) -> DealerConnection[SendT, ReceiveT]:
        check_address(address, self._key, parameter=self.parameter)
        peer = f"{self.peer_kind} {address}"
        try:
            socket = self._make_socket(zmq.DEALER, address)
            secure(socket, self._key, is_server=False)
            return DealerConnection(peer, self.receives, self._lock, socket, address)
        except zmq.ZMQError as error:
            raise _refused(self.parameter, address, error) from None

    def reach(self, timeout_s: float) -> dict[int, WorkerError]:
        """Wait until every peer has been reached, and log what keeps one from it.

        Returns:
            Why each of the others could not be reached, by index. A host name that does not
            resolve, and a refused key, are not waited for.
        """
        reasons: dict[int, WorkerError] = {}

        def missing() -> list[int]:
            for index, connection in enumerate(self._connections):
                try:
                    connection.check()
                except WorkerError as error:
                    reasons[index] = error
            places = enumerate(self._connections)
            return [i for i, x in places if not (x.is_reached or i in reasons)]

        def wait(seconds: float) -> None:
            wait_for(lambda: not missing() or None, self._open_sockets, self._lock, seconds)

        def failures() -> list[tuple[int, str, OSError | None]]:
            """Ask the system about those that are still missing."""
            asked = missing()
            with ThreadPoolExecutor(max(1, len(asked))) as pool:
                addresses = [self._connections[index].address for index in asked]
                errors = pool.map(partial(connect_error, timeout_s=_PROBE_S), addresses)
                peers = [self._connections[index].peer for index in asked]
                return list(zip(asked, peers, errors, strict=True))

        def unreachable(peer: str, why: str) -> WorkerError:
            return WorkerError(f"can't reach {peer}{why}", code="worker_unreachable")

        wait(min(_PROMPT_S, timeout_s))
        left_s = timeout_s - _PROMPT_S
        if left_s > 0:
            for index, peer, error in failures():
                if isinstance(error, gaierror):
                    reasons[index] = unreachable(peer, f": {explained(error)}")
                elif error is not None:
                    logger.warning(
                        "can't reach %s yet, trying for %g s more: %s",
                        peer, left_s, explained(error),
                    )  # fmt: skip
            wait(left_s)
        for index, peer, error in failures():
            is_open = f"does {self.command} run there, and is the network open?"
            why = is_open if error is None else explained(error)
            reasons[index] = unreachable(peer, f" within {timeout_s:g} s: {why}")
        return reasons

    def _poll_any(self) -> tuple[int, ReceiveT] | None:
        found = super()._poll_any()
        if found is None and not any(x.is_open for x in self._connections):
            peers = ", ".join(x.peer for x in self._connections) or "every peer"
            raise closed_error(peers, by_peer=True)
        return found


class ZmqHub(DealerHub[ToRWorker, FromRWorker]):
    """Connections to R-workers, of an S-worker or of another R-worker
    (``rworker.transfers.neighbours.Neighbours``)."""

    peer_kind = "R-worker"
    command = "fastdecode r-worker --bind"
    parameter = "r_worker_addresses"
    receives = frozenset(get_args(FromRWorker))

    def expect(self, address: str, line: int) -> None:
        """Any process with the key may connect at any time."""


class PeerListener(_Hub[SendT, ReceiveT]):
    """A socket at which peers connect. The index of one that this side has closed goes to the next.

    Args:
        address: tcp://HOST:PORT; the port may be * for any that is free.
        name: Of its owner, for peers that are refused.
        most_peers: Of each role; one that is missing isn't accepted.

    Raises:
        ConfigError: If the address is none, is in use, or may not be used without a key.
    """

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
        self._name = name
        self._codec = Codec((Failed,))
        self._most_peers = most_peers
        self._peers: dict[bytes, RouterConnection[SendT, ReceiveT]] = {}  # by identity
        self._num_dropped = 0
        self._socket = self._make_socket(zmq.ROUTER, address)
        self._readable = [(self._socket, zmq.POLLIN)]
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = secure(self._socket, key, is_server=True)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise _refused("bind", address, error) from None

    @property
    def address(self) -> str:
        """With the port that was chosen."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def close(self) -> None:
        """Close every connection, and stop listening."""
        for connection in self._connections:
            connection.close()
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        super().close()

    def _open_sockets(self) -> Iterable[Socket]:
        return (self._socket,)  # peers may come at any time

    def _poll_any(self) -> tuple[int, ReceiveT] | None:
        with self._lock:
            while (found := super()._poll_any()) is None:
                has_news = any(x.inbox and x.is_open for x in self._peers.values())
                if not (has_news or self._take_in_one()):
                    break
            return found

    def _take_in_for(self, wanted: RouterConnection[SendT, ReceiveT]) -> None:
        while not wanted.inbox and self._take_in_one():
            pass

    def _take_in_one(self) -> bool:
        """Take one message from the socket, and give it to its connection, or to a new one; lock
        held. False if none is there."""
        if not zmq.zmq_poll(self._readable, 0):  # a third of what a receive takes that fails
            return False
        parts = receive_parts(self._socket, _MOST_PARTS)
        if not parts:
            return False
        identity, frames = parts[0].bytes, parts[1:]
        connection = self._peers.get(identity)
        if connection is not None and connection.is_open:
            connection.inbox.append(frames)
            return True
        try:
            self._greet(identity, frames)
        except Exception as error:  # of a peer that is no member, perhaps
            logger.debug("what a peer without a connection sent can't be read", exc_info=True)
            if isinstance(error, ProtocolError) and bytes(frames[0].buffer[:3]) == NAME:
                self._answer(identity, error.code, error.message)
            self._num_dropped += 1
            if self._num_dropped & (self._num_dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
                logger.warning(
                    "%s: dropped what a stranger sent (%d so far): %s",
                    self.address, self._num_dropped, error,
                )  # fmt: skip
        return True

    def _greet(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Give a peer that says what it is a connection, if there is room for its role."""
        head = frames[0].buffer
        if len(head) <= 1 or (Prefix.of(head) and kind_of(head) not in _GREETINGS):
            return  # a peer that was lost speaks on
        role = _role_of(head)
        taken = [x.peer for x in self._peers.values() if x.is_open and x.role is role]
        if len(taken) >= self._most_peers.get(role, 0):
            busy = f"it serves another {role.value} ({', '.join(taken)})"
            self._answer(identity, "busy", busy if taken else f"it takes no {role.value}")
            return
        connection: RouterConnection[SendT, ReceiveT] = RouterConnection(
            f"the {role.value} at {frames[0].get('Peer-Address')}",
            self.receives, self._lock, self._socket, identity, role, self._take_in_for,
        )  # fmt: skip
        connection.inbox.append(frames)
        closed = [index for index, other in enumerate(self._connections) if other.is_closed]
        index = closed[0] if closed else len(self._connections)
        self._connections[index : index + 1] = [connection]
        self._peers = {i: x for i, x in self._peers.items() if not x.is_closed}
        self._peers[identity] = connection

    def _answer(self, identity: bytes, code: str, message: str) -> None:
        head = self._codec.encode(Failed(self._name, code, message)).head
        with contextlib.suppress(zmq.ZMQError):
            send_parts(self._socket, [identity, head])


class ZmqListener(PeerListener[FromRWorker, ToRWorker]):
    """An R-worker's socket."""

    receives = frozenset(get_args(ToRWorker))


def _role_of(head: memoryview) -> Role:
    """Return what the peer is whose first message this is. Raises ProtocolError: If it can't be
    read."""
    if kind_of(head) in _OF_PROMPT_STAGES:
        return Role.FEEDER
    greeting = Codec(_GREETINGS).decode_frames(head, (), bytearray)
    if isinstance(greeting, InstanceHello):
        return Role.CONTROLLER
    return greeting.role if isinstance(greeting, Hello) else Role.READER


def _refused(parameter: str, address: str, error: zmq.ZMQError) -> ConfigError:
    reason = explained(OSError(error.errno, error.strerror))
    return ConfigError(Given(parameter, address), f": {reason}")
