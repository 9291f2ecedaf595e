"""Numbers: whole but for rounding, searched for, and as fields of JSON objects. An error names the
value and where it was given."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastdecode.core.errors import ConfigError

LARGEST = 1e15
MAX_TOKENS = 1 << 24
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


def count(
    fields: Mapping[str, Any], name: str, where: str, low: int = 1, most: int = MAX_TOKENS
) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        raise _refused(fields, name, where, f"a whole number from {low} to {most}")
    return value


def number(fields: Mapping[str, Any], name: str, where: str, *, may_be_0: bool = False) -> float:
    """Return a number above 0, or of at least 0, and below 1e15. Raises ConfigError."""
    value: Any = fields.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (0 < value < LARGEST or (may_be_0 and value == 0)):
        return float(value)
    least = "of at least" if may_be_0 else "above"
    raise _refused(fields, name, where, f"a number {least} 0 and below {LARGEST:g}")


def _refused(fields: Mapping[str, Any], name: str, where: str, wanted: str) -> ConfigError:
    if name not in fields:
        return ConfigError(f"{where}: {name} is missing; give {wanted}")
    return ConfigError(f"{where}: {name}={fields[name]!r} is not {wanted}")


def check_known(fields: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(known)}")
