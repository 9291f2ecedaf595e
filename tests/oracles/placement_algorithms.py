"""Algorithms 1 and 2 of DistServe over goodputs that are known (section 4)."""

from __future__ import annotations

from collections.abc import Mapping

from cost_model.goodput.placements import (
    Degrees,
    Pair,
    RatedInstance,
    ReplicatedInstance,
    best_per_gpu,
    replicate,
)


def algorithm_1(
    prefill: Mapping[Degrees, float], decode: Mapping[Degrees, float], rate: float
) -> tuple[ReplicatedInstance | None, ReplicatedInstance | None]:
    """Each phase by itself.

    Args:
        prefill, decode: the goodput of one instance in the phase alone.
        rate: requests a second that are to be carried.

    Returns:
        instances for prefill and for decode; None where nothing meets the SLO.
    """
    best = [
        best_per_gpu(RatedInstance(degrees, goodput) for degrees, goodput in phase.items())
        for phase in (prefill, decode)
    ]
    first, second = (None if each is None else replicate(each, rate) for each in best)
    return first, second


def algorithm_2(pairs: Mapping[Pair, float], rate: float) -> ReplicatedInstance | None:
    """Pairs as a whole. ``pairs``: the goodput of each. None: none meets the SLO."""
    best = best_per_gpu(RatedInstance(pair, goodput) for pair, goodput in pairs.items())
    return None if best is None else replicate(best, rate)
