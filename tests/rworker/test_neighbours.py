"""What a sequence's attention comes to, whatever else is in the step."""

from __future__ import annotations

import numpy as np
import pytest
from conversation import to_bits

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Hello,
    OpenSequence,
)
from rworker.worker import start_worker_thread

HQ, HKV, D, PAST, PROMPT = 6, 2, 20, 40, 3
# Of the tests' Gemma 2, whose kernels other tests compile, too.
SPEC = AttentionSpec(HQ, HKV, D, scale=D**-0.5)
WAIT_S = 120.0


def begin(step: int, num_past: list[int], num_new: list[int], *, attended: bool) -> BeginStep:
    past, new = np.array(num_past, np.int32), np.array(num_new, np.int32)
    queries = new if attended else np.zeros_like(new)
    return BeginStep(step, 0, np.arange(len(past), dtype=np.int64), past, new, queries, past + new)


def decoded(kv_dtype: DType, activation_dtype: DType, *, beside_a_prompt: bool) -> np.ndarray:
    """o of sequence 0, which decodes; sequence 1 brings a chunk of its prompt, or nothing."""
    rng = np.random.default_rng(7)

    def rows(num_rows: int, num_heads: int) -> np.ndarray:
        return to_bits(
            rng.standard_normal((num_rows, num_heads, D)).astype(np.float32), activation_dtype
        )

    worker = start_worker_thread("r0", kv_bytes=1 << 22)
    try:
        kv = KVSpec(1, HKV, D, kv_dtype, 64)
        worker.connection.send(Hello(PROTOCOL_VERSION, "hash", kv, (SPEC,), activation_dtype))
        worker.connection.receive(WAIT_S)
        for sequence in (0, 1):
            worker.connection.send(OpenSequence(sequence, 2 * PAST))
            assert worker.connection.receive(WAIT_S) == Accepted(sequence)
        worker.connection.send(begin(0, [0, 0], [PAST, PAST], attended=False))
        worker.connection.send(
            Attend(0, 0, 0, rows(0, HQ), rows(2 * PAST, HKV), rows(2 * PAST, HKV))
        )
        worker.connection.receive(WAIT_S)
        q, k, v = rows(1 + PROMPT, HQ), rows(1 + PROMPT, HKV), rows(1 + PROMPT, HKV)
        new = [1, PROMPT] if beside_a_prompt else [1]
        worker.connection.send(begin(1, [PAST] * len(new), new, attended=True))
        worker.connection.send(Attend(1, 0, 0, q[: sum(new)], k[: sum(new)], v[: sum(new)]))
        answer = worker.connection.receive(WAIT_S)
        assert isinstance(answer, AttendResult) and answer.o.shape == (sum(new), HQ, D)
        return answer.o[0].copy()
    finally:
        worker.stop()
        worker.join(WAIT_S)


@pytest.mark.parametrize("activation_dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("kv_dtype", [DType.BFLOAT16, DType.INT8])
def test_a_prompt_beside_it_changes_no_bit_of_what_decodes(
    kv_dtype: DType, activation_dtype: DType
) -> None:
    alone, beside = (
        decoded(kv_dtype, activation_dtype, beside_a_prompt=prompt) for prompt in (False, True)
    )
    assert alone.any()
    np.testing.assert_array_equal(alone, beside)
