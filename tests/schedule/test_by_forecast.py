"""``--schedule auto``: stabilized starts while they are forecast to pay, else greedy."""

from __future__ import annotations

import math

import pytest
from schedule_choices import schedule_options

from cost_model.simulate import Table, TabledTimes
from fastdecode.schedule.admission.by_forecast import stabilizing_gain
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.simulation.resources import Rounds
from fastdecode.schedule.simulation.simulation import Simulation
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.schedule.times import MeasuredTimes

LENGTH, BATCH, BLOCKS = 96, 8, (10_000,)


def times(balance: float, batch: int = BATCH) -> TabledTimes:
    """The R-part of the mean load takes ``balance`` times as long as the S-part."""
    token_s = balance / (batch * LENGTH / 2)
    return TabledTimes(Table(((0, 1.0),)), (Table(((0, 0.0), (1, token_s))),))


@pytest.mark.parametrize(
    ("balance", "gain"), [(0.25, 1.0), (0.5, 1.0), (0.75, 13 / 12), (1.0, 1.25), (2.0, 17 / 16)]
)
def test_the_gain_is_the_mean_over_the_ramp(balance: float, gain: float) -> None:
    """Of max(S, R) where R rises from 0 to 2 · balance, over max(S, balance)."""
    found = stabilizing_gain(times(balance), BATCH, BLOCKS, (0, LENGTH))
    assert found == pytest.approx(gain, rel=0.005)


def test_nothing_is_forecast_while_step_times_are_unknown() -> None:
    assert math.isnan(stabilizing_gain(MeasuredTimes(), BATCH, BLOCKS, (0, LENGTH)))


def total_s(mode: str, lengths: list[int], balance: float, max_tokens: int | None = None) -> float:
    lanes = 2
    step_times = times(balance, BATCH // lanes)
    chosen = {"max_num_sequences": BATCH, "max_step_tokens": BATCH + 64}
    scheduler = make_scheduler(schedule_options(mode, lanes, **chosen), BLOCKS, 32, step_times)
    requests = tuple(TracedRequest(1, length, max_tokens or length) for length in lengths)
    return Simulation(
        RequestTrace(requests), scheduler, Rounds(step_times, 1), worker_blocks=BLOCKS,
        block_size=32, num_lanes=lanes,
    ).run().total_s  # fmt: skip


def test_many_equal_sequences_in_balance_are_spread() -> None:
    lengths = [LENGTH] * (BATCH * 12)
    assert total_s("auto", lengths, 1.0) < 0.95 * total_s("greedy", lengths, 1.0)


@pytest.mark.parametrize(
    ("lengths", "balance", "max_tokens"),
    [
        ([LENGTH] * (BATCH * 12), 0.4, None),  # R-workers keep up with the peak
        ([LENGTH] * BATCH * 2, 1.0, None),  # no generation is left to gain by
        ([LENGTH - 30, LENGTH + 30] * (BATCH * 4), 1.0, None),  # lengths spread by themselves
        ([LENGTH] * (BATCH * 8), 1.0, 4 * LENGTH),  # of unknown lengths
    ],
    ids=["R-workers keep up", "few", "unequal", "unknown"],
)
def test_all_others_start_greedily(
    lengths: list[int], balance: float, max_tokens: int | None
) -> None:
    found = [total_s(mode, lengths, balance, max_tokens) for mode in ("auto", "greedy")]
    assert found[0] == found[1]
