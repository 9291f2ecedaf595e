"""What every place that K and V may be streamed to must do, as tests to be
inherited: ``class TestX(StreamSuite)`` gives a ``make_place`` fixture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest
from values import replace

import cpu_kernels
from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import HolderId, PartId, SequenceId
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import StoreChunk
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Hello,
    Open,
    Shutdown,
    Welcome,
)
from rworker.cache_state import CacheState
from rworker.stream.chunk_endpoints import ChunkSink, ChunkSource, MemoryCache, WorkerCache
from rworker.stream.chunks import layout_of
from rworker.stream.cutting import CacheKind, cut_pieces
from rworker.stream.pieces import Box, Piece, Region, redistribute
from rworker.stream.streams import expect_pieces, stream_out

KV = KVSpec(3, 4, 24, DType.FLOAT32, 8)
LENGTHS = {0: 37, 1: 8, 2: 1, 3: 16, 4: 23}
"""Of the sequences: parts of blocks, whole ones, both."""
RESERVED = 64
NUM_BLOCKS = 80
ALL_KV = [replace(KV, dtype=dtype) for dtype in DType]
WAIT_S = 60.0


class Place(Protocol):
    """Somewhere to stream to, which can be read back once all is there."""

    sink: ChunkSink

    def open(self, sequence: int, num_reserved: int) -> None: ...

    def source(self) -> ChunkSource: ...


MakePlace = Callable[[KVSpec], contextlib.AbstractContextManager[Place]]


READING = 77


def hello_for(kv: KVSpec) -> Hello:
    spec = AttentionSpec(2 * kv.num_kv_heads, kv.num_kv_heads, kv.head_dim, 0.3)
    specs = (spec,) * kv.num_layers
    return Hello(PROTOCOL_VERSION, "a model", kv, specs, DType.FLOAT32, reading=READING)


class Memory(MemoryCache):
    """A cache in this process, whose blocks hold anything before."""

    def __init__(self, kv: KVSpec, num_blocks: int = NUM_BLOCKS) -> None:
        self.books = CacheState(hello_for(kv), num_blocks)
        self.layout = layout_of(kv)
        self.pool = cpu_kernels.allocate_pool(self.layout, kv.num_layers, num_blocks)
        self.pool[:] = np.random.default_rng(3).integers(0, 256, self.layout.block_bytes, np.uint8)
        super().__init__(self.books, self.pool)
        self.sink: ChunkSink = self

    def open(self, sequence: int, num_reserved: int) -> None:
        assert self.books.reserve(Open(sequence, num_reserved)) == Accepted(sequence)

    def source(self) -> ChunkSource:
        return self

    def fill(self, lengths: dict[int, int], seed: int) -> None:
        """Sequences of so many random tokens."""
        rng = np.random.default_rng(seed)
        for sequence, length in lengths.items():
            self.open(sequence, RESERVED)
            ids = np.array([sequence], np.int64)
            slots = self.books.store.append(ids, np.array([length], np.int32)).slots
            for layer in self.pool:
                shape = (length, self.layout.num_kv_heads, self.layout.head_dim)
                k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
                cpu_kernels.append(self.layout, layer, k, v, slots)

    def stored(self, sequence: int, first: int, count: int) -> list[Any]:
        """Stored rows of all layers and heads, with their scales."""
        columns = (np.array([x], t) for x, t in ((sequence, np.int64), (first, np.int32)))
        slots = self.books.store.slots(*columns, np.array([count], np.int32))
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
        hello = hello_for(kv)
        connection.send(replace(hello, max_blocks=NUM_BLOCKS))
        welcome = connection.receive(WAIT_S)
        assert isinstance(welcome, Welcome), welcome
        self.cache = WorkerCache(connection, CacheKind(hello.model_hash, kv), link_bytes=1)
        self.sink: ChunkSink = self.cache

    def open(self, sequence: int, num_reserved: int) -> None:
        self.connection.send(Open(sequence, num_reserved))
        assert self.connection.receive(WAIT_S) == Accepted(sequence)

    def source(self) -> ChunkSource:
        return self.cache

    def leave(self) -> None:
        with contextlib.suppress(FastDecodeError):
            self.connection.send(Shutdown())


def region(holder: int, part: int, kv: KVSpec, length: int) -> Region:
    """A whole sequence in one cache."""
    box = Box(range(kv.num_layers), range(kv.num_kv_heads), range(length))
    return Region(HolderId(holder), PartId(part), box)


def pieces_between(lengths: dict[int, int], kv: KVSpec, by: int = 0) -> tuple[Piece, ...]:
    """All of holder 0's sequences to holder 1, under other names."""
    here = {SequenceId(s): [region(0, s, kv, n)] for s, n in lengths.items()}
    there = {SequenceId(s): [region(1, s + by, kv, n)] for s, n in lengths.items()}
    return redistribute(here, there)


