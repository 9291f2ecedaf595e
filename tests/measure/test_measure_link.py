"""Measuring a link: every batch is measured, the R-worker's own compute is
taken off, and it can be used afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.measure.link import NUM_LAYERS, measure_link
from rworker.worker import WorkerThread, start_worker_thread

SPEC = AttentionSpec(4, 2, 16, 0.25)
KV = KVSpec(30, 2, 16, DType.FLOAT16, 16)


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    thread = start_worker_thread("measured", kv_bytes=4 << 20)
    yield thread
    thread.stop()
    thread.join(30.0)


def test_a_link_is_measured_twice_the_same_way(worker: WorkerThread) -> None:
    for _ in range(2):
        times = measure_link(
            worker.connection, KV, SPEC, DType.FLOAT16, (1, 8), repeats=2, wait=lambda _: None
        )
        # q and o are 4 heads of 16 in 2 bytes, k and v 2 heads: 384 bytes out
        # and back in all, for each sequence.
        assert [point.size for point in times.transfer] == [192, 8 * 192]
        assert all(len(point.timing.seconds) == 2 * (NUM_LAYERS - 1) for point in times.transfer)
        for timing in (
            *(point.timing for point in times.transfer),
            times.round_trip,
            times.message,
        ):
            assert min(timing.seconds) > 0


def test_the_workers_compute_is_not_the_links() -> None:
    """On the worker's clock every call takes a second; on ours a round trip takes three."""
    theirs, ours = itertools.count(), itertools.count(step=3)
    worker = start_worker_thread("slow", kv_bytes=4 << 20, clock=lambda: float(next(theirs)))
    clocks = {"clock": lambda: float(next(ours)), "wait": lambda _: None}
    times = measure_link(worker.connection, KV, SPEC, DType.FLOAT32, (2,), repeats=1, **clocks)
    worker.stop()
    worker.join(30.0)
    assert set(times.transfer[0].timing.seconds) == {(3.0 - 1.0) / 2}
    assert set(times.round_trip.seconds) == {3.0 - 1.0}
    assert set(times.message.seconds) == {6.0}


def test_a_worker_without_room_says_so(worker: WorkerThread) -> None:
    with pytest.raises(WorkerError, match="can't be measured"):
        measure_link(
            worker.connection, KV, SPEC, DType.FLOAT16, (100_000,), repeats=1, wait=lambda _: None
        )
