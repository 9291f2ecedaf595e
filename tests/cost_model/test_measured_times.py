"""What steps take, found in the totals that instances tell."""

from __future__ import annotations

import random

import pytest

from cost_model.goodput.replanning import InstanceTotals, LinearTimes, StepLog
from fastdecode.schedule.simulation.instance_time import InstanceTime


def test_step_times_are_found_in_totals() -> None:
    rng, log, totals = random.Random(3), StepLog(), {"p": InstanceTotals(), "d": InstanceTotals()}
    truth = LinearTimes(2e-3, 1e-4, 1e-7, 3e-4)
    for _ in range(200):
        for name in totals:
            steps = rng.randint(1, 20)
            tokens = steps * rng.randint(1, 30)
            load = tokens * rng.randint(10, 900) * (name == "d")
            prompt = steps * rng.randint(50, 500) * (name == "p")
            seconds = (truth.step_s * steps + truth.token_s * tokens + truth.cached_s * load
                       + truth.prompt_s * prompt) * rng.uniform(0.95, 1.05)  # fmt: skip
            was = totals[name]
            totals[name] = InstanceTotals(
                was.steps + steps, was.tokens + tokens, was.load + load,
                was.prompt_tokens + prompt, was.seconds + seconds,
                was.fetched_tokens + 100 * (name == "d"), was.fetching_s + 0.5 * (name == "d"),
            )  # fmt: skip
            log.look(name, totals[name])
    found = log.measured()
    assert found is not None and found.transfer_s(200.0) == pytest.approx(1.0)
    ours, theirs = InstanceTime(found), InstanceTime(truth)
    for length in (100, 800):
        assert ours.prefill_s([length]) == pytest.approx(theirs.prefill_s([length]), rel=0.1)
    for batch, context in ((1, 500), (30, 15_000)):
        steps_s = theirs.decode_s(batch, context, 3)
        assert ours.decode_s(batch, context, 3) == pytest.approx(steps_s, rel=0.1)
    assert ours.mixed_s(4, 400, [(0, 100)]) > ours.mixed_s(4, 400, [])


def test_times_that_vary_widely_are_right_in_sum() -> None:
    rng, log, totals = random.Random(4), StepLog(), InstanceTotals()
    log.look("p", totals)
    rows = []
    for number in range(1000):
        prompt = 10 * rng.randint(50, 500) if number % 2 else 0.0
        seconds = (0.2 + 3e-4 * prompt) * rng.choice([0.7, 0.7, 0.7, 1.9])
        rows.append((prompt, seconds))
        totals = InstanceTotals(totals.steps + 10, totals.tokens + 10, totals.load,
                        totals.prompt_tokens + prompt, totals.seconds + seconds)  # fmt: skip
        log.look("p", totals)
    found = log.measured()
    assert found is not None
    for kind in (False, True):
        some = [(prompt, seconds) for prompt, seconds in rows if (prompt > 0) is kind]
        predicted = sum(
            10 * (found.step_s + found.token_s) + found.prompt_s * prompt for prompt, _ in some
        )
        assert predicted == pytest.approx(sum(seconds for _, seconds in some), rel=0.03)


def test_totals_that_fall_or_say_too_little_are_none() -> None:
    log = StepLog()
    for steps in (10, 20, 5, 15, *range(16, 33)):  # twenty differences, and one fall
        assert log.measured() is None
        log.look("p", InstanceTotals(steps, steps, 0, steps, steps * 0.1))
    assert log.measured() is None
    log.look("p", InstanceTotals(33, 33, 0, 33, 3.3))
    found = log.measured()
    assert found is not None
    only_decode = StepLog()
    for steps in range(60):
        only_decode.look("d", InstanceTotals(steps, steps, 10 * steps, 0, steps * 0.1))
    assert only_decode.measured() is None
