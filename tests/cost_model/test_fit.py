"""Fits find back the functions that made the points, and say how wrong they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.fit import fit_curve, fit_decode
from fastdecode.core.errors import ConfigError
from fastdecode.core.measurement import DecodePoint, Point, Timing

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def points(time_of: Callable[[float], float], noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    return [
        Point(size, Timing(tuple(time_of(size) * np.exp(noise * rng.standard_normal(5)))))
        for size in SIZES
    ]


def test_a_roofline_is_found_back() -> None:
    def time_of(size: float) -> float:
        return max(1e-3, 1e-4 + 5e-6 * size)

    curve = fit_curve(points(time_of))
    assert curve.form == "roofline"
    assert curve.relative_error < 1e-6
    for size in (1, 3, 100, 180, 700, 5000):
        assert curve(size) == pytest.approx(time_of(size), rel=1e-6)


def test_a_staircase_is_followed_piecewise() -> None:
    def time_of(size: float) -> float:
        return 1e-3 * (1 + math.floor(math.log2(size) / 3))

    curve = fit_curve(points(time_of))
    assert curve.form == "piecewise"
    for size in SIZES:
        assert curve(size) == pytest.approx(time_of(size), rel=1e-9)


def test_noise_is_averaged_and_stated() -> None:
    def time_of(size: float) -> float:
        return max(2e-3, 3e-4 + 1e-5 * size)

    calm, loud = (fit_curve(points(time_of, noise)) for noise in (0.01, 0.1))
    assert 0.002 < calm.relative_error < 0.05 < loud.relative_error < 0.5
    for size in (1, 50, 500, 2000):
        assert calm(size) == pytest.approx(time_of(size), rel=0.05)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1.0)), min_size=1, max_size=12),
    st.lists(st.floats(0, 10_000), min_size=2, max_size=10),
)
def test_more_work_never_takes_less_time(
    measured: list[tuple[int, float]], asked: list[float]
) -> None:
    curve = fit_curve([Point(size, Timing((seconds,))) for size, seconds in measured])
    assert len(measured) > 1 or curve(measured[0][0]) == pytest.approx(measured[0][1])
    times = [curve(size) for size in sorted(asked)]
    assert all(math.isfinite(t) and t > 0 for t in times)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(times))


def test_decode_terms_are_told_apart() -> None:
    call_s, sequence_s, token_s = 2e-5, 1e-6, 3e-8
    made = [
        DecodePoint(n, context, Timing((call_s + sequence_s * n + token_s * n * context,)))
        for n in (1, 8, 64, 256)
        for context in (16, 256, 2048)
    ]
    fit = fit_decode(made)
    assert fit.call_s == pytest.approx(call_s, rel=1e-6)
    assert fit.sequence_s == pytest.approx(sequence_s, rel=1e-6)
    assert fit.token_s == pytest.approx(token_s, rel=1e-6)
    assert fit.relative_error < 1e-6


def test_decode_coefficients_are_never_negative() -> None:
    rng = np.random.default_rng(1)
    made = [
        DecodePoint(n, context, Timing((1e-7 * n * context * float(rng.uniform(0.7, 1.4)),)))
        for n in (1, 16, 128)
        for context in (64, 1024)
    ]
    fit = fit_decode(made)
    assert min(fit.call_s, fit.sequence_s, fit.token_s) >= 0
    assert 0.05 < fit.relative_error < 1


def test_too_little_to_fit() -> None:
    with pytest.raises(ConfigError, match="no points"):
        fit_curve([])
    with pytest.raises(ConfigError, match="at least 3"):
        fit_decode([DecodePoint(1, 1, Timing((1.0,)))] * 2)
