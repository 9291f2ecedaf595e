"""R-workers that come in a lost one's place."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("zmq")

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.wire.messages import PROTOCOL_VERSION, Hello, Welcome
from fastdecode.wire.transport import SoleHub
from fastdecode.wire.zmq.connection import wait_for
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener
from rworker.attention import AttentionExecutor
from rworker.state import RWorkerState
from rworker.worker import serve


class Greeted(SoleHub[Any, Any]):
    """A listener's connection, of which the greeting was read."""

    def __init__(self, listener: ZmqListener) -> None:
        index, self._hello = listener.receive_any(30.0)
        super().__init__(listener.connections[index])

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        hello, self._hello = self._hello, None  # type: ignore[assignment]
        return super().receive_any(timeout_s) if hello is None else (0, hello)


def test_one_that_was_given_up_though_it_lives_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = ZmqListener("tcp://127.0.0.1:*", "r")

    def serve_two() -> None:
        for _ in range(2):
            serve(
                Greeted(listener),
                RWorkerState("r", kv_bytes=1 << 20, num_threads=1),
                AttentionExecutor(num_threads=1),
            )

    thread = threading.Thread(target=serve_two)
    thread.start()
    hub = ZmqHub()
    spec = AttentionSpec(2, 1, 16, 1.0)
    hello = Hello(
        PROTOCOL_VERSION, "model", KVSpec(1, 1, 16, DType.FLOAT32, 16), (spec,), DType.FLOAT32
    )
    try:
        hub.add(listener.address).send(hello)
        assert isinstance(hub.receive_any(60.0)[1], Welcome)
        made: list[Any] = []
        reconnect = hub.reconnect
        monkeypatch.setattr(
            hub, "reconnect", lambda index: made.append(reconnect(index)) or made[-1]
        )
        # Nobody has closed the connection to the lost one.
        replacements = HubReplacements(hub, hello, Deadlines(60.0))
        assert wait_for(
            lambda: replacements.look([0]) or None,
            lambda: made[-1].sockets if made[-1].is_open else (),
            threading.RLock(),
            30.0,
        )
        replacements.admit(0)
    finally:
        hub.close()
        thread.join(30)
        listener.close()
