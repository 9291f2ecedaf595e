"""R-workers in threads of a test, which listen at addresses and reach others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from chunk_memory import WAIT_S

from cpu_kernels import reference
from rworker.attention import AttentionExecutor
from rworker.serving_terms import ANYBODY_ONCE, ServingTerms
from rworker.state import RWorkerState
from rworker.worker import serve

if TYPE_CHECKING:
    from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener


@dataclass
class RWorker:
    """With its sockets in sight."""

    listener: ZmqListener
    neighbours: ZmqHub
    state: RWorkerState

    @property
    def address(self) -> str:
        return self.listener.address

    def has_nothing(self) -> bool | None:
        has_buffers = any(x._codec.pool.num_bytes for x in self.listener.connections)
        is_connected = any(x.readable for x in self.neighbours.made)
        return not (has_buffers or is_connected or list(self.state._caches)) or None


@contextlib.contextmanager
def listening(name: str, serving: ServingTerms = ANYBODY_ONCE) -> Iterator[RWorker]:
    """One, which ends after its S-worker has left."""
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener

    listener, neighbours = ZmqListener("tcp://127.0.0.1:*", name), ZmqHub(None)
    state = RWorkerState(name, kv_bytes=16 << 20, serving=serving)
    args = listener, state, AttentionExecutor(kernels=reference), None, neighbours
    thread = threading.Thread(target=serve, args=args, daemon=True)
    thread.start()
    try:
        yield RWorker(listener, neighbours, state)
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        neighbours.close()
        listener.close()
