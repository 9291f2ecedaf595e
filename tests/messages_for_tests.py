"""Messages to send in tests, what they are as bytes, and whether two messages are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from values import replace

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire import blocks
from fastdecode.wire.codec import Codec
from fastdecode.wire.instances import InstanceWelcome
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    Extend,
    Failed,
    FromRWorker,
    Hello,
    Inspect,
    Message,
    Open,
    Refused,
    Report,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.stages import StageHello, StageWelcome

_CODEC = Codec()
HOST = HostFacts("a", ("numpy 2.0",), "", (0, 2), 4, ("0-3",), "never", 5, ())


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, arrays included."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Struct):
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__
        )
    return type(one) is type(other) and bool(one == other)


def attend(
    num_tokens: int, *, step: int = 0, num_queries: int | None = None, dtype: Any = np.uint16
) -> Attend:
    """1 KiB of q and 512 bytes of k and v a token (in uint16), filled with what
    tells steps apart."""
    queries = num_tokens if num_queries is None else num_queries
    q = np.arange(queries * 512, dtype=np.int64).reshape(queries, 8, 64) + step
    k = np.arange(num_tokens * 256, dtype=np.int64).reshape(num_tokens, 4, 64) + 7 * step
    return Attend(step, 0, step % 5, q.astype(dtype), k.astype(dtype), (k + 1).astype(dtype))


def packed_attend(num_tokens: int, step: int, *, gap: int = 0) -> Attend:
    """As ``attend``, its arrays one behind the other in one flat array, where
    a device's copy has left them; ``gap``: elements between them."""
    plain = attend(num_tokens, step=step)
    arrays = (plain.q, plain.k, plain.v)
    packed = np.zeros(sum(x.size for x in arrays) + 2 * gap, plain.q.dtype)
    first, views = 0, []
    for array in arrays:
        view = packed[first : first + array.size].reshape(array.shape)
        view[:] = array
        views.append(view)
        first += array.size + gap
    return replace(plain, q=views[0], k=views[1], v=views[2])


def answer(message: Attend, *, want_lse: bool = False) -> AttendResult:
    lse = np.full(message.q.shape[:2], message.step, np.float32) if want_lse else None
    return AttendResult(message.step, message.lane, message.layer, message.q + 1, lse, 0.25)


def to_r_worker() -> list[ToRWorker]:
    """One of each, and attends of all sizes."""
    kv = KVSpec(2, 4, 64, DType.BFLOAT16)
    layers = (
        AttentionSpec(8, 4, 64, 0.125, alibi_slopes=(0.5,) * 8),
        AttentionSpec(8, 4, 64, 0.1, sliding_window=9),
    )
    counts = [np.arange(5, dtype=np.int32) + i for i in range(4)]
    pieces = np.arange(3), counts[0][:3], counts[1][:3]
    hello = Hello("a hash", kv, layers, DType.FLOAT16)
    data = np.arange(20_000, dtype=np.int64).astype(np.uint8)
    source = blocks.KVSource("rank 3", 1 << 62, 0, 100, 2, 2, 0, 4, is_held=True)
    share, one = (kv, blocks.ChunkForm.BLOCKS, 0, 2, 1, 2), np.ones(1, np.int32)
    return [
        hello,
        replace(hello, session=5),
        Open(1, 100),
        Open(2, 100, 10, parent_id=1),
        Extend(2, 200),
        BeginStep(3, 1, np.arange(5), *counts, True),
        attend(1),
        attend(20, step=1, dtype=np.float32),
        attend(127, step=2),  # in one piece over MPI, and the first size that isn't
        attend(128, step=3),
        attend(500, step=4),
        attend(30, step=5, num_queries=0),
        attend(300, step=6, num_queries=0),
        Close(1),
        blocks.StoreChunk(blocks.ChunkForm.TOKENS, *pieces, data),
        blocks.StoreChunk(blocks.ChunkForm.BLOCKS, *pieces, data.repeat(300)),
        blocks.Truncate(2, 7),
        blocks.TakeOver(1 << 62, *pieces[:2]),
        blocks.TakeOver(1 << 62, *pieces[:2], 3, is_in_file=True),
        blocks.DropCache(1 << 62, 3, 2, 5),
        blocks.Replicate("tcp://127.0.0.1:5555", 1 << 26, 4, 300.0),
        blocks.Name(1, 2, np.arange(6).reshape(3, 2)),
        blocks.Open(2, 100, 47, np.arange(6).reshape(3, 2)),
        blocks.Open(3, 200, 190, np.arange(6).reshape(3, 2), 64, 128),
        blocks.Forget(np.arange(4).reshape(2, 2)),
        Close(5, tail="0123456789abcdef" * 2),
        blocks.UseTier("0123456789abcdef" * 4),
        blocks.Retain(1, np.arange(4).reshape(2, 2), np.array([64, 128], np.int32)),
        blocks.Fetch(2, np.arange(4).reshape(2, 2)),
        blocks.Forget(np.arange(4).reshape(2, 2), is_below=True),
        blocks.Fetch(5, np.arange(4).reshape(2, 2), (source, source), 7, 60.0, 1e9, 2),
        blocks.ReadBlocks(9, "a hash", *share, np.ones((1, 2), np.int64), one),
        Inspect(),
        Shutdown(),
    ]


