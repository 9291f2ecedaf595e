"""Connections over ZeroMQ, for clusters without MPI and for R-workers that come
and go.

Every R-worker has one socket (ROUTER), bound to one address; an S-worker has
one (DEALER) for each R-worker. A message is one ZeroMQ message, head and body
in one piece, or, where that would be longer than ``MAX_FRAME_BYTES``, several:
its head, then its body in chunks. So nobody, known or not, can make us take
more memory at a time. Two more are known: an empty one, this side has closed;
and one of a single byte, which an R-worker that waits sends now and then to
learn whether its S-worker is still there.

**A connection that breaks is over.** ZeroMQ would connect again by itself, but
what was under way is lost, and a connection is lossless or nothing. Whoever
connects next begins a new one, under a number of its own (the ``epoch`` of
every head), so that nothing of the old can be taken for the new.

**An R-worker has several peers**, which it accepts by role, so many of each;
one too many is answered ``Failed`` (busy). There is room again when a peer has
closed, died (noticed at once), or been silent for ``silence_s``: both sides'
ZeroMQ threads exchange heartbeats whatever Python does, and give the other up
without them.

**What isn't for us is dropped**: what doesn't speak ZeroMQ or hasn't the key,
by ZeroMQ; what doesn't speak our protocol, here, with a line in the log. What
breaks the protocol within a connection ends that connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, get_args

import zmq

from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.core.os_errors import explained
from fastdecode.wire.messages import FromRWorker, Message, ToRWorker
from fastdecode.wire.transport import PeerLostError, closed_error, timeout_error
from fastdecode.wire.zmq.connection import ReceiveT, SendT, ZmqConnection
from fastdecode.wire.zmq.keys import (
    ClusterKey,
    Socket,
    check_address,
    connect_error,
    lookup_error,
)
from fastdecode.wire.zmq.line import Bell, DealerLine, wait_for

logger = logging.getLogger(__name__)

DEFAULT_SILENCE_S: Final = 5.0
_PROMPT_S: Final = 0.5
"""A peer that is not reached within this is asked why, over a TCP connection of its own."""
_PROBE_S: Final = 0.25


@dataclass(frozen=True)
class Others:
    """What a hub's peers are."""

    name: str
    """In front of their addresses."""
    command: str
    """That is to run there."""
    parameter: str
    """That gave their addresses."""
    says: frozenset[type[Message]]


R_WORKERS: Final = Others(
    "R-worker", "fastdecode r-worker --bind", "r_worker_addresses", frozenset(get_args(FromRWorker))
)


class DealerHub(Generic[SendT, ReceiveT]):
    """Connections to peers at addresses; see ``fastdecode.wire.transport.Hub``.
    Close it when done.

    Args:
        key: of the cluster; None: peers of this host only.
        silence_s: one that gives no sign of life for so long is lost.
        others: what they are.
        num_io_threads: that encrypt and copy; connections are dealt out to them.
    """

    def __init__(
        self,
        key: ClusterKey | None,
        silence_s: float,
        others: Others,
        num_io_threads: int = 1,
    ) -> None:
        self._others = others
        self._bell = Bell()
        self._key = key
        self._silence_s = silence_s
        self._context: zmq.Context[Socket] = zmq.Context(num_io_threads)
        self._lock = threading.RLock()
        self._connections: list[ZmqConnection[SendT, ReceiveT]] = []
        self._addresses: list[str] = []
        self._outside: set[ZmqConnection[SendT, ReceiveT]] = set()
        """Open connections without an index: candidates, and what ``open`` made."""
        self._first = 0

    @property
    def connections(self) -> Sequence[ZmqConnection[SendT, ReceiveT]]:
        return self._connections  # itself: it is asked for with every message

    @property
    def num_outside(self) -> int:
        """Open connections of ``open`` and ``reconnect``."""
        return len(self._outside)

    def add(self, address: str) -> ZmqConnection[SendT, ReceiveT]:
        """A connection to the peer at an address, at any time. Never waits: it
        needn't be there yet, and one that can't be reached doesn't answer. It
        keeps its index in the hub, closed or not, until it is replaced.

        Raises:
            ConfigError: the address is none, or may not be used without a key.
        """
        self._connections.append(self._connect(address))
        self._addresses.append(address)
        return self._connections[-1]

    def reconnect(self, index: int) -> ZmqConnection[SendT, ReceiveT]:
        """Another connection to the same address, for the process that is there
        now. It has no index before ``replace``; closed, it leaves the hub."""
        return self.open(self._addresses[index])

    def open(self, address: str) -> ZmqConnection[SendT, ReceiveT]:
        """A connection that has no index: ``receive_any`` doesn't read it.
        Closed, it leaves the hub.

        Raises:
            ConfigError: see ``add``.
        """
        connection = self._connect(address)
        self._outside.add(connection)
        return connection

    def replace(self, index: int, connection: ZmqConnection[SendT, ReceiveT]) -> None:
        """Give a connection that came of ``reconnect`` the index of the one
        before it, which is closed."""
        self._outside.remove(connection)
        self._connections[index].close()
        self._connections[index] = connection

    def _connect(self, address: str) -> ZmqConnection[SendT, ReceiveT]:
        others = self._others
        check_address(address, self._key, parameter=others.parameter)
        try:
            line = DealerLine(self._context, address, self._key, self._silence_s)
        except zmq.ZMQError as error:
            raise ConfigError(
                Given(others.parameter, address),
                f": {explained(OSError(error.errno, error.strerror))}",
            ) from None
        name = f"{others.name} {address}"
        return ZmqConnection(line, name, others.says, self._lock, self._outside.discard)

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
            why = why or f"does {self._others.command} run there, and is the network open?"
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
        """Have whoever waits in ``receive_any`` look up, or who does so next; any
        thread."""
        self._bell.ring()

    def close(self) -> None:
        """Close every connection, and see off what was sent over them, for a
        few seconds at most."""
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
        """Asks every open connection, each call starting behind the one that answered last."""
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
    """An S-worker's connections to R-workers.

    Args:
        key, silence_s, num_io_threads: see ``DealerHub``.
    """

    def __init__(
        self,
        key: ClusterKey | None = None,
        *,
        silence_s: float = DEFAULT_SILENCE_S,
        num_io_threads: int = 1,
    ) -> None:
        super().__init__(key, silence_s, R_WORKERS, num_io_threads)
