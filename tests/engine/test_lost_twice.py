"""A column that is lost in a later stage may be lost in the first one, too,
while a step there still waits for its own R-worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.trace import NoTrace
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.step.arrivals import Arrivals
from fastdecode.engine.step.lanes import Lanes
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.stages import ColumnLost


def test_a_step_learns_of_its_own_r_worker_when_the_column_is_lost_already() -> None:
    hub: InprocHub[Any, Any] = InprocHub()
    for name in ("r0", "r1"):
        connect(hub, "the first stage", InprocHub(), name)
    here, there = connect(hub, "the first stage", InprocHub(), "stage 1")
    fleet = ColumnPool(hub, 60.0, stages=StageLinks({1: here}, is_asked=False))
    lanes, column = Lanes(1), HolderId(1)
    lost: set[HolderId] = set()
    step: Any = SimpleNamespace(lane=0, remote=SimpleNamespace(lose=lost.add))
    lanes.enter(step)
    arrivals = Arrivals(fleet, lanes, NoTrace())

    there.send(ColumnLost(1, "gone", "it left"))
    fleet.look()
    assert [holder for holder, _ in arrivals.take_news()] == [column]
    assert not lost, "the first stage's own R-worker is there, and answers"

    fleet.lose(column, WorkerError("it left, too", code="gone"))
    assert arrivals.take_news() == [], "of a column one is told once"
    assert lost == {column}
