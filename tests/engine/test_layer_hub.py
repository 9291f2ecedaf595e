"""R-workers of token stages as a prompt stage sees them: every layer goes to
whoever keeps it, once, and is answered in its order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import WorkerError
from fastdecode.engine.stages.layer_hub import LayerHub, homes_of, stages_of
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Attend, AttendResult, BeginStep, Failed, StorePrompt
from fastdecode.wire.transport import TIMEOUT, PeerLostError

NUM_COLUMNS = 2
STAGES = (range(2), range(2, 5))
"""Of tokens; the prompt stage has layers 1 to 3."""


def cut(num_layers: int, ends: set[int]) -> list[range]:
    bounds = sorted({0, num_layers, *ends})
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


@given(st.integers(1, 40), st.data())
def test_all_layers_of_all_stages_are_brought_once(num_layers: int, data: st.DataObject) -> None:
    """Whatever the cuts: a prompt stage's layers in their order, and all that token
    stages keep."""
    ends = st.sets(st.integers(1, num_layers))
    of_tokens, of_prompts = (cut(num_layers, data.draw(ends)) for _ in range(2))
    brought = []
    for layers in of_prompts:
        homes = homes_of(layers, of_tokens)
        assert [of_tokens[home.stage][home.layer] for home in homes] == list(layers)
        assert stages_of(homes) == sorted({home.stage for home in homes})
        brought += [(home.stage, home.layer) for home in homes]
    kept = [(i, layer) for i, each in enumerate(of_tokens) for layer in range(len(each))]
    assert brought == kept


class Peers:
    """A prompt stage with layers 1, 2 and 3, and the other ends of its connections:
    R-workers of two token stages in two columns, and another stage."""

    def __init__(self) -> None:
        inner: InprocHub[Any, Any] = InprocHub()
        self.r_workers: dict[tuple[int, int], InprocConnection[Any, Any]] = {}
        for stage in range(2):
            for column in range(NUM_COLUMNS):
                end: InprocHub[Any, Any] = InprocHub()
                name = f"R-worker s{stage}-r{column}"
                self.r_workers[stage, column] = connect(inner, "the prompt stage", end, name)[1]
        self.stage = connect(inner, "the prompt stage", InprocHub(), "the first stage")[1]
        self.hub = LayerHub(inner, homes_of(range(1, 4), STAGES), NUM_COLUMNS)
        self.hub.sessions[:] = [70, 71]

    def send(self, column: int, layer: int) -> Attend:
        counts = np.array([0], np.int32), np.array([3], np.int32)
        begin = BeginStep(8, 4, np.array([5]), *counts, *counts)
        kv = np.full((3, 2, 4), layer, np.float32)
        attend = Attend(8, 4, layer, np.zeros((0, 4, 4), np.float32), kv, kv + 1)
        if not layer:
            self.hub.connections[column].send(begin)
        self.hub.connections[column].send(attend)
        return attend

    def answer(self, stage: int, column: int) -> StorePrompt:
        """What an R-worker got, which it answers."""
        got: StorePrompt = self.r_workers[stage, column].receive(1.0)
        o = np.zeros((0, 4, 4), np.float32)
        self.r_workers[stage, column].send(
            AttendResult(got.step, got.lane, got.layer, o, None, 0.5)
        )
        return got

    def receive(self) -> tuple[int, Any]:
        return self.hub.receive_any(1.0)


def test_layers_go_to_whoever_keeps_them_and_are_answered_in_their_order() -> None:
    peers = Peers()
    sent = [peers.send(1, layer) for layer in range(3)]
    late = [peers.answer(1, 1) for _ in range(2)]
    with pytest.raises(WorkerError) as silence:
        peers.hub.receive_any(0.01)
    assert silence.value.code == TIMEOUT, "the first layer's answer isn't here"
    first = peers.answer(0, 1)
    got = [first, *late]
    assert [(one.session, one.layer, one.holder) for one in got] == [
        (70, 1, 1),
        (71, 0, 1),
        (71, 1, 1),
    ]
    for one, attend in zip(got, sent, strict=True):
        assert one.k is attend.k and one.v is attend.v, "as it was, and lent"
        assert (one.sequence_ids.tolist(), one.num_past.tolist(), one.num_new.tolist()) == (
            [5], [0], [3]
        )  # fmt: skip
    answers = [peers.receive() for _ in range(3)]
    assert [(index, answer.layer) for index, answer in answers] == [(1, 0), (1, 1), (1, 2)]


def test_stages_come_behind_the_columns() -> None:
    peers = Peers()
    assert len(peers.hub.connections) == NUM_COLUMNS + 1
    peers.stage.send("an order")
    assert peers.receive() == (NUM_COLUMNS, "an order")
    peers.stage.close()
    with pytest.raises(PeerLostError) as lost:
        peers.receive()
    assert lost.value.index == NUM_COLUMNS


def test_a_column_is_lost_with_any_of_its_r_workers_once() -> None:
    peers = Peers()
    peers.send(0, 0)
    peers.send(1, 0)
    peers.r_workers[1, 0].close()
    with pytest.raises(PeerLostError) as lost:
        peers.receive()
    assert lost.value.index == 0 and "s1-r0" in str(lost.value)
    peers.answer(0, 0)
    peers.answer(0, 1)
    assert peers.receive()[0] == 0, "whoever has lost the column doesn't want it"
    assert peers.receive()[0] == 1
    peers.r_workers[0, 0].close()
    with pytest.raises(WorkerError) as silence:
        peers.hub.receive_any(0.01)
    assert silence.value.code == TIMEOUT


def test_whom_nobody_waits_for_may_leave() -> None:
    """As at the end of a job; who is sent something is missed then."""
    peers = Peers()
    peers.r_workers[0, 1].close()
    with pytest.raises(WorkerError) as silence:
        peers.hub.receive_any(0.01)
    assert silence.value.code == TIMEOUT
    with pytest.raises(WorkerError, match="s0-r1"):
        peers.send(1, 0)


@pytest.mark.parametrize("wrong", [{"layer": 0}, {"layer": 7}])
def test_who_answers_for_another_layer_is_lost(wrong: dict[str, int]) -> None:
    peers = Peers()
    peers.send(0, 0)
    answer = AttendResult(8, 4, 1, np.zeros((0, 4, 4), np.float32), None, 0.5)
    peers.r_workers[0, 0].send(replace(answer, **wrong))  # type: ignore[arg-type]
    with pytest.raises(PeerLostError, match="which isn't due") as lost:
        peers.receive()
    assert lost.value.index == 0


def test_last_words_are_passed_on() -> None:
    peers = Peers()
    peers.r_workers[1, 1].send(Failed("s1-r1", "kernel_failed", "it is too hot"))
    index, failed = peers.receive()
    assert index == 1 and failed.message == "it is too hot"
    peers.r_workers[1, 0].send(Failed("s1-r0", "kernel_failed", "it is too cold"))
    assert peers.hub.connections[0].poll() == Failed("s1-r0", "kernel_failed", "it is too cold")
