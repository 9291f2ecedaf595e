"""What the codec writes, to the byte: if one of these changes, so must
PROTOCOL_VERSION."""

from __future__ import annotations

import dataclasses

import numpy as np
from messages_for_tests import in_one_piece, with_crc

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import AttendResult, BeginStep, Hello, Shutdown, Welcome


def unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def test_golden_bytes_of_a_message_without_fields() -> None:
    head = unhex("46445750 1300 07 00 05000000 1c000000 0000000000000000")
    assert in_one_piece(Shutdown(), epoch=5).tobytes() == with_crc(head)


def test_golden_bytes_of_numbers_before_text() -> None:
    head = unhex(
        "46445750 1300 41 00 00000000 46000000 0000000000000000"  # header: Welcome, 70 bytes
        "6400000000000000 2000000000000000 0800000000000000"  # num_blocks, block_size, num_threads
        "03000000 72c3a9 00 00 05000000 312e322e33"  # worker, has_tier, is_resumed, version
    )
    assert in_one_piece(Welcome("ré", 100, 32, 8, version="1.2.3")).tobytes() == with_crc(head)


def test_golden_bytes_of_arrays() -> None:
    o = np.arange(4, dtype=np.uint16).reshape(1, 2, 2)
    lse = np.array([[1.0, -2.0]], np.float32)
    head = unhex(
        "46445750 1300 44 00 07000000"  # header: AttendResult, epoch 7
        "58000000 4800000000000000"  # 88 + 72 bytes
        "02000000 01000000 02000000 02000000"  # o: uint16 [1, 2, 2]
        "01000000 01000000 02000000"  # lse: float32 [1, 2]
        "0900000000000000 0100000000000000"  # step, lane
        "0300000000000000 000000000000e03f"  # layer, compute_s
    )
    body = unhex("0000 0100 0200 0300") + bytes(56) + unhex("0000803f 000000c0")
    whole = in_one_piece(AttendResult(9, 1, 3, o, lse, 0.5), epoch=7).tobytes()
    assert whole == with_crc(head).ljust(128, b"\0") + body


def test_golden_bytes_of_a_step() -> None:
    begin = BeginStep(
        9,
        1,
        np.array([1 << 36]),
        *(np.array([x], np.int32) for x in (64, 0, 1, 64)),
        True,
        np.array([5], np.int32),
    )
    head = unhex(
        "46445750 1300 05 00 00000000"  # header: BeginStep
        "65000000 4401000000000000"  # 101 + 324 bytes
        "04000000 01000000"  # sequence_ids: int64 [1]
        "03000000 01000000 03000000 01000000 03000000 01000000"  # int32 [1] each
        "03000000 01000000 03000000 01000000"
        "0900000000000000 0100000000000000 ffffffffffffffff 01"  # step, lane, holder, want_lse
    )
    numbers = [1 << 36, 64, 0, 1, 64, 5]
    body = b"".join(x.to_bytes(8, "little").ljust(64, b"\0") for x in numbers)[:324]
    whole = in_one_piece(begin).tobytes()
    assert whole == with_crc(head).ljust(128, b"\0") + body
    whole_sequences = in_one_piece(dataclasses.replace(begin, num_beyond=None)).tobytes()
    assert whole_sequences[64:72] == bytes(8), "no array, and no dims"


def test_golden_bytes_of_nested_fields() -> None:
    kv = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16, block_size=32)
    layer = AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, logit_softcap=30.0
    )
    head = unhex(
        "46445750 1300 01 00 00000000 9b000000 0000000000000000"  # header: Hello
        "0100000000000000 0000000000000000"  # protocol_version, holder
        "0000000000000000 0000000000000000"  # max_blocks, session
        "03000000 616263"  # model_hash
        "0100000000000000 0200000000000000 4000000000000000 02 2000000000000000"  # kv
        "01000000 0400000000000000 0200000000000000"  # one layer: heads
        "4000000000000000 000000000000c03f"  # dim, scale
        "00 00 01 0000000000003e40"  # no window, no slopes, a soft-cap
        "01 00 00 00 00000000"  # activation_dtype, role, outlives, resumes, no feeders
    )
    assert in_one_piece(Hello(1, "abc", kv, (layer,), DType.FLOAT16)).tobytes() == with_crc(head)
