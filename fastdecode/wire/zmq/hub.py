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
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, Generic, get_args

import zmq

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.blocks import FetchChunk
from fastdecode.wire.codec import NAME, Codec, kind_of, read_prefix
from fastdecode.wire.instances import InstanceHello
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
    MORE_FOLLOWS,
    Bell,
    DealerConnection,
    ReceiveT,
    RouterConnection,
    SendT,
    receive_parts,
    set_options,
    wait_for,
)
from fastdecode.wire.zmq.keys import (
    ClusterKey,
    Socket,
    admit_only,
    check_address,
    connect_error,
    lookup_error,
)

logger = logging.getLogger(__name__)

DEFAULT_SILENCE_S: Final = 5.0
_PROMPT_S: Final = 0.5
"""A peer that is not reached within this is asked why, over a TCP connection of its own."""
_PROBE_S: Final = 0.25
_MOST_PARTS: Final = 320
"""Of a message: its sender's identity, its head, and arrays in frames of at most 4 MiB."""
_ANSWER_INTERVAL_S: Final = 0.02
"""Between answers to one peer without a connection: those that it doesn't read stay in memory."""
_MOST_ANSWERED: Final = 1024
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


class DealerHub(Generic[SendT, ReceiveT]):
    """Connections to peers at addresses; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        key: The cluster's. None for peers of this host only.
        silence_s: A peer without a sign of life for this long is lost.
        num_io_threads: Threads that encrypt and copy.
    """

    peer_kind: ClassVar[str]
    """In front of peers' addresses."""
    command: ClassVar[str]
    """That is to run there."""
    parameter: ClassVar[str]
    """That gave the addresses."""
    receives: ClassVar[frozenset[type[Message]]]

    def __init__(
        self,
        key: ClusterKey | None = None,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
        num_io_threads: int = 1,
    ) -> None:
        self._bell = Bell()
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context(num_io_threads)
        self._lock = threading.RLock()
        self._connections: list[DealerConnection[SendT, ReceiveT]] = []
        self._addresses: list[str] = []
        self._outside: set[DealerConnection[SendT, ReceiveT]] = set()
        """Open connections without an index: candidates, and what ``connect`` made."""
        self._first = 0

    @property
    def connections(self) -> Sequence[DealerConnection[SendT, ReceiveT]]:
        return self._connections  # itself: it is asked for with every message

    @property
    def num_connections(self) -> int:
        """Open connections of ``connect`` and ``reconnect``."""
        return len(self._outside)

    def add(self, address: str) -> DealerConnection[SendT, ReceiveT]:
        """Connect to an address. Never waits: the peer needn't be there yet, and one that can't be
        reached doesn't answer. The connection keeps its index, closed or not, until it is replaced.

        Raises:
            ConfigError: If the address is none, or may not be used without a key.
        """
        self._connections.append(self._connect(address))
        self._addresses.append(address)
        return self._connections[-1]

    def reconnect(self, index: int) -> DealerConnection[SendT, ReceiveT]:
        """Connect to the same address, for the process that is there now. The connection has no
        index before ``replace``; closed, it leaves the hub."""
        return self.connect(self._addresses[index])

    def connect(self, address: str, line: int = 0) -> DealerConnection[SendT, ReceiveT]:
        """Connect without an index: ``receive_any`` doesn't read it. Closed, it leaves the hub.

        Raises:
            ConfigError: See ``add``.
        """
        connection = self._connect(address)
        self._outside.add(connection)
        return connection

    def replace(self, index: int, connection: DealerConnection[SendT, ReceiveT]) -> None:
        """Give a connection of ``reconnect`` the index of the one before it, which is closed."""
        self._outside.remove(connection)
        self._connections[index].close()
        self._connections[index] = connection

    def _connect(self, address: str) -> DealerConnection[SendT, ReceiveT]:
        check_address(address, self._key, parameter=self.parameter)
        try:
            return DealerConnection(
                self._context, address, self._key, self._silence_s, f"{self.peer_kind} {address}",
                self.receives, self._lock, self._outside.discard,
            )  # fmt: skip
        except zmq.ZMQError as error:
            raise ConfigError(
                Given(self.parameter, address),
                f": {explained(OSError(error.errno, error.strerror))}",
            ) from None

    def reach(self, timeout_s: float) -> dict[int, WorkerError]:
        """Wait until every peer has been reached, and log what keeps one from it.

        Returns:
            Why each of the others could not be reached, by index. A host name that does not
            resolve, and a refused key, are not waited for.
        """
        reasons: dict[int, WorkerError] = {}
        for index, connection in enumerate(self._connections):
            if why := lookup_error(self._addresses[index]):
                reasons[index] = _unreachable(connection.peer, why)

        def all_known() -> bool | None:
            for index, connection in enumerate(self._connections):
                try:
                    connection.check()
                except WorkerError as error:
                    reasons[index] = error
            known = [x.is_reached or index in reasons for index, x in enumerate(self._connections)]
            return True if all(known) else None

        def wait(seconds: float) -> None:
            wait_for(all_known, self._open_sockets, self._lock, seconds)

        def failures() -> dict[int, str]:
            """Ask the system about those that are still missing."""
            missing = [i for i, x in enumerate(self._connections) if not x.is_reached]
            missing = [i for i in missing if i not in reasons]
            with ThreadPoolExecutor(max(1, len(missing))) as pool:
                ask = partial(connect_error, timeout_s=_PROBE_S)
                whys = pool.map(ask, [self._addresses[i] for i in missing])
                return dict(zip(missing, whys, strict=True))

        wait(min(_PROMPT_S, timeout_s))
        left_s = timeout_s - _PROMPT_S
        if left_s > 0:
            for index, why in failures().items():
                if why:
                    peer = self._connections[index].peer
                    logger.warning(
                        "can't reach %s yet, trying for %g s more: %s", peer, left_s, why
                    )
            wait(left_s)
        for index, why in failures().items():
            why = why or f"does {self.command} run there, and is the network open?"
            reasons[index] = _unreachable(self._connections[index].peer, why, timeout_s)
        return reasons

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        """See ``Hub``; ``wake`` ends it like a deadline."""
        waiting = self._poll_any, self._open_sockets, self._lock, timeout_s, self._bell
        received = wait_for(*waiting)
        if received is None:
            names = " or ".join(x.peer for x in self._connections if x.is_open)
            raise timeout_error(names, timeout_s or 0.0)
        return received

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up; any thread."""
        self._bell.ring()

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        for connection in (*self._connections, *self._outside):
            connection.close()
        self._context.term()
        self._bell.close()

    def _open_sockets(self) -> list[Socket]:
        return [
            socket
            for connection in self._connections
            if connection.is_open
            for socket in connection.sockets
        ]

    def _poll_any(self) -> tuple[int, ReceiveT] | None:
        """Ask every open connection, each call starting behind the one that answered last."""
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


def _unreachable(peer: str, why: str, timeout_s: float | None = None) -> WorkerError:
    within = "" if timeout_s is None else f" within {timeout_s:g} s"
    return WorkerError(f"can't reach {peer}{within}: {why}", code="worker_unreachable")


class ZmqHub(DealerHub[ToRWorker, FromRWorker]):
    """Connections to R-workers, of an S-worker or of another R-worker
    (``rworker.transfers.neighbours.Neighbours``)."""

    peer_kind = "R-worker"
    command = "fastdecode r-worker --bind"
    parameter = "r_worker_addresses"
    receives = frozenset(get_args(FromRWorker))

    def expect(self, address: str, line: int) -> None:
        """Any process with the key may connect at any time."""


class PeerListener(Generic[SendT, ReceiveT]):
    """A socket at which peers connect; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        address: tcp://HOST:PORT; the port may be * for any that is free.
        name: Of its owner, for peers that are refused.
        key: The cluster's. None for peers of this host only.
        silence_s: A peer without a sign of life for this long is lost.
        most_peers: Of each role; one that is missing isn't accepted.

    Raises:
        ConfigError: If the address is none, is in use, or may not be used without a key.
    """

    receives: ClassVar[frozenset[type[Message]]]

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
        self._name = name
        self._codec = Codec((Failed,))
        self._most_peers = most_peers
        self._bell = Bell()
        self._lock = threading.RLock()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._readable = [(self._socket, zmq.POLLIN)]
        self._connections: list[RouterConnection[SendT, ReceiveT]] = []
        self._index_of: dict[bytes, int] = {}  # by identity
        self._first = 0
        self._answered_s: dict[bytes, float] = {}  # by identity, of peers without a connection
        self._num_dropped = 0
        set_options(self._socket, address, silence_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = admit_only(self._context, self._socket, key)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                Given("bind", address), f": {explained(OSError(error.errno, error.strerror))}"
            ) from None

    @property
    def address(self) -> str:
        """With the port that was chosen."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def connections(self) -> Sequence[RouterConnection[SendT, ReceiveT]]:
        """The place of one that this side has closed goes to the next peer."""
        return self._connections

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        """See ``Hub``. Others may come at any time, so that it waits where no peer is left."""
        waiting = self._look, lambda: (self._socket,), self._lock, timeout_s, self._bell
        received = wait_for(*waiting)
        if received is None:
            raise timeout_error(f"every peer of {self.address}", timeout_s or 0.0)
        return received

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up, as if its time
        were over; any thread."""
        self._bell.ring()

    def close(self) -> None:
        """Close every connection, and stop listening."""
        for connection in self._connections:
            connection.close()
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._bell.close()

    def _look(self) -> tuple[int, ReceiveT] | None:
        """Each call starts behind the one that answered last."""
        with self._lock:
            while True:
                for i in range(len(self._connections)):
                    index = (self._first + i) % len(self._connections)
                    connection = self._connections[index]
                    if not (connection.inbox and connection.is_open):
                        continue
                    try:
                        message = connection.poll()
                    except WorkerError as error:
                        raise PeerLostError(index, error) from None
                    if message is not None:
                        self._first = index + 1
                        return index, message
                if not self._take_in_one():
                    break
            for index, connection in enumerate(self._connections):
                if connection.is_open:  # and nothing is left to read of it
                    try:
                        connection.check()
                    except WorkerError as error:
                        connection.is_open = False
                        raise PeerLostError(index, error) from None
            return None

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
        index = self._index_of.get(identity)
        if index is not None and self._connections[index].is_open:
            self._connections[index].inbox.append(frames)
            return True
        try:
            self._greet(identity, frames)
        except Exception as error:  # of a peer that is no member, perhaps
            logger.debug("what a peer without a connection sent can't be read", exc_info=True)
            self._refuse(identity, frames, error)
        return True

    def _greet(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Give a peer that says what it is a connection, if there is room for its role."""
        head = frames[0].buffer
        if len(head) <= 1 or (read_prefix(head) and kind_of(head) not in _GREETINGS):
            return  # a peer that was lost speaks on
        role = _role_of(head)
        taken = [x for x in self._connections if x.is_open and x.role is role]
        if len(taken) >= self._most_peers.get(role, 0):
            whom = f" ({', '.join(connection.peer for connection in taken)})" if taken else ""
            busy = f"it serves another {role.value}{whom}" if taken else f"it takes no {role.value}"
            self._answer(identity, "busy", busy)
            return
        peer = f"the {role.value} at {frames[0].get('Peer-Address')}"
        connection: RouterConnection[SendT, ReceiveT] = RouterConnection(
            self._socket, identity, role, self._take_in_for, peer, self.receives, self._lock
        )
        connection.inbox.append(frames)
        closed = [index for index, other in enumerate(self._connections) if other.is_closed]
        index = closed[0] if closed else len(self._connections)
        if closed:
            self._index_of.pop(self._connections[index].identity, None)
        self._connections[index : index + 1] = [connection]
        self._index_of[identity] = index

    def _refuse(self, identity: bytes, frames: Sequence[zmq.Frame], error: Exception) -> None:
        """Drop what a peer sent, and say why if it speaks as we do. The log has the 1st, 2nd, 4th,
        8th, …, so that it isn't flooded."""
        if isinstance(error, ProtocolError) and bytes(frames[0].buffer[:3]) == NAME:
            self._answer(identity, error.code, error.message)
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:
            logger.warning(
                "%s: dropped what a stranger sent (%d so far): %s",
                self.address, self._num_dropped, error,
            )  # fmt: skip

    def _answer(self, identity: bytes, code: str, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self._answered_s.get(identity, 0.0) < _ANSWER_INTERVAL_S:
            return
        if len(self._answered_s) >= _MOST_ANSWERED:
            self._answered_s.clear()
        self._answered_s[identity] = now_s
        head = self._codec.encode(Failed(self._name, code, message)).head
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(identity, MORE_FOLLOWS)
            self._socket.send(head, zmq.NOBLOCK)


def _role_of(head: memoryview) -> Role:
    """Return what the peer is whose first message this is. Raises ProtocolError: If it can't be
    read."""
    if kind_of(head) in _OF_PROMPT_STAGES:
        return Role.FEEDER
    greeting = Codec(_GREETINGS).decode(head)
    if isinstance(greeting, InstanceHello):
        return Role.CONTROLLER
    return greeting.role if isinstance(greeting, Hello) else Role.READER


class ZmqListener(PeerListener[FromRWorker, ToRWorker]):
    """An R-worker's socket."""

    receives = frozenset(get_args(ToRWorker))
