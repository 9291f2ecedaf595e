"""R-workers that take a lost one's place: another process at the same address, the same one once
it is reached again, or a spare one. A hub, which makes connections, knows where they are.

A replacement is greeted, and waits until nothing is left of the lost one (``admit``). Where a
neighbour serves the lost one's cache, the replacement first gets a copy (``make_way``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from msgspec import structs

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import Shard
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import RConnection, RHub
from fastdecode.wire.blocks import DropCache, Dropped
from fastdecode.wire.messages import FromRWorker, Hello, ToRWorker, Welcome
from fastdecode.wire.transport import PeerLostError, timeout_error

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause between two attempts where an R-worker answers, but refuses to serve; and after a
replacement is lost again soon, doubled each time."""
LONGEST_PAUSE_S = 60.0  # a replacement that serves longer is not lost "soon"


class Replacements(Protocol):
    """R-workers that take the place of lost ones. Never waits."""

    @property
    def timeout_s(self) -> float:
        """How long to keep looking when all are lost. Infinite if every candidate is sure to
        answer or to be lost."""

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """Set the most KV blocks that each replacement may offer."""

    def look(self, lost: Collection[int]) -> Mapping[int, Welcome]:
        """Return the replacements of lost R-workers that wait to be let in (``admit``)."""

    def admit(self, worker: int) -> None:
        """Make the new R-worker's connection the hub's, under that number."""


def limited(hello: Hello, most_blocks: Mapping[int, int], worker: int) -> Hello:
    """Return a greeting that limits the KV blocks an R-worker offers."""
    return structs.replace(hello, max_blocks=most_blocks.get(worker, hello.max_blocks))


class NewConnection(RConnection, Protocol):
    """A connection to a possible replacement."""

    @property
    def is_reached(self) -> bool:
        """True if the other end has sent anything."""


class Places(Protocol):
    """A hub whose connections can be replaced."""

    @property
    def connections(self) -> Sequence[RConnection]: ...

    def reconnect(self, index: int) -> NewConnection:
        """Connect to the possible replacement of a connection.

        Raises:
            FastDecodeError: If none can be reached now.
        """

    def replace(self, index: int, connection: Any) -> None:
        """Put a connection from ``reconnect`` into the hub, in that place."""


@dataclass(eq=False)
class _Candidate:
    connection: NewConnection
    since_s: float  # when it was asked what it hasn't answered
    is_greeted: bool = False
    welcome: Welcome | None = None
    makes_way: bool = False
    """True if it is to give up its empty cache for the one that it is sent."""
    has_made_way: bool = False

    @property
    def owes(self) -> bool:
        """True if it hasn't answered what it was asked last."""
        return self.welcome is None or self.makes_way > self.has_made_way

    def take(self, answer: FromRWorker, hello: Hello) -> None:
        """Take in a message, the answer to ``hello`` if it was greeted.

        Raises:
            ProtocolError: If that was not asked for, or is impossible.
        """
        if isinstance(answer, Dropped):
            self.has_made_way = self.makes_way
        elif self.is_greeted and self.welcome is None and isinstance(answer, Welcome):
            hello.check(answer)
            self.welcome = answer
        else:
            raise ProtocolError(f"says: {getattr(answer, 'message', type(answer).__name__)}")

    def check_patience(self, deadlines: Deadlines) -> None:
        """
        Raises:
            WorkerError: If it has been greeted, and its answer is overdue, or it is silent.
        """
        end_s, reason = deadlines.end(self.since_s, self.connection.heard_s)
        if self.is_greeted and end_s <= deadlines.clock():
            raise WorkerError(f"{self.connection.peer} {reason}")


class _Pauses:
    """For how long no replacement is sought, by the lost R-worker's place."""

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._until_s: dict[int, float] = {}
        self._admitted_s: dict[int, float] = {}
        self._lengths_s: dict[int, float] = {}

    def admitted(self, worker: int) -> None:
        self._admitted_s[worker] = self._clock()

    def is_over(self, worker: int) -> bool:
        """Return True if a replacement is to be sought. One that was let in before is lost."""
        now = self._clock()
        admitted_s = self._admitted_s.pop(worker, None)
        if admitted_s is not None and now - admitted_s < LONGEST_PAUSE_S:
            length_s = min(2 * self._lengths_s.get(worker, RETRY_S / 2), self._longest_s)
            self._lengths_s[worker] = length_s
            self._until_s[worker] = now + length_s
        elif admitted_s is not None:
            self._lengths_s.pop(worker, None)
        return now >= self._until_s.get(worker, -math.inf)

    def begin(self, worker: int) -> None:
        self._until_s[worker] = self._clock() + RETRY_S


