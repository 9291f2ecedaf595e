"""What every transport offers: a connection to one peer, and a hub that waits for any of several.

**Arrays.** Sending a message lends its arrays to the receiver until the receiver answers, so that
no transport has to copy, and every transport may use the same buffers again:

- The sender of an ``Attend`` leaves q, k and v alone until its ``AttendResult`` is here. The sender
  of a ``BeginStep`` leaves its arrays alone until the step's first ``AttendResult``.
- The receiver of an ``AttendResult`` may read o and lse, in place, until it sends the lane's next
  ``Attend`` that has queries. It copies what it keeps for longer.
- A received array is read-only.

**Errors.** A closed or failed peer, and a deadline that passes, raise ``WorkerError``, which names
the peer. Its code is ``CLOSED`` or ``TIMEOUT``. After a timeout the answer may still come. Messages
that a peer sent before it closed are received first, and then every call raises ``CLOSED``.

**Threads.** A connection, and all connections of one hub, belong to one thread. Any thread may
call ``close`` at any time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.wire.waiting import look_until_found

logger = logging.getLogger(__name__)

SendT_contra = TypeVar("SendT_contra", contravariant=True)
ReceiveT_co = TypeVar("ReceiveT_co", covariant=True)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

CLOSED = "connection_closed"
TIMEOUT = "worker_timeout"
_LOOK_S: Final = 1e-3
"""Seconds between two looks at peers that move KV, while others are waited for."""


class Connection(Protocol[SendT_contra, ReceiveT_co]):
    """One side of a two-way, ordered, lossless link to one peer."""

    @property
    def peer(self) -> str:
        """Name of the peer for people: a thread's name, a rank, an address."""

    @property
    def heard_s(self) -> float | None:
        """Time of the peer's last heartbeat on ``time.monotonic``. None if it sends none: it can't
        hang alone, or the transport closes the connection to a silent peer."""

    def send(self, message: SendT_contra) -> None:
        """Send the message, without waiting for the peer to take it.

        Raises:
            WorkerError: (``CLOSED``) If this side or the peer has closed.
        """

    def receive(self, timeout_s: float | None = None) -> ReceiveT_co:
        """Wait for the peer's next message, with or without a deadline.

        Raises:
            WorkerError: (``CLOSED``) If nothing more will come; (``TIMEOUT``) if nothing came.
        """

    def poll(self) -> ReceiveT_co | None:
        """Return the peer's next message, or None; never waits.

        Raises:
            WorkerError: (``CLOSED``) If nothing more will come.
        """

    def close(self) -> None:
        """Close this side, and wake the threads that wait on either. It may be called twice."""


class Hub(Protocol[SendT_contra, ReceiveT_co]):
    """Connections that one thread serves together."""

    @property
    def connections(self) -> Sequence[Connection[SendT_contra, ReceiveT_co]]:
        """Connections in the order in which they were made, closed ones included, so that an index
        keeps its meaning."""

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT_co]:
        """Return the index of a connection and its next message, in order of arrival.

        Raises:
            PeerLostError: If nothing more will come over one connection; once for each.
            WorkerError: (``CLOSED``) If no connection is open; (``TIMEOUT``) if nothing came.
        """


class PeerLostError(WorkerError):
    """The peer at a hub's connection ``index`` has closed it, is dead or silent, or broke the
    protocol."""

    def __init__(self, index: int, error: WorkerError) -> None:
        super().__init__(error.message, code=error.code)
        self.index = index


def unreadable(peer: str, error: Exception) -> WorkerError:
    """Return the error for a message that can't be read, which ends that connection alone. The
    mistake is the peer's (ProtocolError), or one of this side that no reader expects."""
    if isinstance(error, ProtocolError):
        return WorkerError(f"{peer} broke the protocol: {error}", code=error.code)
    logger.error("what %s sent can't be read", peer, exc_info=error)
    what = f"{type(error).__name__}: {error}"
    return WorkerError(f"{peer} sent what can't be read: {what}", code=ProtocolError.default_code)


def closed_error(peer: str, *, by_peer: bool) -> WorkerError:
    if by_peer:
        return WorkerError(
            f"{peer} has closed the connection: it ended or crashed; see its log", code=CLOSED
        )
    return WorkerError(f"the connection to {peer} was closed on this side", code=CLOSED)


