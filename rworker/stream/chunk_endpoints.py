"""Where chunks come from and go to: a cache in this process, or an R-worker at
the other end of a connection."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import BlockLayout
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    ChunkAnswer,
    ChunkStored,
    FetchChunk,
    FetchedChunk,
    StoreChunk,
)
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Array
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.transport import Connection
from rworker.cache_state import CacheState
from rworker.instructions import PlaceChunk, ReadChunk
from rworker.stream.checks import expect_tokens, fetch_chunk, store_chunk
from rworker.stream.chunks import ChunkShape, expectation, layout_of
from rworker.stream.cutting import CacheKind
from rworker.stream.memory import gather, scatter

LINK_BYTES: Final = 64 << 20  # that may be under way on one connection, unanswered
ANSWER_TIMEOUT_S: Final = 60.0
NO_PEER: Final = -1
"""Stands for a peer's number: no peer waits for an answer."""


class ChunkSource(Protocol):
    """A cache that chunks are read from."""

    @property
    def kind(self) -> CacheKind: ...

    def ask(self, request: FetchChunk) -> None:
        """Ask for a chunk. Never waits."""

    def fetch(self) -> Array:
        """The data of the oldest chunk that was asked for and not fetched.

        Raises:
            WorkerError: the R-worker that has it is gone, or refuses.
        """


class ChunkSink(Protocol):
    """A cache that chunks are sent to."""

    @property
    def kind(self) -> CacheKind: ...

    def expect(self, sequence_id: int, num_tokens: int) -> None:
        """Tokens of a sequence are going to come."""

    def flush(self, chunk: StoreChunk) -> None:
        """Send a chunk. Waits only while there is no credit left.

        Raises:
            WorkerError: the R-worker that is to have it is gone, or refuses.
        """

    def finish(self) -> None:
        """Wait until all that was sent is there. Raises as ``flush``."""


class ChunkMemory(Protocol):
    """Reads and writes K and V in the memory of an R-worker's caches."""

    def read(self, read: ReadChunk) -> Array: ...

    def place(self, place: PlaceChunk) -> None: ...


class LocalCache:
    """A cache of this R-worker.

    Args:
        holder: the cache, as ``memory`` calls it.
        books: the cache's.
        memory: of its blocks.
    """

    def __init__(self, holder: HolderId, books: CacheState, memory: ChunkMemory) -> None:
        self.kind: Final = CacheKind(books.hello.model_hash, books.hello.kv)
        self._holder = holder
        self._books = books
        self._memory = memory
        self._asked: deque[ReadChunk] = deque()

    def ask(self, request: FetchChunk) -> None:
        """See ``ChunkSource``."""
        self.ask_places(request, fetch_chunk(self._books, request))

    def ask_places(self, request: FetchChunk, places: NDArray[np.int64]) -> None:
        """Ask for what lies there, as ``ReadChunk`` has it, be it any sequence's or none's."""
        self._asked.append(ReadChunk(NO_PEER, self._holder, request, places))

    def fetch(self) -> Array:
        """See ``ChunkSource``."""
        return self._memory.read(self._asked.popleft())

    def flush(self, chunk: StoreChunk) -> None:
        """Write a chunk that sequences expect. Raises ProtocolError: none does."""
        places = store_chunk(self._books, chunk)
        self._memory.place(PlaceChunk(NO_PEER, self._holder, chunk, places))


class _PoolMemory:
    """One cache's blocks, in memory of this process."""

    def __init__(self, layout: BlockLayout, pool: NDArray[np.uint8], num_threads: int) -> None:
        self._where = layout, pool
        self._num_threads = num_threads
        self._buffers = BufferPool()

    def read(self, read: ReadChunk) -> Array:
        layout, pool = self._where
        take, num_threads = self._buffers.take, self._num_threads
        return scatter(layout, pool, read.request, read.places, take, num_threads=num_threads)

    def place(self, place: PlaceChunk) -> None:
        gather(*self._where, place.chunk, place.places, num_threads=self._num_threads)


class MemoryCache(LocalCache):
    """A cache in memory of this process, and of no R-worker, as source and sink.

    Args:
        books: whose blocks are in ``pool``.
        pool: uint8 [num_layers, num_blocks, block_bytes].
        num_threads: of the kernels.
    """

    def __init__(self, books: CacheState, pool: NDArray[np.uint8], num_threads: int = 1) -> None:
        memory = _PoolMemory(layout_of(books.hello.kv), pool, num_threads)
        super().__init__(HolderId(0), books, memory)
        self._pool = pool

    def expect(self, sequence_id: int, num_tokens: int) -> None:
        appended = expect_tokens(self._books, expectation({sequence_id: num_tokens}))
        self._pool[:, appended.copy_targets] = self._pool[:, appended.copy_sources]

    def finish(self) -> None:
        """All is there."""


class WorkerCache:
    """An R-worker's cache, as source and sink. It has been greeted with a cache
    of this kind; whatever else was asked over the connection is answered.

    Args:
        connection: to the R-worker.
        kind: of the cache.
        link_bytes: the most that is under way unanswered.
        timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        connection: Connection[ToRWorker, FromRWorker],
        kind: CacheKind,
        *,
        link_bytes: int = LINK_BYTES,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.kind: Final = kind
        self._connection = connection
        self._link_bytes = max(link_bytes, MAX_CHUNK_BYTES)
        self._timeout_s = timeout_s
        self._due: deque[tuple[type[ChunkAnswer], int]] = deque()  # answers, and bytes of each
        self._under_way = 0  # bytes of chunks that aren't stored yet
        self._fetched: deque[Array] = deque()

    def ask(self, request: FetchChunk) -> None:
        shape = ChunkShape.of(layout_of(self.kind.kv), request)
        self._connection.send(request)
        self._due.append((FetchedChunk, shape.num_bytes))

    def fetch(self) -> Array:
        while not self._fetched:
            self._take_answer()
        return self._fetched.popleft()

    def expect(self, sequence_id: int, num_tokens: int) -> None:
        self._connection.send(expectation({sequence_id: num_tokens}))

    def flush(self, chunk: StoreChunk) -> None:
        num_bytes = len(chunk.data)
        while self._under_way and self._under_way + num_bytes > self._link_bytes:
            self._take_answer()
        self._connection.send(chunk)
        self._due.append((ChunkStored, num_bytes))
        self._under_way += num_bytes

    def finish(self) -> None:
        while self._under_way:
            self._take_answer()

    def _take_answer(self) -> None:
        answer = self._connection.receive(self._timeout_s)
        kind, num_bytes = self._due.popleft()
        if isinstance(answer, FetchedChunk) and kind is FetchedChunk:
            if len(answer.data) == num_bytes:
                self._fetched.append(answer.data)
                return
        elif kind is ChunkStored and answer == ChunkStored(num_bytes):
            self._under_way -= num_bytes
            return
        raise self._refused(answer, f"{kind.__name__} of {num_bytes} bytes")

    def _refused(self, answer: FromRWorker, wanted: str) -> Exception:
        if isinstance(answer, Failed):
            return WorkerError(f"{self._connection.peer}: {answer.message}", code=answer.code)
        return ProtocolError(
            f"{self._connection.peer} answered {type(answer).__name__} where {wanted} was due"
        )
