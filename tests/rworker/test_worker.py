"""R-workers as threads: random ragged steps against plain dense attention, crashes, and how they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dense_attention import dense_attention, rounded, to_bits, to_float

import cpu_kernels
from cpu_kernels import reference
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    Failed,
    ForkSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT
from rworker import attention
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute, CopyBlocks, Prepare
from rworker.worker import WorkerThread, start_worker_thread

HQ, HKV, D, BLOCK_SIZE = 6, 2, 20, 8
PLAIN = AttentionSpec(HQ, HKV, D, scale=D**-0.5)
LAYERS = (
    PLAIN,
    replace(PLAIN, sliding_window=11),
    replace(PLAIN, alibi_slopes=tuple(2.0 ** -(i + 1) for i in range(HQ)), logit_softcap=5.0, scale=0.4),
)
WAIT_S = 120.0


def hello(kv_dtype: DType, activation_dtype: DType = DType.FLOAT32) -> Hello:
    return Hello(PROTOCOL_VERSION, "hash", KVSpec(len(LAYERS), HKV, D, kv_dtype, BLOCK_SIZE), LAYERS, activation_dtype)


class Conversation:
    """Drives one R-worker at random, and knows all the K and V that it should hold."""

    def __init__(self, worker: WorkerThread, kv_dtype: DType, activation_dtype: DType, seed: int) -> None:
        self.connection = worker.connection
        self.kv_dtype = kv_dtype
        self.activation_dtype = activation_dtype
        self.rng = np.random.default_rng(seed)
        self.cached: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # per sequence and layer: k, v
        self.room: dict[int, int] = {}
        self.next_id = 0
        self.num_compared = 0

    def ask(self, message: ToRWorker) -> FromRWorker:
        self.connection.send(message)
        return self.connection.receive(WAIT_S)

    def length(self, sequence: int) -> int:
        return len(self.cached[sequence][0][0])

    def open(self) -> None:
        room = int(self.rng.integers(1, 90))
        if self.ask(OpenSequence(self.next_id, room)) == Accepted(self.next_id):
            empty = np.zeros((0, HKV, D), np.float32)
            self.cached[self.next_id] = [(empty, empty) for _ in LAYERS]
            self.room[self.next_id] = room
        self.next_id += 1

    def fork(self) -> None:
        parents = [s for s in self.cached if self.length(s)]
        if parents:
            parent = int(self.rng.choice(parents))
            shared = int(self.rng.integers(1, self.length(parent) + 1))
            room = shared + int(self.rng.integers(0, 20))
            if self.ask(ForkSequence(parent, self.next_id, shared, room)) == Accepted(self.next_id):
                self.cached[self.next_id] = [(k[:shared], v[:shared]) for k, v in self.cached[parent]]
                self.room[self.next_id] = room
            self.next_id += 1

    def close(self) -> None:
        if self.cached:
            sequence = int(self.rng.choice(list(self.cached)))
            self.connection.send(CloseSequence(sequence))
            del self.cached[sequence], self.room[sequence]

    def begin(self, step: int, lane: int, sequences: list[int]) -> BeginStep:
        """Each sequence decodes, stores a prompt's first chunk, attends a later chunk's past, or a chunk causally, or
        attends without growing."""
        rows = []
        for sequence in sequences:
            past, kind = self.length(sequence), self.rng.integers(5)
            new = 1 if kind == 0 else int(self.rng.integers(1, self.room[sequence] - past + 1))
            queries = 0 if kind == 1 else new if kind == 2 else int(self.rng.integers(1, new + 1))
            beyond = 0
            if kind == 4:  # a part of a sequence that has its last tokens elsewhere
                queries, new = int(self.rng.integers(1, 4)), 0
                beyond = queries + int(self.rng.integers(0, 30))
            rows.append((past, new, queries, past if kind == 2 else past + new, beyond))
        past, new, queries, visible, beyond = np.array(rows, np.int32).T.copy()
        ids, want_lse = np.array(sequences, np.int64), bool(self.rng.integers(2))
        return BeginStep(step, lane, ids, past, new, queries, visible, want_lse, beyond if beyond.any() else None)

    def step(self, step: int) -> None:
        """One step in each of two lanes, their layers interleaved."""
        free = [s for s in self.cached if self.length(s) < self.room[s]]
        self.rng.shuffle(free)
        cut = int(self.rng.integers(0, len(free) + 1))
        lanes = [(lane, part) for lane, part in enumerate((free[:cut], free[cut:])) if part]
        begins = [self.begin(step, lane, part) for lane, part in lanes]
        for begin in begins:
            self.connection.send(begin)
        for layer in range(len(LAYERS)):
            sent = [self.send_layer(begin, layer) for begin in begins]
            for begin, q in zip(begins, sent, strict=True):
                self.check(begin, layer, q, self.connection.receive(WAIT_S))

    def send_layer(self, begin: BeginStep, layer: int) -> np.ndarray:
        T_q, T_kv = int(begin.num_queries.sum()), int(begin.num_new.sum())
        shapes = ((T_q, HQ, D), (T_kv, HKV, D), (T_kv, HKV, D))
        bits = [to_bits(self.rng.standard_normal(shape, np.float32), self.activation_dtype) for shape in shapes]
        self.connection.send(Attend(begin.step, begin.lane, layer, *bits))
        q, k, v = (to_float(x, self.activation_dtype) for x in bits)
        ends = np.cumsum(begin.num_new)
        for sequence, end, new in zip(begin.sequence_ids.tolist(), ends, begin.num_new, strict=True):
            old_k, old_v = self.cached[sequence][layer]
            self.cached[sequence][layer] = (
                np.concatenate([old_k, rounded(k[end - new : end], self.kv_dtype)]),
                np.concatenate([old_v, rounded(v[end - new : end], self.kv_dtype)]),
            )
        return q

    def check(self, begin: BeginStep, layer: int, q: np.ndarray, result: FromRWorker) -> None:
        assert isinstance(result, AttendResult), result
        assert (result.step, result.lane, result.layer) == (begin.step, begin.lane, layer)
        assert result.o.shape == q.shape
        assert result.o.dtype == self.activation_dtype.carrier
        assert (result.lse is not None) == begin.want_lse
        assert result.compute_s >= 0
        o = to_float(result.o, self.activation_dtype)
        # o is rounded once, to the activations' dtype; all else is float32, or split into pairs of bfloat16, which
        # keep 16 bits, where bfloat16 K and V are multiplied as such.
        close = 3e-6 if self.kv_dtype is not DType.BFLOAT16 else 5e-5
        both = DType.BFLOAT16 is self.kv_dtype is self.activation_dtype  # then q is rounded again, scaled
        close_lse = 4e-3 if both else close
        tolerance = {DType.FLOAT32: close, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}[self.activation_dtype]
        first = 0
        for i, sequence in enumerate(begin.sequence_ids.tolist()):
            num_queries, visible = int(begin.num_queries[i]), int(begin.num_visible[i])
            rows = slice(first, first + num_queries)
            first += num_queries
            beyond = 0 if begin.num_beyond is None else int(begin.num_beyond[i])
            position = int(begin.num_past[i] + begin.num_new[i]) + beyond - num_queries
            k, v = self.cached[sequence][layer]
            want_o, want_lse = dense_attention(q[rows], k, v, position, visible, LAYERS[layer])
            np.testing.assert_allclose(o[rows], want_o, rtol=tolerance, atol=tolerance)
            if result.lse is not None:
                np.testing.assert_allclose(result.lse[rows], want_lse, rtol=close_lse, atol=close_lse)
            self.num_compared += num_queries


def greeted(worker: WorkerThread, message: Hello) -> Welcome:
    worker.connection.send(message)
    welcome = worker.connection.receive(WAIT_S)
    assert isinstance(welcome, Welcome), welcome
    return welcome


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


@pytest.mark.parametrize("kernels", ["compiled", "NumPy twins"])
@pytest.mark.parametrize(
    ("kv_dtype", "activation_dtype"),
    [
        (DType.FLOAT32, DType.FLOAT32),
        (DType.FLOAT16, DType.FLOAT32),
        (DType.BFLOAT16, DType.FLOAT32),
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT16),
    ],
)
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
    assert [connection.peer for connection in hub.connections] == ["R-worker r0", "R-worker r1", "R-worker r2"]
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


def test_no_step_compiles_after_hello(start: Callable[..., WorkerThread]) -> None:
    """What Hello warmed up is what a step calls: same kernels, with the same types of arguments."""
    seen: list[tuple[str, tuple[object, ...]]] = []

    def spy(name: str) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            arrays = [x for x in (*args, *options.values()) if isinstance(x, np.ndarray)]
            kinds = tuple((x.dtype, x.ndim, x.flags.c_contiguous, x.flags.writeable) for x in arrays)
            is_ragged = name == "attend" and len(args[2]) > len(args[6])  # rows of q; sequences
            seen.append((name, (is_ragged, *kinds)))
            getattr(reference, name)(*args, **options)

        return call

    module: Any = SimpleNamespace(**{name: spy(name) for name in ("append", "attend", "copy_blocks")})
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
    def allocate_pool(layout: cpu_kernels.BlockLayout, num_layers: int, num_blocks: int) -> np.ndarray:
        if num_layers > 1:
            raise OSError(12, "Cannot allocate memory")
        return cpu_kernels.allocate_pool(layout, num_layers, num_blocks)

    monkeypatch.setattr(attention, "allocate_pool", allocate_pool)
    # The books alone would fill memory, were they filled in beforehand.
    worker = start(kv_bytes=1 << 55, executor=AttentionExecutor(free_bytes=lambda: 1 << 60))
    worker.connection.send(hello(DType.FLOAT32))
    expect_failed_then_closed(worker, "out_of_capacity", "less KV memory")


def test_a_cache_larger_than_what_is_free_is_refused_not_promised(start: Callable[..., WorkerThread]) -> None:
    worker = start(executor=AttentionExecutor(free_bytes=lambda: 300_000))
    worker.connection.send(hello(DType.FLOAT32))
    expect_failed_then_closed(worker, "out_of_capacity", "but 300000 are free", "--kv-memory-gb")


def test_shutdown_ends_the_thread_after_the_work_before_it(start: Callable[..., WorkerThread]) -> None:
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
