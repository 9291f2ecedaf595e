"""Room for those that start later: its shape, and that it keeps a stabilised
load stable where load control drifts."""

from __future__ import annotations

import random

import pytest

from fastdecode.schedule.admission.headroom import Headroom
from fastdecode.schedule.admission.load_control import FixedInterval, LoadControl, MicroBatch


def learnt(lengths: list[tuple[int, int]]) -> Headroom:
    """From (first length, target length)."""
    headroom = Headroom()
    for step, (first, target) in enumerate(lengths):
        headroom.started(MicroBatch(1, target, step, first))
    return headroom


def test_equal_lengths_may_use_what_an_even_stagger_uses() -> None:
    length, limit = 1000, 1_000_000
    limit_at = learnt([(1, length)] * 40).limit_for(MicroBatch(1, length, 500), limit)
    for horizon in range(0, length, 50):
        assert limit_at(500 + horizon) == pytest.approx(
            limit * (1 - (horizon / length) ** 2), abs=0.003 * limit
        )
    assert limit_at(500) == limit
    assert limit_at(500 + 10 * length) >= length, "one more always fits"


def test_the_limit_never_rises_with_the_horizon() -> None:
    rng = random.Random(3)
    lengths = [(first := rng.randint(1, 50), first + rng.randint(0, 80)) for _ in range(200)]
    limit_at = learnt(lengths).limit_for(MicroBatch(1, 60, 0, 10), 2000)
    limits = [limit_at(step) for step in range(150)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == 2000
    assert limits[-1] == pytest.approx(max(target for _, target in lengths) * 1.5)


def test_where_sequences_end_early_nothing_is_left_on_purpose() -> None:
    headroom = learnt([(1, 100)] * 40)
    for _ in range(400):
        headroom.ended(early=True)
    limit_at = headroom.limit_for(MicroBatch(1, 100, 0), 10_000)
    assert limit_at(99) == pytest.approx(10_000, rel=1e-3)


def mean_load(limit: int, lengths: list[int], headroom: Headroom | None) -> float:
    """Of a crowd that starts as soon as it may, relative to the limit, once the
    first have ended."""
    control = LoadControl(limit)
    waiting = list(reversed(lengths))
    loads = []
    step = 0
    while waiting:
        control.forget_before(step)
        while waiting and control.earliest_start(MicroBatch(1, waiting[-1], step)) == step:
            batch = MicroBatch(1, waiting[-1], step)
            if headroom is not None and not control.fits(batch, headroom.limit_for(batch, limit)):
                break
            waiting.pop()
            control.add(batch)
            if headroom is not None:
                headroom.started(batch)
        loads.append(control.load_at(step))
        assert loads[-1] <= limit
        step += 1
    settled = loads[max(lengths) :]
    return sum(settled) / len(settled) / limit


def test_equal_lengths_stay_spread() -> None:
    interval = FixedInterval.of(16, 64, 4)
    crowd = [64] * 400
    even = 64 / (64 + 4)  # the mean over the peak of an even stagger
    assert mean_load(interval.peak, crowd, None) < 0.6
    assert mean_load(interval.peak, crowd, Headroom()) > 0.97 * even


def test_nearly_equal_lengths_gain_and_varied_lengths_lose_little() -> None:
    rng = random.Random(5)
    near = [60 + rng.randint(-4, 4) for _ in range(600)]
    varied = [1 + min(400, int(rng.expovariate(1 / 60))) for _ in range(1500)]
    assert mean_load(1600, near, Headroom()) > mean_load(1600, near, None) + 0.15
    assert mean_load(2500, varied, Headroom()) > mean_load(2500, varied, None) - 0.06
