"""Load limits follow from step times; step times follow from measurements."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.goodput.replanning import LinearTimes
from cost_model.hardware import Hardware
from cost_model.plans.question import Setup
from cost_model.predict import LaneTimes, System, SystemTime
from cost_model.shapes import model_named
from cost_model.simulate import Table, TabledTimes
from cost_model.workload import Workload
from fastdecode.schedule.life.events import Run
from fastdecode.schedule.simulation.resources import Flight, Rounds
from fastdecode.schedule.times import (
    MeasuredTimes,
    Prompts,
    RPartTime,
    StepTime,
    balanced_loads,
    cycle_s,
    num_tokens_of,
)


@dataclass(frozen=True)
class Linear(StepTime):
    base_s: float
    token_s: float
    r_token_s: tuple[float, ...]

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        return self.base_s + self.token_s * num_tokens_of(num_decoding, prompts)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.r_token_s[worker] * load_tokens


def paper_system() -> System:
    hardware, spec = Hardware.load(), model_named("Llama-2 7B")
    return Setup(
        spec,
        spec.choose_dtype("auto"),
        "float16",
        hardware.gpu("A10"),
        hardware.cpu("EPYC 7452"),
        hardware.nic("100GbE"),
        Workload(0, 1024),
    ).system()


def test_a_limit_is_the_load_that_takes_as_long_as_the_s_part() -> None:
    times = Linear(0.010, 0.0001, (1e-6, 2e-6, 1e-9))
    assert balanced_loads(times, 100, (10**6, 10**6, 5000)) == (20_000, 10_000, 5000)


def test_a_limit_is_never_below_one_token() -> None:
    assert balanced_loads(Linear(0.0, 0.0, (1.0,)), 8, (100,)) == (1,)


@settings(max_examples=300, deadline=None)
@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.integers(1, 10_000))
def test_limits_are_the_largest_loads_in_time(
    base_s: float, r_token_s: float, capacity: int
) -> None:
    times = Linear(base_s, 0.0, (r_token_s,))
    limits = balanced_loads(times, 1, (capacity,))
    assert limits is not None
    (limit,) = limits
    assert limit == 1 or times.r_part_s(0, limit) <= base_s
    assert limit == capacity or times.r_part_s(0, limit + 1) > base_s


def measured(
    truth: Linear, loads: list[int], batches: list[int], times: MeasuredTimes
) -> MeasuredTimes:
    for load, batch in zip(loads, batches, strict=True):
        workers = range(len(truth.r_token_s))
        r_parts = {worker: RPartTime(load, 0, truth.r_part_s(worker, load)) for worker in workers}
        times.observe(batch, 0, truth.s_part_s(batch), r_parts)
    return times


def test_measurements_reveal_the_lines_behind_them() -> None:
    rng = random.Random(0)
    truth = Linear(0.010, 0.0001, (1e-6, 3e-6))
    loads, batches = [[rng.randrange(100, 9000) for _ in range(80)] for _ in range(2)]
    times = measured(truth, loads, batches, MeasuredTimes())
    assert times.s_part_s(256) == pytest.approx(truth.s_part_s(256), rel=1e-6)
    for worker in (0, 1):
        assert times.r_part_s(worker, 20_000) == pytest.approx(
            truth.r_part_s(worker, 20_000), rel=1e-6
        )


def test_a_constant_batch_and_load_don_t_make_up_a_slope() -> None:
    truth = Linear(0.010, 0.0001, (1e-6,))
    times = measured(truth, [5000] * 50, [100] * 50, MeasuredTimes())
    assert times.s_part_s(400) == pytest.approx(truth.s_part_s(100))
    assert times.r_part_s(0, 10_000) == pytest.approx(truth.r_part_s(0, 10_000))


@pytest.mark.parametrize("chunk", [1, 30, 60])
def test_prompts_count_at_their_average(chunk: int) -> None:
    """In every step another part of a prompt runs, the longer the smaller the
    batch is, as in an engine whose steps have a fixed budget."""
    rng = random.Random(2)
    truth, prompt_s, store_s = Linear(0.010, 0.0001, (1e-6,)), 0.0003, 2e-6
    times, prompts = MeasuredTimes(half_life=1e9), []
    for _ in range(400):
        load, batch = rng.randrange(100, 9000), rng.randrange(20, 60)
        prompts.append(rng.randrange(chunk) + 100 - batch)
        part = RPartTime(load, prompts[-1], truth.r_part_s(0, load) + store_s * prompts[-1])
        times.observe(batch, prompts[-1], truth.s_part_s(batch) + prompt_s * prompts[-1], {0: part})
        # Nothing decodes: what it took is no matter.
        times.observe(0, 5000, 99.0, {0: RPartTime(0, 5000, 99.0)})
    mean = sum(prompts) / len(prompts)
    assert times.r_part_s(0, 20_000) == pytest.approx(
        truth.r_part_s(0, 20_000) + store_s * mean, rel=1e-6
    )
    if chunk == 1:
        # How large the batch is and how long the prompts are can't be told
        # apart: what steps took on average speaks.
        assert times.s_part_s(90) == pytest.approx(
            truth.s_part_s(100) + (prompt_s - 0.0001) * mean, rel=1e-6
        )
    else:
        assert times.s_part_s(90) == pytest.approx(truth.s_part_s(90) + prompt_s * mean, rel=0.01)


def test_a_worker_that_slows_down_is_noticed() -> None:
    rng = random.Random(1)
    loads, batches = [[rng.randrange(100, 9000) for _ in range(400)] for _ in range(2)]
    times = measured(Linear(0.010, 0.0, (1e-6,)), loads, batches, MeasuredTimes(half_life=30))
    before = balanced_loads(times, 64, (10**6,))
    times = measured(Linear(0.010, 0.0, (2e-6,)), loads, batches, times)
    after = balanced_loads(times, 64, (10**6,))
    assert before is not None and after is not None
    assert after[0] == pytest.approx(before[0] / 2, rel=0.01)


def test_until_something_is_measured_there_is_no_limit() -> None:
    assert balanced_loads(MeasuredTimes(), 64, (1234,)) is None
    times = MeasuredTimes(min_observed=3)
    measured(Linear(0.010, 0.0, (2e-5,)), [100, 200], [64, 64], times)
    assert balanced_loads(times, 64, (1234,)) is None
    measured(Linear(0.010, 0.0, (2e-5,)), [300], [64], times)
    assert balanced_loads(times, 64, (1234,)) == (500,)


EVERY = {
    "fitted": LinearTimes(0.02, 1e-4, 1e-7, 3e-4, 1e-6),
    "tabled": TabledTimes(Table(((1, 0.01), (256, 0.016))), (Table(((0, 0.0), (1, 1e-6))),), 2e-3),
    "datasheet": SystemTime(paper_system(), 8, 1e10),
    "measured": measured(Linear(0.01, 1e-4, (1e-6,)), [9000] * 40, [64] * 40, MeasuredTimes()),
}


@pytest.mark.parametrize("times", EVERY.values(), ids=EVERY)
def test_all_step_times_give_five_numbers_that_never_fall(times: StepTime) -> None:
    functions: list[Callable[[int], float]] = [
        times.s_part_s,
        lambda tokens: times.s_part_s(4, [(0, tokens)]),
        lambda tokens: times.r_part_s(0, tokens, 4),
        times.link_s,
        times.trip_s,
        times.transfer_s,
    ]
    for function in functions:
        seconds = [function(tokens) for tokens in (1, 2, 63, 64, 65, 4096)]
        assert seconds == sorted(seconds) and seconds[0] >= 0
    assert times.s_part_s(64) > 0 and times.r_part_s(0, 4096, 4) > 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.tuples(*[st.integers(0, 64).map(lambda n: n / 64)] * 4))
def test_equal_lanes_step_as_a_simulated_round_and_as_size_says(
    num_lanes: int, each: tuple[float, float, float, float]
) -> None:
    s_part_s, r_part_s, trip_s, link_s = each
    expected = cycle_s(num_lanes, s_part_s, r_part_s, trip_s, link_s)
    rounds = Rounds(Linear(0, 0, ()), 1)
    flights = {
        lane: Flight(Run(lane, ()), s_part_s, (r_part_s,), trip_s, {}, 1, link_s)
        for lane in range(num_lanes)
    }
    assert set(rounds.steps_s(flights, 0.0).values()) == {expected}
    # Where the link is busy all the way out and nothing else is in the trip.
    lane = LaneTimes(s_part_s, trip_s, r_part_s, 0.0, 0.0)
    assert lane.cycle_s(num_lanes) == cycle_s(num_lanes, s_part_s, r_part_s, trip_s, trip_s)


def test_a_busy_link_sets_the_pace_of_lanes() -> None:
    assert cycle_s(1, 1.0, 1.0, 3.0, 3.0) == 5.0
    assert cycle_s(2, 1.0, 1.0, 3.0, 3.0) == 6.0 and cycle_s(2, 1.0, 1.0, 3.0) == 5.0