def move(pieces: tuple[Piece, ...], source: ChunkSource, place: Place, **options: int) -> int:
    """Open, expect, and stream."""
    for piece in pieces:
        place.open(int(piece.target.part_id), RESERVED)
    expect_pieces(pieces, {HolderId(1): place.sink})
    return stream_out(pieces, {HolderId(0): source}, {HolderId(1): place.sink}, **options)


def assert_same(one: Memory, other: Memory, lengths: dict[int, int], by: int = 0) -> None:
    for sequence, length in lengths.items():
        pairs = zip(
            one.stored(sequence, 0, length), other.stored(sequence + by, 0, length), strict=True
        )
        for left, right in pairs:
            assert left.any() and left.tobytes() == right.tobytes(), sequence


class StreamSuite:
    @pytest.fixture
    def place_of(self, make_place: MakePlace) -> Iterator[Callable[[KVSpec], Place]]:
        with contextlib.ExitStack() as stack:
            yield lambda kv: stack.enter_context(make_place(kv))

    @pytest.mark.parametrize("kv", ALL_KV, ids=lambda kv: kv.dtype.value)
    def test_there_and_back_bit_for_bit(self, place_of: Any, kv: KVSpec) -> None:
        home, back = Memory(kv), Memory(replace(kv, block_size=5))
        home.fill(LENGTHS, seed=1)
        place = place_of(kv)
        move(pieces_between(LENGTHS, kv, by=100), home, place)
        again = pieces_between({s + 100: n for s, n in LENGTHS.items()}, kv, by=-100)
        move(again, place.source(), back)
        assert_same(home, back, LENGTHS)

    @pytest.mark.parametrize("kv", ALL_KV[:2], ids=lambda kv: kv.dtype.value)
    def test_cut_to_many_chunks(self, place_of: Any, kv: KVSpec) -> None:
        home, back = Memory(kv), Memory(kv)
        home.fill(LENGTHS, seed=2)
        place = place_of(kv)
        move(pieces_between(LENGTHS, kv), home, place, most_bytes=4096)
        move(pieces_between(LENGTHS, kv), place.source(), back, most_bytes=1000)
        assert_same(home, back, LENGTHS)

    def test_tokens_follow_those_that_are_there(self, place_of: Any) -> None:
        home, back = Memory(KV), Memory(KV)
        home.fill({0: 40}, seed=4)
        place = place_of(KV)
        move(pieces_between({0: 13}, KV), home, place)
        (whole,) = pieces_between({0: 40}, KV)
        rest = replace(whole, box=replace(whole.box, tokens=range(13, 40)))
        expect_pieces([rest], {HolderId(1): place.sink})
        stream_out([rest], {HolderId(0): home}, {HolderId(1): place.sink})
        move(pieces_between({0: 40}, KV), place.source(), back)
        assert_same(home, back, {0: 40})

    def test_another_model_is_refused_by_name(self, place_of: Any) -> None:
        home = Memory(KV)
        home.fill({0: 3}, seed=5)
        place = place_of(KV)
        place.open(0, RESERVED)
        (cut,) = cut_pieces(pieces_between({0: 3}, KV), home.kind, home.kind)
        home.ask(cut.request)
        chunk = replace(cut.filled(home.fetch()), model_hash="another")
        with pytest.raises(FastDecodeError, match="another"):
            send(place, chunk)


def send(place: Place, chunk: StoreChunk) -> None:
    """A chunk alone, expected, and what becomes of it."""
    place.sink.expect(int(chunk.sequence_ids[0]), int(chunk.num_tokens[0]))
    place.sink.flush(chunk)
    place.sink.finish()
    place.source()