def from_r_worker() -> list[FromRWorker]:
    return [
        Welcome("a worker", 100, 32, 4, is_resumed=True),
        Report("a worker", HOST, 2, 100, ""),
        Accepted(1),
        Refused(2, "out_of_capacity", "no room: é"),
        answer(attend(2)),
        answer(attend(600, step=1), want_lse=True),
        answer(attend(9, step=2, num_queries=0)),
        blocks.TakenOver(np.arange(-1, 4, dtype=np.int32)),
        blocks.Replicated(2, 1, 77, 4),
        blocks.Replicated(2, 0, blocks.NO_STEP, 4, "no R-worker is there"),
        blocks.Dropped(2, 1),
        blocks.Progress(2, 7, 4, 32, 0.125),
        blocks.Done(2, 7, np.arange(2).reshape(1, 2), 1 << 20, 0.25, 3, 2, 1, 4),
        blocks.Inventory(2, 9, np.arange(4).reshape(2, 2), np.array([64, 7], np.int32), True),
        blocks.Done(2, 5, np.arange(2).reshape(1, 2), 1 << 20, 0.25, reason="r3 is gone"),
        blocks.BlockData(np.array([1, 0], np.uint8), np.arange(300).astype(np.uint8)),
        blocks.BlockData(np.ones(1, np.uint8), np.arange(3000, dtype=np.int64).astype(np.uint8)),
        Failed("a worker", "internal_error", "it " * 3000),
    ]


STAGE_HELLO = StageHello("a hash", 1, 2, 4, 10, 12, 64, 16, DType.BFLOAT16, DType.INT8)
STAGE_WELCOME = StageWelcome(1, (100, 0), 1 << 62, ("s1-r0", "é"), np.eye(7, dtype=np.int32))
_SIZES = 4096, 1 << 16, 16, 64, 512, 2, 8
INSTANCE_WELCOME = InstanceWelcome(
    "p0", InstanceRole.PREFILL, "a hash", DType.FLOAT32, DType.INT8, *_SIZES
)


def small_attend(*, dtype: Any = np.float32, k_tokens: int = 3) -> Attend:
    q, k, v = np.ones((2, 4, 8), dtype), np.ones((3, 2, 8), dtype), np.ones((k_tokens, 2, 8), dtype)
    return Attend(1, 0, 2, q, k, v)


def in_frames(message: Message) -> list[bytes]:
    """Its head and its arrays, as a large message travels over ZeroMQ."""
    frame = _CODEC.encode(message)
    return [frame.head, *(array.tobytes() for array in frame.arrays if array.nbytes)]


def in_one_piece(message: Message) -> np.ndarray:
    return np.frombuffer(bytearray(_CODEC.encode(message).in_one_piece()), np.uint8)
