"""Caches that streams are measured between: in memory, in a file, an
R-worker's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId, PartId
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    CloseSequence,
    Failed,
    FromRWorker,
    Hello,
    OpenSequence,
    Refused,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import Connection
from rworker.cache_state import CacheState
from rworker.stream.chunk_endpoints import ChunkSink, MemoryCache, WorkerCache
from rworker.stream.cutting import CacheKind
from rworker.stream.files import KVFileWriter
from rworker.stream.memory import new_pool
from rworker.stream.pieces import Box, Piece, Region

TIMEOUT_S: Final = 300.0
"""Of an answer. The first may wait until kernels have been compiled."""
KV: Final = KVSpec(4, 8, 128, DType.BFLOAT16, 64)
TOKENS: Final = 256
"""Of each sequence: 4 MiB."""
SEQUENCE_BYTES: Final = TOKENS * KV.token_bytes
MODEL: Final = "streamed"
HERE: Final = HolderId(0)
THERE: Final = HolderId(1)


class Target(Protocol):
    """Where streams go."""

    def begin(self) -> ChunkSink:
        """Room for all sequences, none of which is there."""

    def end(self) -> None:
        """All have come."""


def hello(kv: KVSpec, **more: object) -> Hello:
    """What opens a cache for streams. ``more``: its other fields."""
    spec = AttentionSpec(kv.num_kv_heads, kv.num_kv_heads, kv.head_dim, 0.1)
    specs = (spec,) * kv.num_layers
    return Hello(PROTOCOL_VERSION, MODEL, kv, specs, DType.BFLOAT16, **more)  # type: ignore[arg-type]


class MemoryTarget:
    """A cache of this process; every page of it was written.

    Args:
        num_sequences: of ``TOKENS`` tokens each.
    """

    def __init__(self, kv: KVSpec, num_sequences: int) -> None:
        num_blocks = num_sequences * kv.num_blocks_for(TOKENS)
        self._num_sequences = num_sequences
        self._books = CacheState(hello(kv), num_blocks)
        pool = new_pool(kv, num_blocks)
        pool[:] = 1
        self._cache = MemoryCache(self._books, pool)

    def fill(self) -> MemoryCache:
        """Have all sequences there: a source."""
        for i in range(self._num_sequences):
            self._books.reserve(OpenSequence(i, TOKENS))
            self._books.store.append(np.array([i], np.int64), np.array([TOKENS], np.int32))
        return self._cache

    def begin(self) -> MemoryCache:
        """See ``Target``."""
        for i in range(self._num_sequences):
            if i in self._books.store:
                self._books.close(CloseSequence(i))
            self._books.reserve(OpenSequence(i, TOKENS))
        return self._cache

    def end(self) -> None:
        """See ``Target``."""


class Worker:
    """An R-worker's cache, which is opened.

    Raises:
        WorkerError: the R-worker doesn't open it.
    """

    def __init__(
        self, connection: Connection[ToRWorker, FromRWorker], greeting: Hello, num_sequences: int
    ) -> None:
        self._connection = connection
        self._num_sequences = num_sequences
        self._kind = CacheKind(greeting.model_hash, greeting.kv)
        self._is_open = False
        connection.send(greeting)
        _expect(connection, Welcome)

    def begin(self) -> WorkerCache:
        """See ``Target``."""
        for i in range(self._num_sequences):
            if self._is_open:
                self._connection.send(CloseSequence(i))
            self._connection.send(OpenSequence(i, TOKENS))
            _expect(self._connection, Accepted)
        self._is_open = True
        return WorkerCache(self._connection, self._kind)

    def end(self) -> None:
        """See ``Target``."""


class File:
    """A file, written anew each time."""

    def __init__(self, path: Path, kv: KVSpec) -> None:
        self._path = path
        self._kind = CacheKind(MODEL, kv)
        self._writer: KVFileWriter | None = None

    def begin(self) -> KVFileWriter:
        """See ``Target``."""
        self._path.unlink(missing_ok=True)
        self._writer = KVFileWriter(self._path, self._kind)
        return self._writer

    def end(self) -> None:
        """See ``Target``: it is on the disk."""
        assert self._writer is not None
        self._writer.__exit__(None, None, None)


def pieces(
    sequences: Sequence[int],
    *,
    first: int = 0,
    layers: range = range(KV.num_layers),
    heads: range = range(KV.num_kv_heads),
) -> list[Piece]:
    """Tokens from ``first`` on of some sequences, layers and heads; by default
    all of them."""
    whole = Box(range(KV.num_layers), range(KV.num_kv_heads), range(TOKENS))
    some = Box(layers, heads, range(first, TOKENS))
    # The target has nothing of what comes before.
    there = Box(whole.layers, whole.heads, some.tokens)
    return [
        Piece(Region(HERE, PartId(i), whole), Region(THERE, PartId(i), there), some)
        for i in sequences
    ]


def _expect(connection: Connection[ToRWorker, FromRWorker], kind: type[object]) -> None:
    answer = connection.receive(TIMEOUT_S)
    if isinstance(answer, (Failed, Refused)):
        raise WorkerError(f"{connection.peer} can't be measured: {answer.message}")
    if not isinstance(answer, kind):
        raise WorkerError(f"{connection.peer} answered {type(answer).__name__}")
