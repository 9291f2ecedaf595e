"""The listening end of the ZeroMQ transport, as R-workers have it: one socket,
peers that are accepted by role."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Final, Generic, get_args

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.codec import Codec, Prefix, kind_of
from fastdecode.wire.instances.messages import InstanceHello
from fastdecode.wire.kv.chunks import FetchChunk
from fastdecode.wire.messages import (
    FromRWorker,
    Greeting,
    Hello,
    Message,
    StorePrompt,
    ToRWorker,
)
from fastdecode.wire.patience import Pump
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError, timeout_error
from fastdecode.wire.zmq.access import ClusterKey, check_address
from fastdecode.wire.zmq.admission import admit_only
from fastdecode.wire.zmq.connection import ReceiveT, SendT, ZmqConnection
from fastdecode.wire.zmq.doors import MOST_PARTS, Door, ProvingDoor
from fastdecode.wire.zmq.hub import DEFAULT_SILENCE_S
from fastdecode.wire.zmq.line import LINGER_MS, Bell, RouterLine, Socket, set_options, wait_for
from fastdecode.wire.zmq.peer_slots import ListenerPeer, PeerSlots
from fastdecode.wire.zmq.strangers import Strangers

logger = logging.getLogger(__name__)

_PUMP_INTERVAL_S: Final = 0.01
_FRAMES_A_TURN: Final = 256
_OF_PROMPT_STAGES: Final = StorePrompt, FetchChunk
_GREETINGS: Final = (*get_args(Greeting), InstanceHello, *_OF_PROMPT_STAGES)


class PeerListener(Generic[SendT, ReceiveT]):
    """A socket at which peers connect; see
    ``fastdecode.wire.transport.Hub``. Close it when done.

    While the caller computes, a thread goes on taking in what
    arrives: strangers' frames are dropped before they pile up.

    Args:
        address: tcp://HOST:PORT; the port may be * for any that is free.
        name: whose it is, for those who are told that it is busy.
        hears: the messages that peers may send.
        key: of the cluster; None: peers of this host only.
        silence_s: a peer that gives no sign of life for so long is lost.
        most_peers: of each role; a role that isn't there isn't accepted.

    Raises:
        ConfigError: the address is none, is in use, or may not be used without
            a key.
    """

    def __init__(
        self,
        address: str,
        name: str,
        hears: frozenset[type[Message]],
        *,
        key: ClusterKey | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
        most_peers: Mapping[Role, int] = MOST_PEERS,
    ) -> None:
        self._hears = hears
        self._bell = Bell()
        check_address(address, key, parameter="bind")
        self._most_peers = most_peers
        self._lock = threading.RLock()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._pump: Pump | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._readable = [(self._socket, zmq.POLLIN)]
        self._places: PeerSlots[SendT, ReceiveT] = PeerSlots()
        self._door = Door(self._socket)
        if key is not None and not key.encrypts:
            self._door = ProvingDoor(self._socket, key.for_proofs, self._places.open_line)
        self._strangers = Strangers(self._socket, name, self._door)
        set_options(self._socket, address, silence_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if key is not None:
            self._authenticator = admit_only(self._context, self._socket, key)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                Given("bind", address), f": {explained(OSError(error.errno, error.strerror))}"
            ) from None
        self._pump = Pump(self._take_in_while_busy, _PUMP_INTERVAL_S)
        self._pump.start()
        self._pump.wake()

    @property
    def address(self) -> str:
        """With the port that was chosen."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def connections(self) -> tuple[ZmqConnection[SendT, ReceiveT], ...]:
        return self._places.connections

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        """See ``Hub``. Others may come at any time, so that it waits where no peer is left."""
        waiting = self._look, lambda: (self._socket,), self._lock, timeout_s, self._bell
        received = wait_for(*waiting)
        if received is None:
            raise timeout_error(f"every peer of {self.address}", timeout_s or 0.0)
        return received

    def wake(self) -> None:
        """Have whoever waits in ``receive_any`` look up, or who does so next, as
        if its time were over; any thread."""
        self._bell.ring()

    def accept(self, timeout_s: float | None = None) -> ZmqConnection[SendT, ReceiveT] | None:
        """The next peer that greets; None: none came in time."""
        return wait_for(self._accept, lambda: (self._socket,), self._lock, timeout_s)

    def close(self) -> None:
        """Close every connection, and stop listening."""
        if self._pump is not None:
            self._pump.stop()
        for connection in self._places.connections:
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
                for index, peer in self._places.in_turn():
                    message = _polled(index, peer)
                    if message is not None:
                        self._places.begin_behind(index)
                        return index, message
                if not self._take_in_one():
                    break
            for index, connection in enumerate(self._places.connections):
                if connection.is_open:  # and nothing is left to read of it
                    try:
                        connection.check()
                    except WorkerError as error:
                        connection.is_open = False
                        raise PeerLostError(index, error) from None
            return None

    def _accept(self) -> ZmqConnection[SendT, ReceiveT] | None:
        with self._lock:
            while not self._places.has_new and self._take_in_one():
                pass
            return self._places.take_new() if self._places.has_new else None

    def _take_in_while_busy(self) -> bool:
        """The pump's work: whoever looks holds the lock, and takes in what arrives itself."""
        if self._lock.acquire(blocking=False):
            try:
                for _ in range(_FRAMES_A_TURN):
                    if not self._take_in_one():
                        break
            finally:
                self._lock.release()
        return True

    def _take_in_for(self, wanted: RouterLine) -> None:
        while not wanted.has_news and self._take_in_one():
            pass

    def _take_in_one(self) -> bool:
        """Take one frame from the socket, and give it to its line, or to a new
        one; lock held. False: none is there."""
        if not zmq.zmq_poll(self._readable, 0):  # a third of what a receive takes that fails
            return False
        try:
            parts = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return False
        while parts[-1].more:  # recv_multipart asks the socket, which takes longer
            part = self._socket.recv(copy=False)
            if len(parts) > MOST_PARTS:
                parts.pop()  # the message is refused: its parts are not kept
            parts.append(part)
        identity = parts[0].bytes
        try:
            frame = self._door.take(identity, parts[1:])
        except ProtocolError as error:
            self._strangers.drop(error.message)
            return True
        try:
            if frame is not None:
                self._arrive(identity, frame)
        except Exception as error:
            logger.debug("a frame can't be read", exc_info=True)
            self._strangers.drop(f"{type(error).__name__}: {error}")
        return True

    def _arrive(self, identity: bytes, frame: zmq.Frame) -> None:
        """A frame to its line, or to a new one; lock held."""
        line = self._places.open_line(identity)
        if line is not None:
            line.arrive(frame)
            return
        prefix = self._strangers.prefix_of(identity, frame)
        if prefix is not None and kind_of(frame.buffer) in _GREETINGS:
            self._greet(identity, frame, prefix)

    def _greet(self, identity: bytes, frame: zmq.Frame, prefix: Prefix) -> None:
        """Somebody says who it is. It gets a connection, if there is room for its role."""
        try:
            role = _role_of(frame)
        except ProtocolError as error:
            self._strangers.refuse(identity, frame, error)
            return
        taken = self._places.open_in(role)
        if len(taken) >= self._most_peers.get(role, 0):
            whom = f" ({', '.join(connection.peer for connection in taken)})" if taken else ""
            busy = f"it serves another {role.value}{whom}" if taken else f"it takes no {role.value}"
            self._strangers.answer(identity, "busy", busy, prefix.epoch)
            return
        send = partial(self._door.send, identity)
        line = RouterLine(self._socket, send, prefix.epoch, self._take_in_for)
        line.arrive(frame)
        peer = f"the {role.value} at {frame.get('Peer-Address')}"
        connection = ZmqConnection[SendT, ReceiveT](line, peer, self._hears, self._lock)
        self._places.add(ListenerPeer(identity, line, role, connection))


