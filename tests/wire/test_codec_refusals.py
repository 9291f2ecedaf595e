"""The codec: what it refuses, however a peer, a forger or a broken line came to send it."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import in_one_piece, same, small_attend, to_r_worker
from values import replace

from examples import examples
from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.wire.codec import MAX_BODY_BYTES, Codec
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
from fastdecode.wire.stages import StagePass
from fastdecode.wire.traits import Role

CODEC = Codec()
PREFIX = struct.Struct("<4sIQ")


def refuse(data: bytes | np.ndarray, match: str) -> ProtocolError:
    with pytest.raises(ProtocolError, match=match) as caught:
        CODEC.decode(np.frombuffer(bytes(data), np.uint8))
    return caught.value


def forged(said: Any, body: bytes = b"") -> bytes:
    """Return any builtins as a message."""
    return in_frame(msgspec.msgpack.encode(said), body)


def in_frame(head: bytes, body: bytes = b"") -> bytes:
    start = PREFIX.pack(b"FDN" + bytes([PROTOCOL_VERSION]), len(head), len(body)) + head
    return start + (bytes(-len(start) % 64) + body if body else b"")


def words(code: int, *dims: int) -> bytes:
    return struct.pack(f"<BB{len(dims)}I", code, len(dims), *dims)


def test_another_version_is_refused_naming_both() -> None:
    piece = in_one_piece(Shutdown())
    piece[3] = 77
    error = refuse(piece, f"version 77, this side {PROTOCOL_VERSION}:")
    assert error.code == "protocol_version"


Q, KV = words(0, 2, 4, 8), words(0, 3, 2, 8)
BODY = bytes(1024)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (5, "an unknown message"),
        ([], "an unknown message"),
        ([99, 1], "an unknown message"),
        ([66], "Accepted: .* length"),
        ([66, 3, 4], "Accepted: .* length"),
        ([66, "3"], "Accepted: Expected `int`, got `str` - at `sequence_id`"),
        ([66, 3.0], "Accepted: Expected `int`"),
        ([66, 1 << 63], "Accepted: Expected `int` <="),
        ([66, -1], "Accepted: Expected `int` >= 0 - at `sequence_id`"),
        ([2, 1, 20, 8, words(3, 1, 2), 4, 0, -1, -1], "Open: gap_stop=0 is before"),
        ([18, words(3, 5, 3), -1], "Forget: an array of int64 .5, 3. stands .* `keys`"),
        ([69, "r0", "c", "m" * 20_000], "Failed: .* length"),
        ([6, 1, 0, 2, words(3, 2, 4, 8), KV, KV, -1], "int64 .* where float32 or uint16 of 3"),
        ([6, 1, 0, 2, words(0, 2, 4), KV, KV, -1], "where float32 or uint16 of 3 dims"),
        ([6, 1, 0, 2, words(9, 2, 4, 8), KV, KV, -1], "header of an array is damaged"),
        ([6, 1, 0, 2, words(0, 1, 1, 1, 1), KV, KV, -1], "of 3 dims belongs"),
        ([6, 1, 0, 2, words(0), KV, KV, -1], "of 3 dims belongs"),
        ([6, 1, 0, 2, Q[:-1], KV, KV, -1], "header of an array is damaged"),
        ([6, 1, 0, 2, [1], KV, KV, -1], "Attend: "),
        ([6, 1, 0, 2, None, KV, KV, -1], "Attend: "),
        ([6, 1, 0, 2, words(0, 0xFFFFFFFF, 4, 8), KV, KV, -1], "exceeds"),
        ([6, 1, 0, 2, words(0, 0, 0xFFFFFFFF, 0xFFFFFFFF), KV, KV, -1], "exceeds"),
        ([6, 1, 0, 2, Q, words(0, 300, 2, 8), KV, -1], "go beyond its body"),
        ([6, 1, 0, 2, words(0, 1, 1, 1), words(0, 1, 1, 1), KV, -1], "bytes too many"),
    ],
)
def test_forged_messages_are_refused(said: Any, match: str) -> None:
    refuse(forged(said, BODY), match)


def test_a_prefix_that_lies_is_refused() -> None:
    for head_bytes, body_bytes, match in (
        (1 << 31, 0, "bytes exceed"),
        (4, 1 << 63, "bytes exceed"),
        (1000, 0, "were announced"),
    ):
        start = PREFIX.pack(b"FDN" + bytes([PROTOCOL_VERSION]), head_bytes, body_bytes)
        refuse(start + bytes(4), match)
    refuse(b"HTTP/1.1 400 Bad Request\r\n", "another program")


def test_kinds_that_this_side_does_not_receive_are_refused() -> None:
    codec = Codec((Attend, Shutdown))
    assert codec.decode(in_one_piece(Shutdown())) == Shutdown()
    for message in (Accepted(3), Failed("r0", "c", "m")):
        with pytest.raises(ProtocolError, match=f"{type(message).__name__} is not for this side"):
            codec.decode(in_one_piece(message))
    with pytest.raises(ProtocolError, match="Shutdown is not for this side"):
        Codec(()).decode(in_one_piece(Shutdown()))


def test_only_long_messages_may_have_fields_for_a_body() -> None:
    for fields in ([66, 3], [64, words(4, 0)]):
        packed = msgspec.msgpack.encode(fields)
        refuse(forged([64, words(4, len(packed))], packed), "room in a head|an unknown message")
    refuse(forged([64, words(4, 0)]), "an unknown message")


def test_rows_of_a_stage_must_be_as_many() -> None:
    x, ids, counts = np.ones((3, 4), np.float32), np.arange(3), np.ones(3, np.int32)
    marks, lost = np.ones(2, np.uint8), np.zeros(0, np.int32)
    with pytest.raises(ProtocolError, match="draws has 2 rows, where 3 belong"):
        StagePass(1, 0, x, ids, counts, counts, counts, marks, lost)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"num_layers": -5}, "num_layers"), ({"dtype": "float7"}, "float7"), ({"more": 1}, "")],
)
def test_values_in_messages_are_held_to_their_own_rules(
    changes: dict[str, Any], match: str
) -> None:
    kv = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    layer = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125}
    good = [1, "abc", kv, [layer], "float16"]
    assert isinstance(CODEC.decode(np.frombuffer(forged(good), np.uint8)), Hello)
    if "more" in changes:
        good = [*good, *[0] * 20]
    refuse(forged([*good[:2], {**kv, **changes}, *good[3:]]), f"Hello: .*{match}")


@pytest.mark.parametrize(("session", "role"), [(0, Role.S_WORKER), (7, Role.NEIGHBOUR)])
def test_only_an_s_workers_cache_of_a_session_outlives_it(session: int, role: Role) -> None:
    """Refuse what would keep a neighbour's cache for ever."""
    hello = to_r_worker()[0]
    for field in ("outlives", "resumes"):
        with pytest.raises(ConfigError, match="only an S-worker's cache of a session"):
            replace(hello, session=session, role=role, **{field: True})


