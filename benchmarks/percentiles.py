"""Of measured values."""

from __future__ import annotations


def percentile(values: list[float], percent: float) -> float:
    """The value that so many percent of them are below."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]