class HubReplacements:
    """Connects to replacements over a hub (``Replacements``).

    Args:
        deadlines: How long to keep looking when all are lost, and how long a greeted R-worker may
            take.
    """

    def __init__(self, hub: Places, hello: Hello, deadlines: Deadlines) -> None:
        self._hub = hub
        self._hello = hello
        self._greeting = deadlines.while_greeting()
        self._waiting = replace(deadlines, timeout_s=math.inf)
        self._clock = deadlines.clock
        self._timeout_s = deadlines.timeout_s
        self._most_blocks: Mapping[int, int] = {}
        self._shards: Mapping[HolderId, Shard] = {}
        self._candidates: dict[int, _Candidate] = {}
        # When all are lost, the next attempt has to precede the time-out.
        longest_s = LONGEST_PAUSE_S
        if self._timeout_s > 0:
            longest_s = min(longest_s, self._timeout_s / 4)
        self._pauses = _Pauses(self._clock, longest_s)

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def limit(
        self, num_blocks: Mapping[int, int], shards: Mapping[HolderId, Shard] | None = None
    ) -> None:
        """Set the most blocks by place; and ``shards``, if places are members of a group."""
        self._most_blocks = num_blocks
        self._shards = shards or {}

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        for deadlines in (self._greeting, self._waiting):
            deadlines.begin_look()
        for worker in lost:
            if worker not in self._candidates:
                self._seek(worker)
            if worker in self._candidates:
                self._hear(worker)
        for deadlines in (self._greeting, self._waiting):
            deadlines.end_look()
        candidates = self._candidates.items()
        return {worker: one.welcome for worker, one in candidates if one.welcome is not None}

    @property
    def is_owed(self) -> bool:
        """True if a greeted candidate hasn't answered."""
        return any(x.is_greeted and x.welcome is None for x in self._candidates.values())

    def admit(self, worker: int) -> None:
        self._pauses.admitted(worker)
        self._hub.replace(worker, self._candidates.pop(worker).connection)

    def make_way(self, worker: int) -> None:
        """Ask a candidate to drop its empty cache: a neighbour sends it another."""
        candidate, session = self._candidates[worker], self._hello.session
        candidate.makes_way, candidate.since_s = True, self._clock()
        self._tell(worker, DropCache(session, worker, holder=worker))

    def has_made_way(self, worker: int) -> bool:
        """Return True if a candidate is connected, and has dropped its empty cache."""
        if worker in self._candidates:
            self._hear(worker)
        candidate = self._candidates.get(worker)
        return candidate is not None and candidate.has_made_way

    def greet_again(self, worker: int) -> None:
        """Let a candidate that was to get a cache wait with an empty one instead."""
        candidate = self._candidates.get(worker)
        if candidate is not None:
            candidate.welcome = None
            candidate.makes_way = candidate.has_made_way = False
            self._tell(worker, DropCache(self._hello.session, worker, holder=worker))
            self._greet(worker)

    def is_whole(self, worker: int, welcome: Welcome) -> bool:
        """Return True if a candidate offers all the room that the lost R-worker did."""
        return welcome.num_blocks >= self._most_blocks.get(worker, 0)

    def _seek(self, worker: int) -> None:
        """Connect to a possible replacement, unless there is a pause."""
        if not self._pauses.is_over(worker):
            return
        # An R-worker that was given up though it lives would serve the old connection, and be
        # busy for ever.
        self._hub.connections[worker].close()
        try:
            connection = self._hub.reconnect(worker)
        except FastDecodeError as error:  # no socket or spare is left, or a name is unknown
            logger.info("no replacement yet: %s", error)
            self._pauses.begin(worker)
            return
        self._candidates[worker] = _Candidate(connection, self._clock())

    def _hear(self, worker: int) -> None:
        """Take in what a candidate has sent, and greet it once it is connected."""
        candidate = self._candidates[worker]
        connection = candidate.connection
        try:
            if connection.is_reached and not candidate.is_greeted:
                self._greet(worker)
            while worker in self._candidates and (answer := connection.poll()) is not None:
                candidate.take(answer, self._hello)
            candidate.check_patience(self._greeting if candidate.owes else self._waiting)
        except ProtocolError as lie:
            self._give_up(worker, f"{connection.peer} {lie.message}")
        except WorkerError as error:
            self._give_up(worker, error.message)

    def _greet(self, worker: int) -> None:
        candidate = self._candidates.get(worker)
        if candidate is not None:
            hello = structs.replace(limited(self._hello, self._most_blocks, worker), holder=worker)
            candidate.is_greeted, candidate.since_s = True, self._clock()
            self._tell(worker, hello.part(self._shards.get(HolderId(worker), Shard())))

    def _tell(self, worker: int, *messages: ToRWorker) -> None:
        try:
            for message in messages:
                self._candidates[worker].connection.send(message)
        except WorkerError as error:
            self._give_up(worker, error.message)

    def _give_up(self, worker: int, reason: str) -> None:
        logger.info("no replacement yet: %s", reason)
        candidate = self._candidates.pop(worker, None)
        if candidate is not None:
            candidate.connection.close()
        self._pauses.begin(worker)


