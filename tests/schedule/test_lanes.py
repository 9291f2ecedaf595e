"""The number of lanes follows what steps turn out to take; a machine with known
times tells what it should be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from fastdecode.core.config.groups import Batching
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import ScheduleOptions, make_scheduler
from fastdecode.schedule.times import MeasuredTimes, RPartTime


@dataclass(frozen=True)
class Machine:
    """Seconds of a lane's step: T_S = fixed_s + num_tokens · token_s, T_R =
    load · load_s, and L."""

    fixed_s: float
    token_s: float
    load_s: float
    round_trip_s: float

    def cycle_s(self, batch: int, load: int, lanes: int) -> float:
        s, r = self.fixed_s + batch / lanes * self.token_s, load / lanes * self.load_s
        return max(lanes * s, lanes * r, s + r + self.round_trip_s)


def run(
    machine: Machine, *, batch: int = 60, load: int = 60_000, start: int = 2, num_steps: int = 800
) -> list[int]:
    """The number of lanes at every step."""
    times = MeasuredTimes(min_observed=8)
    control = LaneControl(times, start, every=16)
    lanes = []
    count = start
    for step in range(num_steps):
        wanted = control.decide()
        if wanted != count:
            count = wanted
            control.regrouped(count)
        tokens, lane_load = batch // count, load // count
        times.observe(
            tokens,
            0,
            machine.fixed_s + tokens * machine.token_s,
            {0: RPartTime(lane_load, 0, lane_load * machine.load_s)},
        )
        times.observe_trip(machine.round_trip_s)
        control.observe(step % count, tokens, {0: lane_load})
        lanes.append(count)
    return lanes


@pytest.mark.parametrize(
    "machine",
    [
        Machine(0.0, 1e-3, 1e-6, 0.0),  # in balance, an instant network: two
        Machine(0.0, 1e-3, 1e-6, 20e-3),  # a slow network: three or more
        Machine(0.0, 1e-3, 1e-6, 60e-3),
        # Little R-part, and each lane reads the weights anew: one.
        Machine(30e-3, 1e-4, 0.2e-6, 0.0),
        Machine(5e-3, 1e-3, 1e-6, 10e-3),
    ],
)
def test_lanes_settle_near_the_best(machine: Machine) -> None:
    lanes = run(machine)
    settled = lanes[-200:]
    best = min(machine.cycle_s(60, 60_000, k) for k in range(1, 9))
    assert len(set(settled)) == 1
    assert machine.cycle_s(60, 60_000, settled[0]) <= 1.07 * best


def test_nothing_is_decided_before_times_are_known() -> None:
    control = LaneControl(MeasuredTimes(), 2, every=4)
    for step in range(8):
        control.observe(step % 2, 10, {0: 100})
    assert control.decide() == 2


def requests(lengths: list[int], max_tokens: int = 64) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(str(i), (5,) * n, params, max_tokens, seed=0) for i, n in enumerate(lengths)]


def run_a_step(lifecycle: Lifecycle, lane: int) -> list[int]:
    """Of R-workers that answer at once. Returns who stepped."""
    for instruction in lifecycle.handle(events.LaneIdle(lane)):
        if isinstance(instruction, events.Ask):
            assert not lifecycle.handle(events.Opened(instruction.part.part_id))
    members: list[int] = []
    for run in lifecycle.handle(events.LaneReady(lane)):
        assert isinstance(run, events.Run)
        assert all(1 <= chunk.num_tokens <= chunk.sequence.num_uncached for chunk in run.chunks)
        members = [chunk.sequence.sequence_id for chunk in run.chunks]
        drawn = [c.sequence for c in run.chunks if c.num_tokens == c.sequence.num_uncached]
        lifecycle.handle(
            events.StepDone(lane, tuple(events.Drawn(sequence, 7) for sequence in drawn))
        )
    return members


@pytest.mark.parametrize("mode", ["greedy", "stabilized", "synchronized"])
def test_regrouped_sequences_go_on_and_end(mode: str) -> None:
    """Every sequence runs every token once, whatever the lanes; lanes are as
    even as whole sequences allow."""
    options = ScheduleOptions(
        Batching(schedule=mode, max_num_sequences=12, prefill_chunk=16, max_step_tokens=40, lanes=2)
    )
    scheduler = make_scheduler(options, (64, 64), 16)
    lifecycle = Lifecycle(scheduler)
    for request in requests([1, 50, 3, 33, 7, 90, 2, 20, 41, 5, 18, 9, 70, 4]):
        lifecycle.handle(events.Submitted(request))
    num_lanes, changes = 2, itertools.cycle([1, 4, 3, 2])
    for step in itertools.count():
        assert step < 2000, "it doesn't get on"
        if not scheduler.num_running + len(scheduler.waiting):
            break
        if step % 7 == 6:
            num_lanes = next(changes)
            lifecycle.handle(events.Regrouped(num_lanes))
            assert_even(scheduler, num_lanes)
        members: list[int] = []
        ended = 0
        for lane in range(num_lanes):
            before = scheduler.num_running + len(scheduler.waiting)
            members += run_a_step(lifecycle, lane)
            ended += before - scheduler.num_running - len(scheduler.waiting)
        lifecycle.check_invariants()
        assert len(set(members)) == len(members) == scheduler.num_running + ended
    assert scheduler.num_running == len(scheduler.waiting) == 0


def assert_even(scheduler: ContinuousScheduler, num_lanes: int) -> None:
    sizes = [len(lane.running) for lane in scheduler.lanes]
    assert len(sizes) == num_lanes and max(sizes) - min(sizes) <= 1


def test_a_lane_that_never_decodes_holds_nothing_up() -> None:
    times = MeasuredTimes(min_observed=8)
    control = LaneControl(times, 2, every=16)
    wanted = []
    for _ in range(64):
        times.observe(20, 0, 20e-3, {0: RPartTime(20_000, 0, 20e-3)})
        times.observe_trip(30e-3)  # a slow network: more lanes
        control.observe(0, 20, {0: 20_000})
        wanted.append(control.decide())
    assert wanted[:31] == [2] * 31 and wanted[-1] > 2
