"""From measured points to functions, each with its error.

Errors are relative: what nine of ten points are off by at most when they are left out of the fit,
and the spread of the repeats.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.measurement import DecodePoint, Point

# A simpler form wins unless the other one's error is smaller by more than this.
ROOFLINE_BONUS = 0.01


@dataclass(frozen=True)
class Curve:
    """A time over a size, which never falls: straight lines between knots, flat before the first,
    the last slope after the last."""

    form: Literal["roofline", "piecewise"]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    last_slope: float
    """Seconds per unit of size beyond the last knot."""
    relative_error: float

    def __call__(self, size: float) -> float:
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] + self.last_slope * (size - self.sizes[-1])
        right = bisect.bisect_right(self.sizes, size)
        x0, x1 = self.sizes[right - 1], self.sizes[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def fit_curve(points: Sequence[Point]) -> Curve:
    """Fit a roofline if two straight lines predict points well, else straight lines between all."""
    if not points:
        raise ConfigError("nothing to fit: the profile has no points", code="invalid_profile")
    medians: dict[int, list[float]] = {}
    for point in sorted(points, key=lambda point: point.size):
        medians.setdefault(point.size, []).append(point.timing.median_s)
    sizes, seconds = list(map(float, medians)), [float(np.mean(x)) for x in medians.values()]
    spread = float(np.median([point.timing.spread for point in points]))
    candidates = []
    for form, fit in _FITS.items():
        errors = []
        for i in range(1, len(sizes) - 1):
            others = fit(sizes[:i] + sizes[i + 1 :], seconds[:i] + seconds[i + 1 :])
            errors.append(abs(others(sizes[i]) / seconds[i] - 1.0))
        left_out = float(np.mean(errors)) if errors else 0.0
        bonus = ROOFLINE_BONUS if form == "roofline" else 0.0
        candidates.append((left_out - bonus, form, math.hypot(_most(errors), spread)))
    _, form, error = min(candidates)
    curve = _FITS[form](sizes, seconds)
    residual = _most([abs(curve(x) / y - 1.0) for x, y in zip(sizes, seconds, strict=True)])
    return replace(curve, relative_error=max(error, residual))


def _most(errors: Sequence[float]) -> float:
    """Return what nine of ten errors don't exceed."""
    return float(np.quantile(errors, 0.9)) if errors else 0.0


def _fit_piecewise(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Return knots at the points, pooled where times would fall: isotonic regression of
    logarithms."""
    levels = np.exp(_isotonic(np.log(seconds)))
    slope = 0.0
    if len(sizes) >= 2:
        first = max(0, len(sizes) - 3)
        slope = max(0.0, float((levels[-1] - levels[first]) / (sizes[-1] - sizes[first])))
    return Curve("piecewise", tuple(sizes), tuple(float(level) for level in levels), slope, 0.0)


def _isotonic(values: np.ndarray) -> np.ndarray:
    """Return the nearest non-falling sequence (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, weight = pools.pop()
            mean, count = (mean * count + before * weight) / (count + weight), count + weight
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def _fit_roofline(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Fit max(floor, fixed + slope · size), by relative least squares. Of all splits of the points
    between floor and line, the best is kept."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    best: tuple[float, float, float, float] | None = None
    for split in range(len(x) + 1):
        fixed, slope = _line(x[split:], y[split:])
        first = max(fixed, float(fixed + slope * x[0]))
        floor = float(np.exp(np.mean(np.log(y[:split])))) if split else first
        error = float(np.sum((np.maximum(floor, fixed + slope * x) / y - 1.0) ** 2))
        if best is None or error < best[0]:
            best = (error, floor, fixed, slope)
    assert best is not None
    _, floor, fixed, slope = best
    knee = (floor - fixed) / slope if slope > 0 else float(x[-1])
    knee = max(knee, float(x[0]))
    return Curve("roofline", (knee,), (max(floor, fixed + slope * knee),), slope, 0.0)


_FITS = {"roofline": _fit_roofline, "piecewise": _fit_piecewise}


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return (fixed, slope) of the relative least-squares line, neither of them negative."""
    if len(x) == 0:
        return 0.0, 0.0
    if len(x) == 1 or x[0] == x[-1]:
        return 0.0, float(np.mean(y / x))
    columns = np.stack([1.0 / y, x / y], axis=1)
    return non_negative(columns, np.ones(len(x)))  # type: ignore[return-value]


def non_negative(columns: np.ndarray, target: np.ndarray) -> tuple[float, ...]:
    """Return least squares with no negative coefficient, the best over all subsets of columns."""
    best: tuple[float, np.ndarray] | None = None
    width = columns.shape[1]
    for size in range(1, width + 1):
        for subset in itertools.combinations(range(width), size):
            part, *_ = np.linalg.lstsq(columns[:, subset], target, rcond=None)
            if (part < 0).any():
                continue
            whole = np.zeros(width)
            whole[list(subset)] = part
            error = float(np.sum((columns @ whole - target) ** 2))
            if best is None or error < best[0] - 1e-15:
                best = (error, whole)
    assert best is not None, "of positive columns one alone has a positive coefficient"
    return tuple(float(each) for each in best[1])


@dataclass(frozen=True)
class DecodeFit:
    """One layer of the R-part: ``call_s + sequence_s · sequences + token_s · cached tokens``."""

    call_s: float
    sequence_s: float
    token_s: float
    relative_error: float


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    if len(points) < 3:
        raise ConfigError(
            "an R-part needs at least 3 decode points to be fitted", code="invalid_profile"
        )
    seconds = np.array([point.timing.median_s for point in points])
    counts = np.array([float(point.num_sequences) for point in points])
    tokens = counts * np.array([float(point.context_tokens) for point in points])
    columns = np.stack([np.ones(len(points)), counts, tokens], axis=1) / seconds[:, None]
    errors = []
    for i in range(len(points)):
        keep = np.arange(len(points)) != i
        others = non_negative(columns[keep], np.ones(len(points) - 1))
        errors.append(abs(float(columns[i] @ others) - 1.0))
    spread = float(np.median([point.timing.spread for point in points]))
    call_s, sequence_s, token_s = non_negative(columns, np.ones(len(points)))
    return DecodeFit(call_s, sequence_s, token_s, math.hypot(_most(errors), spread))
