"""What every transport offers: a connection to one peer, and a hub that waits
for any of several.

**Whose is an array?** Sending a message lends its arrays to the receiver until
the receiver answers, so that no transport has to copy and every transport may
use the same buffers again:

- The sender of an ``Attend`` leaves q, k and v alone until its ``AttendResult``
  is here; the sender of a ``BeginStep`` leaves its arrays alone until the
  step's first ``AttendResult``.
- The receiver of an ``AttendResult`` may read o and lse, in place, until it
  sends the lane's next ``Attend`` that has queries. What it wants to keep for
  longer it copies.
- Nobody writes into an array that it received.

**Errors.** A closed or failed peer, and a deadline that passes, raise
``WorkerError``, which names the peer; its code says which it was: ``CLOSED`` or
``TIMEOUT``. After a timeout the connection is as it was: the answer may still
come. What a peer sent before it closed is received first, and then every call
says that it is closed.

**Threads.** A connection, and all connections of one hub, belong to one thread,
save for ``close``, which any thread may call at any time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.wire.waiting import look_until_found

logger = logging.getLogger(__name__)

SendT_contra = TypeVar("SendT_contra", contravariant=True)
ReceiveT_co = TypeVar("ReceiveT_co", covariant=True)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

CLOSED = "connection_closed"
TIMEOUT = "worker_timeout"


class Connection(Protocol[SendT_contra, ReceiveT_co]):
    """One side of a two-way, ordered, lossless link to one peer."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for people: a thread's name, a rank, an address."""

    @property
    def heard_s(self) -> float | None:
        """When the peer last gave a sign of life that we took in, on
        ``time.monotonic``. None: it gives none of its own accord; either it
        can't hang alone, or the transport itself closes the connection to a
        silent peer."""

    def send(self, message: SendT_contra) -> None:
        """Hand the message over. Returns without waiting for the peer to take
        it.

        Raises:
            WorkerError: (``CLOSED``) this side or the peer has closed.
        """

    def receive(self, timeout_s: float | None = None) -> ReceiveT_co:
        """The peer's next message; waits for it, at most ``timeout_s`` seconds,
        or for as long as it takes.

        Raises:
            WorkerError: (``CLOSED``) nothing more will come; (``TIMEOUT``)
                nothing came in time.
        """

    def poll(self) -> ReceiveT_co | None:
        """The peer's next message if it is here, None if not; never waits.

        Raises:
            WorkerError: (``CLOSED``) nothing more will come.
        """

    def close(self) -> None:
        """Close this side and wake whoever waits on either. Closing twice is allowed."""


class Hub(Protocol[SendT_contra, ReceiveT_co]):
    """Connections that one thread serves together."""

    @property
    def connections(self) -> Sequence[Connection[SendT_contra, ReceiveT_co]]:
        """In the order in which they were made; closed ones included, so that
        an index keeps its meaning."""

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT_co]:
        """The index of a connection, and its next message; whichever is here
        first, in order of arrival.

        Raises:
            PeerLostError: nothing more will come over one connection; told once
                for each.
            WorkerError: (``CLOSED``) no connection is left open; (``TIMEOUT``)
                nothing came in time.
        """


class PeerLostError(WorkerError):
    """One connection of a hub is over: the peer has closed it, or is dead,
    silent, or broke the protocol.

    Args:
        index: the connection's.
        error: what it raised.
    """

    def __init__(self, index: int, error: WorkerError) -> None:
        super().__init__(error.message, code=error.code)
        self.index = index


class SoleHub(Generic[SendT, ReceiveT]):
    """A hub with this one connection, whose index is 0."""

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
    """The error for a connection over which something came that could not even be
    refused: the mistake is ours, and ends that connection and no other."""
    logger.error("what %s sent can't be read", peer, exc_info=error)
    what = f"{type(error).__name__}: {error}"
    return WorkerError(f"{peer} sent what can't be read: {what}", code=ProtocolError.default_code)


def closed_error(peer: str, *, by_peer: bool) -> WorkerError:
    """The error for a connection that has been closed."""
    if by_peer:
        return WorkerError(
            f"{peer} has closed the connection: it ended or crashed; see its log", code=CLOSED
        )
    return WorkerError(f"the connection to {peer} was closed on this side", code=CLOSED)


def loss(peer: str, error: FastDecodeError) -> str:
    """That a peer is lost, and why; the error may name it itself, or say that it is lost."""
    if not error.message.startswith(f"{peer} "):
        return f"{peer} is lost: {error.message}"
    reason = error.message.removeprefix(f"{peer} ")
    return (
        f"{peer} is lost: "
        f"{reason.removeprefix('is lost: ') if reason.startswith('is lost: ') else f'it {reason}'}"
    )


def timeout_error(peer: str, timeout_s: float) -> WorkerError:
    """The error for a message that didn't come in time."""
    return WorkerError(
        f"{peer} sent nothing for {timeout_s:g} s: it hangs, is overloaded, or can't be reached",
        code=TIMEOUT,
    )


_LOOK_S: Final = 1e-3
"""Between two looks at peers that move KV, while others are waited for."""


class PeerHere(Connection[SendT_contra, ReceiveT_co], Protocol):
    """A connection to a peer that works in this very thread, when it is looked for."""

    @property
    def is_busy(self) -> bool:
        """Whether it moves KV behind its answers, and tells of that at any time."""


class HubBehind(Generic[SendT, ReceiveT]):
    """Connections whose peers work in this very thread, when they are looked
    for, and behind them a hub's: nobody is waited for while one of those peers
    has something to do, nor for long while one moves KV.

    Args:
        hub: None: there are no others.
    """

    def __init__(
        self,
        firsts: Sequence[PeerHere[SendT, ReceiveT]],
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
            found = self._poll()  # which ends what is under way, or begins what was asked for
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
        """What one of the first has to say."""
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
        """Each hub once, each call starting behind the one that had something last."""
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
