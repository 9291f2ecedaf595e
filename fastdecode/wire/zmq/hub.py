"""Hubs over ZeroMQ, for clusters without MPI and for R-workers that come and go.

An R-worker has one socket (ROUTER), bound to one address; an S-worker has one (DEALER) for each
R-worker. A connection that breaks is over: ZeroMQ would connect again by itself, but what was under
way is lost. Both sides' ZeroMQ threads exchange heartbeats whatever Python does, and give a silent
peer up. ZeroMQ drops what doesn't speak its protocol or hasn't the key.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from socket import gaierror
from typing import Any, Final, get_args

import zmq

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.blocks import ReadBlocks
from fastdecode.wire.codec import NAME, Codec, kind_of, read_prefix
from fastdecode.wire.instances import InstanceHello
from fastdecode.wire.messages import Failed, FromRWorker, Hello, Inspect, Message, ToRWorker
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.zmq.connection import (
    DEFAULT_SILENCE_S,
    SocketHub,
    ZmqConnection,
    receive_parts,
    send_parts,
)
from fastdecode.wire.zmq.keys import ClusterKey, check_address, connect_error, secure

logger = logging.getLogger(__name__)

_PROMPT_S: Final = 0.5
"""A peer that is not reached within this is asked why, over a TCP connection of its own."""
_MOST_TAKEN: Final = 100
"""Messages that a listener takes in before it looks at its connections, even in a flood."""
_ROLES: Final[dict[type[Message] | None, Role]] = {
    Inspect: Role.READER,
    ReadBlocks: Role.READER,
    InstanceHello: Role.CONTROLLER,
}
"""Of peers, by the kind of their first message. ``Hello`` says its own."""


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

    def reach(self, timeout_s: float) -> dict[int, WorkerError]:
        """Wait until every peer has been reached, and log what keeps one from it. Return why each
        of the others could not be, by index: for an unknown host or a refused key, at once."""
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
                if isinstance(error, gaierror) or not left_s:
                    within = "" if isinstance(error, gaierror) else f" within {timeout_s:g} s"
                    reasons[index] = WorkerError(
                        f"{what}{within}: {why}", code="worker_unreachable"
                    )
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
    most_peers: Mapping[Role, int] = MOST_PEERS
    may_grow = True

    def __init__(
        self,
        address: str,
        name: str,
        *,
        key: ClusterKey | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
        most_peers: Mapping[Role, int] | None = None,
    ) -> None:
        check_address(address, key, parameter="bind")
        super().__init__(key, silence_s=silence_s)
        self._name = name
        self.most_peers = most_peers or self.most_peers
        self._codec = Codec((Hello,))
        self._peers: dict[bytes, ZmqConnection] = {}  # by identity
        self._socket = self._make_socket(zmq.ROUTER, address)
        self._items: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._bell, zmq.POLLIN)]
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = secure(self._socket, key, is_server=True)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise _unusable("bind", address, error) from None
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        """With the port that was chosen."""

    def take_in(self, connection: ZmqConnection) -> None:
        self._take_in_all()
        if not connection.inbox:
            connection.ask()

    def _readable(self) -> list[tuple[Any, int]]:
        return self._items  # peers may come at any time

    def _poll_any(self) -> tuple[int, Any] | None:
        with self.lock:
            self._take_in_all()
            while (found := super()._poll_any()) is None:
                if not any(x.inbox and x.is_open for x in self.connections):
                    break
            return found

    def _take_in_all(self) -> None:
        """Give each connection what has arrived for it, and peers that greet a new one."""
        for _ in range(_MOST_TAKEN):
            if not zmq.zmq_poll(self._items[:1], 0):  # a third of what a receive takes that fails
                return
            parts = receive_parts(self._socket)
            if not parts:
                return
            identity, frames = parts[0].bytes, parts[1:]
            peer = self._peers.get(identity)
            if peer is not None and peer.is_open:
                peer.inbox.append(frames)
            elif len(frames[0]) > 1:  # else one that was lost speaks on
                try:
                    self._greet(identity, frames)
                except Exception as error:  # of a peer that is not a member, perhaps
                    self._refuse(identity, frames[0].buffer, error)

    def _greet(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Give a peer that says what it is a connection, if there is room for its role."""
        head = frames[0].buffer
        read_prefix(head)
        kind = kind_of(head)
        role = _ROLES.get(kind)
        if kind is Hello:
            greeting: Any = self._codec.decode(head, frames=frames[1:])
            role = greeting.role
        if role is None:
            return  # one that was lost speaks on
        taken = [x.peer for x in self.connections if x.is_open and x.role is role]
        if len(taken) >= self.most_peers.get(role, 0):
            others = f"serves another {role.value} ({', '.join(taken)})"
            why = f"it {others}" if taken else f"it takes no {role.value}"
            raise ProtocolError(why, code="busy")
        peer = f"the {role.value} at {frames[0].get('Peer-Address')}"
        connection = ZmqConnection(self, peer, self._socket, [identity])
        connection.role = role
        connection.inbox.append(frames)
        closed = [index for index, other in enumerate(self.connections) if not other.readable]
        index = closed[0] if closed else len(self.connections)
        self.connections[index : index + 1] = [connection]
        self._peers = {x.route[0]: x for x in self.connections if x.is_open}

    def _refuse(self, identity: bytes, head: memoryview, error: Exception) -> None:
        """Say why to a peer that speaks as we do."""
        if not isinstance(error, ProtocolError) or bytes(head[:3]) != NAME:
            logger.debug("%s: what a stranger sent is dropped: %s", self.address, error)
            return
        logger.warning("%s: a peer is refused: %s", self.address, error)
        answer = self._codec.encode(Failed(self._name, error.code, error.message))
        with contextlib.suppress(zmq.ZMQError):
            send_parts(self._socket, [identity, answer.head])


def _unusable(parameter: str, address: str, error: zmq.ZMQError) -> ConfigError:
    reason = explained(OSError(error.errno, error.strerror))
    return ConfigError(Given(parameter, address), f": {reason}")
