"""R-workers that take a lost one's place: another process at the same address, the same one once
it is reached again, or a spare one. A hub, which makes connections, knows where they are.

A replacement is greeted, and waits until nothing is left of the lost one (``admit``). Where a
neighbour serves the lost one's cache, the replacement first gets a copy (``make_way``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
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
"""Pause between two attempts where an R-worker answers, but refuses to serve. It doubles each time
after a replacement is lost again soon, and where one serves another model."""
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


def limited(hello: Hello, most_blocks: Mapping[Any, int], worker: int) -> Hello:
    """Return a greeting that limits the KV blocks an R-worker offers."""
    return structs.replace(hello, max_blocks=most_blocks.get(worker, hello.max_blocks))


class Places(Protocol):
    """A hub whose connections can be replaced."""

    @property
    def connections(self) -> Sequence[RConnection]: ...

    def reconnect(self, index: int) -> Any:
        """Connect to a possible replacement. The connection has ``is_reached``.

        Raises:
            FastDecodeError: If none can be reached now.
        """

    def replace(self, index: int, connection: Any) -> None:
        """Put a connection from ``reconnect`` into the hub, in that place."""


@dataclass(eq=False)
class _Candidate:
    connection: Any
    since_s: float  # when it was asked what it hasn't answered
    is_greeted: bool = False
    welcome: Welcome | None = None
    makes_way: bool = False  # true if it is to give up its empty cache for the one that it is sent
    has_made_way: bool = False


@dataclass
class _Pause:
    """Pause in which no replacement of a lost R-worker is sought."""

    until_s: float = -math.inf
    length_s: float = RETRY_S / 2
    admitted_s: float | None = None  # when a replacement that may be lost again was admitted


class HubReplacements:
    """Connects to replacements over a hub (``Replacements``). ``deadlines``: How long to keep
    looking when all are lost, and how long a greeted R-worker may take."""

    def __init__(self, hub: Places, hello: Hello, deadlines: Deadlines) -> None:
        self._hub = hub
        self._hello = hello
        self._deadlines = replace(deadlines)  # it looks at other times than others
        self._clock = deadlines.clock
        self.most_blocks: Mapping[int, int] = {}
        self._shards: Mapping[HolderId, Shard] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._pauses: defaultdict[int, _Pause] = defaultdict(_Pause)

    @property
    def timeout_s(self) -> float:
        if not isinstance(self._hub, SpareHub):
            return self._deadlines.timeout_s
        return math.inf if self._candidates or self._hub.num_left else 0.0

    def limit(
        self, num_blocks: Mapping[int, int], shards: Mapping[HolderId, Shard] | None = None
    ) -> None:
        """Set the most blocks by place; and ``shards``, if places are members of a group."""
        self.most_blocks = num_blocks
        self._shards = shards or {}

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        self._deadlines.begin_look()
        for worker in lost:
            if worker not in self._candidates:
                self._seek(worker)
            self._hear(worker)
        self._deadlines.end_look()
        candidates = self._candidates.items()
        return {worker: one.welcome for worker, one in candidates if one.welcome is not None}

    @property
    def is_owed(self) -> bool:
        """True if a greeted candidate hasn't answered."""
        return any(x.is_greeted and x.welcome is None for x in self._candidates.values())

    def admit(self, worker: int) -> None:
        self._pauses[worker].admitted_s = self._clock()
        self._hub.replace(worker, self._candidates.pop(worker).connection)

    def make_way(self, worker: int) -> None:
        """Ask a candidate to drop its empty cache: a neighbour sends it another."""
        candidate = self._candidates[worker]
        candidate.makes_way, candidate.since_s = True, self._clock()
        self._tell(worker, DropCache(self._hello.session, worker, holder=worker))

    def has_made_way(self, worker: int) -> bool:
        """Return True if a candidate is connected, and has dropped its empty cache."""
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

    def _seek(self, worker: int) -> None:
        """Connect to a possible replacement, unless there is a pause."""
        if self._is_paused(worker):
            return
        # An R-worker that was given up though it lives would serve the old connection, and be
        # busy for ever.
        self._hub.connections[worker].close()
        try:
            connection = self._hub.reconnect(worker)
        except FastDecodeError as error:  # no socket or spare is left, or a name is unknown
            self._give_up(worker, str(error))
            return
        self._candidates[worker] = _Candidate(connection, self._clock())

    def _is_paused(self, worker: int) -> bool:
        """Return True if no replacement is to be sought yet, since one was lost again soon."""
        pause, now = self._pauses[worker], self._clock()
        if pause.admitted_s is not None:
            if now - pause.admitted_s < LONGEST_PAUSE_S:
                self._lengthen(pause)
            else:
                pause.length_s = RETRY_S / 2
            pause.admitted_s = None
        return now < pause.until_s

    def _lengthen(self, pause: _Pause) -> None:
        """Start a pause twice as long as the last one."""
        # When all are lost, the next attempt has to precede the time-out.
        longest_s = min(LONGEST_PAUSE_S, self._deadlines.timeout_s / 4 or math.inf)
        pause.length_s = min(2 * pause.length_s, longest_s)
        pause.until_s = self._clock() + pause.length_s

    def _hear(self, worker: int) -> None:
        """Take in what a candidate has sent, and greet it once it is connected."""
        candidate = self._candidates.get(worker)
        if candidate is None:
            return
        connection = candidate.connection
        try:
            if connection.is_reached and not candidate.is_greeted:
                self._greet(worker)
            while worker in self._candidates and (answer := connection.poll()) is not None:
                is_due = candidate.is_greeted and candidate.welcome is None
                if isinstance(answer, Dropped):
                    candidate.has_made_way = candidate.makes_way
                elif is_due and isinstance(answer, Welcome):
                    self._hello.check(answer)
                    candidate.welcome = answer
                else:
                    what = getattr(answer, "message", type(answer).__name__)
                    raise ProtocolError(f"says: {what}", code=getattr(answer, "code", None))
            owes = candidate.welcome is None or candidate.makes_way > candidate.has_made_way
            deadlines = self._deadlines
            end = deadlines.while_greeting().end if owes else deadlines.silent_end
            end_s, reason = end(candidate.since_s, connection.heard_s)
            if candidate.is_greeted and end_s <= self._clock():
                self._give_up(worker, f"{connection.peer} {reason}")
        except ProtocolError as lie:
            self._give_up(worker, f"{connection.peer} {lie.message}")
            if lie.code == "model_mismatch":  # it will serve no other model
                self._lengthen(self._pauses[worker])
        except WorkerError as error:
            self._give_up(worker, error.message)

    def _greet(self, worker: int) -> None:
        candidate = self._candidates.get(worker)
        if candidate is not None:
            hello = structs.replace(limited(self._hello, self.most_blocks, worker), holder=worker)
            candidate.is_greeted, candidate.since_s = True, self._clock()
            self._tell(worker, hello.part(self._shards.get(HolderId(worker), Shard())))

    def _tell(self, worker: int, message: ToRWorker) -> None:
        try:
            self._candidates[worker].connection.send(message)
        except WorkerError as error:
            self._give_up(worker, error.message)

    def _give_up(self, worker: int, reason: str) -> None:
        logger.info("no replacement yet: %s", reason)
        candidate = self._candidates.pop(worker, None)
        if candidate is not None:
            candidate.connection.close()
        self._pauses[worker].until_s = self._clock() + RETRY_S


