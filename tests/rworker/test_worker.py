"""R-workers as threads: random ragged steps against plain dense attention,
crashes, and how they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from conversation import HKV, HQ, LAYERS, PLAIN, WAIT_S, Conversation, D, greeted, hello, to_bits

import cpu_kernels
from cpu_kernels import reference
from examples import TRIES_ALL
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    Failed,
    Hello,
    Open,
    Welcome,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT
from rworker import attention
from rworker.attention import AttentionExecutor
from rworker.worker import WorkerThread, start_worker_thread


@pytest.fixture
def start() -> Any:
    workers: list[WorkerThread] = []

    def start(name: str = "r0", kv_bytes: int = 400_000, **options: Any) -> WorkerThread:
        workers.append(start_worker_thread(name, kv_bytes=kv_bytes, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.connection.close()
        worker.join(WAIT_S)


DTYPES = [(DType.FLOAT32, DType.FLOAT32), (DType.FLOAT16, DType.FLOAT32),
          (DType.BFLOAT16, DType.BFLOAT16)]  # fmt: skip
MORE_DTYPES = [(DType.BFLOAT16, DType.FLOAT32), (DType.FLOAT16, DType.FLOAT16)]


@pytest.mark.parametrize("kernels", ["compiled", "NumPy twins"])
@pytest.mark.parametrize(("kv_dtype", "activation_dtype"), DTYPES + MORE_DTYPES * TRIES_ALL)
def test_random_ragged_steps_equal_dense_attention(
    start: Callable[..., WorkerThread], kv_dtype: DType, activation_dtype: DType, kernels: str
) -> None:
    module: Any = cpu_kernels if kernels == "compiled" else reference
    worker = start(executor=AttentionExecutor(num_threads=2, kernels=module))
    welcome = greeted(worker, hello(kv_dtype, activation_dtype))
    assert welcome.worker == "r0"
    conversation = Conversation(worker, kv_dtype, activation_dtype, seed=11)
    for step in range(40 if kernels == "compiled" else 12):
        for act in (conversation.open, conversation.fork, conversation.close):
            if conversation.rng.random() < 0.5:
                act()
        conversation.step(step)
    assert conversation.num_compared > 100
    for sequence in list(conversation.cached):
        conversation.connection.send(Close(sequence))
    assert greeted(worker, hello(kv_dtype, activation_dtype)) == welcome  # all is free again


def begin_one(sequence: int, past: int, new: int, step: int = 0) -> BeginStep:
    columns = [np.array([x], np.int32) for x in (past, new, new, past + new)]
    return BeginStep(step, 0, np.array([sequence], np.int64), *columns)


def attend_one(begin: BeginStep, layer: int) -> Attend:
    T = int(begin.num_new[0])
    q, k, v = (np.ones((T, heads, D), np.float32) for heads in (HQ, HKV, HKV))
    return Attend(begin.step, begin.lane, layer, q, k, v)


def test_compute_is_timed_with_the_clock_given(start: Callable[..., WorkerThread]) -> None:
    ticks = iter(range(10_000))
    worker = start(clock=lambda: 0.25 * next(ticks))
    greeted(worker, hello(DType.FLOAT32))
    worker.connection.send(Open(1, 1))
    worker.connection.send(begin_one(1, 0, 1))
    worker.connection.send(attend_one(begin_one(1, 0, 1), 0))
    assert worker.connection.receive(WAIT_S) == Accepted(1)
    result = worker.connection.receive(WAIT_S)
    assert isinstance(result, AttendResult)
    assert result.compute_s == 0.25


def test_outputs_use_the_same_memory_in_every_layer(start: Callable[..., WorkerThread]) -> None:
    worker = start()
    greeted(worker, hello(DType.FLOAT32))
    worker.connection.send(Open(1, 4))
    assert worker.connection.receive(WAIT_S) == Accepted(1)
    worker.connection.send(begin_one(1, 0, 4))
    outputs = []
    for layer in range(len(LAYERS)):
        worker.connection.send(attend_one(begin_one(1, 0, 4), layer))
        result = worker.connection.receive(WAIT_S)
        assert isinstance(result, AttendResult)
        outputs.append(result.o)
    assert np.shares_memory(outputs[0], outputs[2])


def test_no_step_compiles_after_hello(start: Callable[..., WorkerThread]) -> None:
    """What Hello warmed up is what a step calls: same kernels, with the same types of arguments."""
    seen: list[tuple[str, tuple[object, ...]]] = []

    def spy(name: str) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            arrays = [x for x in (*args, *options.values()) if isinstance(x, np.ndarray)]
            kinds = tuple(
                (x.dtype, x.ndim, x.flags.c_contiguous, x.flags.writeable) for x in arrays
            )
            is_ragged = name == "attend" and len(args[2]) > len(args[6])  # rows of q; sequences
            seen.append((name, (is_ragged, *kinds)))
            getattr(reference, name)(*args, **options)

        return call

    module: Any = SimpleNamespace(
        **{name: spy(name) for name in ("append", "attend", "copy_blocks")}
    )
    worker = start(executor=AttentionExecutor(kernels=module))
    greeted(worker, hello(DType.BFLOAT16))
    warmed = set(seen)
    seen.clear()
    conversation = Conversation(worker, DType.BFLOAT16, DType.FLOAT32, seed=5)
    for step in range(8):
        conversation.open()
        conversation.fork()
        conversation.step(step)
    assert {name for name, _ in seen} == {"append", "attend", "copy_blocks"}
    assert set(seen) <= warmed


class Broken(AttentionExecutor):
    """An executor whose ``stage`` raises."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__()
        setattr(self, stage, Mock(side_effect=error))


