"""R-workers as threads: random ragged steps against plain dense attention,
crashes, and how they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conversation import HKV, HQ, LAYERS, WAIT_S, Conversation, D, greeted, hello
from values import replace

import cpu_kernels
from cpu_kernels import reference
from examples import TRIES_ALL
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.blocks import Stocked
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    Failed,
    FromRWorker,
    OpenSequence,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT
from rworker import attention
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute, CopyBlocks, Drop, OpenTier, Prepare
from rworker.tiers.tiers import Tiers
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
        conversation.connection.send(CloseSequence(sequence))
    assert greeted(worker, hello(kv_dtype, activation_dtype)) == welcome  # all is free again


def test_one_hub_serves_several_workers(start: Callable[..., WorkerThread]) -> None:
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    workers = [start(f"r{i}", hub=hub) for i in range(3)]
    assert [connection.peer for connection in hub.connections] == [
        "R-worker r0",
        "R-worker r1",
        "R-worker r2",
    ]
    for worker in workers:
        worker.connection.send(hello(DType.FLOAT32))
    answers = dict(hub.receive_any(WAIT_S) for _ in workers)
    assert {i: answer.worker for i, answer in answers.items()} == {0: "r0", 1: "r1", 2: "r2"}  # type: ignore[union-attr]


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
    worker.connection.send(OpenSequence(1, 1))
    worker.connection.send(begin_one(1, 0, 1))
    worker.connection.send(attend_one(begin_one(1, 0, 1), 0))
    assert worker.connection.receive(WAIT_S) == Accepted(1)
    result = worker.connection.receive(WAIT_S)
    assert isinstance(result, AttendResult)
    assert result.compute_s == 0.25


def test_outputs_use_the_same_memory_in_every_layer(start: Callable[..., WorkerThread]) -> None:
    worker = start()
    greeted(worker, hello(DType.FLOAT32))
    worker.connection.send(OpenSequence(1, 4))
    assert worker.connection.receive(WAIT_S) == Accepted(1)
    worker.connection.send(begin_one(1, 0, 4))
    outputs = []
    for layer in range(len(LAYERS)):
        worker.connection.send(attend_one(begin_one(1, 0, 4), layer))
        result = worker.connection.receive(WAIT_S)
        assert isinstance(result, AttendResult)
        outputs.append(result.o)
    assert np.shares_memory(outputs[0], outputs[2])


def test_a_block_may_be_as_small_as_a_token(start: Callable[..., WorkerThread]) -> None:
    worker = start()
    asked = hello(DType.FLOAT32)
    welcome = greeted(worker, replace(asked, kv=replace(asked.kv, block_size=1)))
    assert welcome.block_size == 1
    worker.connection.send(OpenSequence(1, 4))
    assert worker.connection.receive(WAIT_S) == Accepted(1)


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


class Broken:
    """An executor whose ``stage`` raises."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage, self.error = stage, error

    def _at(self, stage: str) -> None:
        if stage == self.stage:
            raise self.error

    def prepare(self, prepare: Prepare) -> None:
        self._at("prepare")

    def copy_blocks(self, copy: CopyBlocks) -> None:
        self._at("copy_blocks")

    def compute(self, compute: Compute) -> AttendResult:
        self._at("compute")
        raise AssertionError("not reached")

    def drop(self, drop: Drop) -> None:
        pass

    tiers = Tiers()

    def open_tier(self, wanted: OpenTier) -> list[Stocked]:
        raise AssertionError("nobody wants one")


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
        worker.connection.send(OpenSequence(1, 4))
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
    worker.connection.send(CloseSequence(4))
    expect_failed_then_closed(worker, "protocol_error", "CloseSequence", "sequence 4 is not open")


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

    class Stuck(Broken):
        def prepare(self, prepare: Prepare) -> None:
            assert release.wait(WAIT_S)

    worker = start("r3", executor=Stuck("", ValueError()))
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
