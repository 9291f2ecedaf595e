"""Numbers as they were typed: 0.1 is a tenth. Bounds that are rounded up or
down, and ties, come out as on paper."""

from __future__ import annotations

import math
from fractions import Fraction

from fastdecode.core.errors import ConfigError, Given

LARGEST = 1e15


def as_typed(value: float | Fraction) -> Fraction:
    """The number with the fewest digits that is read as this one."""
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)))


def exact(
    name: str, value: float | Fraction, *, least: float = 0.0, above: bool = True
) -> Fraction:
    """The number as it was typed.

    Args:
        name: the parameter that it is a value of, for errors.
        least: the value must lie above it, or with ``above`` false, at it or
            above.

    Raises:
        ConfigError: it doesn't, or is no finite number below 1e15.
    """
    fits = math.isfinite(value) and (value > least if above else value >= least)
    if isinstance(value, bool) or not fits or value >= LARGEST:
        limit = "above" if above else "of at least"
        raise ConfigError(
            Given(name, value), f" is not a number {limit} {least:g} and below {LARGEST:g}"
        )
    return as_typed(value)


def number_within(name: str, value: float, low: float, high: float, what: str = "number") -> float:
    """Raises ConfigError if it isn't within these bounds. ``what``: with its unit."""
    if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(Given(name, value), f" is not a {what} from {low:g} to {high:g}")
    return value


def whole_number(name: str, value: int, low: int, high: int) -> int:
    """Raises ConfigError if it isn't within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(Given(name, value), f" is not a whole number from {low} to {high}")
    return value
