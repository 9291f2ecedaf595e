"""Measurement of the R-part on this host: decode steps over sequences and contexts, and the read
bandwidth beside them.

What is timed is what an R-worker does between a message and its answer: the real state machine and
executor, without a transport. Several R-workers run at once, since they share memory bandwidth.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.host.machine import this_machine
from fastdecode.core.measurement import DecodePoint, RProfile, Timing
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    Activations,
    Attend,
    AttendResult,
    BeginStep,
    Failed,
    Hello,
    Open,
    ToRWorker,
)
from rworker.attention import AttentionExecutor
from rworker.state import RWorkerState
from rworker.worker import Answers, RWorker

T = TypeVar("T")

WARM_UP_STEPS = 2
DRAWN_TOKENS = 256  # tokens of random K and V, which are repeated
APPEND_TOKENS = 8192
READ_CHUNKS = 64


@dataclass(frozen=True)
class Host:
    """How this host's R-workers are laid out."""

    num_workers: int
    num_threads: int
    """Of each."""


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    sequences: tuple[int, ...] = (1, 4, 16, 64)
    """Sequences on each R-worker."""
    contexts: tuple[int, ...] = (64, 256, 1024, 4096)
    """Cached tokens of each."""
    repeats: int = 9
    max_kv_bytes: int = 2 << 30
    """Pairs of the above that need more than this on one R-worker are left out."""
    rest_s: float = 0.001
    """Rest before each layer of a decode step, as while the S-worker computes. A call after a rest
    takes some 50 us longer: caches, branch predictors and clocks have cooled down."""
    read_bytes: int = 1 << 29
    """Bytes that each thread reads in one repeat of the ceiling's measurement."""


def measure_r_part(
    host: Host,
    kv: KVSpec,
    attention: Sequence[AttentionSpec],
    activation_dtype: DType,
    memory_bytes: int,
    effort: Effort,
    *,
    clock: Clock = time.perf_counter,
) -> RProfile:
    """Measure this host's R-workers, the read ceiling before and after the decode points.

    Args:
        memory_bytes: memory that the KV cache of each R-worker will have in a job.

    Raises:
        ConfigError: If too few sizes fit into ``effort.max_kv_bytes``.
        CapacityError, WorkerError: As ``measure_decode``.
    """
    sizes = _enough_sizes(kv, effort)
    before = measure_read_bandwidth(host, num_bytes=effort.read_bytes, repeats=3, clock=clock)
    decode = measure_decode(
        host,
        kv,
        attention,
        activation_dtype,
        sizes,
        repeats=effort.repeats,
        rest_s=effort.rest_s,
        clock=clock,
    )
    after = measure_read_bandwidth(host, num_bytes=effort.read_bytes, repeats=3, clock=clock)
    return RProfile(
        machine=this_machine("cpu", ("numpy", "numba", "fastdecode")),
        num_q_heads=attention[0].num_q_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        kv_dtype=kv.dtype.value,
        block_size=kv.block_size,
        num_workers=host.num_workers,
        num_threads=host.num_threads,
        memory_bytes=memory_bytes,
        decode=decode,
        read_bytes_per_s=(*before, *after),
    )


def _enough_sizes(kv: KVSpec, effort: Effort) -> list[tuple[int, int]]:
    """Return ``decode_sizes``. Raises ConfigError: If they are too few to fit a line to."""
    sizes = decode_sizes(kv, effort.max_kv_bytes, effort.sequences, effort.contexts)
    if len(sizes) < 3:
        raise ConfigError(
            f"only {len(sizes)} sizes fit into {effort.max_kv_bytes} bytes of KV cache, of "
            f"{kv.token_bytes} bytes a token; 3 are needed: allow more memory, or measure fewer "
            "sequences and shorter contexts"
        )
    return sizes


def measure_decode(
    host: Host,
    kv: KVSpec,
    attention: Sequence[AttentionSpec],
    activation_dtype: DType,
    sizes: Sequence[tuple[int, int]],
    *,
    repeats: int,
    rest_s: float = 0.0,
    clock: Clock = time.perf_counter,
) -> tuple[DecodePoint, ...]:
    """Time one layer's append-then-attend of decode steps. They go through all layers, so that each
    layer's K and V come from memory.

    Args:
        sizes: (sequences on each R-worker, context tokens of each).
        repeats: steps of each size, after ``WARM_UP_STEPS``.

    Raises:
        CapacityError: If the cache doesn't fit into this host's memory.
        WorkerError: If an R-worker failed.
    """
    points = []
    for num_sequences, context_tokens in sizes:
        num_steps = WARM_UP_STEPS + repeats
        num_reserved = context_tokens + num_steps
        blocks = num_sequences * kv.num_blocks_for(num_reserved)
        workers = [
            _Worker(i, host, kv, attention, activation_dtype, blocks, clock)
            for i in range(host.num_workers)
        ]
        for worker in workers:
            worker.fill(num_sequences, context_tokens - 1, num_reserved)
        steps = []
        for _ in range(num_steps):
            seconds = _at_once([partial(worker.step, rest_s) for worker in workers])
            steps.append(max(seconds) / kv.num_layers)
        points.append(
            DecodePoint(num_sequences, context_tokens, Timing(tuple(steps[WARM_UP_STEPS:])))
        )
    return tuple(points)


