"""Links between R-workers, on which replicas travel.

An R-worker stores a few sequences and replicates them to its neighbour. Then one token is appended.
The neighbour reports that token once it has everything before it. The time from when the
neighbour has made room to that report is the time of the copy, over the links of ``--replicas``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.measure.link import TIMEOUT_S, RConnection, expect
from fastdecode.wire.blocks import NO_STEP, DropCache, Dropped, Replicate, Replicated, Unprotected
from fastdecode.wire.messages import (
    MAX_ID,
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    FromRWorker,
    Hello,
    Open,
    ToRWorker,
    Welcome,
)
from rworker.stream.chunk_endpoints import LINK_BYTES

MOST_SEQUENCES: Final = 8
REACH_S: Final = 10.0  # longest time for a neighbour to be reached and to make room
KV: Final = KVSpec(4, 8, 128, DType.BFLOAT16, 64)
TOKENS: Final = 256  # of each sequence: 4 MiB
SEQUENCE_BYTES: Final = TOKENS * KV.token_bytes


@dataclass(frozen=True)
class NeighbourFacts:
    """The link from one R-worker to the next, or the error if it could not be measured."""

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
    """Measure the links of a ring of R-workers. Fewer than two have none. Their caches are lost.

    Args:
        addresses: Addresses of the R-workers for each other.
        kv_bytes: Memory of each for K and V.
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
            seconds = members[index].copy_to(addresses[keeper])
            num_bytes = num_sequences * SEQUENCE_BYTES
            found.append(NeighbourFacts(names[index], names[keeper], num_bytes, seconds))
        except FastDecodeError as error:
            found.append(NeighbourFacts(names[index], names[keeper], error=error.message))
    return found


class _Member:
    def __init__(
        self, connection: RConnection, holder: int, session: int, num_sequences: int
    ) -> None:
        self._connection, self._num_sequences = connection, num_sequences
        self._holder, self._session = holder, session
        self._num_links = 0
        self._is_full = False

    def fill(self) -> None:
        """Open a cache with all sequences and room for one more, unless that was done."""
        if self._is_full:
            return
        # An earlier measurement may hold all memory, and the name of a neighbour's cache.
        self._open(holder=0, max_blocks=1)
        self._ask(DropCache(self._session, 0, self._holder), Dropped)
        num_blocks = self._num_sequences * KV.num_blocks_for(TOKENS)
        self._open(holder=self._holder, max_blocks=num_blocks + 1)
        for sequence in range(self._num_sequences):
            self._append(sequence, TOKENS)
            for _ in range(KV.num_layers):
                self._receive(AttendResult)
        self._is_full = True

    def copy_to(self, address: str) -> float:
        """Replicate to ``address``. Return the seconds of the copy, once there was room."""
        self._num_links += 1
        self._connection.send(Replicate(address, LINK_BYTES, self._num_links, REACH_S))
        self._await(NO_STEP)
        started = time.perf_counter()
        self._append(self._num_sequences, 1)
        self._await(self._num_sequences)
        return time.perf_counter() - started

    def _open(self, holder: int, max_blocks: int) -> None:
        specs = (AttentionSpec(KV.num_kv_heads, KV.num_kv_heads, KV.head_dim, 0.1),) * KV.num_layers
        hello = Hello(PROTOCOL_VERSION, "streamed", KV, specs, DType.BFLOAT16)
        own = replace(hello, holder=holder, session=self._session, max_blocks=max_blocks)
        self._ask(own, Welcome)

    def _append(self, sequence: int, num_tokens: int) -> None:
        """Open a sequence, and store its tokens in a step of the same number, without queries."""
        self._ask(Open(sequence, num_tokens), Accepted)
        none, new = np.zeros(1, np.int32), np.full(1, num_tokens, np.int32)
        ids = np.array([sequence], np.int64)
        self._connection.send(BeginStep(sequence, 0, ids, none, new, none, new))
        rows = np.ones((num_tokens, KV.num_kv_heads, KV.head_dim), np.uint16)
        for layer in range(KV.num_layers):
            self._connection.send(Attend(sequence, 0, layer, rows[:0], rows, rows))

    def _await(self, step: int) -> None:
        """Wait until the neighbour reports this step."""
        while True:
            news = self._receive(Replicated, AttendResult)
            if isinstance(news, Replicated) and (news.link, news.step) == (self._num_links, step):
                return

    def _ask(self, message: ToRWorker, answer: type[FromRWorker]) -> None:
        self._connection.send(message)
        self._receive(answer)

    def _receive(self, *kinds: type[FromRWorker]) -> FromRWorker:
        answer = self._connection.receive(TIMEOUT_S)
        while isinstance(answer, Unprotected):
            if answer.link >= self._num_links:
                raise WorkerError(answer.reason)
            answer = self._connection.receive(TIMEOUT_S)
        return expect(answer, *kinds)
