"""An R-worker that serves one S-worker after the other keeps nothing of one that has
left: no connection, and no buffer of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from chunk_memory import KV, NUM_BLOCKS, WAIT_S, Worker, hello_for
from listening import RWorker, listening
from values import replace

from fastdecode.wire.blocks import NO_STEP, Replicate, Replicated
from fastdecode.wire.messages import Welcome
from fastdecode.wire.waiting import look_until_found
from rworker.serving_terms import ServingTerms

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.wire.zmq.hub import ZmqHub

NUM_S_WORKERS = 4
NUM_CONNECTIONS = 50


@contextlib.contextmanager
def r_worker(name: str) -> Iterator[RWorker]:
    with listening(name, ServingTerms(return_s=WAIT_S)) as worker:
        yield worker
        with contextlib.closing(ZmqHub()) as hub:
            Worker(hub.add(worker.address), KV).leave()


def serve_one(worker: RWorker, keeper: RWorker, session: int) -> None:
    """An S-worker comes, has its cache replicated, and leaves."""
    hub = ZmqHub()
    connection = hub.add(worker.address)
    connection.send(replace(hello_for(KV), max_blocks=NUM_BLOCKS, session=session))
    assert isinstance(connection.receive(WAIT_S), Welcome)
    connection.send(Replicate(keeper.address, 1 << 20, session, WAIT_S))
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
    with r_worker("other") as other, contextlib.closing(ZmqHub(None)) as neighbours:
        for _ in range(NUM_CONNECTIONS):
            connection = neighbours.open(other.address)
            connection.send(hello_for(KV))
            assert isinstance(connection.receive(WAIT_S), Welcome)
            assert len(neighbours.made) == 1
            connection.close()
            del connection
            # Else the next one may come while the other still serves this one.
            assert look_until_found(other.has_nothing, WAIT_S)
