"""The greatest rate that instances carry within an SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.goodput.simulator import GoodputRun
from cost_model.goodput.slo import Attainment, Slo
from cost_model.goodput.workload import Draw
from cost_model.numbers import smallest

PRECISION = 0.02
"""Of a rate that is found."""
MIN_REQUESTS = 300
MAX_REQUESTS = 6000
RESIDENCES = 2.5
"""A run is at least so many times as long as a request decodes at the SLO's
pace: before that, batches are still growing."""
_SPAN = 1 << 12
"""Rates this many times below the greatest are no longer tried."""


@dataclass(frozen=True)
class Load:
    """What comes, and what it must keep."""

    draw: Draw
    slo: Slo
    how: Attainment = "both"
    min_requests: int = MIN_REQUESTS
    """Of a run."""

    @property
    def residence_s(self) -> float:
        """How long a mean request decodes at the SLO's pace."""
        return self.draw.mean_output * self.slo.tpot_s

    def requests(self, rate: float) -> list[tuple[float, int, int]]:
        wanted = math.ceil(RESIDENCES * rate * self.residence_s)
        num = max(self.min_requests, min(MAX_REQUESTS, wanted))
        return self.draw.at(rate, num)

    def is_carried(self, run: GoodputRun) -> bool:
        """Enough requests keep the SLO, and they don't wait longer and longer."""
        counted = run.counted(self.residence_s)
        return self.slo.is_attained(counted, self.how) and run.is_sustained


def greatest_rate(
    load: Load,
    run_at: Callable[[list[tuple[float, int, int]]], GoodputRun],
    most: float,
    top: float | None = None,
) -> float:
    """Requests a second, to 2 %, and no more than ``most``; 0 if the SLO isn't kept at any rate
    worth the name. The same requests come at every rate, only closer.

    Args:
        top: rates that are looked at are this, and 2 % apart from each other
            below it, so that what instances carry can be compared; None:
            ``most``.
    """
    top = most if top is None else top
    step = 1 + PRECISION

    def rate(place: int) -> float:
        return top / step**place

    def is_carried(place: int) -> bool:
        return load.is_carried(run_at(load.requests(rate(place))))

    high = max(0, math.ceil(math.log(top / most) / math.log(step) - 1e-9))
    if is_carried(high):
        return rate(high)
    least = high + math.ceil(math.log(_SPAN) / math.log(step))
    if not is_carried(least):
        return 0.0
    halving = round(math.log(2) / math.log(step))
    low = high + halving
    while low < least and not is_carried(low):
        low, high = low + halving, low
    return rate(smallest(is_carried, min(low, least), above=high))
