"""Several hubs as one: connections over different transports that one thread
serves together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Generic, Protocol

from fastdecode.core.errors import WorkerError
from fastdecode.wire.patience import look_until_found
from fastdecode.wire.transport import (
    TIMEOUT,
    Connection,
    Hub,
    PeerLostError,
    ReceiveT,
    ReceiveT_co,
    SendT,
    SendT_contra,
    closed_error,
    timeout_error,
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
    (``fastdecode.wire.patience``): no transport can wait for another.
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
