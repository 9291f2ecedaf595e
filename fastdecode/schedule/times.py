"""How long does a step take? What load limits follow from, injected into the policy: fitted, or measured as it runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol


class StepTimes(Protocol):
    """Seconds of a lane's step through all layers. Neither falls when its argument grows."""

    def s_part_s(self, num_tokens: int) -> float:
        """The S-part of a step that runs so many tokens: the paper's T(B), over all layers. NaN while unknown."""

    def r_part_s(self, worker: int, load_tokens: int) -> float:
        """One R-worker's part of a step whose sequences there have so many cached tokens: the paper's R·W."""


def balanced_loads(times: StepTimes, num_tokens: int, capacity_tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    """The load of each R-worker that it attends to within the time of the S-part, for a lane that runs ``num_tokens`` a
    step: then neither waits for the other (FastDecode, section "Workload-balanced hardware selection", R·W ≈ T(B)).
    Never more than its memory holds, never below one token. None while the S-part's time is unknown."""
    s_part_s = times.s_part_s(num_tokens)
    if math.isnan(s_part_s):
        return None
    return tuple(
        max(1, bisect_right(range(capacity + 1), s_part_s, key=partial(times.r_part_s, worker)) - 1)
        for worker, capacity in enumerate(capacity_tokens)
    )


class MeasuredTimes:
    """Step times fitted to the steps that were run lately: straight lines, old steps weighing less and less.

    Args:
        prior: speaks until enough has been measured.
        half_life: after so many steps a measurement weighs half.
        min_observed: steps that are enough.
    """

    def __init__(self, prior: StepTimes | None = None, *, half_life: float = 200.0, min_observed: int = 32) -> None:
        assert half_life > 0 and min_observed >= 1
        self._prior = prior
        self._keep = 0.5 ** (1 / half_life)
        self._min_observed = min_observed
        self._s_part = _Line()
        self._r_part: dict[int, _Line] = {}

    def observe(self, num_tokens: int, s_part_s: float, r_parts: Mapping[int, tuple[int, float]]) -> None:
        """A lane's step was run.

        Args:
            r_parts: R-worker → (cached tokens of the step's sequences there, seconds it computed).
        """
        self._s_part.observe(num_tokens, s_part_s, self._keep)
        for worker, (load_tokens, r_part_s) in r_parts.items():
            self._r_part.setdefault(worker, _Line()).observe(load_tokens, r_part_s, self._keep)

    def s_part_s(self, num_tokens: int) -> float:
        if self._s_part.num_observed < self._min_observed:
            return math.nan if self._prior is None else self._prior.s_part_s(num_tokens)
        # The weights are read whatever the batch: as long as its size hasn't varied, its slope is taken to be 0.
        return self._s_part.at(num_tokens, slope_if_unknown=0.0)

    def r_part_s(self, worker: int, load_tokens: int) -> float:
        line = self._r_part.get(worker)
        if line is None or line.num_observed < self._min_observed:
            return 0.0 if self._prior is None else self._prior.r_part_s(worker, load_tokens)
        # Attention reads every cached token and little else: as long as the load hasn't varied, through the origin.
        return line.at(load_tokens, slope_if_unknown=line.mean_y / max(line.mean_x, 1.0))


# Relative to the mean: less variation than this says nothing about a slope.
_MIN_VARIATION = 0.02


@dataclass
class _Line:
    """A weighted least-squares line, updated in place."""

    num_observed: int = 0
    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    variance_x: float = 0.0  # times weight
    covariance: float = 0.0  # times weight

    def observe(self, x: float, y: float, keep: float) -> None:
        """A new point of weight 1; what came before keeps the part ``keep`` of its weight."""
        self.num_observed += 1
        self.weight = self.weight * keep + 1
        shift = x - self.mean_x
        self.mean_x += shift / self.weight
        self.mean_y += (y - self.mean_y) / self.weight
        self.variance_x = self.variance_x * keep + shift * (x - self.mean_x)
        self.covariance = self.covariance * keep + shift * (y - self.mean_y)

    def at(self, x: float, *, slope_if_unknown: float) -> float:
        """The line at x, with a slope of at least 0 and a value of at least 0."""
        slope = slope_if_unknown
        if self.variance_x > self.weight * (_MIN_VARIATION * self.mean_x) ** 2:
            slope = max(0.0, self.covariance / self.variance_x)
        return max(0.0, self.mean_y + slope * (x - self.mean_x))
