"""The greatest rate that instances carry within an SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.goodput.simulator import GoodputRun
from cost_model.goodput.slo import Attainment, Slo
from cost_model.goodput.workload import MIN_REQUESTS, Draw
from cost_model.numbers import smallest

PRECISION = 0.02  # relative precision of a rate
MAX_REQUESTS = 6000
RESIDENCES = 2.5
"""Shortest run, in times that a request decodes at the SLO's pace. Before that, batches grow."""
_SPAN = 1 << 12
"""Rates this many times below the greatest are not tried."""


@dataclass(frozen=True)
class Load:
    """Requests and the limits that they are to keep."""

    draw: Draw
    slo: Slo
    how: Attainment = "both"
    min_requests: int = MIN_REQUESTS
    """Fewest requests of a run."""

    @property
    def residence_s(self) -> float:
        """How long a mean request decodes at the SLO's pace."""
        return self.draw.mean_output * self.slo.tpot_s

    def requests(self, rate: float) -> list[tuple[float, int, int]]:
        wanted = math.ceil(RESIDENCES * rate * self.residence_s)
        return self.draw.at(rate, max(self.min_requests, min(MAX_REQUESTS, wanted)))

    def is_carried(self, run: GoodputRun) -> bool:
        counted = run.counted(self.residence_s)
        return self.slo.is_attained(counted, self.how) and run.is_sustained


def greatest_rate(
    load: Load,
    run_at: Callable[[list[tuple[float, int, int]]], GoodputRun],
    most: float,
    top: float | None = None,
) -> float:
    """Return requests per second to 2 %, at most ``most``. 0 if no rate keeps the SLO.

    Args:
        top: Rates to try are this, and 2 % apart below it, so that rates of several instances
            can be compared. None for ``most``.
    """
    top = most if top is None else top
    step = 1 + PRECISION

    def is_carried(index: int) -> bool:
        return load.is_carried(run_at(load.requests(top / step**index)))

    high = max(0, math.ceil(math.log(top / most) / math.log(step) - 1e-9))
    if is_carried(high):
        return top / step**high
    least = high + math.ceil(math.log(_SPAN) / math.log(step))
    if not is_carried(least):
        return 0.0
    halving = round(math.log(2) / math.log(step))
    low = high + halving
    while low < least and not is_carried(low):
        low, high = low + halving, low
    return top / step ** smallest(is_carried, min(low, least), above=high)