def test_a_lie_about_sizes_costs_no_memory() -> None:
    big = words(0, 1 << 13, 1 << 8, 8)
    data = forged([6, 1, 0, 2, big, big, big, -1], bytes(64))
    long_list = in_frame(b"\x96\x01\x01\xa1h\x80\xdd\x0f\xff\xff\xff")
    tracemalloc.start()
    try:
        refuse(data, "go beyond its body")
        refuse(long_list, "no message|Hello")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_deep_nesting_is_refused() -> None:
    nested = b"\x91" * 100_000 + b"\x01"
    refuse(in_frame(b"\x9b\xcc\xc3" + b"\x00" * 9 + nested), "StatusReport: ")


SAMPLES: list[Message] = [
    small_attend(),
    small_attend(dtype=np.uint16),
    AttendResult(1, 0, 2, np.ones((2, 4, 8), np.float32), np.ones((2, 4), np.float32), 0.25),
    AttendResult(1, 0, 2, np.ones((0, 4, 8), np.float32), None, 0.25),
    BeginStep(1, 0, np.arange(3), *[np.arange(3, dtype=np.int32)] * 4, want_lse=True),
    to_r_worker()[0],
    Failed("rank 3", "internal_error", "the kernel failed"),
    Shutdown(),
]


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_truncated_and_extended_messages_are_refused(message: Message, data: st.DataObject) -> None:
    whole = in_one_piece(message)
    with pytest.raises(ProtocolError):
        CODEC.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProtocolError):
        CODEC.decode(np.concatenate([whole, np.zeros(data.draw(st.integers(1, 300)), np.uint8)]))


@given(message=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=examples(1000), deadline=None)
def test_forgers_get_a_message_or_a_refusal(message: Message, data: st.DataObject) -> None:
    """Whatever a forger changes, the result is something that a peer may say, or is refused."""
    forgery = in_one_piece(message)
    head_bytes = len(CODEC.encode(message).head)
    at = data.draw(st.integers(0, head_bytes - 1))
    change = data.draw(st.binary(min_size=1, max_size=min(8, head_bytes - at)))
    forgery[at : at + len(change)] = np.frombuffer(change, np.uint8)
    try:
        decoded = CODEC.decode(forgery)
    except ProtocolError:
        return
    assert same(decoded, CODEC.decode(in_one_piece(decoded)))


@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage: bytes) -> None:
    refuse(garbage, "another program")


def test_messages_of_ever_new_shapes_take_no_more_memory() -> None:
    rng = np.random.default_rng(0)

    def receive(num: int) -> None:
        for dims in rng.integers(0, 50, (num, 3)):
            arrays = [np.empty((n, *dims[1:]), np.uint16) for n in (dims[0], 3, 3)]
            CODEC.decode(in_one_piece(Attend(0, 0, 0, *arrays)))

    receive(3000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        receive(6000)
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_array_beyond_the_bound_of_a_message_is_not_sent() -> None:
    huge = np.broadcast_to(np.zeros((1, 1, 1), np.float32), (MAX_BODY_BYTES // 4 + 1, 1, 1))
    small = np.zeros((1, 1, 1), np.float32)
    with pytest.raises(ProtocolError, match="bytes exceed"):
        CODEC.encode(Attend(0, 0, 0, huge, small, small))
