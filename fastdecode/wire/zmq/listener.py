"""An R-worker's end of the ZeroMQ transport: one socket, one S-worker at a time, and strangers."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Final, get_args

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.wire import codec
from fastdecode.wire.messages import Failed, FromRWorker, Hello, Inspect, ToRWorker
from fastdecode.wire.zmq.access import ClusterKey, check_address
from fastdecode.wire.zmq.hub import DEFAULT_SILENCE_S, ZmqConnection
from fastdecode.wire.zmq.line import LINGER_MS, RouterLine, Socket, set_options, wait_for

logger = logging.getLogger(__name__)

_ZAP_DOMAIN: Final = "fastdecode"


class ZmqListener:
    """An R-worker's socket, at which S-workers connect, one at a time.

    Args:
        address: tcp://HOST:PORT; the port may be * for any that is free.
        name: the R-worker's, for those who are told that it is busy.
        key: of the cluster; None: S-workers of this host only.
        silence_s: an S-worker that gives no sign of life for so long is lost.

    Raises:
        ConfigError: the address is none, is in use, or may not be used without a key.
    """

    def __init__(
        self, address: str, name: str, *, key: ClusterKey | None = None, silence_s: float = DEFAULT_SILENCE_S
    ) -> None:
        check_address(address, key, option="--bind")
        self._name = name
        self._lock = threading.RLock()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._served = b""  # the identity of the S-worker that is being served
        self._connection: ZmqConnection[FromRWorker, ToRWorker] | None = None
        self._num_dropped = 0
        set_options(self._socket, address, silence_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if key is not None:
            self._admit_only(key)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--bind={address!r}: {error.strerror}") from None

    @property
    def address(self) -> str:
        """With the port that was chosen."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def accept(self, timeout_s: float | None = None) -> ZmqConnection[FromRWorker, ToRWorker] | None:
        """The next S-worker that says Hello; None: none came in time. The connection before it has been closed."""
        assert self._connection is None or not self._connection.is_open
        self._served = b""
        return wait_for(self._accept, lambda: (self._socket,), self._lock, timeout_s)

    def close(self) -> None:
        """Stop listening."""
        if self._connection is not None:
            self._connection.close()
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _admit_only(self, key: ClusterKey) -> None:
        class Members:
            def callback(self, domain: str, public: bytes) -> bool:
                return public == key.public

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, Members())
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = key.secret, key.public
        self._socket.zap_domain = _ZAP_DOMAIN.encode()

    def _accept(self) -> ZmqConnection[FromRWorker, ToRWorker] | None:
        with self._lock:
            while (arrived := self._next()) is not None:
                identity, frame = arrived
                head = self._head_of(identity, frame)
                if head is not None and head.kind in (Hello, Inspect):
                    return self._serve(identity, frame, head.epoch)
        return None

    def _serve(self, identity: bytes, hello: zmq.Frame, epoch: int) -> ZmqConnection[FromRWorker, ToRWorker]:
        first = [hello]
        line = RouterLine(self._socket, identity, epoch, lambda: first.pop() if first else self._next_of_served())
        self._served = identity
        peer = f"the S-worker at {hello.get('Peer-Address')}"
        self._connection = ZmqConnection(line, peer, frozenset(get_args(ToRWorker)), self._lock)
        return self._connection

    def _next(self) -> tuple[bytes, zmq.Frame] | None:
        """The next frame of anybody."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(parts) == 2:
                return parts[0].bytes, parts[1]
            self._drop(f"{len(parts) - 1} frames where one belongs")

    def _next_of_served(self) -> zmq.Frame | None:
        while (arrived := self._next()) is not None:
            identity, frame = arrived
            if identity == self._served:
                return frame
            head = self._head_of(identity, frame)
            if head is not None and head.kind in (Hello, Inspect):
                busy = f"it serves another S-worker ({self._connection.peer if self._connection else 'unknown'})"
                self._answer(identity, Failed(self._name, "busy", busy), head.epoch)
        return None

    def _head_of(self, identity: bytes, frame: zmq.Frame) -> codec.Head | None:
        """What a stranger sent, if it is one of our messages."""
        try:
            return codec.read_head(frame.buffer) if len(frame.buffer) > 1 else None
        except ProtocolError as error:
            if error.code == "protocol_version":
                self._answer(identity, Failed(self._name, error.code, error.message), 0)
            self._drop(error.message)
            return None

    def _answer(self, identity: bytes, message: Failed, epoch: int) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, codec.encode(message, epoch=epoch).head], zmq.NOBLOCK)

    def _drop(self, reason: str) -> None:
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th, … so that no log is flooded
            logger.warning("%s: dropped what a stranger sent (%d so far): %s", self.address, self._num_dropped, reason)
