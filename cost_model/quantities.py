"""Numbers with units, as people read them: three significant digits, decimal prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def seconds_text(seconds: float) -> str:
    """0.00123 → ``1.23 ms``."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def times_text(times: Sequence[float | None], separator: str = "/") -> str:
    """Seconds in one unit: ``12/15.3/98 ms``; from 1 s on ``0.8/1.2/3.4 s``.
    None: there is none, ``-``."""
    longest = max((each for each in times if each is not None), default=0.0)
    size, unit = (1.0, "s") if longest >= 1.0 else (1e-3, "ms")
    shown = ("-" if each is None else f"{round_to(each / size, 3):g}" for each in times)
    return f"{separator.join(shown)} {unit}"


def bytes_text(num_bytes: float) -> str:
    """1.2e9 → ``1.2 GB``."""
    return _scaled(num_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B")))


def rate_text(per_s: float) -> str:
    """8123.4 → ``8,120``; three digits are more than any prediction has."""
    return f"{round_to(per_s, 3):,.0f}" if per_s >= 100 else f"{round_to(per_s, 3):g}"


def counted(count: int, noun: str) -> str:
    """``1 socket``, ``1,200 sockets``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def round_to(value: float, digits: int) -> float:
    """Round to this many significant digits."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not math.isfinite(value):
        return "unlimited"
    size, name = next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])
    return f"{round_to(value / size, 3):g} {name}"
