"""The codec gives back what it was given, and refuses what can't travel."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of
from messages_for_tests import (
    attend,
    between_instances,
    between_stages,
    from_r_worker,
    in_one_piece,
    packed_attend,
    same,
    small_attend,
    to_r_worker,
)

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire import arrays, codec, fields
from fastdecode.wire.instances.messages import (
    CancelRequests,
    EndConversation,
    InstanceHello,
    InstanceSays,
    InstanceSeen,
    InstanceWelcome,
    RequestsSay,
    RunRequests,
    SetInstanceRole,
    ToInstance,
)
from fastdecode.wire.kv.chunks import (
    ChunkForm,
    ChunkStored,
    ExpectTokens,
    FetchChunk,
    FetchedChunk,
    StoreChunk,
)
from fastdecode.wire.kv.handing import (
    Gone,
    KVSource,
    Offer,
    OnOffer,
    Pull,
    Pulled,
    ReadOffer,
    ViewOffer,
)
from fastdecode.wire.kv.kept import EndSequence, ForgetBlocks, KeepBlocks, ResumeSequence
from fastdecode.wire.kv.replicating import Dropped, Replicate, Replicated, Unprotected
from fastdecode.wire.kv.taking_over import DropCache, TakenOver, TakeOver, TruncateSequence
from fastdecode.wire.kv.tiers import (
    DropBlocks,
    FetchBlocks,
    Fetching,
    Moved,
    Stocked,
    StoreBlocks,
    UseTier,
)
from fastdecode.wire.messages import (
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
    StorePrompt,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.opcodes import OPCODES
from fastdecode.wire.stages import (
    ColumnInterrupted,
    ColumnLost,
    ColumnTakenOver,
    DropColumn,
    FromStage,
    StageAnswer,
    StageDone,
    StageHello,
    StageMessage,
    StagePass,
    StageWelcome,
)

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
BITS = st.sampled_from([np.dtype(np.float32), np.dtype(np.uint16)])


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
    kv = KVSpec(
        draw(st.integers(1, 100)), draw(st.integers(1, 64)), 64, draw(st.sampled_from(DType))
    )
    layers = tuple(draw(st.lists(attention_specs(), max_size=4)))
    feeders = tuple(draw(st.lists(TEXTS, max_size=3)))
    dtype = draw(st.sampled_from(ACTIVATION_DTYPES))
    return Hello(draw(st.integers(0, 99)), draw(TEXTS), kv, layers, dtype, feeders=feeders)


@st.composite
def begin_steps(draw: st.DrawFn) -> BeginStep:
    n = draw(st.integers(0, 20))
    counts = [draw(arrays_of(np.int32, n)) for _ in range(4)]
    beyond = draw(st.none() | arrays_of(np.int32, n))
    return BeginStep(
        draw(INTS), draw(INTS), draw(arrays_of(np.int64, n)), *counts, draw(st.booleans()), beyond
    )


@st.composite
def attends(draw: st.DrawFn) -> Attend:
    queries, tokens, heads, kv_heads, dim = (draw(st.integers(0, 5)) for _ in range(5))
    dtype = draw(BITS)
    kv = [draw(arrays_of(dtype, (tokens, kv_heads, dim))) for _ in range(2)]
    return Attend(
        draw(INTS), draw(INTS), draw(INTS), draw(arrays_of(dtype, (queries, heads, dim))), *kv
    )


@st.composite
def store_prompts(draw: st.DrawFn) -> StorePrompt:
    of, n = draw(attends()), draw(st.integers(0, 5))
    counts = [draw(arrays_of(np.int32, n)) for _ in range(2)]
    ids = draw(arrays_of(np.int64, n))
    return StorePrompt(draw(INTS), of.step, of.lane, of.layer, ids, *counts, of.k, of.v, draw(INTS))


@st.composite
def attend_results(draw: st.DrawFn) -> AttendResult:
    queries, heads = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    o = draw(arrays_of(draw(BITS), (queries, heads, 3)))
    lse = draw(st.none() | arrays_of(np.float32, (queries, heads)))
    return AttendResult(draw(INTS), draw(INTS), draw(INTS), o, lse, draw(FLOATS))


@st.composite
def fetch_chunks(draw: st.DrawFn) -> FetchChunk:
    count = draw(st.integers(0, 5))
    ids = draw(arrays_of(np.int64, (count,)))
    counts = [draw(arrays_of(np.int32, (count,))) for _ in range(2)]
    numbers = [draw(INTS) for _ in range(4)]
    return FetchChunk(draw(st.sampled_from(ChunkForm)), *numbers, ids, *counts, draw(INTS))


@st.composite
def store_chunks(draw: st.DrawFn) -> StoreChunk:
    what = draw(fetch_chunks())
    fields = [getattr(what, field.name) for field in dataclasses.fields(what)]
    data = draw(arrays_of(np.uint8, (draw(st.integers(0, 200)),)))
    kv = KVSpec(2, 3, 4, draw(st.sampled_from(DType)))
    return StoreChunk(draw(TEXTS), kv, *fields[:-1], data, fields[-1])


@st.composite
def stage_passes(draw: st.DrawFn) -> StagePass:
    n = draw(st.integers(0, 5))
    counts = [draw(arrays_of(np.int32, (n,))) for _ in range(3)]
    x = draw(arrays_of(draw(BITS), (draw(st.integers(0, 5)), 3)))
    ids, marks = draw(arrays_of(np.int64, (n,))), draw(arrays_of(np.uint8, (n,)))
    return StagePass(draw(INTS), draw(INTS), x, ids, *counts, marks, draw(arrays_of(np.int32, 2)))


@st.composite
def stage_dones(draw: st.DrawFn) -> StageDone:
    numbers = [draw(INTS) for _ in range(3)] + [draw(FLOATS) for _ in range(2)]
    of_columns = draw(arrays_of(np.float32, (2,))), draw(arrays_of(np.int32, (1,)))
    return StageDone(*numbers, *of_columns, draw(st.none() | arrays_of(draw(BITS), (2, 3))))


LISTS = st.lists(TEXTS, max_size=3).map(tuple)
HOSTS = st.builds(
    HostFacts,
    TEXTS,
    LISTS,
    TEXTS,
    st.lists(INTS, max_size=3).map(tuple),
    INTS,
    LISTS,
    TEXTS,
    INTS,
    LISTS,
)

SOURCES = st.lists(st.builds(KVSource, TEXTS, INTS, TEXTS, *[INTS] * 4), max_size=3).map(tuple)
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    Hello: hellos(),
    OpenSequence: st.builds(OpenSequence, INTS, INTS),
    ForkSequence: st.builds(ForkSequence, INTS, INTS, INTS, INTS),
    ExtendSequence: st.builds(ExtendSequence, INTS, INTS),
    CloseSequence: st.builds(CloseSequence, INTS),
    KeepBlocks: st.builds(KeepBlocks, INTS, INTS, arrays_of(np.int64, (3, 2))),
    ResumeSequence: st.builds(ResumeSequence, INTS, INTS, INTS, arrays_of(np.int64, (2, 2))),
    EndSequence: st.builds(EndSequence, INTS, arrays_of(np.int64, (1, 2))),
    ForgetBlocks: st.builds(ForgetBlocks, arrays_of(np.int64, (0, 2))),
    BeginStep: begin_steps(),
    Attend: attends(),
    TruncateSequence: st.builds(TruncateSequence, INTS, INTS),
    TakeOver: st.builds(TakeOver, INTS, arrays_of(np.int64, (3,)), arrays_of(np.int32, (3,)), INTS),
    DropCache: st.builds(DropCache, INTS, INTS, INTS),
    Replicate: st.builds(Replicate, TEXTS, TEXTS, INTS, INTS, FLOATS, INTS),
    Replicated: st.builds(Replicated, INTS, INTS, INTS, INTS),
    Unprotected: st.builds(Unprotected, INTS, TEXTS, INTS),
    Dropped: st.builds(Dropped, INTS, INTS),
    UseTier: st.builds(UseTier, TEXTS),
    StoreBlocks: st.builds(
        StoreBlocks, INTS, arrays_of(np.int64, (3, 2)), arrays_of(np.int32, (3,))
    ),
    FetchBlocks: st.builds(FetchBlocks, INTS, arrays_of(np.int64, (3, 2))),
    DropBlocks: st.builds(DropBlocks, arrays_of(np.int64, (3, 2))),
    Fetching: st.builds(Fetching, INTS, INTS, INTS, INTS, FLOATS),
    Moved: st.builds(Moved, INTS, INTS, arrays_of(np.int64, (3, 2)), INTS, FLOATS),
    Stocked: st.builds(
        Stocked, INTS, INTS, arrays_of(np.int64, (3, 2)), arrays_of(np.int32, (3,)), st.booleans()
    ),
    TakenOver: st.builds(TakenOver, arrays_of(np.int32, (2,))),
    ExpectTokens: st.builds(
        ExpectTokens, arrays_of(np.int64, (3,)), arrays_of(np.int32, (3,)), INTS
    ),
    Offer: st.builds(Offer, INTS, TEXTS, INTS),
    Pull: st.builds(Pull, INTS, INTS, INTS, SOURCES, FLOATS, FLOATS, INTS, INTS),
    Pulled: st.builds(Pulled, INTS, INTS, INTS, FLOATS, TEXTS),
    ViewOffer: st.builds(ViewOffer, INTS, TEXTS),
    ReadOffer: st.builds(ReadOffer, TEXTS, st.sampled_from(ChunkForm), *[INTS] * 6),
    OnOffer: st.builds(OnOffer, TEXTS, st.just(KVSpec(2, 4, 64, DType.INT8)), INTS),
    Gone: st.builds(Gone, TEXTS),
    FetchChunk: fetch_chunks(),
    StoreChunk: store_chunks(),
    StorePrompt: store_prompts(),
    ChunkStored: st.builds(ChunkStored, INTS),
    FetchedChunk: st.builds(FetchedChunk, arrays_of(np.uint8, (7,))),
    Inspect: st.just(Inspect()),
    Shutdown: st.just(Shutdown()),
    Report: st.builds(Report, TEXTS, INTS, HOSTS, INTS, INTS, TEXTS),
    Welcome: st.builds(Welcome, TEXTS, INTS, INTS, INTS),
    Accepted: st.builds(Accepted, INTS),
    Refused: st.builds(Refused, INTS, TEXTS, TEXTS),
    AttendResult: attend_results(),
    Failed: st.builds(Failed, TEXTS, TEXTS, TEXTS),
    StageHello: st.builds(
        StageHello,
        *(INTS, TEXTS, INTS, INTS, INTS, INTS, INTS, INTS, INTS),
        *(st.sampled_from(DType), st.sampled_from(DType)),
        st.lists(INTS, max_size=3).map(tuple),
    ),
    StageWelcome: st.builds(StageWelcome, INTS, st.lists(INTS, max_size=3).map(tuple), INTS),
    StagePass: stage_passes(),
    StageDone: stage_dones(),
    StageAnswer: st.builds(StageAnswer, INTS, INTS, TEXTS, TEXTS),
    ColumnLost: st.builds(ColumnLost, INTS, TEXTS, TEXTS),
    ColumnInterrupted: st.builds(ColumnInterrupted, INTS, TEXTS, TEXTS),
    ColumnTakenOver: st.builds(ColumnTakenOver, INTS, arrays_of(np.int32, (3,))),
    DropColumn: st.builds(DropColumn, INTS),
    InstanceHello: st.builds(InstanceHello, INTS, TEXTS),
    InstanceWelcome: st.builds(
        InstanceWelcome,
        TEXTS,
        st.sampled_from(InstanceRole),
        TEXTS,
        *[st.sampled_from(DType)] * 2,
        *[INTS] * 7,
    ),
    RunRequests: st.builds(RunRequests, st.booleans(), arrays_of(np.uint8, (3,))),
    CancelRequests: st.builds(CancelRequests, st.lists(TEXTS, max_size=3).map(tuple)),
    SetInstanceRole: st.builds(SetInstanceRole, st.sampled_from(InstanceRole)),
    EndConversation: st.builds(EndConversation, arrays_of(np.int64, (3,)), TEXTS),
    RequestsSay: st.builds(RequestsSay, arrays_of(np.uint8, (3,))),
    InstanceSeen: st.builds(InstanceSeen, INTS, INTS, arrays_of(np.uint8, (3,))),
}


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
    kinds = {*get_args(ToRWorker), *get_args(FromRWorker)}
    of_stages = {*get_args(StageMessage), *get_args(FromStage)}
    of_instances = {*get_args(ToInstance), *get_args(InstanceSays)}
    assert kinds | of_stages | of_instances == set(OPCODES) == set(MESSAGES)
    assert {type(message) for message in [*to_r_worker(), *from_r_worker()]} == kinds, (
        "what every transport is tried with"
    )
    assert {type(message) for message in between_stages()} == of_stages
    assert {type(message) for message in between_instances()} == of_instances
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
            if "ndarray" in str(hint):
                assert get_origin(hint) is Annotated, f"{kind.__name__}.{name}"
