"""A prompt stage as a writer: every layer goes to the member that keeps it, once, and
a group is lost with any of its members."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages_for_tests import to_r_worker
from numpy.typing import NDArray
from values import replace

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.writers import WriterMembers, WriterPool, WriterRelay, members_of
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Attend, AttendResult, BeginStep, Failed, StorePrompt
from fastdecode.wire.stages import ColumnLost

NUM_COLUMNS = 2
STAGES = (range(2), range(2, 5))
"""Of tokens; the prompt stage has layers 1 to 3."""
NO_O = np.zeros((0, 4, 4), np.float32)
V, W = HolderId(0), HolderId(1)


class Peers:
    """A prompt stage with layers 1, 2 and 3, and the other ends of its connections:
    R-workers of two token stages in two columns, and the first stage."""

    def __init__(self, absent: Mapping[int, WorkerError] | None = None) -> None:
        hub: InprocHub[Any, Any] = InprocHub()
        self.r_workers: dict[tuple[int, int], InprocConnection[Any, Any]] = {}
        for stage in range(2):
            for column in range(NUM_COLUMNS):
                end: InprocHub[Any, Any] = InprocHub()
                name = f"R-worker s{stage}-r{column}"
                self.r_workers[stage, column] = connect(hub, "the prompt stage", end, name)[1]
        here, self.stage = connect(hub, "the prompt stage", InprocHub(), "the first stage")
        self.links = StageLinks({0: here}, is_asked=True)
        layers = members_of(range(1, 4), STAGES)
        members = WriterMembers(
            hub, 60.0, 60.0, stages=self.links, written=layers, num_columns=NUM_COLUMNS,
            absent=absent,
        )  # fmt: skip
        members.sessions = (70, 71)
        self.pool = WriterPool(members, layers)
        self.reports = WriterRelay(self.pool)
        self.reports.regroup(rows(*AT_HOME))

    def write(self, column: HolderId, layer: int) -> None:
        counts = np.array([0], np.int32), np.array([3], np.int32)
        begin = BeginStep(8, 4, np.array([5]), *counts, *counts)
        kv = np.full((3, 2, 4), layer, np.float32)
        if not layer:
            self.pool.send(column, begin)
        self.pool.send(column, Attend(8, 4, layer, NO_O, kv, kv + 1))

    def answer(self, stage: int, column: int) -> None:
        """An R-worker answers what it got."""
        got: StorePrompt = self.r_workers[stage, column].receive(1.0)
        answer = AttendResult(got.step, got.lane, got.layer, NO_O, None, 0.5)
        self.r_workers[stage, column].send(answer)

    def receive(self) -> Any:
        return self.pool.receive(most_s=1.0)

    def reported(self) -> list[Any]:
        """What the first stage has heard."""
        return list(iter(self.stage.poll, None))


def test_a_member_that_owes_nothing_may_leave() -> None:
    """As at the end of a job; its loss is noticed when it is sent something."""
    peers = Peers()
    peers.r_workers[0, 1].close()
    assert peers.pool.receive(most_s=0.01) is None
    assert not peers.pool.take_losses() and not peers.reported()
    peers.write(W, 0)
    assert [column for column, _ in peers.pool.take_losses()] == [W]
    assert [(lost.stage, lost.column) for lost in peers.reported()] == [(0, 1)]


@pytest.mark.parametrize("wrong", [{"layer": 0}, {"layer": 7}, {"step": 9}])
def test_a_member_that_answers_for_another_layer_is_lost(wrong: dict[str, int]) -> None:
    peers = Peers()
    peers.write(V, 0)
    answer = AttendResult(8, 4, 1, NO_O, None, 0.5)
    peers.r_workers[0, 0].send(replace(answer, **wrong))  # type: ignore[arg-type]
    assert peers.receive() is None
    ((column, error),) = peers.pool.take_losses()
    assert column == V and "was due" in str(error)


def test_one_that_was_not_there_to_begin_with_is_reported() -> None:
    peers = Peers(absent={1: WorkerError("can't reach it", code="worker_lost")})
    ((stage, lost),) = [(told.stage, told) for told in peers.reported()]
    assert (stage, lost.column, lost.code, lost.num_replaced) == (0, 1, "worker_lost", 0)
    assert not peers.reported()


def test_last_words_are_passed_on() -> None:
    peers = Peers()
    peers.write(W, 0)
    peers.write(W, 1)
    peers.r_workers[1, 1].send(Failed("s1-r1", "kernel_failed", "it is too hot"))
    assert peers.receive() is None
    (lost,) = peers.reported()
    assert isinstance(lost, ColumnLost) and (lost.stage, lost.column) == (1, 1)
    assert lost.code == "kernel_failed" and "it is too hot" in lost.message


def test_the_first_stage_has_no_orders_for_r_workers() -> None:
    with pytest.raises(ProtocolError, match="StorePrompt"):
        Peers().reports.obey(next(x for x in to_r_worker() if isinstance(x, StorePrompt)))


def rows(*members: tuple[int, int, int, int]) -> NDArray[np.int32]:
    """(column, stage, name, worker) of each, with all heads."""
    return np.array([(*member, 0, 0, 0) for member in members], np.int32)


AT_HOME = [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 1), (1, 1, 1, 1)]


def test_a_step_is_not_done_while_the_rest_of_a_lost_group_stores_it() -> None:
    """Else they are greeted again, and what was on its way comes behind the greeting."""
    peers, step = Peers(), SimpleNamespace(settled=True)
    is_stored: Any = peers.reports.is_stored
    peers.write(V, 0)
    peers.write(V, 1)
    peers.r_workers[1, 0].close()
    assert peers.receive() is None and [x for x, _ in peers.pool.take_losses()] == [V]
    assert not is_stored(step)
    peers.answer(0, 0)
    assert peers.receive() is None and is_stored(step)
    assert not is_stored(SimpleNamespace(settled=False))


def test_members_that_cannot_be_are_refused() -> None:
    pool = Peers().pool
    for wrong in (rows((0, 0, 2, 0)), rows((0, 0, 0, 2)), rows((-1, 0, 0, 0)), np.zeros((1, 5))):
        with pytest.raises(ProtocolError, match="members that can't be"):
            pool.regroup(wrong.astype(np.int32))
