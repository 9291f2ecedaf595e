"""A cache of this R-worker, as source and sink of chunks."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import HolderId
from fastdecode.wire.arrays import Array
from fastdecode.wire.kv.chunks import FetchChunk, StoreChunk
from rworker.cache_state import CacheState
from rworker.instructions import PlaceChunk, ReadChunk
from rworker.stream.checks import fetch_chunk, store_chunk
from rworker.stream.cutting import CacheKind

_NOBODY: Final = -1
"""No peer waits for an answer."""


class ChunkMemory(Protocol):
    """Reads and writes K and V in the memory of an R-worker's caches."""

    def read(self, read: ReadChunk) -> Array: ...

    def place(self, place: PlaceChunk) -> None: ...


class LocalCache:
    """See the module.

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
        self._asked: ReadChunk | None = None

    def ask(self, request: FetchChunk) -> None:
        """Ask for tokens of sequences."""
        self.ask_slots(request, fetch_chunk(self._books, request))

    def ask_slots(self, request: FetchChunk, slots: NDArray[np.int64]) -> None:
        """Ask for what lies in these slots, [T], be it any sequence's or none's."""
        self._asked = ReadChunk(_NOBODY, self._holder, request, slots)

    def fetch(self) -> Array:
        """The data of what was asked for last."""
        assert self._asked is not None
        return self._memory.read(self._asked)

    def flush(self, chunk: StoreChunk) -> None:
        """Write a chunk that sequences expect. Raises ProtocolError: none does."""
        slots = store_chunk(self._books, chunk)
        self._memory.place(PlaceChunk(_NOBODY, self._holder, chunk, slots))
