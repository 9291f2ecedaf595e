"""Who spins: the rule on a virtual clock, and GNU's runtime for real."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from sworker.kernels.threads import (
    FEW_WAIT,
    FIRST_HOLD_S,
    LONGEST_HOLD_S,
    MANY_WAIT,
    WINDOW_S,
    IdleThreads,
    SpareThreads,
    openmp_library,
    waited_for_cores,
    watch_idle_threads,
)


class RecordedBrake:
    def __init__(self) -> None:
        self.turns: list[str] = []

    def turn_on(self) -> None:
        self.turns.append("on")

    def turn_off(self) -> None:
        self.turns.append("off")


class Cores:
    """A clock, and how long threads have waited for a core."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waited = 7.0
        self.num_reads = 0

    def waited_s(self) -> float:
        self.num_reads += 1
        return self.waited

    def clock(self) -> float:
        return self.now

    def go_on(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.waited += share * seconds


def test_threads_sleep_while_others_want_the_cores() -> None:
    brake, cores = RecordedBrake(), Cores()
    idle = IdleThreads(brake, cores.waited_s, cores.clock)
    for share, turns in (
        (0.0, []),
        (0.3, []),  # a neighbour with half of a core
        (0.3, []),
        (MANY_WAIT + 0.01, []),  # a moment
        (0.3, []),
        (MANY_WAIT + 0.01, []),
        (MANY_WAIT + 0.01, ["on"]),
        (0.9, ["on"]),
        (FEW_WAIT + 0.01, ["on"]),
        (FEW_WAIT - 0.01, ["on", "off"]),
        (0.3, ["on", "off"]),
        (0.5, ["on", "off"]),
        (0.5, ["on", "off", "on"]),
    ):
        cores.go_on(1.1 * WINDOW_S, share)
        idle.look()
        assert brake.turns == turns
        assert idle.is_crowded == (turns[-1:] == ["on"])


def test_the_brake_is_tried_without_now_and_then() -> None:
    """With the brake on, threads may wait for each other: that looks like others."""
    brake, cores = RecordedBrake(), Cores()
    idle = IdleThreads(brake, cores.waited_s, cores.clock)
    held: list[float] = []
    began = 0.0
    while len(held) < 7:
        was_crowded = idle.is_crowded
        cores.go_on(1.01 * WINDOW_S, 0.6)
        idle.look()
        if idle.is_crowded and not was_crowded:
            began = cores.now
        elif was_crowded and not idle.is_crowded:
            held.append(cores.now - began)
    expected = [FIRST_HOLD_S * 2**i for i in range(4)] + [LONGEST_HOLD_S] * 3
    assert held == pytest.approx(expected, abs=2 * WINDOW_S)
    for share in (0.0, 0.6, 0.6):  # free for a moment: it begins anew
        cores.go_on(1.01 * WINDOW_S, share)
        idle.look()
    assert idle.is_crowded
    cores.go_on(FIRST_HOLD_S, 0.6)
    idle.look()
    assert not idle.is_crowded


def test_the_brake_is_off_when_the_engine_is_gone() -> None:
    brake, cores = RecordedBrake(), Cores()
    idle = IdleThreads(brake, cores.waited_s, cores.clock)
    for _ in range(2):
        cores.go_on(WINDOW_S * 2, 1.0)
        idle.look()
    del idle
    gc.collect()
    assert brake.turns == ["on", "off"]


def test_seconds_are_of_all_threads(tmp_path: Path) -> None:
    for task, line in (("11", "5 2000000000 3\n"), ("12", "7 500000000 1\n")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(line)
    (tmp_path / "13").mkdir()  # it has just ended
    assert waited_for_cores(tmp_path) == 2.5
    assert waited_for_cores() >= 0.0


def test_nothing_is_watched_where_nothing_can_be_done() -> None:
    assert watch_idle_threads("/x/libgomp.so.1", 1, 8) is None
    assert watch_idle_threads("/x/libiomp5.so", 4, 8) is None
    assert watch_idle_threads(None, 4, 8) is None


def test_spare_threads_come_and_go() -> None:
    library = openmp_library()
    if library is None or "libgomp" not in library:
        pytest.skip("needs torch with GNU's OpenMP runtime")
    torch.ones(8)
    before = set(threading.enumerate())
    spare = SpareThreads(library, 2, 2)
    spare.turn_off()  # it was never on
    spare.turn_on()
    holders = [x for x in threading.enumerate() if x not in before]
    assert [x.name for x in holders] == ["openmp-spare"]
    spare.turn_off()
    spare.turn_off()
    holders[0].join(30)
    assert not holders[0].is_alive()
