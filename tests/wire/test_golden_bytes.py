"""What the codec writes, to the byte: if one of these changes, so must PROTOCOL_VERSION."""

from __future__ import annotations

import numpy as np
from messages_for_tests import in_one_piece
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import AttendResult, BeginStep, Hello, Shutdown, Welcome


def unhex(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def test_golden_bytes_of_a_message_without_fields() -> None:
    # magic and version, bytes of msgpack, bytes of the body; the tag
    head = unhex("46444e1d 02000000 000000000000000091 07")
    assert in_one_piece(Shutdown()).tobytes() == head


def test_golden_bytes_of_numbers_and_text() -> None:
    head = unhex(
        "46444e1d 11000000 0000000000000000 98 41"  # Welcome
        "a3 72c3a9 64 20 08 c2 c2"  # worker, num_blocks, block_size, num_threads, two flags
        "a5 312e322e33"  # version
    )
    assert in_one_piece(Welcome("ré", 100, 32, 8, version="1.2.3")).tobytes() == head


def test_golden_bytes_of_arrays() -> None:
    o = np.arange(4, dtype=np.uint16).reshape(1, 2, 2)
    lse = np.array([[1.0, -2.0]], np.float32)
    head = unhex(
        "46444e1d 2a000000 4800000000000000 97 44"  # AttendResult
        "09 01 03"  # step, lane, layer
        "c40e 01 03 01000000 02000000 02000000"  # o: uint16 [1, 2, 2]
        "c40a 00 02 01000000 02000000"  # lse: float32 [1, 2]
        "cb 3fe0000000000000"  # compute_s
    )
    body = unhex("0000 0100 0200 0300") + bytes(56) + unhex("0000803f 000000c0")
    whole = in_one_piece(AttendResult(9, 1, 3, o, lse, 0.5)).tobytes()
    assert whole == head.ljust(64, b"\0") + body


def test_golden_bytes_of_a_step() -> None:
    counts = [np.array([x], np.int32) for x in (64, 0, 1, 64, 5)]
    begin = BeginStep(9, 1, np.array([1 << 36]), *counts[:4], True, counts[4])
    head = unhex(
        "46444e1d 36000000 4401000000000000 9b 05"  # BeginStep
        "09 01 c406 03 01 01000000"  # step, lane, sequence_ids: int64 [1]
        + 4 * "c406 02 01 01000000"  # int32 [1] each
        + "c3 c406 02 01 01000000 ff"  # want_lse, num_beyond, holder
    )
    numbers = [1 << 36, 64, 0, 1, 64, 5]
    body = b"".join(x.to_bytes(8, "little").ljust(64, b"\0") for x in numbers)[:324]
    assert in_one_piece(begin).tobytes() == head.ljust(128, b"\0") + body
    without = in_one_piece(replace(begin, num_beyond=None)).tobytes()
    assert without[61:63] == unhex("c0 ff"), "None in the place of the array"


def test_golden_bytes_of_nested_fields() -> None:
    kv = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16, block_size=32)
    layer = AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, logit_softcap=30.0
    )
    names = {
        "num_layers": "aa6e756d5f6c6179657273", "num_kv_heads": "ac6e756d5f6b765f6865616473",
        "head_dim": "a8686561645f64696d", "dtype": "a56474797065",
        "block_size": "aa626c6f636b5f73697a65", "num_q_heads": "ab6e756d5f715f6865616473",
        "scale": "a57363616c65", "sliding_window": "ae736c6964696e675f77696e646f77",
        "alibi_slopes": "ac616c6962695f736c6f706573",
        "logit_softcap": "ad6c6f6769745f736f6674636170",
    }  # fmt: skip
    head = unhex(
        "46444e1d c8000000 0000000000000000 9c 01"  # Hello
        "a3 616263 85"  # model_hash; kv, by the names of its fields
        f"{names['num_layers']} 01 {names['num_kv_heads']} 02 {names['head_dim']} 40"
        f"{names['dtype']} a8 62666c6f61743136 {names['block_size']} 20"
        f"91 87 {names['num_q_heads']} 04 {names['num_kv_heads']} 02 {names['head_dim']} 40"
        f"{names['scale']} cb 3fc0000000000000 {names['sliding_window']} c0"
        f"{names['alibi_slopes']} c0 {names['logit_softcap']} cb 403e000000000000"
        "a7 666c6f61743136 00 a8 532d776f726b6572"  # activation_dtype, holder, role
        "00 00 c2 00 c2"  # max_blocks, session, outlives, reading, resumes
    )
    assert in_one_piece(Hello("abc", kv, (layer,), DType.FLOAT16)).tobytes() == head
