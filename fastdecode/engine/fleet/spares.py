"""Spare R-workers (``--spare-r-workers``): idle until one is lost, in whose
place one of them comes then.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import RConnection, RHub
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.wire.messages import FromRWorker, Hello, ToRWorker
from fastdecode.wire.transport import PeerLostError, timeout_error


class SpareConnection:
    """To a spare R-worker; see ``fastdecode.wire.transport.Connection``."""

    def __init__(self, connection: RConnection, address: str) -> None:
        self.inner = connection
        self.address = address
        """What R-workers call it."""
        self.is_closed = False
        self._early: deque[FromRWorker | WorkerError] = deque()

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def heard_s(self) -> float | None:
        return self.inner.heard_s

    is_reached = True
    """It has been there from the beginning, or is dead."""

    def send(self, message: ToRWorker) -> None:
        self.inner.send(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._take() if self._early else self.inner.receive(timeout_s)

    def poll(self) -> FromRWorker | None:
        return self._take() if self._early else self.inner.poll()

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()

    def arrive(self, what: FromRWorker | WorkerError) -> None:
        """It has come while others were waited for."""
        self._early.append(what)

    def _take(self) -> FromRWorker:
        what = self._early[0]
        if isinstance(what, WorkerError):
            raise what  # again and again
        self._early.popleft()
        return what


class SpareHub:
    """A hub of which the last connections are to spare R-workers; see
    ``fastdecode.wire.transport.Hub``. To whoever uses it they aren't there, until
    they come in the place of others (``fastdecode.engine.fleet.replacements.Places``).

    Args:
        hub: all of them; behind them there may be others, which aren't to R-workers.
        num_spares: the last R-workers.
        addresses: what R-workers call each other.
        clock: seconds, for deadlines.
    """

    def __init__(
        self, hub: RHub, num_spares: int, addresses: Sequence[str], clock: Clock = time.monotonic
    ) -> None:
        self.whole: Final = hub
        """With the connections to spare R-workers."""
        self._hub = hub
        self._clock = clock
        self._num_workers = len(addresses)
        self._num_places = num_places = self._num_workers - num_spares
        self._connections = list(hub.connections[:num_places])
        self.addresses = list(addresses[:num_places])
        """What R-workers call each other, by their places: of one in whose
        place a spare one is to come, that one's."""
        spares = zip(
            hub.connections[num_places : self._num_workers], addresses[num_places:], strict=True
        )
        self._spares = {num_places + i: SpareConnection(*spare) for i, spare in enumerate(spares)}
        self._left = deque(self._spares.values())

    @property
    def connections(self) -> Sequence[RConnection]:
        """To the R-workers in their places, and behind these to peers that are no R-workers."""
        whole, num_known = self._hub.connections, len(self._connections) + len(self._spares)
        if len(whole) > num_known:  # more may come
            self._connections += whole[num_known:]
        return self._connections

    @property
    def num_left(self) -> int:
        """Spare ones that nobody has needed yet."""
        return len(self._left)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        """See ``Hub``. What spare ones say waits until they are asked."""
        until_s = math.inf if timeout_s is None else self._clock() + timeout_s
        while True:
            left_s = None if timeout_s is None else max(0.0, until_s - self._clock())
            try:
                index, message = self._hub.receive_any(left_s)
            except PeerLostError as error:
                place = self._place(error.index)
                if place is not None:
                    raise PeerLostError(place, error) from None
                if error.index in self._spares:
                    self._spares[error.index].arrive(WorkerError(error.message, code=error.code))
            else:
                place = self._place(index)
                if place is not None:
                    return place, message
                if index in self._spares:
                    self._spares[index].arrive(message)
            if timeout_s == 0:
                raise timeout_error("any R-worker", 0.0)

    def reconnect(self, index: int) -> SpareConnection:
        """To a spare R-worker, which comes in the place of a connection.

        Raises:
            ConfigError: none is left.
        """
        if not self._left:
            raise ConfigError("no spare R-worker is left")
        spare = self._left.popleft()
        self.addresses[index] = spare.address
        return spare

    def replace(self, index: int, connection: SpareConnection) -> None:
        """A spare connection is the one of this place."""
        self._connections[index] = connection

    def index(self, place: int) -> int:
        """In the whole hub, of the connection of a place."""
        connection = self.connections[place]
        inner = connection.inner if isinstance(connection, SpareConnection) else connection
        return list(self._hub.connections).index(inner)

    @property
    def given_up(self) -> set[int]:
        """In the whole hub, of those that nobody has to do with any more."""
        used = {self.index(place) for place in range(self._num_places)}
        spare = {index for index, each in self._spares.items() if not each.is_closed}
        return set(range(self._num_workers)) - used - spare

    def _place(self, index: int) -> int | None:
        """Of a connection of the whole hub."""
        connection: RConnection = self._spares.get(index) or self._hub.connections[index]
        return self.connections.index(connection) if connection in self.connections else None


class SpareReplacements(HubReplacements[SpareConnection]):
    """Spare R-workers that come in the place of lost ones.

    Args:
        hub: of all.
        hello: what they are greeted with.
        deadlines: how long they may take to answer.
    """

    def __init__(self, hub: SpareHub, hello: Hello, deadlines: Deadlines) -> None:
        super().__init__(hub, hello, deadlines)
        self._spare_hub = hub

    @property
    def timeout_s(self) -> float:
        """While any is left, it is sure to answer, or to be lost, too."""
        return math.inf if self._candidates or self._spare_hub.num_left else 0.0
