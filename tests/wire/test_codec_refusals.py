"""The codec: what it refuses, however a peer, a forger or a broken line came to send it."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import in_one_piece, same, small_attend, with_crc

from examples import examples
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire import codec
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Failed,
    Hello,
    Message,
    Shutdown,
)


def refuse(data: bytes | np.ndarray, match: str, **bounds: int) -> ProtocolError:
    with pytest.raises(ProtocolError, match=match) as caught:
        codec.decode(np.frombuffer(bytes(data), np.uint8), **bounds)
    return caught.value


def forged(message: Message, at: int, value: bytes) -> bytes:
    """The message with some bytes of its head replaced, and a checksum that is right again."""
    data = bytearray(in_one_piece(message).tobytes())
    head_bytes = len(codec.encode(message).head)
    data[at : at + len(value)] = value
    data[head_bytes - 4 : head_bytes] = struct.pack("<I", zlib.crc32(bytes(data[: head_bytes - 4])))
    return bytes(data)


def test_another_version_is_refused_naming_both() -> None:
    error = refuse(
        forged(Shutdown(), 4, struct.pack("<H", 77)), f"version 77, this side {PROTOCOL_VERSION}:"
    )
    assert error.code == "protocol_version"


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"HTTP", "another program"),
        (6, b"\x63", "no message has opcode 99"),
        (7, b"\x01", "no message has opcode"),
        (12, struct.pack("<I", 1 << 31), "a head of 2147483648 bytes"),
        (12, struct.pack("<I", 2), "a head of 2 bytes"),
        (12, struct.pack("<I", 27), "a head of 27 bytes"),
        (16, struct.pack("<Q", 1 << 63), "exceeds the"),
        (16, struct.pack("<Q", 100), "are not its body"),
        (24, struct.pack("<I", 0), "dtype 0 where q: float32 or uint16"),
        (24, struct.pack("<I", 3), "dtype int32 where q: float32 or uint16"),
        (24, struct.pack("<I", 1 << 30), "dtype 1073741824 where"),
        (28, struct.pack("<III", 0xFFFFFFFF, 4, 8), "exceed the"),
        (28, struct.pack("<III", 2, 8, 4), "dim D of k is 8, but 4 elsewhere"),
    ],
)
def test_forged_heads_are_refused(at: int, value: bytes, match: str) -> None:
    refuse(forged(small_attend(), at, value), match)


def test_an_array_without_elements_has_bounds_too() -> None:
    """NumPy makes none whose other dims are beyond what it can count."""
    nothing = AttendResult(1, 0, 2, np.ones((0, 4, 8), np.float32), None, 0.25)
    assert same(codec.decode(in_one_piece(nothing))[0], nothing)
    huge = struct.pack("<III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    refuse(forged(nothing, 28, huge), "exceed the")


def test_dims_of_one_name_must_agree() -> None:
    with pytest.raises(ProtocolError, match="dim T_kv of v is 5, but 3 elsewhere"):
        codec.encode(small_attend(k_tokens=5))
    refuse(forged(small_attend(), 44, struct.pack("<I", 2)), "dim T_kv of v is 3, but 2 elsewhere")


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (56, struct.pack("<I", 1 << 31), "model_hash: a string of 2147483648 bytes exceeds"),
        (56, struct.pack("<I", 1 << 13), "model_hash: a field of 8192 bytes stands where"),
        (60, b"\xff\xfe\xfd", "model_hash: a string is not valid UTF-8"),
        (87, b"\x09", "kv: DType number 9 does not exist"),
        (63, struct.pack("<q", -5), "kv: a KVSpec that makes no sense: num_layers=-5"),
        (96, struct.pack("<I", 0xFFFFFFFF), "attention: a tuple of 4294967295 items"),
        (132, b"\x02", "attention: a flag is 2"),
        (100, struct.pack("<q", 1 << 40), "attention: a AttentionSpec that makes no sense"),
    ],
)
def test_forged_fields_are_refused(at: int, value: bytes, match: str) -> None:
    kv = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16, block_size=32)
    layer = AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, logit_softcap=30.0
    )
    refuse(forged(Hello(1, "abc", kv, (layer,), DType.FLOAT16), at, value), match)


def test_heads_longer_than_their_fields_are_refused() -> None:
    for message in (Accepted(3), Failed("r0", "c", "m")):
        head = codec.encode(message).head
        longer = bytearray(head[:-4] + bytes(8))
        longer[12:16] = struct.pack("<I", len(longer) + 4)
        refuse(
            with_crc(bytes(longer)), "8 bytes follow its last field|a head of 44 bytes, where 36"
        )


def test_a_body_may_not_exceed_the_bound_of_the_connection() -> None:
    message = small_attend()
    body_bytes = codec.encode(message).body_bytes
    refuse(in_one_piece(message), "exceeds the", max_body_bytes=body_bytes - 1)
    codec.decode(in_one_piece(message), max_body_bytes=body_bytes)


def test_a_lie_about_sizes_costs_no_memory() -> None:
    data = forged(small_attend(), 28, struct.pack("<III", 1 << 13, 1 << 8, 8))
    tracemalloc.start()
    try:
        refuse(data, "are not its body")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


SAMPLES: list[Message] = [
    small_attend(),
    small_attend(dtype=np.uint16),
    AttendResult(1, 0, 2, np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32), 0.25),
    BeginStep(1, 0, np.arange(3), *[np.arange(3, dtype=np.int32)] * 4, want_lse=True),
    Hello(
        1,
        "abc",
        KVSpec(2, 2, 64, DType.FLOAT32),
        (AttentionSpec(4, 2, 64, 0.1),) * 2,
        DType.FLOAT32,
    ),
    Failed("rank 3", "internal_error", "the kernel failed"),
    Shutdown(),
]


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(600), deadline=None)
def test_damaged_heads_are_refused(message: Message, data: st.DataObject) -> None:
    damaged = in_one_piece(message)
    head_bytes = len(codec.encode(message).head)
    for bit in data.draw(st.sets(st.integers(0, head_bytes * 8 - 1), min_size=1, max_size=3)):
        damaged[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError):
        codec.decode(damaged)


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_truncated_and_extended_messages_are_refused(message: Message, data: st.DataObject) -> None:
    whole = in_one_piece(message)
    with pytest.raises(ProtocolError):
        codec.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProtocolError):
        codec.decode(np.concatenate([whole, np.zeros(data.draw(st.integers(1, 300)), np.uint8)]))


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(1000), deadline=None)
def test_forgers_get_a_message_or_a_refusal(message: Message, data: st.DataObject) -> None:
    """Whoever computes checksums too may say anything that a peer may say, and nothing else."""
    head_bytes = len(codec.encode(message).head)
    at = data.draw(st.integers(4, head_bytes - 5))
    forgery = forged(
        message, at, data.draw(st.binary(min_size=1, max_size=min(8, head_bytes - 4 - at)))
    )
    try:
        decoded, _ = codec.decode(np.frombuffer(forgery, np.uint8))
    except ProtocolError:
        return
    again, _ = codec.decode(in_one_piece(decoded))
    assert same(decoded, again)


@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage: bytes) -> None:
    refuse(garbage, "another program")


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_heads_that_begin_like_one_that_came_before_are_checked_all_the_same(
    message: Message, data: st.DataObject
) -> None:
    whole = in_one_piece(message)
    head_bytes, body_bytes = len(codec.encode(message).head), codec.encode(message).body_bytes
    assert same(codec.decode(whole)[0], message)
    with pytest.raises(ProtocolError):
        codec.read_head(whole.data[: data.draw(st.integers(0, head_bytes - 1))])
    damaged = whole.copy()
    damaged[data.draw(st.integers(0, head_bytes - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        codec.decode(damaged)
    if body_bytes:
        refuse(whole, "exceeds the", max_body_bytes=body_bytes - 1)


def test_messages_of_ever_new_shapes_take_no_more_memory() -> None:
    rng = np.random.default_rng(0)

    def receive(num: int) -> None:
        for dims in rng.integers(0, 50, (num, 3)):
            message = Attend(
                0, 0, 0, *[np.empty((n, *dims[1:]), np.uint16) for n in (dims[0], 3, 3)]
            )
            codec.decode(in_one_piece(message))

    receive(500)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        receive(2000)
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 18
    finally:
        tracemalloc.stop()
