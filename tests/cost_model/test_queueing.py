"""Mean TTFT in closed form, against examples worked by hand and against waits
summed up request by request."""

from __future__ import annotations

import math
import random

import pytest

from cost_model.goodput.rates import crossing, mean_ttft_s
from fastdecode.core.errors import ConfigError


def one_device(prompt_s: float, rate: float) -> float:
    return mean_ttft_s(prompt_s, prompt_s, rate)


def pipeline(prompt_s: float, num_stages: int, rate: float) -> float:
    """A prompt takes as long as on one device, but the next one follows a stage behind."""
    return mean_ttft_s(prompt_s, prompt_s / num_stages, rate)


def tensor_parallel(prompt_s: float, speed_up: float, rate: float) -> float:
    """Devices that share every layer are one that is so many times as fast."""
    return one_device(prompt_s / speed_up, rate)


def replicas(prompt_s: float, num_replicas: int, rate: float) -> float:
    """Each has a queue of its own; arrivals join any with the same probability."""
    return one_device(prompt_s, rate / num_replicas)


@pytest.mark.parametrize(
    ("found_s", "expected_s"),
    [
        (one_device(0.2, 4), 0.6),
        (pipeline(0.2, 2, 4), 0.7 / 3),
        (tensor_parallel(0.2, 1.6, 4), 0.1875),
        (replicas(0.2, 2, 4), 0.8 / 3),
        (one_device(0.1, 5), 0.15),
        (replicas(0.1, 2, 12), 0.175),
        (one_device(0.2, 0), 0.2),
        (one_device(0.2, 5), math.inf),
        (one_device(0.2, 6), math.inf),
        (pipeline(0.2, 2, 10), math.inf),
        (replicas(0.2, 2, 11), math.inf),
    ],
)
def test_mean_ttft(found_s: float, expected_s: float) -> None:
    assert found_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("speed_up", "x"),
    [(1, 0), (1.3, 0.6105796150), (1.5, 0.9360589701950146), (1.7, 1.2570984415), (2, 2)],
)
def test_crossing(speed_up: float, x: float) -> None:
    assert crossing(speed_up) == pytest.approx(x, abs=1e-10)


def test_both_take_as_long_at_the_crossing() -> None:
    rate = crossing(1.5) / 0.1
    for mean_s in (pipeline(0.1, 2, rate), tensor_parallel(0.1, 1.5, rate)):
        assert mean_s == pytest.approx(0.12199508581708212, rel=1e-9)
    below, above = rate * 0.9, rate * 1.1
    assert tensor_parallel(0.1, 1.5, below) < pipeline(0.1, 2, below)
    assert tensor_parallel(0.1, 1.5, above) > pipeline(0.1, 2, above)


def test_agrees_with_waits_summed_up() -> None:
    rng, prompt_s, rate, num = random.Random(1), 0.1, 5.0, 100_000
    waited_s = total_s = 0.0
    for _ in range(num):
        waited_s = max(0.0, waited_s + prompt_s - rng.expovariate(rate))
        total_s += waited_s + prompt_s
    assert total_s / num == pytest.approx(one_device(prompt_s, rate), rel=0.02)


def test_refuses_a_speed_up_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"speed_up=2\.5"):
        crossing(2.5)