def loss(peer: str, error: FastDecodeError) -> str:
    """Return a text that a peer is lost, and why. The error may name the peer, or its loss."""
    if not error.message.startswith(f"{peer} "):
        return f"{peer} is lost: {error.message}"
    reason = error.message.removeprefix(f"{peer} ")
    return (
        f"{peer} is lost: "
        f"{reason.removeprefix('is lost: ') if reason.startswith('is lost: ') else f'it {reason}'}"
    )


def timeout_error(peer: str, timeout_s: float) -> WorkerError:
    return WorkerError(
        f"{peer} sent nothing for {timeout_s:g} s: it hangs, is overloaded, or can't be reached",
        code=TIMEOUT,
    )


class PolledHub(Generic[SendT, ReceiveT]):
    """Connections whose peers work in this thread when they are polled: they answer at once, or
    never. One that moves KV (``is_busy``) may report on that at any time."""

    def __init__(self, connections: Sequence[Any]) -> None:
        self.connections: Sequence[Any] = tuple(connections)
        self._over: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return any(connection.is_busy for connection in self.connections)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        for index, connection in enumerate(self.connections):
            if index in self._over:
                continue
            try:
                message = connection.poll()
            except WorkerError as error:
                self._over.add(index)
                raise PeerLostError(index, error) from None
            if message is not None:
                return index, message
        peers = ", ".join(connection.peer for connection in self.connections)
        if len(self._over) == len(self.connections):
            raise closed_error(peers, by_peer=True)
        raise timeout_error(peers, timeout_s or 0.0)


class JoinedHub(Generic[SendT, ReceiveT]):
    """The connections of the first hub, and behind them those of the others;
    see ``fastdecode.wire.transport.Hub``. All but the last keep their number of
    connections. Waiting is looking at all of them in turn, politely
    (``fastdecode.wire.waiting``): no transport can wait for another. If all but the last are
    polled (``PolledHub``), it waits in the last, and not for long while one of them is busy.
    """

    def __init__(self, *hubs: Hub[SendT, ReceiveT]) -> None:
        self._hubs, self._next = hubs, 0
        self._polled = [hub for hub in hubs[:-1] if isinstance(hub, PolledHub)]

    @property
    def connections(self) -> Sequence[Connection[SendT, ReceiveT]]:
        return [connection for hub in self._hubs for connection in hub.connections]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        last = len(self._hubs) - 1
        if len(self._polled) < last:
            found = look_until_found(partial(self._look, last + 1), timeout_s)
            if found is None:
                raise timeout_error(" or ".join(x.peer for x in self.connections), timeout_s or 0.0)
            return found
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            was_busy = any(hub.is_busy for hub in self._polled)
            found = self._look(last)  # which ends or begins a transfer
            if found is not None:
                return found
            left_s = max(0.0, end_s - time.monotonic())
            is_busy = was_busy or any(hub.is_busy for hub in self._polled)
            turns = is_busy and left_s > _LOOK_S
            wait_s = _LOOK_S if turns else None if timeout_s is None else left_s
            try:
                return self._receive(last, wait_s)
            except WorkerError as error:
                if not turns or error.code != TIMEOUT or isinstance(error, PeerLostError):
                    raise

    def _look(self, num_hubs: int) -> tuple[int, ReceiveT] | None:
        """Poll the first hubs once. Each call starts behind the one that had a message last."""
        num_closed = 0
        for turn in range(num_hubs):
            number = (self._next + turn) % num_hubs
            try:
                found = self._receive(number, 0.0)
            except PeerLostError:
                raise
            except WorkerError as error:
                num_closed += error.code != TIMEOUT
            else:
                self._next = number + 1
                return found
        if num_closed == len(self._hubs):
            names = ", ".join(x.peer for x in self.connections)
            raise closed_error(names or "every peer", by_peer=True)
        return None

    def _receive(self, number: int, timeout_s: float | None) -> tuple[int, ReceiveT]:
        first = sum(len(hub.connections) for hub in self._hubs[:number])
        try:
            index, message = self._hubs[number].receive_any(timeout_s)
        except PeerLostError as lost:
            raise PeerLostError(first + lost.index, lost) from None
        return first + index, message
