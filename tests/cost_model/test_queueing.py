"""Mean TTFT in closed form, against examples worked by hand and against waits
summed up request by request."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.goodput.queueing import (
    PromptQueue,
    crossing,
    one_device,
    pipeline,
    replicas,
    tensor_parallel,
)
from fastdecode.core.errors import ConfigError


@pytest.mark.parametrize(
    ("queue", "rate", "mean_ttft_s"),
    [
        (one_device(0.2), 4, 0.6),
        (pipeline(0.2, 2), 4, 0.7 / 3),
        (tensor_parallel(0.2, 1.6), 4, 0.1875),
        (replicas(0.2, 2), 4, 0.8 / 3),
        (one_device(0.1), 5, 0.15),
        (replicas(0.1, 2), 12, 0.175),
        (one_device(0.2), 0, 0.2),
        (one_device(0.2), 5, math.inf),
        (one_device(0.2), 6, math.inf),
        (pipeline(0.2, 2), 10, math.inf),
        (replicas(0.2, 2), 11, math.inf),
    ],
)
def test_mean_ttft(queue: PromptQueue, rate: float, mean_ttft_s: float) -> None:
    assert queue.mean_ttft_s(rate) == pytest.approx(mean_ttft_s, rel=1e-12)


@pytest.mark.parametrize(
    ("speed_up", "x"),
    [(1, 0), (1.3, 0.6105796150), (1.5, 0.9360589701950146), (1.7, 1.2570984415), (2, 2)],
)
def test_crossing(speed_up: float, x: float) -> None:
    assert crossing(speed_up) == pytest.approx(x, abs=1e-10)


def test_both_take_as_long_at_the_crossing() -> None:
    rate = crossing(1.5) / 0.1
    for queue in (pipeline(0.1, 2), tensor_parallel(0.1, 1.5)):
        assert queue.mean_ttft_s(rate) == pytest.approx(0.12199508581708212, rel=1e-9)
    below, above = rate * 0.9, rate * 1.1
    assert tensor_parallel(0.1, 1.5).mean_ttft_s(below) < pipeline(0.1, 2).mean_ttft_s(below)
    assert tensor_parallel(0.1, 1.5).mean_ttft_s(above) > pipeline(0.1, 2).mean_ttft_s(above)


@pytest.mark.parametrize(("slo_s", "rate"), [(0.3, 8.0), (0.2, 20 / 3), (0.1, 0.0), (0.05, 0.0)])
def test_greatest_rate(slo_s: float, rate: float) -> None:
    assert one_device(0.1).greatest_rate(slo_s) == pytest.approx(rate, rel=1e-12)


@given(
    prompt_s=st.floats(1e-3, 10),
    degree=st.integers(1, 8),
    speed_up=st.floats(1, 8),
    spare=st.floats(1e-3, 1e3),
)
def test_greatest_rate_is_the_inverse(
    prompt_s: float, degree: int, speed_up: float, spare: float
) -> None:
    queues = (
        pipeline(prompt_s, degree),
        replicas(prompt_s, degree),
        tensor_parallel(prompt_s, speed_up),
    )
    for queue in queues:
        slo_s = queue.bare_s * (1 + spare)
        rate = queue.greatest_rate(slo_s)
        assert 0 < queue.utilisation(rate) < 1
        assert queue.mean_ttft_s(rate) == pytest.approx(slo_s, rel=1e-6)


def test_agrees_with_waits_summed_up() -> None:
    rng, prompt_s, rate, num = random.Random(1), 0.1, 5.0, 100_000
    waited_s = total_s = 0.0
    for _ in range(num):
        waited_s = max(0.0, waited_s + prompt_s - rng.expovariate(rate))
        total_s += waited_s + prompt_s
    assert total_s / num == pytest.approx(one_device(prompt_s).mean_ttft_s(rate), rel=0.02)


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (lambda: one_device(0.0), "prompt_s=0.0"),
        (lambda: one_device(math.nan), "prompt_s=nan"),
        (lambda: pipeline(0.2, 0), "num_stages=0"),
        (lambda: tensor_parallel(0.2, -1.0), "speed_up=-1.0"),
        (lambda: replicas(0.2, 1 << 40), "num_replicas"),
        (lambda: one_device(0.2).mean_ttft_s(-1.0), "rate=-1.0"),
        (lambda: one_device(0.2).greatest_rate(math.inf), "mean_ttft=inf"),
        (lambda: crossing(2.5), "speed_up=2.5"),
    ],
)
def test_refuses_numbers_that_make_no_sense(bad: object, names: str) -> None:
    assert callable(bad)
    with pytest.raises(ConfigError, match=names):
        bad()
