"""A peer that is gone costs only what was to be sent to it."""

from __future__ import annotations

from state_machine import HELLO, KV_BYTES
from values import replace

from cpu_kernels import reference
from fastdecode.wire.blocks import SESSION_RESUMED
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Failed, FromRWorker, Inspect, Report, ToRWorker, Welcome
from rworker.attention import AttentionExecutor
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.worker import RWorker, serve_next

WAIT_S = 60.0
OURS = replace(HELLO, session=77, outlives=True)


class Loop:
    """An R-worker whose loop is turned by the test."""

    def __init__(self) -> None:
        self.hub: InprocHub[FromRWorker, ToRWorker] = InprocHub(keeps_places=False)
        self._state = RWorkerState(
            "r0", kv_bytes=KV_BYTES, serving=ServingTerms(return_s=WAIT_S, keep_s=WAIT_S)
        )
        self._executor = AttentionExecutor(kernels=reference)

    def connect(self) -> InprocConnection[ToRWorker, FromRWorker]:
        here, _ = connect(InprocHub(), "a peer", self.hub, "R-worker r0")
        return here

    def turn(self) -> None:
        worker = RWorker(self.hub, self._state, self._executor)
        assert serve_next(self.hub, worker, None)


def test_an_s_worker_is_fenced_though_the_one_that_resumed_is_gone() -> None:
    loop = Loop()
    first, second = loop.connect(), loop.connect()
    first.send(OURS)
    loop.turn()
    assert isinstance(first.receive(WAIT_S), Welcome)
    second.send(replace(OURS, resumes=True))
    second.close()  # before the R-worker has read it
    loop.turn()
    told = first.poll()
    assert isinstance(told, Failed) and told.code == SESSION_RESUMED
    assert not loop.hub.connections[0].is_open


def test_a_report_to_a_peer_that_is_gone_ends_nothing() -> None:
    loop = Loop()
    first, second = loop.connect(), loop.connect()
    first.send(Inspect())
    first.close()
    second.send(Inspect())
    for _ in range(3):  # both messages, and the end of the first peer
        loop.turn()
    assert isinstance(second.poll(), Report)
