"""What breaks the protocol of chunks, and files that can't be trusted, change nothing."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import in_one_piece
from state_machine import BLOCK_SIZE, HELLO, HKV, KV, NUM_LAYERS, Worker, attend, step_of
from stream_suite import KV as STREAM_KV
from stream_suite import Memory, move, pieces_between
from values import replace

from examples import examples
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.wire.blocks import ChunkForm, FetchChunk, StoreChunk
from fastdecode.wire.messages import Accepted, Close, Inspect, Open
from rworker.instructions import HangUp, PlaceChunk, ReadChunk
from rworker.stream.chunks import ChunkShape, expectation, layout_of
from rworker.stream.files import KVFileWriter, read_file, stream_in

ROW_BYTES = 2 * 4 * KV.head_dim


def request(*pieces: tuple[int, int, int], **changes: Any) -> FetchChunk:
    """Pieces of (sequence, first token, how many), all layers and heads."""
    ids, first, count = (np.array(column) for column in zip(*pieces, strict=True))
    columns = ids.astype(np.int64), first.astype(np.int32), count.astype(np.int32)
    made = FetchChunk(ChunkForm.TOKENS, 0, NUM_LAYERS, 0, HKV, *columns)
    return replace(made, **changes)


def chunk(*pieces: tuple[int, int, int], **changes: Any) -> StoreChunk:
    asked = request(*pieces)
    shape = ChunkShape.of(layout_of(KV), asked)
    fields = {
        "model_hash": HELLO.model_hash,
        "kv": KV,
        "data": np.zeros(shape.num_bytes, np.uint8),
        **{name: getattr(asked, name) for name in asked.__struct_fields__},
    }
    return StoreChunk(**{**fields, **changes})


def opened(worker: Worker, *sequences: int) -> Worker:
    for sequence in sequences:
        assert worker.answer(Open(sequence, 10)) == Accepted(sequence)
    return worker


def test_tokens_arrive_layer_by_layer_and_then_it_steps(worker: Worker) -> None:
    opened(worker, 1)
    assert worker.tell(expectation({1: 4})) == ()
    first = chunk((1, 0, 4), num_layers=1, data=np.zeros(4 * HKV * ROW_BYTES, np.uint8))
    for layer in range(NUM_LAYERS):
        (place,) = worker.tell(replace(first, first_layer=layer))
        assert isinstance(place, PlaceChunk)
        assert place.places.tolist() == [0, 1, 2, 3]
    assert len(worker.run_step(step_of((1, 4, 1)))) == NUM_LAYERS


def test_an_arriving_sequence_is_neither_stepped_nor_forked_too_far_but_may_be_closed(
    worker: Worker,
) -> None:
    opened(worker, 1)
    worker.run_step(step_of((1, 0, 3)))
    worker.tell(expectation({1: 4}))
    one = chunk((1, 3, 2), data=np.zeros(NUM_LAYERS * 2 * HKV * ROW_BYTES, np.uint8))
    worker.tell(one)
    worker.answer(Open(2, 10, 5, parent_id=1))
    worker.tell(Close(2))
    for message in (step_of((1, 7, 1)), Open(3, 10, 6, parent_id=1)):
        other = opened(Worker(), *())
        other.tell(HELLO)
        opened(other, 1)
        other.run_step(step_of((1, 0, 3)))
        other.tell(expectation({1: 4}))
        other.tell(one)
        other.fails(message, "sequence 1")
    assert worker.tell(Close(1)) == ()
    opened(worker, 1)
    worker.run_step(step_of((1, 0, 3)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (chunk((2, 0, 4)), "sequence 2 expects no tokens"),
        (chunk((1, 1, 3)), "tokens from 1 on of sequence 1 have come where those from 0"),
        (chunk((1, 0, 5)), "sequence 1 expects 4 tokens in all, not 5"),
        (chunk((1, 0, 4), kv=replace(KV, dtype=DType.INT8)), "int8"),
        (chunk((1, 0, 4), first_layer=1), "num_layers"),
        (chunk((1, 0, 4), first_head=-1), "first_head"),
        (chunk((1, 0, 4), num_heads=HKV + 1), "num_heads"),
        (chunk((1, 0, 4), data=np.zeros(5, np.uint8)), "data has shape"),
        (chunk((1, 0, 2), (1, 2, 2)), "one piece of a sequence"),
        (chunk((1, 0, 3), form=ChunkForm.BLOCKS), "begin and end with a block of 4"),
        (chunk((1, -4, 4)), "first_tokens"),
        (chunk((1, 0, 0)), "num_tokens"),
        (chunk((9, 0, 4)), "sequence 9 expects no tokens"),
        (expectation({9: 4}), "sequence 9 is not open"),
        (expectation({2: 0}), "num_tokens"),
        (request((1, 0, 1)), "of which 0 are in every layer"),
        (request((2, 0, 4)), "of which 3 are in every layer"),
        (request((9, 0, 4)), "sequence 9 is not open"),
    ],
)
def test_what_does_not_fit_is_refused(worker: Worker, message: Any, reason: str) -> None:
    opened(worker, 1, 2)
    worker.run_step(step_of((2, 0, 3)))
    worker.tell(expectation({1: 4}))
    worker.fails(message, reason)


def test_another_model_has_a_code_of_its_own(worker: Worker) -> None:
    opened(worker, 1)
    worker.tell(expectation({1: 4}))
    worker.fails(chunk((1, 0, 4), model_hash="other"), "other", code="model_mismatch")


def test_more_than_is_reserved_is_refused(worker: Worker) -> None:
    opened(worker, 1)
    worker.fails(expectation({1: 11}), "room was reserved for 10", code="out_of_capacity")


def test_tokens_of_an_open_step_are_not_read(worker: Worker) -> None:
    opened(worker, 1)
    worker.run_step(step_of((1, 0, 3)))
    begin = step_of((1, 3, 2), step=1)
    worker.tell(begin)
    worker.tell(attend(begin, 0))
    (read,) = worker.tell(request((1, 0, 3)))
    assert isinstance(read, ReadChunk)
    worker.fails(request((1, 0, 4)), "of which 3 are in every layer")
    assert worker.tell(expectation({1: 1}))[1] == HangUp(0), "it has been hung up on"


def test_readers_store_nothing_and_read_no_sequences() -> None:
    for message in (request((1, 0, 1)), chunk((1, 0, 1))):
        reader = Worker()
        reader.tell(Inspect())
        reader.fails(message, "a reader may not say that")


def test_copies_come_before_what_arrives(worker: Worker) -> None:
    opened(worker, 1)
    worker.run_step(step_of((1, 0, 3)))
    worker.answer(Open(2, 10, 3, parent_id=1))
    (copy,) = worker.tell(expectation({2: 1}))
    assert (len(copy.source_ids), len(copy.target_ids)) == (1, 1)  # type: ignore[union-attr]
    (place,) = worker.tell(chunk((2, 3, 1), data=np.zeros(NUM_LAYERS * HKV * ROW_BYTES, np.uint8)))
    assert isinstance(place, PlaceChunk)
    assert place.places[0] // BLOCK_SIZE == copy.target_ids[0]  # type: ignore[union-attr]


# Files.


@pytest.fixture
def home() -> Memory:
    memory = Memory(STREAM_KV)
    memory.fill({0: 20, 1: 5}, seed=8)
    return memory


@pytest.fixture
def written(home: Memory, tmp_path: Path) -> Path:
    path = tmp_path / "kv.fdkv"
    with KVFileWriter(path, home.kind) as file:
        move(pieces_between({0: 20, 1: 5}, STREAM_KV), home, _Sequences(file))
    return path


class _Sequences:
    """A file in the place of a cache: nothing is opened there."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink

    def open(self, sequence: int, num_reserved: int) -> None: ...

    def source(self) -> Any:
        raise NotImplementedError


