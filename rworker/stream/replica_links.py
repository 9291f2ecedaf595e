"""Links to neighbours: the replicas of an R-worker's caches are kept up to date
behind the answers to its S-worker.

The loop asks for a **unit** of work when nothing else waits: some changes, and
one chunk of at most 4 MiB. Where the S-worker always has something waiting, a
unit is done after every ``_MOST_STEPS`` steps all the same, or no replica would
ever get on.

A link that breaks, or a neighbour that refuses, costs that cache its replica,
which the S-worker is told; nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.wire.arrays import Array
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.kv.chunks import FetchChunk, StoreChunk
from fastdecode.wire.kv.replicating import (
    MOST_LINK_BYTES,
    NO_STEP,
    Replicate,
    Replicated,
    ReplicationNews,
    Unprotected,
)
from fastdecode.wire.messages import MAX_ID, Failed, FromRWorker, ToRWorker, Welcome
from fastdecode.wire.transport import Connection
from rworker.cache_state import CacheState
from rworker.caches import HolderCache
from rworker.checks import check_integer
from rworker.instructions import EndStep, Follow, LinkReplica, ReadChunk
from rworker.stream.checks import check_seconds, fetch_chunk
from rworker.stream.cutting import CacheKind
from rworker.stream.mirror import Mirror

logger = logging.getLogger(__name__)

LOOK_S: Final = 1e-3
"""Between two looks for a neighbour's answer, while nothing else happens."""
REST_S: Final = 0.25
"""And between two looks whether it is still there, while it owes none."""
REACH_S: Final = 20.0
"""That it may take to reach a neighbour; to make room, it may take longer."""
_MOST_STEPS: Final = 2
_MOST_CHANGES: Final = 64

Tell = Callable[[int, ReplicationNews], None]
"""Tells a peer."""


class NeighbourConnection(Connection[ToRWorker, FromRWorker], Protocol):
    """To another R-worker."""

    @property
    def is_reached(self) -> bool:
        """Whether the other end has been heard of."""


class ChunkReader(Protocol):
    """What reads K and V out of a cache's memory."""

    def read(self, read: ReadChunk) -> Array: ...


class Neighbours(Protocol):
    """How other R-workers are reached over this one's transport."""

    def connect(self, address: str, line: int) -> NeighbourConnection:
        """A new connection to one. Never waits: it needn't be reached yet.

        Args:
            line: a number that no other connection between R-workers has.

        Raises:
            FastDecodeError: the address is none, or may not be used.
        """

    def expect(self, address: str, line: int) -> None:
        """One may connect from now on, over this line."""


class Neighbourhood(Protocol):
    """Where R-workers that are threads of this process meet others."""

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """One can be reached from now on. Returns how it reaches others."""

    def address_of(self, name: str) -> str:
        """By what others reach it."""


class ThreadNeighbours:
    """R-workers that are threads of this process, by name."""

    def __init__(self) -> None:
        self._hubs: dict[str, InprocHub[FromRWorker, ToRWorker]] = {}

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """See ``Neighbourhood``."""
        self._hubs[name] = hub
        return self

    def address_of(self, name: str) -> str:
        """See ``Neighbourhood``."""
        return name

    def connect(self, address: str, line: int) -> NeighbourConnection:
        """See ``Neighbours``."""
        if address not in self._hubs:
            raise ConfigError(f"there is no R-worker {address!r} in this process")
        here, _ = connect(InprocHub(), "a neighbour", self._hubs[address], f"R-worker {address}")
        return here

    def expect(self, address: str, line: int) -> None:
        """A connection is there as soon as it is made."""


class NoNeighbours:
    """Of an R-worker that can't reach others."""

    def connect(self, address: str, line: int) -> NeighbourConnection:
        raise ConfigError("this R-worker can't reach others: it keeps no replicas")

    def expect(self, address: str, line: int) -> None:
        raise ConfigError("this R-worker can't be reached by others: it keeps no replicas")


