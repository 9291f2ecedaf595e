"""Percentiles of durations in memory that doesn't grow with their number."""

from __future__ import annotations

import math

LOWEST_S = 1e-6
HIGHEST_S = 1e6
GROWTH = 1.02


class LatencyHistogram:
    """Counts durations in buckets, each 2% wider than the one before: a
    percentile is off by 1% at most.

    Durations below a microsecond count as one, those above 11 days as 11 days.
    """

    def __init__(self) -> None:
        self._counts = [0] * (_bucket(HIGHEST_S) + 1)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, duration_s: float) -> None:
        self._counts[_bucket(duration_s)] += 1
        self._num += 1

    def add_all(self, other: LatencyHistogram) -> None:
        """Those that another has counted, too."""
        for bucket, count in enumerate(other._counts):
            self._counts[bucket] += count
        self._num += other._num

    @property
    def counts(self) -> dict[int, int]:
        """By bucket, as far as there are any."""
        return {bucket: count for bucket, count in enumerate(self._counts) if count}

    def add_count(self, bucket: int, count: int) -> None:
        """So many more in a bucket. Raises IndexError: there is none like that."""
        if bucket < 0 or count < 0:
            raise IndexError(f"{count} durations in bucket {bucket}")
        self._counts[bucket] += count
        self._num += count

    def percentile(self, percent: float) -> float | None:
        """Seconds that ``percent`` of the durations don't exceed (nearest
        rank); None if there are none."""
        assert 0 < percent <= 100
        rank = math.ceil(self._num * percent / 100)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return LOWEST_S * math.exp((bucket + 0.5) * math.log(GROWTH))
        return None


def _bucket(duration_s: float) -> int:
    return int(math.log(min(max(duration_s, LOWEST_S), HIGHEST_S) / LOWEST_S) / math.log(GROWTH))
