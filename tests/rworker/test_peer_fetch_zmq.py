"""Fetches over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chunk_memory import ALL_KV, KV, READING, WAIT_S, Worker, hello_for, random_rows
from listening import listening
from pulling import keys_of

from cpu_kernels import reference
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import (
    BlockData,
    ChunkForm,
    Done,
    Fetch,
    Forget,
    KVSource,
    Name,
    ReadBlocks,
    words_of,
)
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import Close, Failed
from fastdecode.wire.waiting import look_until_found
from rworker.attention import AttentionExecutor
from rworker.worker import start_worker_thread

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")


def asked(model_hash: str) -> ReadBlocks:
    none = words_of([b"x" * 16]), np.ones(1, np.int32)
    share = ChunkForm.TOKENS, 0, 1, 0, 1
    return ReadBlocks(READING, model_hash, KV, *share, *none)


@contextlib.contextmanager
def reached(address: str, kv: KVSpec) -> Iterator[Worker]:
    from fastdecode.wire.zmq.hub import ZmqHub

    hub = ZmqHub()
    worker = Worker(hub.add(address), kv)
    try:
        yield worker
        worker.leave()
    finally:
        hub.close()


def fetched(worker: Any, job: int, address: str, num_tokens: int) -> Done:
    keys = words_of(keys_of(KV, num_tokens, seed=3))
    shape = 0, KV.num_kv_heads, 0, KV.num_layers
    source = KVSource(address, READING, 0, num_tokens, *shape)
    worker.connection.send(Fetch(job, keys, (source,), num_tokens % KV.block_size, WAIT_S))
    news = worker.connection.receive(WAIT_S)
    assert isinstance(news, Done)
    return news


def check_fetch(kv: KVSpec, p: Worker, address: str, d: Worker) -> None:
    """One gets what the other, at an address, has named, until it forgets that."""
    p.open(0, 62)
    p.step(0, 0, random_rows(kv, 61, seed=3))
    keys, one_more = keys_of(kv, 61, seed=3), random_rows(kv, 1, seed=4)
    p.connection.send(Name(0, 0, words_of(keys[:-1])))
    p.open(3, 62, 61, parent_id=0)
    attended = p.step(3, 61, one_more)
    p.connection.send(Close(3))
    p.connection.send(Close(0, tail=keys[-1].hex()))
    p.open(1, 16)  # accepted once the blocks are named
    assert not len(fetched(d, 5, address, 61).missing)
    d.open(5, 64, 61, words_of(keys))
    assert d.step(5, 61, one_more) == attended
    p.connection.send(Forget(words_of(keys)))
    p.open(2, 16)
    d.connection.send(Close(5))
    d.connection.send(Forget(words_of(keys)))
    assert len(fetched(d, 6, address, 61).missing) == len(keys)


@contextlib.contextmanager
def behind_a_gate(name: str, kv: KVSpec) -> Iterator[tuple[str, Worker]]:
    """In a thread of this process; others read it at a gate's address."""
    from rworker.transfers.export_server import ExportServers

    servers, runs = ExportServers("tcp://127.0.0.1:*", None), AttentionExecutor(kernels=reference)
    thread = start_worker_thread(name, kv_bytes=16 << 20, executor=runs, neighbours=servers)
    try:
        yield servers.address_of(name), Worker(thread.connection, kv)
        thread.stop()
        thread.join(WAIT_S)
    finally:
        thread.connection.close()
        servers.close()


@pytest.mark.parametrize("kv", ALL_KV, ids=lambda kv: kv.dtype.value)
def test_threads_behind_export_servers(kv: KVSpec) -> None:
    with behind_a_gate("p", kv) as (address, p), behind_a_gate("d", kv) as (_, d):
        check_fetch(kv, p, address, d)


def test_a_gate_is_for_readers_alone() -> None:
    from fastdecode.wire.zmq.hub import ZmqHub

    hub = ZmqHub()
    with behind_a_gate("p", KV) as (address, p):
        stranger = hub.add(address)
        stranger.send(hello_for(KV))
        refused = stranger.receive(WAIT_S)
        assert isinstance(refused, Failed) and "takes no S-worker" in refused.message
        reader = hub.add(address)
        reader.send(asked("another model"))
        refused = reader.receive(WAIT_S)
        assert isinstance(refused, Failed) and "another model" in refused.message
        with pytest.raises(WorkerError):
            reader.receive(WAIT_S)  # its R-worker has hung up
        p.open(1, 16)  # and serves its own all the same
    hub.close()


def test_readers_that_come_and_go_leave_nothing_at_a_gate() -> None:
    from fastdecode.wire.zmq.hub import ZmqHub
    from rworker.transfers.export_server import ExportServers

    servers, hub = ExportServers("tcp://127.0.0.1:*", None), ZmqHub()
    runs = AttentionExecutor(kernels=reference)
    thread = start_worker_thread("p", kv_bytes=16 << 20, executor=runs, neighbours=servers)
    owner = Worker(thread.connection, KV)
    inside = servers._servers["p"]._inside
    for i in range(12):
        reader = hub.add(servers.address_of("p"))
        is_sent_away = bool(i % 2)
        reader.send(asked("another model" if is_sent_away else "a model"))
        assert isinstance(reader.receive(WAIT_S), Failed if is_sent_away else BlockData)
        reader.close()

        def have_hung_up() -> bool | None:
            both = *thread.hub.connections[1:], *inside.connections
            return True if not any(x.is_open for x in both) else None

        assert look_until_found(have_hung_up, WAIT_S)
    assert len(thread.hub.connections) <= 3 and len(inside.connections) <= 2
    owner.open(1, 16)
    thread.stop()
    thread.join(WAIT_S)
    thread.connection.close()
    servers.close()
    hub.close()


def test_ports_follow_upon_the_first() -> None:
    from rworker.transfers.export_server import ExportServers

    servers = ExportServers("tcp://127.0.0.1:65535", None)
    servers.add("r0", InprocHub())
    with pytest.raises(ConfigError, match="leaves no port for R-worker 1"):
        servers.add("r1", InprocHub())
    servers.close()


@pytest.mark.parametrize("kv", [ALL_KV[0], ALL_KV[-1]], ids=lambda kv: kv.dtype.value)
def test_over_sockets(kv: KVSpec) -> None:
    with (
        listening("p") as one,
        listening("d") as other,
        reached(one.address, kv) as p,
        reached(other.address, kv) as d,
    ):
        check_fetch(kv, p, one.address, d)