class _Cache:
    """A cache that is mirrored, as source of chunks."""

    def __init__(self, holder: HolderId, books: CacheState, reader: ChunkReader) -> None:
        self.kind: Final = CacheKind(books.hello.model_hash, books.hello.kv)
        self._holder = holder
        self._books = books
        self._reader = reader
        self._asked: ReadChunk | None = None

    def ask(self, request: FetchChunk) -> None:
        self.ask_slots(request, fetch_chunk(self._books, request))

    def ask_slots(self, request: FetchChunk, slots: NDArray[np.int64]) -> None:
        self._asked = ReadChunk(-1, self._holder, request, slots)

    def fetch(self) -> Array:
        assert self._asked is not None
        return self._reader.read(self._asked)


class _Replica:
    """One cache's link: what its mirror says goes out, and answers come in."""

    def __init__(
        self, link: LinkReplica, mirror: Mirror, connection: NeighbourConnection, clock: Clock
    ) -> None:
        self.link = link
        self.mirror = mirror
        self.connection = connection
        self._clock = clock
        self.may_send = False
        """There may be something to send."""
        self._is_open = False  # the neighbour has welcomed us
        self._since_s = clock()
        connection.send(mirror.hello)

    @property
    def is_owed(self) -> bool:
        return not self._is_open or self.mirror.is_owed

    def take_answers(self) -> bool:
        """Whether the neighbour has made room for the replica just now. Raises
        FastDecodeError: it is gone, or refuses."""
        was_open = self._is_open
        while (answer := self.connection.poll()) is not None:
            if isinstance(answer, Failed):
                raise ProtocolError(f"{answer.worker} says: {answer.message}", code=answer.code)
            if self._is_open:
                self.mirror.take(answer)
            else:
                self._welcome(answer)
            self.may_send = True
        if not self._is_open:
            self._check_patience()
        return self._is_open and not was_open

    def send(self) -> None:
        """Some changes, and at most one chunk. Raises as above."""
        self.may_send = self._is_open
        for _ in range(_MOST_CHANGES):
            message = self.mirror.next() if self._is_open else None
            if message is None:
                self.may_send = False
                return
            self.connection.send(message)
            if isinstance(message, StoreChunk):
                return

    def close(self) -> None:
        self.connection.close()

    def _check_patience(self) -> None:
        waited_s, peer = self._clock() - self._since_s, self.connection.peer
        reach_s = min(REACH_S, self.link.timeout_s)
        if waited_s > reach_s and not self.connection.is_reached:
            raise WorkerError(f"{peer} can't be reached from its neighbour within {reach_s:g} s")
        if waited_s > self.link.timeout_s:
            raise WorkerError(
                f"{peer} hasn't made room for a replica within {self.link.timeout_s:g} s "
                "(worker_timeout_s)"
            )

    def _welcome(self, answer: FromRWorker) -> None:
        hello = self.mirror.hello
        hello.check(answer)
        assert isinstance(answer, Welcome)
        if answer.num_blocks != hello.max_blocks:
            raise ProtocolError(
                f"it has {answer.num_blocks} KV blocks for a replica of {hello.max_blocks}"
            )
        self._is_open = True


