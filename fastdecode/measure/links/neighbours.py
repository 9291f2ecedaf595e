"""The ways between R-workers, on which replicas travel.

An R-worker is given a few sequences, and told to have its neighbour keep a
replica of them; then one token is appended. The neighbour has that token once
it has all before it. So the time until it says so, from when it has made room,
is what copying them takes, over the very links that ``--replicas`` uses.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.measure.links.caches import (
    HERE,
    KV,
    SEQUENCE_BYTES,
    THERE,
    TIMEOUT_S,
    TOKENS,
    MemoryTarget,
    Worker,
    hello,
    pieces,
)
from fastdecode.wire.kv.replicating import NO_STEP, Dropped, Replicate, Replicated, Unprotected
from fastdecode.wire.kv.taking_over import DropCache
from fastdecode.wire.messages import (
    MAX_ID,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Failed,
    FromRWorker,
    OpenSequence,
    Refused,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import Connection
from rworker.stream.chunk_endpoints import LINK_BYTES
from rworker.stream.streams import expect_pieces, stream_out

RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]
MOST_SEQUENCES: Final = 8
REACH_S: Final = 10.0
"""That a neighbour may take to be reached, and to make room."""


@dataclass(frozen=True)
class NeighbourFacts:
    """The way from one R-worker to the next; and what went wrong, if it couldn't
    be measured."""

    peer: str
    neighbour: str
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


def examine_neighbours(
    connections: Sequence[RConnection], addresses: Sequence[str], kv_bytes: Sequence[int]
) -> list[NeighbourFacts]:
    """Each R-worker's way to the next, and of the last to the first, as a ring
    of replicas has them. Fewer than two have none.

    Args:
        connections: one an R-worker; whatever was greeted for over them is
            gone afterwards.
        addresses: what R-workers call each other.
        kv_bytes: memory that each has for K and V.
    """
    if len(connections) < 2:
        return []
    num_blocks = KV.num_blocks_for(TOKENS)
    # Each has its own sequences and its neighbour's, and a block for one more of each.
    room = min(kv_bytes) // 2 // KV.block_bytes - 1
    num_sequences = min(MOST_SEQUENCES, room // num_blocks)
    names = [connection.peer for connection in connections]
    keepers = [(index + 1) % len(names) for index in range(len(names))]
    if num_sequences < 1:
        least = 2 * (num_blocks + 1) * KV.block_bytes / 1e6
        text = f"links between R-workers need {least:.0f} MB of KV memory each to be measured"
        return [NeighbourFacts(names[i], names[k], error=text) for i, k in enumerate(keepers)]
    session = 1 + secrets.randbelow(MAX_ID)
    members = [_Member(x, i, session, num_sequences) for i, x in enumerate(connections)]
    found = []
    for index, keeper in enumerate(keepers):
        try:
            for member in (members[index], members[keeper]):
                member.fill()
            members[keeper].expect_guest(addresses[index], line=index)
            seconds = members[index].copy_to(addresses[keeper], line=index)
            num_bytes = num_sequences * SEQUENCE_BYTES
            found.append(NeighbourFacts(names[index], names[keeper], num_bytes, seconds))
        except FastDecodeError as error:
            found.append(NeighbourFacts(names[index], names[keeper], error=error.message))
    return found


class _Member:
    """An R-worker of the ring."""

    def __init__(
        self, connection: RConnection, holder: int, session: int, num_sequences: int
    ) -> None:
        self._connection = connection
        self._holder = holder
        self._session = session
        self._num_sequences = num_sequences
        self._num_links = 0
        self._is_full = False

    def fill(self) -> None:
        """Have its cache, with all sequences and room for one more, once.
        Raises FastDecodeError."""
        if self._is_full:
            return
        # What was measured with may have all memory, and the name of a neighbour's.
        self._connection.send(hello(KV, session=self._session, max_blocks=1))
        self._receive(Welcome)
        self._connection.send(DropCache(self._session, 0, self._holder))
        self._receive(Dropped)
        num_sequences = self._num_sequences
        most = num_sequences * KV.num_blocks_for(TOKENS) + 1
        greeting = hello(KV, holder=self._holder, session=self._session, max_blocks=most)
        sink = Worker(self._connection, greeting, num_sequences).begin()
        some = pieces(range(num_sequences))
        expect_pieces(some, {THERE: sink})
        stream_out(some, {HERE: MemoryTarget(KV, num_sequences).fill()}, {THERE: sink})
        self._connection.send(OpenSequence(num_sequences, 1))
        self._receive(Accepted)
        self._is_full = True

    def expect_guest(self, address: str, line: int) -> None:
        """Another one is going to have its replica kept here."""
        self._replicate(Replicate("", address, LINK_BYTES, 0, REACH_S, guest_line=line))

    def copy_to(self, address: str, line: int) -> float:
        """Have a replica kept there, and wait until it has all: the seconds that
        took once there was room. Raises FastDecodeError."""
        self._replicate(Replicate(address, "", LINK_BYTES, 0, REACH_S, line=line))
        self._await(NO_STEP)
        started = time.perf_counter()
        self._append_one()
        self._await(0)
        return time.perf_counter() - started

    def _replicate(self, message: Replicate) -> None:
        self._num_links += 1
        self._connection.send(replace(message, link=self._num_links))

    def _append_one(self) -> None:
        """One token of one more sequence, in every layer."""
        one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
        ids = np.array([self._num_sequences], np.int64)
        self._connection.send(BeginStep(0, 0, ids, none, one, none, one))
        rows = np.zeros((1, KV.num_kv_heads, KV.head_dim), np.uint16)
        for layer in range(KV.num_layers):
            self._connection.send(Attend(0, 0, layer, rows[:0], rows, rows))

    def _await(self, step: int) -> None:
        """Until the neighbour has this step."""
        while True:
            news = self._receive(Replicated, AttendResult)
            if isinstance(news, Replicated) and (news.link, news.step) == (self._num_links, step):
                return

    def _receive(self, *kinds: type[FromRWorker]) -> FromRWorker:
        answer = self._connection.receive(TIMEOUT_S)
        if isinstance(answer, (Failed, Refused)):
            raise WorkerError(answer.message, code=answer.code)
        if isinstance(answer, Unprotected):
            if answer.link < self._num_links:
                return self._receive(*kinds)
            raise WorkerError(answer.reason)
        if not isinstance(answer, kinds):
            raise WorkerError(f"it answered {type(answer).__name__}")
        return answer
