"""The codec gives back what it was given, and refuses what can't travel."""

from __future__ import annotations

import dataclasses
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import (
    attend,
    from_r_worker,
    in_one_piece,
    packed_attend,
    same,
    small_attend,
    to_r_worker,
)
from random_messages import MESSAGES

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire import arrays, codec, fields
from fastdecode.wire.instances.messages import (
    InstanceSays,
    ToInstance,
)
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    Failed,
    FromRWorker,
    Hello,
    Message,
    ToRWorker,
)
from fastdecode.wire.opcodes import OPCODES
from fastdecode.wire.stages import (
    FromStage,
    StageMessage,
)


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_a_body_that_lies_in_one_piece(rows: int) -> None:
    """Is sent from there, and is what would have been written."""
    frame = codec.encode(packed_attend(rows, 0))
    written = np.zeros(frame.body_bytes, np.uint8)
    frame.write_body(written.data)
    body = frame.body_in_place()
    assert body is not None and body.tobytes() == written.tobytes()
    assert np.shares_memory(body, frame.arrays[0])


def test_a_body_that_does_not() -> None:
    packed, apart = packed_attend(3, 0), attend(3)
    for other in (
        apart,
        dataclasses.replace(packed, k=packed.v, v=packed.k),
        dataclasses.replace(packed, q=packed.q[:-1]),
        dataclasses.replace(packed, v=packed.v.copy()),
        dataclasses.replace(packed, v=packed.v[:, ::-1]),
        packed_attend(3, 0, gap=4),
    ):
        assert codec.encode(other).body_in_place() is None


def test_every_message_of_the_protocol_has_an_opcode_and_is_tested_here() -> None:
    of_r_workers = {*get_args(ToRWorker), *get_args(FromRWorker)}
    of_stages = {*get_args(StageMessage), *get_args(FromStage)}
    of_instances = {*get_args(ToInstance), *get_args(InstanceSays)}
    assert of_r_workers | of_stages | of_instances == set(OPCODES) == set(MESSAGES)
    assert {type(message) for message in [*to_r_worker(), *from_r_worker()]} == of_r_workers, (
        "what every transport is tried with"
    )
    assert len(set(OPCODES.values())) == len(OPCODES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data(), epoch=st.integers(0, codec.MAX_EPOCH))
@settings(max_examples=40, deadline=None)
def test_round_trip(kind: type, data: st.DataObject, epoch: int) -> None:
    message = data.draw(MESSAGES[kind])
    decoded, decoded_epoch = codec.decode(in_one_piece(message, epoch=epoch))
    assert same(message, decoded)
    assert decoded_epoch == epoch


# What senders may do wrong.


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (small_attend(dtype=np.float64), "float64 .* where q"),
        (
            Attend(1, 0, 0, np.ones((2, 4), np.float32), *[np.ones((1, 1, 4), np.float32)] * 2),
            r"float32 \[2, 4\] where q",
        ),
        (Accepted(1 << 63), "a number that can't be sent"),
        (
            Hello(
                1,
                "h",
                KVSpec(1, 1, 1, DType.FLOAT32),
                (AttentionSpec(1, 1, 1, 1.0),) * 20000,
                DType.FLOAT32,
            ),
            "20000",
        ),
        (
            Hello(
                1,
                "h",
                KVSpec(1, 1, 1, DType.FLOAT32),
                (AttentionSpec(1, 1, 1, 1.0),) * 9000,
                DType.FLOAT32,
            ),
            "exceed",
        ),
    ],
)
def test_messages_that_cannot_travel_are_refused_at_once(message: Message, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        codec.encode(message)


def test_long_text_is_cut_at_a_character() -> None:
    decoded, _ = codec.decode(
        in_one_piece(Failed("r0", "internal_error", "é" * fields.MAX_STRING_BYTES))
    )
    assert isinstance(decoded, Failed)
    assert decoded.message == "é" * ((fields.MAX_STRING_BYTES - 3) // 2) + "..."


def test_slices_travel_and_strided_arrays_do() -> None:
    rows = np.arange(10 * 4 * 8, dtype=np.float32).reshape(10, 4, 8)
    message = Attend(0, 0, 0, rows[2:5], rows[1:4], rows[::2][:3])
    assert same(codec.decode(in_one_piece(message))[0], message)


def test_received_arrays_are_aligned_views_that_keep_their_buffer() -> None:
    frame = codec.encode(small_attend())
    buffer = np.zeros(frame.num_bytes, np.uint8)
    frame.write(buffer.data)
    decoded, _ = codec.decode(buffer)
    assert isinstance(decoded, Attend)
    for array in (decoded.q, decoded.k, decoded.v):
        assert array[1:].base is buffer
        assert (array.ctypes.data - buffer.ctypes.data) % arrays.ALIGNMENT == 0


def test_a_body_is_received_on_its_own() -> None:
    frame = codec.encode(small_attend())
    head = codec.read_head(frame.head)
    body = np.zeros(head.body_bytes, np.uint8)
    frame.write_body(body.data)
    assert same(head.message(body), small_attend())
    with pytest.raises(ProtocolError, match="Attend: a body of"):
        head.message(body[:-1])


def test_arrays_of_a_message_declare_dtype_and_dims() -> None:
    for kind in OPCODES:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if "ndarray" in str(hint).lower():
                assert get_origin(hint) is Annotated, f"{kind.__name__}.{name}"


def test_dtypes_are_read_from_aliases_of_every_numpy() -> None:
    shaped = GenericAlias(np.ndarray, (Any, np.dtype[np.float32]))
    named = GenericAlias(np.ndarray, (np.float32,))  # as NDArray is from NumPy 2.5 on
    for alias in (shaped, named):
        field = arrays.ArrayField.of("q", Annotated[alias | None, "rows dim"])
        assert (field.dtypes, field.optional) == ((np.dtype("f4"),), True)
        assert field.dims == ("rows", "dim")
