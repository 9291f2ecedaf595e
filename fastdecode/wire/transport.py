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
import time
from collections.abc import Sequence
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


class SoleHub(Generic[SendT, ReceiveT]):
    """A hub with one connection, whose index is 0."""

    def __init__(self, connection: Connection[SendT, ReceiveT]) -> None:
        self.connections = (connection,)
        self._is_over = False

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        try:
            return 0, self.connections[0].receive(timeout_s)
        except WorkerError as error:
            if error.code == TIMEOUT or self._is_over:
                raise
            self._is_over = True
            raise PeerLostError(0, error) from None


def unreadable(peer: str, error: Exception) -> WorkerError:
    """Return the error for a message that raised what no reader expects. The mistake is on this
    side, and ends that connection alone."""
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


class HubBehind(Generic[SendT, ReceiveT]):
    """Connections whose peers work in this thread when they are polled, and behind them those of
    ``hub``. It does not wait for others while one of the first has work, nor for long while one
    moves KV (``is_busy``) and may report on that at any time."""

    def __init__(
        self,
        firsts: Sequence[Any],
        hub: Hub[SendT, ReceiveT] | None = None,
    ) -> None:
        self._firsts = tuple(firsts)
        self._hub = hub
        self._over: set[int] = set()

    @property
    def connections(self) -> Sequence[Connection[SendT, ReceiveT]]:
        return [*self._firsts, *(() if self._hub is None else self._hub.connections)]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            was_busy = self._is_busy
            found = self._poll()  # which ends or begins a transfer
            if found is not None:
                return found
            if self._hub is None:  # they answer at once, or never
                peers = ", ".join(first.peer for first in self._firsts)
                raise timeout_error(peers, timeout_s or 0.0)
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            turns = (was_busy or self._is_busy) and (left_s is None or left_s > _LOOK_S)
            try:
                index, message = self._hub.receive_any(_LOOK_S if turns else left_s)
            except PeerLostError as lost:
                raise PeerLostError(len(self._firsts) + lost.index, lost) from None
            except WorkerError as error:
                if not turns or error.code != TIMEOUT:
                    raise
            else:
                return len(self._firsts) + index, message

    @property
    def _is_busy(self) -> bool:
        return any(first.is_busy for first in self._firsts)

    def _poll(self) -> tuple[int, ReceiveT] | None:
        for index, first in enumerate(self._firsts):
            if index in self._over:
                continue
            try:
                message = first.poll()
            except WorkerError as error:
                self._over.add(index)
                raise PeerLostError(index, error) from None
            if message is not None:
                return index, message
        return None


class JoinedHub(Generic[SendT, ReceiveT]):
    """The connections of the first hub, and behind them those of the others;
    see ``fastdecode.wire.transport.Hub``. All but the last keep their number of
    connections. Waiting is looking at all of them in turn, politely
    (``fastdecode.wire.waiting``): no transport can wait for another.
    """

    def __init__(self, *hubs: Hub[SendT, ReceiveT]) -> None:
        self._hubs = hubs
        self._next = 0

    @property
    def connections(self) -> Sequence[Connection[SendT, ReceiveT]]:
        return [connection for hub in self._hubs for connection in hub.connections]

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        found = look_until_found(self._look, timeout_s)
        if found is None:
            assert timeout_s is not None
            raise timeout_error(" or ".join(self._names), timeout_s)
        return found

    def _look(self) -> tuple[int, ReceiveT] | None:
        """Poll each hub once. Each call starts behind the one that had a message last."""
        num_closed = 0
        for turn in range(len(self._hubs)):
            number = (self._next + turn) % len(self._hubs)
            first = sum(len(hub.connections) for hub in self._hubs[:number])
            try:
                index, message = self._hubs[number].receive_any(0.0)
            except PeerLostError as lost:
                raise PeerLostError(first + lost.index, lost) from None
            except WorkerError as error:
                num_closed += error.code != TIMEOUT
            else:
                self._next = number + 1
                return first + index, message
        if num_closed == len(self._hubs):
            raise closed_error(", ".join(self._names) or "every peer", by_peer=True)
        return None

    @property
    def _names(self) -> list[str]:
        return [connection.peer for connection in self.connections]
