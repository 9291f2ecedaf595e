"""An R-worker that serves one S-worker after the other keeps nothing of those
that have left: no connection, and no buffer of one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from stream_suite import (
    KV,
    NUM_BLOCKS,
    WAIT_S,
    Worker,
    hello_for,
)

from cpu_kernels import reference
from fastdecode.wire.kv.replicating import NO_STEP, Replicate, Replicated
from fastdecode.wire.messages import Welcome
from fastdecode.wire.patience import look_until_found
from rworker.attention import AttentionExecutor
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.worker import serve

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.wire.zmq.hub import ZmqHub
from fastdecode.wire.zmq.listener import ZmqListener
from fastdecode.wire.zmq.neighbours import ZmqNeighbours

NUM_S_WORKERS = 4
NUM_CONNECTIONS = 50


@dataclass
class RWorker:
    """In a thread, with its sockets in sight."""

    listener: ZmqListener
    neighbours: ZmqNeighbours
    state: RWorkerState
    thread: threading.Thread

    @property
    def buffer_bytes(self) -> int:
        return sum(connection.buffer_bytes for connection in self.listener.connections)

    def has_nothing(self) -> bool | None:
        is_idle = not self.neighbours.num_connections and not self.buffer_bytes
        return True if is_idle and not list(self.state._caches) else None


@contextlib.contextmanager
def r_worker(name: str) -> Iterator[RWorker]:
    listener, neighbours = ZmqListener("tcp://127.0.0.1:*", name), ZmqNeighbours(None)
    state = RWorkerState(name, kv_bytes=16 << 20, serving=ServingTerms(return_s=WAIT_S))
    runs = AttentionExecutor(kernels=reference)
    args = listener, state, runs, None, neighbours
    thread = threading.Thread(target=serve, args=args, daemon=True)
    thread.start()
    try:
        yield RWorker(listener, neighbours, state, thread)
        with contextlib.closing(ZmqHub()) as hub:
            Worker(hub.add(listener.address), KV).leave()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        neighbours.close()
        listener.close()


def serve_one(worker: RWorker, keeper: RWorker, session: int) -> None:
    """An S-worker comes, has its cache replicated, and leaves."""
    hub = ZmqHub()
    connection = hub.add(worker.listener.address)
    connection.send(replace(hello_for(KV), max_blocks=NUM_BLOCKS, session=session))
    assert isinstance(connection.receive(WAIT_S), Welcome)
    connection.send(Replicate(keeper.listener.address, "", 1 << 20, session, WAIT_S))
    news = connection.receive(WAIT_S)
    assert news == Replicated(news.holder, 0, NO_STEP, session)  # type: ignore[union-attr]
    hub.close()


def test_s_workers_with_replicas_leave_nothing() -> None:
    with r_worker("one") as one, r_worker("other") as other:
        for session in range(1, NUM_S_WORKERS + 1):
            serve_one(one, other, session)
            assert look_until_found(one.has_nothing, WAIT_S)
            assert look_until_found(other.has_nothing, WAIT_S)
        assert len(one.listener.connections) == len(other.listener.connections) == 1


def test_neighbours_that_are_closed_leave_their_hub() -> None:
    with r_worker("other") as other, contextlib.closing(ZmqNeighbours(None)) as neighbours:
        for line in range(NUM_CONNECTIONS):
            connection = neighbours.connect(other.listener.address, line)
            connection.send(hello_for(KV))
            assert isinstance(connection.receive(WAIT_S), Welcome)
            assert connection.buffer_bytes and neighbours.num_connections == 1
            connection.close()
            assert not connection.buffer_bytes and not neighbours.num_connections
            # Else the next one may come while the other still serves this one.
            assert look_until_found(other.has_nothing, WAIT_S)