class SpareConnection:
    """A connection to a spare R-worker, which is polled."""

    is_reached = True  # it was connected from the beginning, or is dead

    def __init__(self, connection: RConnection, address: str) -> None:
        self.inner = connection
        self.peer, self.send = connection.peer, connection.send
        self.address = address  # what R-workers call it
        self.is_closed = False
        self.early: deque[FromRWorker | WorkerError] = deque()
        """Messages that the hub received before the R-worker was needed."""

    @property
    def heard_s(self) -> float | None:
        return self.inner.heard_s

    def poll(self) -> FromRWorker | None:
        if not self.early:
            return self.inner.poll()
        message = self.early[0]
        if isinstance(message, WorkerError):
            raise message  # by each later call, too
        self.early.popleft()
        return message

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class SpareHub:
    """A ``Hub`` whose last R-workers are spare. It hides them until they take the places of others
    (``Places``).

    Args:
        hub: The whole hub. Behind R-workers there may be connections to other peers.
        num_spares: How many of the last R-workers are spare.
    """

    def __init__(
        self, hub: RHub, num_spares: int, addresses: Sequence[str], clock: Clock = time.monotonic
    ) -> None:
        self.whole: Final = hub  # with the connections to spare R-workers
        self._clock = clock
        self._num_workers = len(addresses)
        num_places = self._num_workers - num_spares
        self._placed: list[Any] = list(hub.connections[:num_places])
        self._indices = list(range(num_places))  # in the whole hub, by places
        self.addresses = list(addresses[:num_places])
        """What R-workers call each other, by their places."""
        self._spares = {
            index: SpareConnection(hub.connections[index], addresses[index])
            for index in range(num_places, self._num_workers)
        }
        self._left = deque(self._spares.values())

    @property
    def connections(self) -> Sequence[Any]:
        """Connections to the R-workers in their places, followed by connections to other peers."""
        return [*self._placed, *self.whole.connections[self._num_workers :]]

    @property
    def num_left(self) -> int:
        """Number of spare R-workers that are unused."""
        return len(self._left)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        """Receive as any hub does. Messages of spare R-workers wait in their connections."""
        until_s = math.inf if timeout_s is None else self._clock() + timeout_s
        message: FromRWorker | WorkerError
        while True:
            left_s = None if timeout_s is None else max(0.0, until_s - self._clock())
            try:
                index, message = self.whole.receive_any(left_s)
            except PeerLostError as error:
                index, message = error.index, WorkerError(error.message, code=error.code)
            if index >= self._num_workers:
                place = index - len(self._spares)
            elif index in self._indices:
                place = self._indices.index(index)
            else:
                if index in self._spares:
                    self._spares[index].early.append(message)
                if timeout_s == 0:
                    raise timeout_error("any R-worker", 0.0)
                continue
            if isinstance(message, WorkerError):
                raise PeerLostError(place, message)
            return place, message

    def reconnect(self, index: int) -> SpareConnection:
        """Return the connection to a spare R-worker, which takes that place. Raises ConfigError: If
        none is left."""
        if not self._left:
            raise ConfigError("no spare R-worker is left")
        spare = self._left.popleft()
        self.addresses[index] = spare.address
        return spare

    def replace(self, index: int, connection: Any) -> None:
        self._placed[index] = connection
        self._indices[index] = next(i for i, x in self._spares.items() if x is connection)

    def given_up(self, lost: Collection[int]) -> set[int]:
        """Return the indices in the whole hub of R-workers that are not used any longer, those in
        ``lost`` places among them."""
        used = {index for place, index in enumerate(self._indices) if place not in lost}
        spare = {i for i, x in self._spares.items() if i not in self._indices and not x.is_closed}
        return set(range(self._num_workers)) - used - spare
