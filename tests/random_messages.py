"""Any message of the protocol, for tests of how they travel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of
from random_requests import DELTAS, REQUESTS, TOKENS

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.instances.messages import (
    Cancel,
    Deltas,
    EndConversation,
    InstanceHello,
    InstanceWelcome,
    SetRole,
    StatusReport,
    Submit,
)
from fastdecode.wire.kv.chunks import (
    ChunkForm,
    ChunkStored,
    ExpectTokens,
    FetchChunk,
    FetchedChunk,
    StoreChunk,
)
from fastdecode.wire.kv.exporting import (
    DescribeExport,
    ExportDescription,
    ExportExpired,
    ExportSequence,
    KVSource,
    Pull,
    Pulled,
)
from fastdecode.wire.kv.kept import EndSequence, ForgetBlocks, KeepBlocks, ResumeSequence
from fastdecode.wire.kv.replicating import Dropped, Replicate, Replicated, Restore, Unprotected
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
    Hello,
    Inspect,
    OpenSequence,
    Refused,
    Report,
    Shutdown,
    StorePrompt,
    Welcome,
)
from fastdecode.wire.stages import (
    ColumnLost,
    ColumnReady,
    ColumnTakenOver,
    ColumnVacant,
    ColumnWelcome,
    GreetColumn,
    PlaceColumn,
    StageAnswer,
    StageDone,
    StageHello,
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
    what = draw(st.sampled_from(ChunkForm)), *numbers, ids, *counts, draw(INTS)
    return FetchChunk(*what, draw(TEXTS), draw(INTS), draw(INTS))


@st.composite
def store_chunks(draw: st.DrawFn) -> StoreChunk:
    what = draw(fetch_chunks())
    fields = [getattr(what, field.name) for field in dataclasses.fields(what)]
    data = draw(arrays_of(np.uint8, (draw(st.integers(0, 200)),)))
    kv = KVSpec(2, 3, 4, draw(st.sampled_from(DType)))
    return StoreChunk(draw(TEXTS), kv, *fields[:-4], data, what.holder)


@st.composite
def stage_passes(draw: st.DrawFn) -> StagePass:
    n = draw(st.integers(0, 5))
    counts = [draw(arrays_of(np.int32, (n,))) for _ in range(3)]
    x = draw(arrays_of(draw(BITS), (draw(st.integers(0, 5)), 3)))
    ids, marks = draw(arrays_of(np.int64, (n,))), draw(arrays_of(np.uint8, (n,)))
    passed = StagePass(draw(INTS), draw(INTS), x, ids, *counts, marks, draw(arrays_of(np.int32, 2)))
    if draw(st.booleans()):
        return passed
    parts = draw(arrays_of(np.int64, (3,))), draw(arrays_of(np.int32, (3, 6)))
    passed = dataclasses.replace(passed, members=draw(arrays_of(np.int32, (2, 7))))
    return dataclasses.replace(passed, first_tokens=counts[0], closed_ids=parts[0], closed=parts[1])


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
    DropCache: st.builds(DropCache, INTS, INTS, INTS, INTS),
    Replicate: st.builds(Replicate, TEXTS, TEXTS, INTS, INTS, FLOATS, INTS),
    Replicated: st.builds(Replicated, INTS, INTS, INTS, INTS),
    Restore: st.builds(Restore, INTS, INTS, INTS),
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
    ExportSequence: st.builds(ExportSequence, INTS, TEXTS, INTS),
    Pull: st.builds(Pull, INTS, INTS, INTS, SOURCES, FLOATS, FLOATS, INTS, INTS),
    Pulled: st.builds(Pulled, INTS, INTS, INTS, FLOATS, TEXTS),
    DescribeExport: st.builds(DescribeExport, INTS, TEXTS),
    ExportDescription: st.builds(
        ExportDescription, TEXTS, st.just(KVSpec(2, 4, 64, DType.INT8)), INTS
    ),
    ExportExpired: st.builds(ExportExpired, TEXTS),
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
    StageWelcome: st.builds(
        StageWelcome,
        INTS,
        st.lists(INTS, max_size=3).map(tuple),
        INTS,
        st.lists(TEXTS, max_size=3).map(tuple),
        arrays_of(np.int32, (2, 7)),
    ),
    StagePass: stage_passes(),
    StageDone: stage_dones(),
    StageAnswer: st.builds(StageAnswer, INTS, INTS, TEXTS, TEXTS),
    ColumnLost: st.builds(ColumnLost, INTS, TEXTS, TEXTS, INTS, INTS),
    ColumnTakenOver: st.builds(
        ColumnTakenOver, INTS, arrays_of(np.int32, (3,)), arrays_of(np.uint8, (2,))
    ),
    PlaceColumn: st.builds(PlaceColumn, INTS, INTS),
    GreetColumn: st.builds(GreetColumn, INTS, INTS),
    ColumnReady: st.builds(ColumnReady, INTS),
    ColumnVacant: st.builds(ColumnVacant, INTS),
    ColumnWelcome: st.builds(
        ColumnWelcome, INTS, INTS, INTS, INTS, st.booleans(), arrays_of(np.int32, (2, 7))
    ),
    InstanceHello: st.builds(InstanceHello, INTS, TEXTS),
    InstanceWelcome: st.builds(
        InstanceWelcome,
        TEXTS,
        st.sampled_from(InstanceRole),
        TEXTS,
        *[st.sampled_from(DType)] * 2,
        *[INTS] * 7,
    ),
    Submit: st.builds(Submit, st.lists(REQUESTS, max_size=2).map(tuple), st.booleans()),
    Cancel: st.builds(Cancel, st.lists(TEXTS, max_size=3).map(tuple)),
    SetRole: st.builds(SetRole, st.sampled_from(InstanceRole)),
    EndConversation: st.builds(EndConversation, TOKENS, TEXTS),
    Deltas: st.builds(Deltas, st.lists(DELTAS, max_size=2).map(tuple)),
    StatusReport: st.builds(
        StatusReport,
        INTS,
        st.none() | FLOATS,
        FLOATS,
        *[INTS] * 4,
        st.booleans(),
        TEXTS,
        st.none() | TEXTS,
        st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=3),
    ),
}