class SpareConnection:
    """A ``Connection`` to a spare R-worker."""

    def __init__(self, connection: RConnection, address: str) -> None:
        self.inner = connection
        self.address = address  # what R-workers call it
        self.is_closed = False
        self._early: deque[FromRWorker | WorkerError] = deque()

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def heard_s(self) -> float | None:
        return self.inner.heard_s

    is_reached = True  # it was connected from the beginning, or is dead

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
        self._early.append(what)

    def _take(self) -> FromRWorker:
        what = self._early[0]
        if isinstance(what, WorkerError):
            raise what  # by each later call, too
        self._early.popleft()
        return what


class SpareHub:
    """A ``Hub`` whose last connections are to spare R-workers. It hides them until they take the
    places of others (``Places``).

    Args:
        hub: The whole hub. Behind R-workers there may be connections to other peers.
        num_spares: How many of the last R-workers are spare.
    """

    def __init__(
        self, hub: RHub, num_spares: int, addresses: Sequence[str], clock: Clock = time.monotonic
    ) -> None:
        self.whole: Final = hub  # with the connections to spare R-workers
        self._hub = hub
        self._clock = clock
        self._num_workers = len(addresses)
        self._num_places = num_places = self._num_workers - num_spares
        self._connections = list(hub.connections[:num_places])
        self.addresses = list(addresses[:num_places])
        """What R-workers call each other, by their places. Where a spare R-worker is to take a
        place, it is the spare one's."""
        spares = zip(
            hub.connections[num_places : self._num_workers], addresses[num_places:], strict=True
        )
        self._spares = {num_places + i: SpareConnection(*spare) for i, spare in enumerate(spares)}
        self._left = deque(self._spares.values())

    @property
    def connections(self) -> Sequence[RConnection]:
        """Those to the R-workers in their places, and behind these those to other peers."""
        whole, num_known = self._hub.connections, len(self._connections) + len(self._spares)
        if len(whole) > num_known:  # more have been added
            self._connections += whole[num_known:]
        return self._connections

    @property
    def num_left(self) -> int:
        """Number of spare R-workers that are unused."""
        return len(self._left)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        """Receive as any hub does. Messages of spare R-workers wait in their connections."""
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
        """Return the connection to a spare R-worker, which takes that place.

        Raises:
            ConfigError: If none is left.
        """
        if not self._left:
            raise ConfigError("no spare R-worker is left")
        spare = self._left.popleft()
        self.addresses[index] = spare.address
        return spare

    def replace(self, index: int, connection: Any) -> None:
        self._connections[index] = connection

    def index(self, place: int) -> int:
        """Return the index in the whole hub of the connection in a place."""
        connection = self.connections[place]
        inner = connection.inner if isinstance(connection, SpareConnection) else connection
        return list(self._hub.connections).index(inner)

    @property
    def given_up(self) -> set[int]:
        """Indices in the whole hub of connections that are no longer used."""
        used = {self.index(place) for place in range(self._num_places)}
        spare = {index for index, each in self._spares.items() if not each.is_closed}
        return set(range(self._num_workers)) - used - spare

    def _place(self, index: int) -> int | None:
        """Return the place of a connection of the whole hub. None if it has none."""
        connection: RConnection = self._spares.get(index) or self._hub.connections[index]
        return self.connections.index(connection) if connection in self.connections else None


class SpareReplacements(HubReplacements):
    """Spare R-workers that come in the place of lost ones."""

    def __init__(self, hub: SpareHub, hello: Hello, deadlines: Deadlines) -> None:
        super().__init__(hub, hello, deadlines)
        self._spare_hub = hub

    @property
    def timeout_s(self) -> float:
        """Infinite while a spare R-worker is left: it is sure to answer or to be lost."""
        return math.inf if self._candidates or self._spare_hub.num_left else 0.0