def expect_failed_then_closed(worker: WorkerThread, code: str, *reasons: str) -> None:
    failed = worker.connection.receive(WAIT_S)
    assert isinstance(failed, Failed), failed
    assert (failed.worker, failed.code) == (worker.name, code)
    for reason in reasons:
        assert reason in failed.message
    expect_closed(worker)


def expect_closed(worker: WorkerThread) -> None:
    with pytest.raises(WorkerError, match=worker.name) as caught:
        worker.connection.receive(WAIT_S)
    assert caught.value.code == CLOSED
    worker.stop()
    worker.join(WAIT_S)
    assert not worker.thread.is_alive()


@pytest.mark.parametrize("stage", ["prepare", "compute"])
def test_a_crash_is_told_and_logged(
    start: Callable[..., WorkerThread], stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start("r3", executor=Broken(stage, ZeroDivisionError("by nought")))
    worker.connection.send(hello(DType.FLOAT32))
    if stage == "compute":
        assert isinstance(worker.connection.receive(WAIT_S), Welcome)
        worker.connection.send(Open(1, 4))
        assert worker.connection.receive(WAIT_S) == Accepted(1)
        worker.connection.send(begin_one(1, 0, 4))
        worker.connection.send(attend_one(begin_one(1, 0, 4), 0))
    expect_failed_then_closed(worker, "worker_failed", "ZeroDivisionError: by nought")
    crash = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert crash.name == "rworker.worker"
    assert "R-worker r3 crashed" in crash.getMessage()
    assert crash.exc_info


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_even_an_exit_closes_the_connection(start: Callable[..., WorkerThread]) -> None:
    worker = start("r3", executor=Broken("prepare", SystemExit()))
    worker.connection.send(hello(DType.FLOAT32))
    expect_closed(worker)


def test_breaking_the_protocol_ends_the_service(start: Callable[..., WorkerThread]) -> None:
    worker = start()
    greeted(worker, hello(DType.FLOAT32))
    worker.connection.send(Close(4))
    expect_failed_then_closed(worker, "protocol_error", "Close", "sequence 4 is not open")


def test_a_cache_that_cannot_be_had_is_a_typed_failure(
    start: Callable[..., WorkerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate_pool(
        layout: cpu_kernels.BlockLayout, num_layers: int, num_blocks: int
    ) -> np.ndarray:
        if num_layers > 1:
            raise OSError(12, "Cannot allocate memory")
        return cpu_kernels.allocate_pool(layout, num_layers, num_blocks)

    monkeypatch.setattr(attention, "allocate_pool", allocate_pool)
    # The books alone would fill memory, were they filled in beforehand.
    worker = start(kv_bytes=1 << 55, executor=AttentionExecutor(free_bytes=lambda: 1 << 60))
    worker.connection.send(hello(DType.FLOAT32))
    expect_failed_then_closed(worker, "out_of_capacity", "less KV memory")


def test_a_cache_larger_than_what_is_free_is_refused_not_promised(
    start: Callable[..., WorkerThread],
) -> None:
    worker = start(executor=AttentionExecutor(free_bytes=lambda: 300_000))
    worker.connection.send(hello(DType.FLOAT32))
    expect_failed_then_closed(worker, "out_of_capacity", "but 300000 are free", "--kv-memory-gb")


def test_shutdown_ends_the_thread_after_the_work_before_it(
    start: Callable[..., WorkerThread],
) -> None:
    worker = start()
    worker.connection.send(hello(DType.FLOAT32))
    worker.stop()
    assert isinstance(worker.connection.receive(WAIT_S), Welcome)
    expect_closed(worker)


def test_closing_ends_the_thread(start: Callable[..., WorkerThread]) -> None:
    worker = start()
    worker.connection.close()
    worker.join(WAIT_S)
    assert not worker.thread.is_alive()


def test_joining_a_busy_worker_fails_in_time(start: Callable[..., WorkerThread]) -> None:
    release = threading.Event()

    executor = AttentionExecutor()
    executor.prepare = lambda prepare: release.wait(WAIT_S)  # type: ignore[assignment, method-assign, return-value]
    worker = start("r3", executor=executor)
    worker.connection.send(hello(DType.FLOAT32))
    with pytest.raises(WorkerError, match="R-worker r3") as caught:
        worker.connection.receive(0.0)
    assert caught.value.code == TIMEOUT
    with pytest.raises(WorkerError, match="R-worker r3 has not ended within 0 s"):
        worker.join(0.0)
    release.set()


def test_bad_options_raise_at_the_start() -> None:
    with pytest.raises(ConfigError, match="R-worker r9: kv_bytes=0"):
        start_worker_thread("r9", kv_bytes=0)


PAST, PROMPT = 40, 3


def begin_both(step: int, num_past: list[int], num_new: list[int], *, attended: bool) -> BeginStep:
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
        worker.connection.send(Hello("hash", kv, (PLAIN,), activation_dtype))
        worker.connection.receive(WAIT_S)
        for sequence in (0, 1):
            worker.connection.send(Open(sequence, 2 * PAST))
            assert worker.connection.receive(WAIT_S) == Accepted(sequence)
        worker.connection.send(begin_both(0, [0, 0], [PAST, PAST], attended=False))
        worker.connection.send(
            Attend(0, 0, 0, rows(0, HQ), rows(2 * PAST, HKV), rows(2 * PAST, HKV))
        )
        worker.connection.receive(WAIT_S)
        q, k, v = rows(1 + PROMPT, HQ), rows(1 + PROMPT, HKV), rows(1 + PROMPT, HKV)
        new = [1, PROMPT] if beside_a_prompt else [1]
        worker.connection.send(begin_both(1, [PAST] * len(new), new, attended=True))
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
