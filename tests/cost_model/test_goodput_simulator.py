"""Requests through instances on a virtual clock: against closed forms, by hand,
and step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fixed_time import fixed
from hypothesis import given, settings
from hypothesis import strategies as st
from sizing import setup

from cost_model.goodput.simulator import (
    DecodeSpec,
    GoodputRun,
    PrefillSpec,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import RequestTimes
from cost_model.predict import MAX_LANES, SystemTime
from cost_model.workload import Workload
from fastdecode.schedule.simulation.instance_time import InstanceTime

requests_ = st.lists(
    st.tuples(st.integers(0, 40).map(lambda n: n / 8), st.integers(1, 40), st.integers(1, 12)),
    min_size=1, max_size=25,
).map(sorted)  # fmt: skip


def poisson(num: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(num):
        now_s += rng.expovariate(rate)
        found.append((now_s, 100, 1))
    return found


@pytest.mark.parametrize(
    ("utilisation", "tolerance", "num"),
    [(0.2, 0.01, 10_000), (0.5, 0.02, 20_000), (0.8, 0.05, 30_000)],
)
def test_waits_as_in_a_queue_of_equal_prompts(
    utilisation: float, tolerance: float, num: int
) -> None:
    prompt_s = 0.1
    rate = utilisation / prompt_s
    run = simulate(poisson(num, rate, 1), [PrefillSpec(fixed(prompt_s), 100)], [])
    found_s = sum(each.ttft_s for each in run.times) / num
    mean_s = prompt_s + utilisation * prompt_s / (2 * (1 - utilisation))  # M/D/1
    assert found_s == pytest.approx(mean_s, rel=tolerance)
    assert run.prefill_busy == pytest.approx([utilisation], rel=0.02) and run.is_sustained


def test_overload_is_not_sustained() -> None:
    run = simulate(poisson(3000, 12.0, 1), [PrefillSpec(fixed(0.1), 100)], [])
    assert not run.is_sustained


def test_one_request_by_hand() -> None:
    prefill = PrefillSpec(fixed(0.2, token_transfer_s=0.02), 100)
    decode = DecodeSpec(fixed(0.0, 0.05, token_transfer_s=0.04), 1000)
    run = simulate([(1.0, 10, 4)], [prefill], [decode])
    # Prefill 0.2 s, 10 tokens by the slower port 0.4 s, three steps of 0.05 s.
    (times,) = run.times
    assert times.ttft_s == pytest.approx(0.2)
    assert times.tpot_s == pytest.approx((0.4 + 0.15) / 3)
    assert run.most_buffered == 10 and run.total_s == pytest.approx(1.75)


def test_batches_of_prompts() -> None:
    prefill = PrefillSpec(fixed(1.0), 100)  # a second for each prompt
    together = simulate([(0.0, 60, 1), (0.0, 60, 1), (0.0, 30, 1)], [prefill], [])
    # The first alone: it begins as it comes; then 60 + 30 fit in one batch.
    assert [each.ttft_s for each in together.times] == [1.0, 3.0, 3.0]
    long = simulate([(0.0, 500, 1), (0.0, 5, 1)], [prefill], [])
    assert [each.ttft_s for each in long.times] == [1.0, 2.0]


def test_stages_of_a_pipeline_follow_each_other() -> None:
    prefill = PrefillSpec(fixed(1.0, num_stages=2), 10)
    run = simulate([(0.0, 10, 1), (0.0, 10, 1), (0.0, 10, 1)], [prefill], [])
    assert [each.ttft_s for each in run.times] == [1.0, 1.5, 2.0]


def test_decode_full_then_buffer_full_then_prefill_waits() -> None:
    prefill = PrefillSpec(fixed(0.001), 10, buffer_tokens=20)
    decode = DecodeSpec(fixed(0.0, 0.1), capacity_tokens=40)
    burst = [(0.0, 10, 11)] * 30
    run = simulate(burst, [prefill], [decode])
    assert len(run.times) == 30 and run.most_buffered <= 20
    assert all(each.tpot_s is not None for each in run.times)
    # One at a time decodes (21 of 40 tokens): 10 steps of 0.1 s each.
    assert run.total_s == pytest.approx(30.0, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(requests_, st.integers(1, 3), st.integers(1, 3))
def test_all_are_served_and_none_before_its_time(
    requests: list[tuple[float, int, int]], num_prefill: int, num_decode: int
) -> None:
    prefill = PrefillSpec(fixed(0.05, token_transfer_s=1e-3), 60, buffer_tokens=50)
    times = fixed(0.0, 0.02, token_transfer_s=1e-3)
    decode = DecodeSpec(times, capacity_tokens=70, max_sequences=3)
    apart = simulate(requests, [prefill] * num_prefill, [decode] * num_decode)
    both = DecodeSpec(fixed(0.05, 0.02), capacity_tokens=70, max_sequences=3)
    beside = simulate_colocated(requests, [both] * num_decode, 16)
    for run in (apart, beside):
        for times, (arrived_s, _, output) in zip(run.times, requests, strict=True):
            assert times.arrived_s == arrived_s and times.ttft_s >= 0.05 - 1e-9
            assert (times.tpot_s is None) == (output == 1)
            assert times.tpot_s is None or times.tpot_s >= 0.02 - 1e-9


def test_tokens_wait_for_prompts_on_an_instance_for_both() -> None:
    both = DecodeSpec(fixed(1.0, 0.1), 1000)
    alone = simulate_colocated([(0.0, 10, 5)], [both], 100)
    assert alone.times[0] == RequestTimes(0.0, 1.0, pytest.approx(0.1))
    run = simulate_colocated([(0.0, 10, 5), (1.05, 10, 2)], [both], 100)
    # The second's prompt joins the step after 1.1 s, which then takes 1.1 s.
    assert run.times[1].ttft_s == pytest.approx(1.1 + 1.1 - 1.05)
    assert run.times[0].tpot_s == pytest.approx((0.1 + 1.1 + 0.1 + 0.1) / 4)


def test_where_rooms_are_asked_for_between_steps_the_next_one_goes_on_without() -> None:
    both = DecodeSpec(fixed(1.0, 0.1), 1000, opens_at_once=False)
    run = simulate_colocated([(0.0, 10, 5), (1.05, 10, 2)], [both], 100)
    assert run.times[0].ttft_s == pytest.approx(1.0), "nobody ran: it needn't wait"
    # The second's room is asked for at 1.1, the step up to 1.2 goes on without.
    assert run.times[1].ttft_s == pytest.approx(1.2 + 1.1 - 1.05)
    assert run.times[0].tpot_s == pytest.approx((0.1 + 0.1 + 1.1 + 0.1) / 4)


def test_what_is_fetched_is_asked_for_between_two_steps() -> None:
    prefill = PrefillSpec(fixed(0.25), 100)
    decode = DecodeSpec(fixed(0.0, 0.125, token_transfer_s=1 / 160), 1000, opens_at_once=False)
    first, second = simulate([(0.0, 10, 16), (0.25, 10, 2)], [prefill], [decode]).times
    # Fetched at once, from 0.25 to 0.3125, as nobody steps; so steps end at 0.4375, 0.5625, ...
    assert first.tpot_s == pytest.approx((0.0625 + 15 * 0.125) / 15)
    # Offered at 0.5, fetched from 0.5625 to 0.625, in the step from 0.6875 to 0.8125.
    assert second.tpot_s == pytest.approx(0.8125 - 0.5)


def test_who_has_fetched_within_no_time_waits_for_a_step_whatever_is_rounded() -> None:
    prefill = PrefillSpec(fixed(0.01), 100)
    decode = DecodeSpec(fixed(0.0, 0.1), 10_000, opens_at_once=False)
    asked = [(7.3 + 0.037 * i, 10, 3) for i in range(100)]
    busy = [(7.0, 10, 200)]
    found = simulate([*busy, *asked], [prefill], [decode]).times[1:]
    waited_s = [2 * each.tpot_s - 0.2 for each in found if each.tpot_s is not None]
    # Until a step ends, and then that whole one, in which others go on.
    assert len(waited_s) == 100 and all(0.1 - 1e-6 <= s <= 0.2 + 1e-6 for s in waited_s)


def test_steps_of_a_system_grow_with_contexts() -> None:
    system = setup().system()
    times = InstanceTime(SystemTime(system, 11), 11, most_lanes=MAX_LANES)
    steps_s = times.decode_s(192, 192 * 512, 4)
    one_by_one = [float(times.decode_s(192, 192 * (512 + i), 1)[0]) for i in range(4)]
    assert steps_s == pytest.approx(one_by_one, rel=1e-9)
    # As `size` predicts it: all of them in lanes, at this context.
    at_512 = replace(system, workload=Workload(0, 1023))
    best_s = min(at_512.predict(-(-192 // lanes), lanes, 11).step_s for lanes in (1, 2, 3, 4))
    assert float(steps_s[0]) == pytest.approx(best_s, rel=1e-9)
    assert times.prefill_s([512]) < times.prefill_s([512, 512]) < 2.1 * times.prefill_s([512])
    assert times.mixed_s(192, 192 * 512, [(0, 256)]) > float(steps_s[0])
    assert np.all(np.diff(times.decode_s(192, 192 * 512, 200)) >= 0)


def test_the_first_requests_are_not_counted() -> None:
    times = [RequestTimes(float(i), 0.1, None) for i in range(200)]
    assert len(GoodputRun(times).counted()) == 180 and len(GoodputRun(times[:100]).counted()) == 100
    assert GoodputRun(times).counted(since_s=90.0)[0].arrived_s == 90
    assert len(GoodputRun(times).counted(since_s=190.0)) == 180, "too few would be left"
