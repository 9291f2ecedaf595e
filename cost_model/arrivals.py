"""Random arrivals: gaps that are gamma, drawn once and scaled to any rate."""

from __future__ import annotations

import numpy as np

from fastdecode.core.errors import ConfigError, Given

GENERATOR = "NumPy PCG64"
"""What draws: the same seed gives the same numbers wherever it does."""
MAX_SEED = (1 << 63) - 1
MAX_CV = 100.0


def unit_gaps(num_gaps: int, cv: float, seed: int) -> np.ndarray:
    """Gaps of mean 1.

    Args:
        cv: coefficient of variation: 1 is Poisson, 0 is a clock, above 1 bursts.

    Raises:
        ConfigError: cv or seed make no sense.
    """
    if not 0.0 <= cv <= MAX_CV:
        raise ConfigError(Given("cv", cv), f" is not a number from 0 to {MAX_CV:g}")
    if isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise ConfigError(Given("seed", seed), f" is not a whole number from 0 to {MAX_SEED}")
    if cv == 0.0:
        return np.ones(num_gaps)
    shape = 1.0 / (cv * cv)
    return np.random.Generator(np.random.PCG64(seed)).gamma(shape, 1.0 / shape, num_gaps)


def arrivals(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first one at 0. Twice the rate is
    the same pattern in half the time.

    Raises:
        ConfigError: rate, cv or seed make no sense.
    """
    if not 1e-9 <= rate <= 1e9:
        raise ConfigError(
            Given("rate", rate), " is not a number of requests a second from 1e-9 to 1e9"
        )
    gaps = unit_gaps(max(0, num_requests - 1), cv, seed)
    return [0.0, *(float(each) for each in np.cumsum(gaps) / rate)][:num_requests]
