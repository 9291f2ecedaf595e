"""The codec gives back what it was given, and refuses what can't travel."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_for_tests import (
    attend,
    from_r_worker,
    in_frames,
    in_one_piece,
    packed_attend,
    same,
    small_attend,
    to_r_worker,
)
from random_messages import MESSAGES
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import KVSource
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import MAX_SOURCES, Fetch, words_of
from fastdecode.wire.buffers import BufferPool, in_one_array
from fastdecode.wire.codec import ALIGNMENT, KINDS, MAX_HEAD_BYTES, Codec, read_prefix
from fastdecode.wire.instances import Cancel, InstanceSays, ToInstance
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    Failed,
    FromRWorker,
    Hello,
    Message,
    ToRWorker,
)
from fastdecode.wire.stages import FromStage, StageMessage
from fastdecode.wire.traits import MAX_TEXT_CHARS

CODEC = Codec()


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_a_body_that_lies_in_one_piece(rows: int) -> None:
    """Is sent from there, and is what would have been written."""
    frame = CODEC.encode(packed_attend(rows, 0))
    written = frame.copied(BufferPool(), whole=False)
    body = in_one_array(frame.arrays, ALIGNMENT)
    assert body is not None and body.tobytes() == written.tobytes()
    assert np.shares_memory(body, frame.arrays[0])


def test_a_body_that_does_not() -> None:
    packed, apart = packed_attend(3, 0), attend(3)
    for other in (
        apart,
        replace(packed, k=packed.v, v=packed.k),
        replace(packed, q=packed.q[:-1]),
        replace(packed, v=packed.v.copy()),
        replace(packed, v=packed.v[:, ::-1]),
        packed_attend(3, 0, gap=4),
    ):
        assert in_one_array(CODEC.encode(other).arrays, ALIGNMENT) is None


def test_every_message_of_the_protocol_is_tested_here() -> None:
    of_r_workers = {*get_args(ToRWorker), *get_args(FromRWorker)}
    of_stages = {*get_args(StageMessage), *get_args(FromStage)}
    of_instances = {*get_args(ToInstance), *get_args(InstanceSays)}
    assert of_r_workers | of_stages | of_instances == set(KINDS.values()) == set(MESSAGES)
    assert {type(message) for message in [*to_r_worker(), *from_r_worker()]} == of_r_workers, (
        "what every transport is tried with"
    )
    assert len(KINDS) == len(MESSAGES), "a number is used twice"


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    assert same(message, CODEC.decode(in_one_piece(message)))
    head, *frames = in_frames(message)
    assert same(message, CODEC.decode(memoryview(head), *frames))
    cut = [frame[at : at + 5] for frame in frames for at in range(0, len(frame), 5)]
    assert same(message, CODEC.decode(memoryview(head), *cut))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=2, deadline=None)
def test_numbers_beyond_their_bounds_are_refused(kind: type, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    for name, hint in get_type_hints(kind, include_extras=True).items():
        # What an engine measures of itself is shown, and reaches no memory.
        assert hint not in (int, float) or name == "longest_step_s", "a number without bounds"
        if get_origin(hint) is Annotated and get_args(hint)[0] in (int, float):
            bounds = get_args(hint)[1]
            least = bounds.gt if bounds.ge is None else bounds.ge - 1
            most = bounds.lt if bounds.le is None else bounds.le + 1
            for value in (least, most):
                with pytest.raises(ProtocolError, match=name):
                    CODEC.decode(in_one_piece(replace(message, **{name: value})))


# What senders may do wrong.


LAYER = AttentionSpec(1, 1, 1, 1.0)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (small_attend(dtype=np.float64), r"Attend can.t be sent: an array of float64 \[2, 4, 8\]"),
        (Accepted(1 << 64), "Accepted can't be sent"),
        (Hello("h", KVSpec(1, 1, 1, DType.FLOAT32), (LAYER,) * 9000, DType.FLOAT32), "exceed"),
    ],
)
def test_messages_that_cannot_travel_are_refused_at_once(message: Message, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        CODEC.encode(message)


def test_long_text_is_cut() -> None:
    decoded = CODEC.decode(in_one_piece(Failed("r0", "internal_error", "é" * MAX_TEXT_CHARS * 2)))
    assert isinstance(decoded, Failed)
    assert decoded.message == "é" * (MAX_TEXT_CHARS - 3) + "..."


def test_a_fetch_with_the_most_sources_and_longest_addresses_fits() -> None:
    source = KVSource("a" * 256, 2**63 - 1, 0, 1, 0, 1, 0, 1, is_held=True)
    fetch = Fetch(2**63 - 1, words_of([bytes(16)]), (source,) * MAX_SOURCES)
    assert CODEC.decode(in_one_piece(fetch)).source == fetch.source


def test_fields_that_fill_no_head_travel_as_a_body() -> None:
    message = Cancel(tuple(f"request {number}" for number in range(100_000)))
    frame = CODEC.encode(message)
    assert frame.body_bytes > MAX_HEAD_BYTES > len(frame.head)
    assert CODEC.decode(in_one_piece(message)) == message


def test_slices_travel_and_strided_arrays_do() -> None:
    rows = np.arange(10 * 4 * 8, dtype=np.float32).reshape(10, 4, 8)
    message = Attend(0, 0, 0, rows[2:5], rows[1:4], rows[::2][:3])
    assert same(CODEC.decode(in_one_piece(message)), message)


def test_received_arrays_are_aligned_views_that_keep_their_buffer() -> None:
    buffer = in_one_piece(small_attend())
    decoded = CODEC.decode(buffer)
    assert isinstance(decoded, Attend)
    for array in (decoded.q, decoded.k, decoded.v):
        assert array[1:].base is buffer
        assert (array.ctypes.data - buffer.ctypes.data) % ALIGNMENT == 0


def test_a_body_is_received_on_its_own() -> None:
    frame = CODEC.encode(small_attend())
    head = np.frombuffer(frame.head, np.uint8)
    head_bytes, body_bytes = read_prefix(head.data)
    assert head_bytes == len(head)
    body = frame.copied(BufferPool(), whole=False)
    assert len(body) == body_bytes and same(CODEC.decode(head, body), small_attend())
    assert same(CODEC.decode(frame.copied(BufferPool(), whole=True)), small_attend())
    with pytest.raises(ProtocolError, match="Attend: its arrays go beyond its body"):
        CODEC.decode(head, body[:-1])


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda frames: frames[:-1], "go beyond its body"),
        (lambda frames: [*frames, b"more"], "bytes too many|were announced"),
        (lambda frames: [frames[0] + frames[1][:-1], frames[1][-1:], frames[2]], "do not fit"),
        (lambda frames: [frames[0][:-1], frames[0][-1:] + frames[1], frames[2]], "do not fit"),
        (lambda frames: [frames[0][:-1], *frames[1:]], "do not fit|go beyond"),
    ],
)
def test_frames_that_do_not_fit_are_refused(damage: Any, match: str) -> None:
    head, *frames = in_frames(small_attend())
    with pytest.raises(ProtocolError, match=match):
        CODEC.decode(memoryview(head), *damage(frames))
    for of_body in (frames, []):
        with pytest.raises(ProtocolError, match="were announced"):
            CODEC.decode(memoryview(head)[: len(head) - bool(of_body)], *of_body)
