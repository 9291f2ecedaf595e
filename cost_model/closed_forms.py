"""Whole numbers and limits of formulas, but for rounding."""

from __future__ import annotations

import math

# Far below anything that matters, far above what rounding adds to a handful of
# products (a few 1e-16).
_ROUNDING = 1e-12


def whole(count: float) -> int:
    """The least whole number that isn't below ``count``, but for rounding:
    100.00000000000001 is 100. At least 1."""
    nearest = round(count)
    if math.isclose(count, nearest, rel_tol=_ROUNDING):
        return max(1, nearest)
    return max(1, math.ceil(count))


def at_most(value: float, limit: float) -> bool:
    """``value <= limit``, but for rounding."""
    return value <= limit or math.isclose(value, limit, rel_tol=_ROUNDING)