@given(data=st.data())
@settings(max_examples=examples(200))
def test_no_damage_goes_unnoticed(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("damaged") / "kv.fdkv"
    memory = Memory(STREAM_KV)
    memory.fill({0: 3}, seed=8)
    with KVFileWriter(path, memory.kind) as file:
        move(pieces_between({0: 3}, STREAM_KV), memory, _Sequences(file))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["torn", "doubled", "changed"]))
    if kind == "torn":
        damaged = whole[:at]
    elif kind == "doubled":
        damaged = whole[: at + 1] + whole
    else:
        flipped = whole[at] ^ data.draw(st.integers(1, 255))
        damaged = whole[:at] + bytes([flipped]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"kv\.fdkv") as caught:
        list(read_file(path, memory.kind))
    assert caught.value.code == "bad_kv_file"


def record(message: Any) -> bytes:
    data = in_one_piece(message).tobytes()
    return struct.pack("<II", len(data), crc32(data)) + data


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(b"x" * 999), "can't be right"),
        (lambda path: path.write_bytes(b""), "torn"),
        (lambda path: path.chmod(0o644), "others may read or write it: chmod 600"),
        (lambda path: path.write_bytes(record(Open(1, 2))), "Open"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "doesn't end where"),
        (lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")), "symbolic links"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_foreign_files_are_refused_by_name(
    written: Path, home: Memory, change: Callable[[Path], Any], reason: str
) -> None:
    change(written)
    with pytest.raises(ConfigError, match=reason) as caught:
        list(read_file(written, home.kind))
    assert str(written) in caught.value.message


def test_a_file_of_another_cache_is_refused(written: Path, home: Memory) -> None:
    other = Memory(replace(STREAM_KV, block_size=16))
    for sequence in (0, 1):
        other.open(sequence, 64)
    with pytest.raises(ConfigError, match="it is for a cache of") as caught:
        stream_in(written, other)
    assert str(written) in caught.value.message
    with pytest.raises(ConfigError, match="there already"):
        KVFileWriter(written, home.kind)


def test_what_blocks_held_before_is_not_in_a_file(tmp_path: Path) -> None:
    """Caches hold other requests' words."""
    used, clean = Memory(STREAM_KV), Memory(STREAM_KV)
    for memory in (used, clean):
        memory.pool[:] = 0
    used.fill(dict.fromkeys(range(10), 60), seed=9)
    for sequence in range(10):
        used.books.close(Close(sequence))
    for memory in (used, clean):
        memory.fill({0: 20, 1: 5}, seed=8)
    files = []
    for index, memory in enumerate((used, clean)):
        path = tmp_path / f"{index}"
        with KVFileWriter(path, memory.kind) as file:
            for _ in range(2):
                move(pieces_between({0: 20, 1: 5}, STREAM_KV), memory, _Sequences(file))
        files.append(path.read_bytes())
    assert files[0] == files[1]