def _polled(index: int, peer: ListenerPeer[SendT, ReceiveT]) -> ReceiveT | None:
    """What a peer has sent that has been taken in. Raises PeerLostError."""
    connection = peer.connection
    if not (peer.line.has_news and connection.is_open):
        return None
    try:
        return connection.poll()
    except WorkerError as error:
        connection.is_open = False
        raise PeerLostError(index, error) from None


def _role_of(frame: zmq.Frame) -> Role:
    """Of the peer whose first message this is. A prompt stage's may be in several frames,
    of which this is the first. Raises ProtocolError: another message can't be read."""
    if kind_of(frame.buffer) in _OF_PROMPT_STAGES:
        return Role.FEEDER
    greeting = Codec(_GREETINGS).decode(np.frombuffer(frame, np.uint8))
    if isinstance(greeting, InstanceHello):
        return Role.CONTROLLER
    return greeting.role if isinstance(greeting, Hello) else Role.READER


class ZmqListener(PeerListener[FromRWorker, ToRWorker]):
    """An R-worker's socket.

    Args:
        address, name, key, silence_s, most_peers: see ``PeerListener``.
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
        hears = frozenset(get_args(ToRWorker))
        super().__init__(address, name, hears, key=key, silence_s=silence_s, most_peers=most_peers)