class ReplicaLinks:
    """Of one R-worker.

    Args:
        reader: of its caches.
        neighbours: how others are reached.
        tell: how peers are told how far replicas are.
        clock: seconds.
    """

    def __init__(
        self,
        reader: ChunkReader,
        neighbours: Neighbours,
        tell: Tell,
        clock: Clock = time.monotonic,
    ) -> None:
        self._reader = reader
        self._neighbours = neighbours
        self._tell = tell
        self._clock = clock
        self._replicas: dict[HolderId, _Replica] = {}
        self._numbers: dict[HolderId, int] = {}  # of the last link of each, which may be over
        self._num_ended = 0  # steps, since anything was sent

    @property
    def wait_s(self) -> float | None:
        """How long to wait for others' messages before ``work``; None: for as
        long as it takes."""
        replicas = self._replicas.values()
        if not replicas:
            return None
        if any(replica.may_send for replica in replicas):
            return 0.0
        return LOOK_S if any(replica.is_owed for replica in replicas) else REST_S

    @property
    def is_late(self) -> bool:
        """Whether a unit is due, whatever else waits."""
        return self._num_ended >= _MOST_STEPS

    def obey(self, instruction: LinkReplica | Follow | EndStep) -> None:
        """A link begins or ends, or a cache has changed that has one."""
        if isinstance(instruction, LinkReplica):
            self._link(instruction)
            return
        replica = self._replicas.get(instruction.holder)
        if replica is None:
            return
        replica.may_send = True
        if isinstance(instruction, Follow):
            replica.mirror.follow(instruction.change)
        else:
            replica.mirror.end_step(instruction.lane, instruction.step)
            self._num_ended += 1

    def _link(self, link: LinkReplica) -> None:
        is_new = self._numbers.get(link.holder) != link.number
        if is_new:
            self.drop(link.holder)
            self._numbers[link.holder] = link.number
        try:
            if link.guest:
                self._neighbours.expect(link.guest, link.guest_line)
            if link.keeper and is_new:
                source = _Cache(link.holder, link.books, self._reader)
                mirror = Mirror(link.holder, link.books, source, link.link_bytes)
                connection = self._neighbours.connect(link.keeper, link.line)
                self._replicas[link.holder] = _Replica(link, mirror, connection, self._clock)
        except FastDecodeError as error:
            self._tell(link.to, Unprotected(link.holder, error.message, link.number))

    def work(self) -> None:
        """A unit of each link."""
        self._num_ended = 0
        for replica in list(self._replicas.values()):
            try:
                self._advance(replica)
            except FastDecodeError as error:
                self._end(replica, error.message)
            except Exception as error:
                logger.exception("a link is given up")
                self._end(replica, f"{type(error).__name__}: {error}")

    def _advance(self, replica: _Replica) -> None:
        to, holder, number = replica.link.to, replica.link.holder, replica.link.number
        if replica.take_answers():
            self._tell(to, Replicated(holder, 0, NO_STEP, number))
        replica.send()
        for lane, step in replica.mirror.take_held().items():
            self._tell(to, Replicated(holder, lane, step, number))

    def _end(self, replica: _Replica, reason: str) -> None:
        """The cache has no replica any more."""
        holder = replica.link.holder
        logger.warning("holder %d has no replica any more: %s", holder, reason)
        self._replicas.pop(holder).close()
        self._tell(replica.link.to, Unprotected(holder, reason, replica.link.number))

    def drop(self, holder: HolderId) -> None:
        """The cache, or its link, is over."""
        self._numbers.pop(holder, None)
        replica = self._replicas.pop(holder, None)
        if replica is not None:
            replica.close()

    def give_up(self, reason: str) -> None:
        """All are over. The S-worker gets a report that its caches have no replicas, and why."""
        for replica in list(self._replicas.values()):
            self._end(replica, reason)

    def close(self) -> None:
        """All are over, and the replicas with them if nobody goes on with them."""
        for holder in list(self._replicas):
            self.drop(holder)


def link_for(number: int, cache: HolderCache, message: Replicate) -> LinkReplica:
    """What a peer says of a cache's replica, as an instruction.

    Args:
        number: the peer's.

    Raises:
        ProtocolError: there can be none like that.
    """
    link_bytes = check_integer("link_bytes", message.link_bytes, 1, MOST_LINK_BYTES)
    if message.keeper and not cache.books.hello.session:
        raise ProtocolError("a cache of no session can't be replicated: nobody could go on")
    serial = check_integer("link", message.link, 0, MAX_ID)
    timeout_s = check_seconds("timeout_s", message.timeout_s)
    cache.is_replicated = bool(message.keeper)
    lines = [
        check_integer(name, getattr(message, name), 0, MAX_ID) for name in ("line", "guest_line")
    ]
    who = (message.keeper, message.guest)
    return LinkReplica(
        number, cache.holder, cache.books, *who, link_bytes, serial, timeout_s, *lines
    )
