"""Numbers: whole but for rounding, and searched for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

# Far above what rounding adds to a handful of products (a few 1e-16).
_ROUNDING = 1e-12


def whole(count: float) -> int:
    """Round up to a whole number, at least 1. 100.00000000000001 is 100."""
    nearest = round(count)
    if math.isclose(count, nearest, rel_tol=_ROUNDING):
        return max(1, nearest)
    return max(1, math.ceil(count))


def at_most(value: float, limit: float) -> bool:
    """Return True if ``value <= limit``, but for rounding."""
    return value <= limit or math.isclose(value, limit, rel_tol=_ROUNDING)


def smallest(holds: Callable[[int], bool], known: int, *, above: int = 0) -> int:
    """Return the smallest number that holds, up to ``known``, which holds. All above a number that
    holds must hold, too."""
    return above + 1 + bisect_left(range(above + 1, known), True, key=holds)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to ``most`` that holds. 0 if none does. All below a number
    that holds must hold, too."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    return smallest(lambda number: not holds(number), min(high, most + 1), above=low) - 1
