"""A cache in the memory of a test, and one behind a connection."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from state_machine import step_of
from values import replace

import cpu_kernels
from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.messages import Accepted, Attend, AttendResult, Hello, Open, Shutdown, Welcome
from rworker.cache_state import CacheState
from rworker.instructions import PlaceChunk, ReadChunk
from rworker.stream.checks import places_of
from rworker.stream.chunks import layout_of
from rworker.stream.memory import place_chunk, read_chunk

KV = KVSpec(3, 4, 24, DType.FLOAT32, 8)
LENGTHS = {0: 37, 1: 8, 2: 1, 3: 16, 4: 23}
"""Lengths of sequences: parts of blocks, whole ones, both."""
RESERVED = 64
NUM_BLOCKS = 80
ALL_KV = [replace(KV, dtype=dtype) for dtype in DType]
WAIT_S = 60.0
READING = 77


def hello_for(kv: KVSpec) -> Hello:
    spec = AttentionSpec(2 * kv.num_kv_heads, kv.num_kv_heads, kv.head_dim, 0.3)
    specs = (spec,) * kv.num_layers
    return Hello("a model", kv, specs, DType.FLOAT32, reading=READING)


def random_rows(kv: KVSpec, length: int, seed: int) -> NDArray[np.float32]:
    """K and V of a sequence's tokens, [layers, 2, T, heads, head_dim]."""
    shape = kv.num_layers, 2, length, kv.num_kv_heads, kv.head_dim
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Memory:
    """A cache in this process, whose blocks hold anything before."""

    def __init__(self, kv: KVSpec, num_blocks: int = NUM_BLOCKS) -> None:
        self.books = CacheState(hello_for(kv), num_blocks)
        self.layout = layout_of(kv)
        self.pool = cpu_kernels.allocate_pool(self.layout, kv.num_layers, num_blocks)
        self.pool[:] = np.random.default_rng(3).integers(0, 256, self.layout.block_bytes, np.uint8)

    def read(self, read: ReadChunk) -> NDArray[np.uint8]:
        return read_chunk(read.shape, self.pool, read.places, lambda n: np.full(n, 255, np.uint8))

    def place(self, place: PlaceChunk) -> None:
        place_chunk(place.shape, self.pool, place.places, place.data)

    def open(self, sequence: int, num_reserved: int) -> None:
        assert self.books.reserve(Open(sequence, num_reserved)) == Accepted(sequence)

    def fill(self, lengths: dict[int, int], seed: int) -> None:
        """Store sequences of random tokens, by their lengths."""
        for sequence, length in lengths.items():
            self.open(sequence, RESERVED)
            ids = np.array([sequence], np.int64)
            slots = self.books.store.append(ids, np.array([length], np.int32)).slots
            rows = random_rows(self.books.hello.kv, length, seed + sequence)
            for layer, (k, v) in zip(self.pool, rows, strict=True):
                cpu_kernels.append(self.layout, layer, k, v, slots)

    def places(self, form: ChunkForm, sequence: int, first: int, count: int) -> NDArray[np.int64]:
        columns = (np.array([x], t) for x, t in ((sequence, np.int64), (first, np.int32)))
        return places_of(self.books.store, form, *columns, np.array([count], np.int32))

    def stored(self, sequence: int, first: int, count: int) -> list[Any]:
        """Stored rows of all layers and heads, with their scales."""
        slots = self.places(ChunkForm.TOKENS, sequence, first, count)
        rows = []
        for layer in self.pool:
            tokens = cpu_kernels.allocate_tokens(self.layout, count)
            cpu_kernels.gather(self.layout, layer, slots, *tokens)
            rows.append(tokens)
        return [np.stack(x) for x in zip(*rows, strict=True) if x[0] is not None]


class Worker:
    """An R-worker's cache, over a connection to it."""

    def __init__(self, connection: Any, kv: KVSpec) -> None:
        self.connection = connection
        self._num_steps = 0
        connection.send(replace(hello_for(kv), max_blocks=NUM_BLOCKS))
        welcome = connection.receive(WAIT_S)
        assert isinstance(welcome, Welcome), welcome

    def open(self, sequence: int, num_reserved: int, *start: Any, **more: Any) -> None:
        self.connection.send(Open(sequence, num_reserved, *start, **more))
        assert self.connection.receive(WAIT_S) == Accepted(sequence)

    def step(self, sequence: int, num_past: int, rows: NDArray[np.float32]) -> list[bytes]:
        """Append tokens, K and V as of ``random_rows``, and attend the last one in each layer."""
        _, _, length, num_heads, head_dim = rows.shape
        begin = step_of((sequence, num_past, length), step=self._num_steps, queries=[1])
        self._num_steps += 1
        self.connection.send(begin)
        q = np.ones((1, 2 * num_heads, head_dim), np.float32)
        attended = []
        for layer, (k, v) in enumerate(rows):
            self.connection.send(Attend(begin.step, 0, layer, q, k.copy(), v.copy()))
            result = self.connection.receive(WAIT_S)
            assert isinstance(result, AttendResult), result
            attended.append(result.o.tobytes())
        return attended

    def leave(self) -> None:
        with contextlib.suppress(FastDecodeError):
            self.connection.send(Shutdown())


def assert_same(one: Memory, other: Memory, lengths: dict[int, int]) -> None:
    for sequence, length in lengths.items():
        pairs = zip(one.stored(sequence, 0, length), other.stored(sequence, 0, length), strict=True)
        for left, right in pairs:
            assert left.any() and left.tobytes() == right.tobytes(), sequence
