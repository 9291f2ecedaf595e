"""Algorithms 1 and 2 of DistServe over goodputs that are known (section 4): the instance, or the
pair, with the greatest goodput a GPU, as often as the rate takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from cost_model.goodput.placements import Degrees, Pair
from cost_model.numbers import at_most, whole

What = TypeVar("What", Degrees, Pair)


def best_per_gpu(goodputs: Mapping[What, float], rate: float) -> tuple[What, int] | None:
    """Of equal ones, but for rounding, the one with the fewest GPUs; and how many carry the rate.
    None: none meets the SLO."""
    per_gpu = {what: goodput / what.num_gpus for what, goodput in goodputs.items() if goodput > 0}
    greatest = max(per_gpu.values(), default=0.0)
    equal = [what for what, each in per_gpu.items() if at_most(greatest, each)]
    if not equal:
        return None
    best = min(equal, key=lambda what: (what.num_gpus, what))
    return best, whole(rate / goodputs[best])
