"""What breaks the protocol of chunks changes nothing, nor do files that can't be trusted."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from chunk_memory import KV as STREAM_KV
from chunk_memory import Memory
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import in_one_piece
from state_machine import BLOCK_SIZE, HELLO, Worker, chunk, step_of
from values import replace

from examples import examples
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.messages import Accepted, Close, Inspect, Open
from fastdecode.wire.traits import Role
from rworker.instructions import CopyBlocks, PlaceChunk, ReadChunk, Send
from rworker.stream.chunks import ChunkShape
from rworker.stream.files import RecordWriter, read_records


def opened(*sequences: int) -> Worker:
    """A replica with sequences."""
    worker = Worker()
    worker.tell(replace(HELLO, role=Role.NEIGHBOUR, session=7, max_blocks=12))
    for sequence in sequences:
        assert worker.answer(Open(sequence, 10)) == Accepted(sequence)
    return worker


def test_tokens_are_placed_before_they_are_answered_for() -> None:
    place, send = opened(1).tell(chunk((1, 0, 4)))
    assert isinstance(place, PlaceChunk) and place.places.tolist() == [0, 1, 2, 3]
    assert send == Send(0, Accepted(1))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (chunk((1, 1, 3)), "tokens from 1 on of sequence 1 have come where those from 0"),
        (chunk((2, 0, 4)), "tokens from 0 on of sequence 2 have come where those from 3"),
        (chunk((1, 0, 4), data=np.zeros(5, np.uint8)), "data has shape"),
        (chunk((1, 0, 2), (1, 2, 2)), "one piece of a sequence"),
        (chunk((1, 0, 3), form=ChunkForm.BLOCKS), "begin and end with a block of 4"),
        (chunk((1, -4, 4)), "first_tokens"),
        (chunk((1, 0, 0)), "num_tokens"),
        (chunk((9, 0, 4)), "sequence 9 is not open"),
    ],
)
def test_what_does_not_fit_is_refused(message: Any, reason: str) -> None:
    worker = opened(1, 2)
    worker.tell(chunk((2, 0, 3)))
    worker.fails(message, reason)


def test_more_than_is_reserved_is_refused() -> None:
    opened(1).fails(chunk((1, 0, 11)), "room was reserved for 10", code="out_of_capacity")


def test_only_neighbours_store_chunks_and_they_step_nothing(worker: Worker) -> None:
    worker.answer(Open(1, 10))
    worker.fails(chunk((1, 0, 1)), "a S-worker may not say that")
    reader = Worker()
    reader.tell(Inspect())
    reader.fails(chunk((1, 0, 1)), "a reader may not say that")
    opened(1).fails(step_of((1, 0, 1)), "a neighbour may not say that")


def test_copies_come_before_what_arrives() -> None:
    worker = opened(1)
    worker.tell(chunk((1, 0, 3)))
    worker.answer(Open(2, 10, 3, parent_id=1))
    copy, place, _ = worker.tell(chunk((2, 3, 1)))
    assert isinstance(copy, CopyBlocks) and isinstance(place, PlaceChunk)
    assert (len(copy.source_ids), len(copy.target_ids)) == (1, 1)
    assert place.places[0] // BLOCK_SIZE == copy.target_ids[0]


def test_what_blocks_held_before_is_not_in_a_chunk() -> None:
    """Caches hold other requests' words, and so does the memory that chunks are read into."""
    kv = replace(STREAM_KV, head_dim=13)  # rows end within a multiple of 64 bytes
    used, clean = Memory(kv), Memory(kv)
    for memory in (used, clean):
        memory.pool[:] = 0
    used.fill(dict.fromkeys(range(10), 60), seed=9)
    for sequence in range(10):
        used.books.close(Close(sequence))
    for memory in (used, clean):
        memory.fill({0: 20, 1: 5}, seed=8)
    shape = ChunkShape.whole(kv, ChunkForm.TOKENS, 5)
    one, other = (
        memory.read(ReadChunk(HolderId(0), shape, memory.places(ChunkForm.TOKENS, 1, 0, 5)))
        for memory in (used, clean)
    )
    assert one.any() and one.tobytes() == other.tobytes()
    (start, stop), _ = shape.gaps
    assert start < stop and not one[start:stop].any()


# Files.


def written(path: Path) -> Path:
    writer = RecordWriter(path)
    for message in (Open(1, 10), chunk((1, 0, 3)), Close(1)):
        writer.write(message)
    writer.close()
    return path


@given(data=st.data())
@settings(max_examples=examples(200))
def test_no_damage_goes_unnoticed(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = written(tmp_path_factory.mktemp("damaged") / "kv.fdkv")
    before = [in_one_piece(message).tobytes() for message in read_records(path)]
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:at])
    else:
        flipped = whole[at] ^ data.draw(st.integers(1, 255))
        path.write_bytes(whole[:at] + bytes([flipped]) + whole[at + 1 :])
    found: list[bytes] = []
    with contextlib.suppress(ConfigError):
        found.extend(in_one_piece(message).tobytes() for message in read_records(path))
    assert found == before[: len(found)] and len(found) < len(before)


def record(data: bytes) -> bytes:
    return struct.pack("<II", len(data), crc32(data)) + data


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(b"x" * 999), "can't be right"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "torn"),
        (lambda path: path.chmod(0o644), "others may read or write it: chmod 600"),
        (lambda path: path.write_bytes(record(b"no message of ours" * 4)), "record 0"),
        (lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")), "symbolic links"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_foreign_files_are_refused_by_name(
    change: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "kv.fdkv")
    change(path)
    with pytest.raises(ConfigError, match=reason) as caught:
        list(read_records(path))
    assert str(path) in caught.value.message and caught.value.code == "bad_kv_file"
