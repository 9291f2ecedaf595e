"""Random arrivals: gaps that are gamma, drawn once and scaled to any rate."""

from __future__ import annotations

import numpy as np

from cost_model.numbers import number_within, whole_number

GENERATOR = "NumPy PCG64"
"""What draws: the same seed gives the same numbers wherever it does."""
MAX_SEED = (1 << 63) - 1
MAX_CV = 100.0


def unit_gaps(num_gaps: int, cv: float, seed: int) -> np.ndarray:
    """Gaps of mean 1.

    Args:
        cv: coefficient of variation: 1 is Poisson, 0 is a clock, above 1 bursts.
    """
    number_within("cv", cv, 0, MAX_CV)
    whole_number("seed", seed, 0, MAX_SEED)
    if cv == 0.0:
        return np.ones(num_gaps)
    shape = 1.0 / (cv * cv)
    return np.random.Generator(np.random.PCG64(seed)).gamma(shape, 1.0 / shape, num_gaps)


def arrivals(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first one at 0. Twice the rate is
    the same pattern in half the time."""
    number_within("rate", rate, 1e-9, 1e9, "number of requests a second")
    gaps = unit_gaps(max(0, num_requests - 1), cv, seed)
    return [0.0, *(float(each) for each in np.cumsum(gaps) / rate)][:num_requests]
