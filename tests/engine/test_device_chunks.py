"""K and V between a cache on a device and an R-worker's, and two devices that fetch from one
another."""

from __future__ import annotations

import contextlib
import threading
from itertools import product

import numpy as np
import pytest
import torch
from chunk_memory import ALL_KV, KV, READING, RESERVED, WAIT_S, Memory, Worker, assert_same
from pulling import keys_of
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step.device import DeviceWorker
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.blocks import ChunkForm, Done, Fetch, Forget, KVSource, Name, Retain, words_of
from fastdecode.wire.messages import Close
from rworker.inline import WORKER
from rworker.instructions import MoveBlocks, PlaceChunk, ReadChunk
from rworker.stream.chunks import ChunkShape
from rworker.tiers.tier import MoveJob, Tier
from rworker.transfers.background_transfers import BackgroundTransfers
from rworker.transfers.neighbours import ThreadNeighbours

KV_BYTES = 16 << 20
CPU = torch.device("cpu")


ODD = [replace(KV, dtype=dtype, head_dim=13) for dtype in (DType.BFLOAT16, DType.INT4)]
"""Rows that fill no whole cell."""


@pytest.mark.parametrize("form", ChunkForm)
@pytest.mark.parametrize("kv", [*ALL_KV, *ODD], ids=lambda kv: f"{kv.dtype.value}-{kv.head_dim}")
def test_a_device_has_what_an_r_worker_has_bit_for_bit(kv: KVSpec, form: ChunkForm) -> None:
    """Some layers and heads travel at a time."""
    home, back = Memory(kv), Memory(kv)
    num_tokens = 37 if form is ChunkForm.TOKENS else 32
    for memory, seed in ((home, 6), (back, 7)):
        memory.fill({0: num_tokens}, seed)
    executor = TorchExecutor(CPU)
    with contextlib.closing(DeviceWorker(executor, KV_BYTES)) as connection:
        Worker(connection, kv)
        (holder,) = executor.caches
        places = home.places(form, 0, 0, num_tokens)
        for layers, heads in product((range(2), range(2, 3)), (range(1), range(1, 4))):
            shape = ChunkShape(home.layout, form, layers, heads, num_tokens)
            read = ReadChunk(holder, shape, places)
            executor.place(PlaceChunk(holder, shape, places, home.read(read)))
            back.place(PlaceChunk(holder, shape, places, executor.read(read)))
    assert_same(home, back, {0: num_tokens})


def reached(name: str, others: ThreadNeighbours) -> ReachedDevice:
    return ReachedDevice(TorchExecutor(CPU), KV_BYTES, name, others)


def test_who_closes_ends_what_others_fetch_from_it() -> None:
    others = ThreadNeighbours()
    prefill, decode = reached("p", others), reached("d", others)
    with contextlib.closing(decode):
        Worker(decode, KV)
        Worker(prefill, KV)
        prefill.close()
        decode.send(fetch(9))
        done = decode.receive(WAIT_S)
        assert isinstance(done, Done) and "closed" in done.reason
        with pytest.raises(WorkerError, match=r"0\.01 s"):
            decode.receive(0.01)
    with pytest.raises(WorkerError, match="closed"):
        decode.poll()


class StuckTier(Tier):
    """A tier whose jobs never end, and whose ``wait`` ends with the test."""

    num_layers, stored_bytes = KV.num_layers, 1

    def __init__(self) -> None:
        self.is_waited_for, self.ends = threading.Event(), threading.Event()

    def begin(self, job: MoveJob) -> None: ...

    def progress(self, job: MoveJob) -> int:
        self.is_waited_for.set()
        return 0

    def wait(self, timeout_s: float | None) -> None:
        self.ends.wait(timeout_s)


def fetch(job: int) -> Fetch:
    source = KVSource("p", READING, 0, 37, 0, KV.num_kv_heads, 0, KV.num_layers)
    keys = words_of(keys_of(KV, 37, seed=3))
    return Fetch(job, keys, (source,), 37 % KV.block_size, WAIT_S)


def offer(prefill: ReachedDevice) -> None:
    """Name the blocks of a device's sequence."""
    home, keys = Memory(KV), keys_of(KV, 37, seed=3)
    home.fill({0: 37}, seed=3)
    Worker(prefill, KV).open(0, RESERVED)
    (cache,) = prefill._state._caches
    ids, count = np.array([0]), np.array([37], np.int32)
    slots = cache.books.store.append(ids, count).slots
    shape = ChunkShape.whole(KV, ChunkForm.TOKENS, 37)
    data = home.read(ReadChunk(cache.holder, shape, home.places(shape.form, 0, 0, 37)))
    prefill._at_work.executor.place(PlaceChunk(cache.holder, shape, slots, data))
    prefill.send(Name(0, 0, words_of(keys[:-1])))
    prefill.send(Close(0, tail=keys[-1].hex()))


def test_others_read_while_the_s_worker_waits_for_a_tier() -> None:
    others, tier = ThreadNeighbours(), StuckTier()
    executor = TorchExecutor(CPU)
    prefill = ReachedDevice(executor, KV_BYTES, "p", others)
    with contextlib.closing(reached("d", others)) as decode, contextlib.closing(prefill):
        offer(prefill)
        (holder,) = executor.caches
        executor.tiers.use(holder, tier, num_slots=4)
        books = prefill._state.cache_of(WORKER).books
        job = MoveJob(0, False, (b"key",), (0,), (8,))
        order = Retain(0, words_of([b"key" * 5 + b"!"]), np.ones(1, np.int32))
        prefill._at_work.obey((MoveBlocks(WORKER, holder, books, job, order),))
        waiting = threading.Thread(target=_received, args=(prefill,))
        waiting.start()
        try:
            assert tier.is_waited_for.wait(WAIT_S)
            Worker(decode, KV)
            decode.send(fetch(9))
            done = decode.receive(WAIT_S / 6)
        finally:
            tier.ends.set()
            prefill.close()
            waiting.join(WAIT_S)
    assert isinstance(done, Done) and (done.job, done.reason, len(done.missing)) == (9, "", 0)


def _received(connection: ReachedDevice) -> None:
    with contextlib.suppress(WorkerError):
        connection.receive(WAIT_S)


def test_a_device_whose_thread_has_died_refuses_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both requests in flight and later ones are refused. Its own S-worker continues."""
    monkeypatch.setattr(BackgroundTransfers, "work", lambda self: 1 / 0)
    others = ThreadNeighbours()
    prefill, decode = reached("p", others), reached("d", others)
    with contextlib.closing(decode), contextlib.closing(prefill):
        offer(prefill)
        place = Worker(decode, KV)
        for job in (8, 9):
            decode.send(fetch(job))
            done = decode.receive(WAIT_S / 6)
            assert isinstance(done, Done) and done.job == job and "other" in done.reason
            decode.send(Forget(words_of(keys_of(KV, 37, seed=3))))
        place.open(10, 64)
