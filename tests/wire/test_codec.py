"""The codec: what it writes, to the byte; that it gives back what it was given; that it refuses all else."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
import zlib
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.host import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire import arrays, codec, fields
from fastdecode.wire.messages import (
    OPCODES,
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    ExtendSequence,
    Failed,
    ForkSequence,
    FromRWorker,
    Hello,
    Inspect,
    Message,
    OpenSequence,
    Refused,
    Report,
    Shutdown,
    ToRWorker,
    Welcome,
)

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
BITS = st.sampled_from([np.dtype(np.float32), np.dtype(np.uint16)])


def in_one_piece(message: Message, *, epoch: int = 0) -> np.ndarray:
    frame = codec.encode(message, epoch=epoch)
    out = np.zeros(frame.num_bytes, np.uint8)
    frame.write(out.data)
    return out


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    return type(one) is type(other) and bool(one == other)


@st.composite
def attention_specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * group
    return AttentionSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 512)),
        scale=draw(st.floats(1e-3, 10)),
        sliding_window=draw(st.none() | st.integers(1, 1 << 40)),
        alibi_slopes=draw(st.none() | st.tuples(*[st.floats(-1, 1)] * heads)),
        logit_softcap=draw(st.none() | st.floats(1, 100)),
    )


ACTIVATION_DTYPES = [dtype for dtype in DType if dtype.is_float]


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    kv = KVSpec(draw(st.integers(1, 100)), draw(st.integers(1, 64)), 64, draw(st.sampled_from(DType)))
    layers = tuple(draw(st.lists(attention_specs(), max_size=4)))
    return Hello(draw(st.integers(0, 99)), draw(TEXTS), kv, layers, draw(st.sampled_from(ACTIVATION_DTYPES)))


@st.composite
def begin_steps(draw: st.DrawFn) -> BeginStep:
    n = draw(st.integers(0, 20))
    counts = [draw(arrays_of(np.int32, n)) for _ in range(4)]
    beyond = draw(st.none() | arrays_of(np.int32, n))
    return BeginStep(draw(INTS), draw(INTS), draw(arrays_of(np.int64, n)), *counts, draw(st.booleans()), beyond)


@st.composite
def attends(draw: st.DrawFn) -> Attend:
    queries, tokens, heads, kv_heads, dim = (draw(st.integers(0, 5)) for _ in range(5))
    dtype = draw(BITS)
    kv = [draw(arrays_of(dtype, (tokens, kv_heads, dim))) for _ in range(2)]
    return Attend(draw(INTS), draw(INTS), draw(INTS), draw(arrays_of(dtype, (queries, heads, dim))), *kv)


@st.composite
def attend_results(draw: st.DrawFn) -> AttendResult:
    queries, heads = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    o = draw(arrays_of(draw(BITS), (queries, heads, 3)))
    lse = draw(st.none() | arrays_of(np.float32, (queries, heads)))
    return AttendResult(draw(INTS), draw(INTS), draw(INTS), o, lse, draw(FLOATS))


LISTS = st.lists(TEXTS, max_size=3).map(tuple)
HOSTS = st.builds(
    HostFacts, TEXTS, LISTS, TEXTS, st.lists(INTS, max_size=3).map(tuple), INTS, LISTS, TEXTS, INTS, LISTS
)

MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    Hello: hellos(),
    OpenSequence: st.builds(OpenSequence, INTS, INTS),
    ForkSequence: st.builds(ForkSequence, INTS, INTS, INTS, INTS),
    ExtendSequence: st.builds(ExtendSequence, INTS, INTS),
    CloseSequence: st.builds(CloseSequence, INTS),
    BeginStep: begin_steps(),
    Attend: attends(),
    Inspect: st.just(Inspect()),
    Shutdown: st.just(Shutdown()),
    Report: st.builds(Report, TEXTS, INTS, HOSTS, INTS, INTS, TEXTS),
    Welcome: st.builds(Welcome, TEXTS, INTS, INTS, INTS),
    Accepted: st.builds(Accepted, INTS),
    Refused: st.builds(Refused, INTS, TEXTS, TEXTS),
    AttendResult: attend_results(),
    Failed: st.builds(Failed, TEXTS, TEXTS, TEXTS),
}


def test_every_message_of_the_protocol_has_an_opcode_and_is_tested_here() -> None:
    kinds = {*get_args(ToRWorker), *get_args(FromRWorker)}
    assert kinds == set(OPCODES) == set(MESSAGES)
    assert len(set(OPCODES.values())) == len(OPCODES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data(), epoch=st.integers(0, codec.MAX_EPOCH))
@settings(max_examples=40, deadline=None)
def test_round_trip(kind: type, data: st.DataObject, epoch: int) -> None:
    message = data.draw(MESSAGES[kind])
    decoded, decoded_epoch = codec.decode(in_one_piece(message, epoch=epoch))
    assert same(message, decoded)
    assert decoded_epoch == epoch


def unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def with_crc(head: bytes) -> bytes:
    return head + struct.pack("<I", zlib.crc32(head))


# Golden bytes: if one of these changes, so must PROTOCOL_VERSION.


def test_golden_bytes_of_a_message_without_fields() -> None:
    head = unhex("46445750 0200 07 00 05000000 1c000000 0000000000000000")
    assert in_one_piece(Shutdown(), epoch=5).tobytes() == with_crc(head)


def test_golden_bytes_of_numbers_before_text() -> None:
    head = unhex(
        "46445750 0200 41 00 00000000 3b000000 0000000000000000"  # header: Welcome, 59 bytes
        "6400000000000000 2000000000000000 0800000000000000"  # num_blocks, block_size, num_threads
        "03000000 72c3a9"  # worker
    )
    assert in_one_piece(Welcome("ré", 100, 32, 8)).tobytes() == with_crc(head)


def test_golden_bytes_of_arrays() -> None:
    o = np.arange(4, dtype=np.uint16).reshape(1, 2, 2)
    lse = np.array([[1.0, -2.0]], np.float32)
    head = unhex(
        "46445750 0200 44 00 07000000 58000000 4800000000000000"  # header: AttendResult, epoch 7, 88 + 72 bytes
        "02000000 01000000 02000000 02000000"  # o: uint16 [1, 2, 2]
        "01000000 01000000 02000000"  # lse: float32 [1, 2]
        "0900000000000000 0100000000000000 0300000000000000 000000000000e03f"  # step, lane, layer, compute_s
    )
    body = unhex("0000 0100 0200 0300") + bytes(56) + unhex("0000803f 000000c0")
    whole = in_one_piece(AttendResult(9, 1, 3, o, lse, 0.5), epoch=7).tobytes()
    assert whole == with_crc(head).ljust(128, b"\0") + body


def test_golden_bytes_of_a_step() -> None:
    begin = BeginStep(
        9, 1, np.array([1 << 36]), *(np.array([x], np.int32) for x in (64, 0, 1, 64)), True, np.array([5], np.int32)
    )
    head = unhex(
        "46445750 0200 05 00 00000000 5d000000 4401000000000000"  # header: BeginStep, 93 + 324 bytes
        "04000000 01000000 03000000 01000000 03000000 01000000"  # sequence_ids: int64 [1]; int32 [1] each
        "03000000 01000000 03000000 01000000 03000000 01000000"
        "0900000000000000 0100000000000000 01"  # step, lane, want_lse
    )
    numbers = [1 << 36, 64, 0, 1, 64, 5]
    body = b"".join(x.to_bytes(8, "little").ljust(64, b"\0") for x in numbers)[:324]
    whole = in_one_piece(begin).tobytes()
    assert whole == with_crc(head).ljust(128, b"\0") + body
    whole_sequences = in_one_piece(dataclasses.replace(begin, num_beyond=None)).tobytes()
    assert whole_sequences[64:72] == bytes(8), "no array, and no dims"


def test_golden_bytes_of_nested_fields() -> None:
    kv = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16, block_size=32)
    layer = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, logit_softcap=30.0)
    head = unhex(
        "46445750 0200 01 00 00000000 7c000000 0000000000000000 0100000000000000"  # header: Hello; protocol_version
        "03000000 616263"  # model_hash
        "0100000000000000 0200000000000000 4000000000000000 02 2000000000000000"  # kv
        "01000000 0400000000000000 0200000000000000 4000000000000000 000000000000c03f"  # one layer: heads, dim, scale
        "00 00 01 0000000000003e40"  # no window, no slopes, a soft-cap
        "01"  # activation_dtype
    )
    assert in_one_piece(Hello(1, "abc", kv, (layer,), DType.FLOAT16)).tobytes() == with_crc(head)


# What is refused.


def attend(*, dtype: Any = np.float32, k_tokens: int = 3) -> Attend:
    q, k, v = np.ones((2, 4, 8), dtype), np.ones((3, 2, 8), dtype), np.ones((k_tokens, 2, 8), dtype)
    return Attend(1, 0, 2, q, k, v)


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
    error = refuse(forged(Shutdown(), 4, struct.pack("<H", 77)), f"version 77, this side {PROTOCOL_VERSION}:")
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
    refuse(forged(attend(), at, value), match)


def test_dims_of_one_name_must_agree() -> None:
    with pytest.raises(ProtocolError, match="dim T_kv of v is 5, but 3 elsewhere"):
        codec.encode(attend(k_tokens=5))
    refuse(forged(attend(), 44, struct.pack("<I", 2)), "dim T_kv of v is 3, but 2 elsewhere")


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (32, struct.pack("<I", 1 << 31), "model_hash: a string of 2147483648 bytes exceeds"),
        (32, struct.pack("<I", 1 << 13), "model_hash: a field of 8192 bytes stands where"),
        (36, b"\xff\xfe\xfd", "model_hash: a string is not valid UTF-8"),
        (63, b"\x09", "kv: DType number 9 does not exist"),
        (39, struct.pack("<q", -5), "kv: a KVSpec that makes no sense: num_layers=-5"),
        (72, struct.pack("<I", 0xFFFFFFFF), "attention: a tuple of 4294967295 items"),
        (108, b"\x02", "attention: a flag is 2"),
        (76, struct.pack("<q", 1 << 40), "attention: a AttentionSpec that makes no sense"),
    ],
)
def test_forged_fields_are_refused(at: int, value: bytes, match: str) -> None:
    kv = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16, block_size=32)
    layer = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, logit_softcap=30.0)
    refuse(forged(Hello(1, "abc", kv, (layer,), DType.FLOAT16), at, value), match)


def test_heads_longer_than_their_fields_are_refused() -> None:
    for message in (Accepted(3), Failed("r0", "c", "m")):
        head = codec.encode(message).head
        longer = bytearray(head[:-4] + bytes(8))
        longer[12:16] = struct.pack("<I", len(longer) + 4)
        refuse(with_crc(bytes(longer)), "8 bytes follow its last field|a head of 44 bytes, where 36")


def test_a_body_may_not_exceed_the_bound_of_the_connection() -> None:
    message = attend()
    body_bytes = codec.encode(message).body_bytes
    refuse(in_one_piece(message), "exceeds the", max_body_bytes=body_bytes - 1)
    codec.decode(in_one_piece(message), max_body_bytes=body_bytes)


def test_a_lie_about_sizes_costs_no_memory() -> None:
    data = forged(attend(), 28, struct.pack("<III", 1 << 13, 1 << 8, 8))
    tracemalloc.start()
    try:
        refuse(data, "are not its body")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


SAMPLES: list[Message] = [
    attend(),
    attend(dtype=np.uint16),
    AttendResult(1, 0, 2, np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32), 0.25),
    BeginStep(1, 0, np.arange(3), *[np.arange(3, dtype=np.int32)] * 4, want_lse=True),
    Hello(1, "abc", KVSpec(2, 2, 64, DType.FLOAT32), (AttentionSpec(4, 2, 64, 0.1),) * 2, DType.FLOAT32),
    Failed("rank 3", "internal_error", "the kernel failed"),
    Shutdown(),
]


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_heads_are_refused(message: Message, data: st.DataObject) -> None:
    damaged = in_one_piece(message)
    head_bytes = len(codec.encode(message).head)
    for bit in data.draw(st.sets(st.integers(0, head_bytes * 8 - 1), min_size=1, max_size=3)):
        damaged[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError):
        codec.decode(damaged)


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=200, deadline=None)
def test_truncated_and_extended_messages_are_refused(message: Message, data: st.DataObject) -> None:
    whole = in_one_piece(message)
    with pytest.raises(ProtocolError):
        codec.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProtocolError):
        codec.decode(np.concatenate([whole, np.zeros(data.draw(st.integers(1, 300)), np.uint8)]))


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=500, deadline=None)
def test_forgers_get_a_message_or_a_refusal(message: Message, data: st.DataObject) -> None:
    """Whoever computes checksums too may say anything that a peer may say, and nothing else."""
    head_bytes = len(codec.encode(message).head)
    at = data.draw(st.integers(4, head_bytes - 5))
    forgery = forged(message, at, data.draw(st.binary(min_size=1, max_size=min(8, head_bytes - 4 - at))))
    try:
        decoded, _ = codec.decode(np.frombuffer(forgery, np.uint8))
    except ProtocolError:
        return
    again, _ = codec.decode(in_one_piece(decoded))
    assert same(decoded, again)


@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage: bytes) -> None:
    refuse(garbage, "another program")


# What senders may do wrong.


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (attend(dtype=np.float64), "float64 .* where q"),
        (
            Attend(1, 0, 0, np.ones((2, 4), np.float32), *[np.ones((1, 1, 4), np.float32)] * 2),
            r"float32 \[2, 4\] where q",
        ),
        (Accepted(1 << 63), "a number that can't be sent"),
        (Hello(1, "h", KVSpec(1, 1, 1, DType.FLOAT32), (AttentionSpec(1, 1, 1, 1.0),) * 20000, DType.FLOAT32), "20000"),
        (Hello(1, "h", KVSpec(1, 1, 1, DType.FLOAT32), (AttentionSpec(1, 1, 1, 1.0),) * 9000, DType.FLOAT32), "exceed"),
    ],
)
def test_messages_that_cannot_travel_are_refused_at_once(message: Message, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        codec.encode(message)


def test_long_text_is_cut_at_a_character() -> None:
    decoded, _ = codec.decode(in_one_piece(Failed("r0", "internal_error", "é" * fields.MAX_STRING_BYTES)))
    assert isinstance(decoded, Failed)
    assert decoded.message == "é" * ((fields.MAX_STRING_BYTES - 3) // 2) + "..."


def test_slices_travel_and_strided_arrays_do() -> None:
    rows = np.arange(10 * 4 * 8, dtype=np.float32).reshape(10, 4, 8)
    message = Attend(0, 0, 0, rows[2:5], rows[1:4], rows[::2][:3])
    assert same(codec.decode(in_one_piece(message))[0], message)


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=200, deadline=None)
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
            message = Attend(0, 0, 0, *[np.empty((n, *dims[1:]), np.uint16) for n in (dims[0], 3, 3)])
            codec.decode(in_one_piece(message))

    receive(500)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        receive(2000)
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 18
    finally:
        tracemalloc.stop()


def test_received_arrays_are_aligned_views_that_keep_their_buffer() -> None:
    frame = codec.encode(attend())
    buffer = np.zeros(frame.num_bytes, np.uint8)
    frame.write(buffer.data)
    decoded, _ = codec.decode(buffer)
    assert isinstance(decoded, Attend)
    for array in (decoded.q, decoded.k, decoded.v):
        assert array[1:].base is buffer
        assert (array.ctypes.data - buffer.ctypes.data) % arrays.ALIGNMENT == 0


def test_a_body_is_received_on_its_own() -> None:
    frame = codec.encode(attend())
    head = codec.read_head(frame.head)
    body = np.zeros(head.body_bytes, np.uint8)
    frame.write_body(body.data)
    assert same(head.message(body), attend())
    with pytest.raises(ProtocolError, match="Attend: a body of"):
        head.message(body[:-1])


def test_arrays_of_a_message_declare_dtype_and_dims() -> None:
    for kind in OPCODES:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if "ndarray" in str(hint):
                assert get_origin(hint) is Annotated, f"{kind.__name__}.{name}"