def measure_read_bandwidth(
    host: Host, *, num_bytes: int, repeats: int, clock: Clock = time.perf_counter
) -> tuple[float, ...]:
    """Return what one R-worker can read while the others read too, in bytes/s, of each repeat.

    Every thread folds ``num_bytes`` of its own, far more than the caches have, into one word
    (NumPy's OR reduction, which runs at the memory's speed and releases the GIL).
    """
    num_threads = host.num_workers * host.num_threads
    areas = [_huge_pages(num_bytes) for _ in range(num_threads)]

    def read(area: NDArray[np.uint64]) -> Callable[[], None]:
        def fold() -> None:
            for chunk in area:
                np.bitwise_or.reduce(chunk)

        return fold

    rates = []
    for _ in range(repeats):
        started = clock()
        _at_once([read(area) for area in areas])
        rates.append(num_bytes * host.num_threads / (clock() - started))
    return tuple(rates)


def decode_sizes(
    kv: KVSpec, max_kv_bytes: int, sequences: Sequence[int], contexts: Sequence[int]
) -> list[tuple[int, int]]:
    """Return all pairs whose KV cache fits into ``max_kv_bytes`` on one R-worker."""
    most_tokens = max_kv_bytes // kv.token_bytes
    return [
        (n, context)
        for n in sequences
        for context in contexts
        if n * (context + kv.block_size) <= most_tokens
    ]


class _Worker:
    """One R-worker without a transport."""

    def __init__(
        self,
        index: int,
        host: Host,
        kv: KVSpec,
        attention: Sequence[AttentionSpec],
        activation_dtype: DType,
        num_blocks: int,
        clock: Clock,
    ) -> None:
        # The layout may pad a block, so leave room.
        kv_bytes = int(1.1 * (num_blocks + 1) * kv.block_bytes) + (1 << 20)
        self._state = RWorkerState(
            f"measured-{index}", kv_bytes=kv_bytes, num_threads=host.num_threads
        )
        self._executor = AttentionExecutor(num_threads=host.num_threads, clock=clock)
        self._kv, self._spec = kv, attention[0]
        self._drawn = _random_rows(DRAWN_TOKENS, self._spec, activation_dtype, seed=index)
        self._lengths: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_steps = 0
        self._obey(Hello("measured", kv, tuple(attention), activation_dtype))

    def fill(self, num_sequences: int, num_tokens: int, num_reserved: int) -> None:
        """Open sequences and append ``num_tokens`` to each, ``APPEND_TOKENS`` at a time in all."""
        self._lengths = np.zeros(num_sequences, np.int32)
        for sequence in range(num_sequences):
            self._obey(Open(sequence, num_reserved))
        share = max(1, APPEND_TOKENS // num_sequences)
        for first in range(0, num_tokens, share):
            self._step(min(share, num_tokens - first), num_queries=0)

    def step(self, rest_s: float) -> float:
        """Run one decode step through all layers. Return the seconds that the executor took."""
        return self._step(1, num_queries=1, rest_s=rest_s)

    def _step(self, num_new: int, num_queries: int, rest_s: float = 0.0) -> float:
        count = len(self._lengths)
        new = np.full(count, num_new, np.int32)
        begin = BeginStep(
            step=self._num_steps,
            lane=0,
            sequence_ids=np.arange(count, dtype=np.int64),
            num_past=self._lengths.copy(),
            num_new=new,
            num_queries=np.full(count, num_queries, np.int32),
            num_visible=self._lengths + new,
        )
        self._obey(begin)
        rows = np.arange(count * num_new) % DRAWN_TOKENS
        q_rows = np.arange(count * num_queries) % DRAWN_TOKENS
        q, k, v = self._drawn[0][q_rows], self._drawn[1][rows], self._drawn[2][rows]
        seconds = 0.0
        for layer in range(self._kv.num_layers):
            if rest_s:
                time.sleep(rest_s)
            seconds += self._obey(Attend(self._num_steps, 0, layer, q, k, v))
        self._lengths += num_new
        self._num_steps += 1
        return seconds

    def _obey(self, message: ToRWorker) -> float:
        """Carry out a message. Return the seconds of the kernels."""
        answers, seconds = Answers("the measurement", 0), 0.0
        RWorker(answers, self._state, self._executor).obey(self._state.handle(0, message))
        for answer in answers.queue:
            if isinstance(answer, Failed):
                raise WorkerError(f"R-worker {answer.worker}: {answer.message}", code=answer.code)
            seconds += answer.compute_s if isinstance(answer, AttendResult) else 0.0
        return seconds


def _random_rows(
    num_rows: int, spec: AttentionSpec, dtype: DType, seed: int
) -> tuple[Activations, ...]:
    """q [T, Hq, D], k and v [T, Hkv, D] in the activation dtype."""
    rng = np.random.default_rng(seed)
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    return tuple(
        _carried(rng.standard_normal((num_rows, h, spec.head_dim), np.float32), dtype)
        for h in heads
    )


def _carried(x: NDArray[np.float32], dtype: DType) -> Activations:
    """Return float32 values as they travel: themselves, or the bits of 16-bit floats."""
    if dtype is DType.FLOAT16:
        return x.astype(np.float16).view(np.uint16)
    if dtype is DType.BFLOAT16:
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x


def _huge_pages(num_bytes: int) -> NDArray[np.uint64]:
    """Return memory that has been written, in huge pages where the system gives them,
    [READ_CHUNKS, words]."""
    words = max(1, num_bytes // 8 // READ_CHUNKS)
    memory = mmap.mmap(-1, READ_CHUNKS * words * 8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    area = np.frombuffer(memory, np.uint64).reshape(READ_CHUNKS, words)
    area[...] = np.arange(words, dtype=np.uint64)
    return area


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls at the same time, each in a thread of its own, and a single one here. Raise what
    the first of them raises."""
    if len(calls) == 1:
        return [calls[0]()]
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
