"""Whom the fleet gives up, and when: workers that hang, workers that are slow,
and time in which nobody looked."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.wire.messages import Accepted, OpenSequence
from fastdecode.wire.transport import TIMEOUT, closed_error, timeout_error


class Hub:
    """Time passes only while somebody waits here. ``signs`` and ``answers``: (when, worker)."""

    def __init__(
        self, num_workers: int, signs: list[tuple[float, int]], answers: list[tuple[float, int]]
    ) -> None:
        self.now = 100.0
        self.signs = sorted(signs)
        self.answers = deque(sorted(answers))
        self.connections = [
            SimpleNamespace(peer=f"R-worker {i}", heard_s=None, send=lambda message: None)
            for i in range(num_workers)
        ]

    def receive_any(self, timeout_s: float) -> Any:
        end = self.now + timeout_s
        answer = self.answers[0] if self.answers and self.answers[0][0] <= end else None
        self.now = max(self.now, end if answer is None else answer[0])
        for when, worker in self.signs:
            if when <= self.now:
                self.connections[worker].heard_s = max(
                    when, self.connections[worker].heard_s or 0.0
                )
        if answer is None:
            raise timeout_error("somebody", timeout_s)
        self.answers.popleft()
        return answer[1], Accepted(0)


def fleet(
    signs: list[tuple[float, int]], answers: list[tuple[float, int]]
) -> tuple[Hub, WorkerPool]:
    hub = Hub(2, signs, answers)
    made = WorkerPool(hub, timeout_s=50.0, silence_s=5.0, clock=lambda: hub.now)  # type: ignore[arg-type]
    for worker in range(2):
        made.send(worker, OpenSequence(0, 1))
    return hub, made


def everything(hub: Hub, fleet: WorkerPool, num_answers: int) -> list[int]:
    """Who answered, until so many have answered or been given up."""
    answered = []
    while len(answered) + len(fleet.lost) < num_answers:
        received = fleet.receive()
        if received is not None:
            answered.append(received[0])
    return answered


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "R-worker 1 has closed the connection",
            "R-worker 1 is lost: it has closed the connection",
        ),
        ("R-worker 1 is lost: its process has died", "R-worker 1 is lost: its process has died"),
        ("out of memory", "R-worker 1 is lost: out of memory"),
        ("R-worker 12 failed", "R-worker 1 is lost: R-worker 12 failed"),
    ],
)
def test_a_loss_is_told_with_one_name(
    said: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, made = fleet([], [])
    made.lose(1, WorkerError(said))
    assert caplog.messages == [shown]


def test_a_slow_worker_that_gives_signs_of_life_is_not_given_up() -> None:
    signs = [(100.0 + i, worker) for i in range(41) for worker in range(2)]
    hub, made = fleet(signs, [(140.0, 0), (141.0, 1)])
    assert everything(hub, made, 2) == [0, 1]
    assert not made.lost


def test_one_that_falls_silent_is_given_up_by_name_after_the_time_asked_for() -> None:
    signs = [(100.0 + i, 0) for i in range(41)] + [(100.0, 1), (101.0, 1), (103.0, 1)]
    hub, made = fleet(signs, [(140.0, 0)])
    while not made.lost:
        assert made.receive() is None
    assert hub.now == pytest.approx(108.0)
    assert list(made.lost) == [1] and made.lost[1].code == TIMEOUT
    assert "R-worker 1 has given no sign of life for 5 s" in made.lost[1].message
    assert everything(hub, made, 2) == [0]


def test_one_that_lives_but_never_answers_is_given_up_too() -> None:
    hub, made = fleet([(100.0 + i, worker) for i in range(90) for worker in range(2)], [(110.0, 0)])
    assert everything(hub, made, 2) == [0]
    assert (
        hub.now == pytest.approx(150.0, abs=1.0)
        and "hasn't answered for 50 s" in made.lost[1].message
    )


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    """The S-worker computed for long, and took no signs of life in."""
    hub, made = fleet([(100.0, 0), (100.0, 1), (131.0, 0)], [(132.0, 0), (130.5, 1)])
    hub.connections[0].heard_s = hub.connections[1].heard_s = 100.0
    hub.now = 130.0
    assert everything(hub, made, 2) == [1, 0]
    assert not made.lost


def test_whoever_is_absent_from_the_beginning_is_lost_and_told_once() -> None:
    """So that others may come in its place."""
    hub = Hub(2, [], [])
    reason = WorkerError("R-worker 1 isn't there")
    made = WorkerPool(hub, timeout_s=50.0, clock=lambda: hub.now, absent={1: reason})  # type: ignore[arg-type]
    assert made.lost == {1: reason}
    assert made.take_losses() == [(1, reason)] and made.take_losses() == []


def test_what_a_lost_worker_said_before_is_no_answer_that_is_owed() -> None:
    """Worker 1 is gone; looking for whom, the fleet finds an answer of worker 0's."""
    hub, made = fleet([], [])

    def receive_any(timeout_s: float) -> Any:
        raise closed_error("somebody", by_peer=True)

    def gone() -> Any:
        raise closed_error("R-worker 1", by_peer=True)

    hub.receive_any = receive_any  # type: ignore[method-assign]
    hub.connections[0].poll = lambda: Accepted(0)
    hub.connections[1].poll = gone
    assert made.receive() is None and list(made.lost) == [1] and made.is_owed
    made.lose(HolderId(0), WorkerError("R-worker 0 sent nonsense before"))
    assert not made.is_owed
