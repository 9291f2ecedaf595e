"""What several engines have done together, and how one tells of itself over a
line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from fastdecode.core.errors import ProtocolError
from fastdecode.engine.figures import EngineFigures, HolderFigures
from fastdecode.engine.latency import LatencyHistogram
from fastdecode.engine.stats import EngineStats


def merged(each: Sequence[EngineStats]) -> EngineStats:
    """Totals of several engines."""
    total = EngineStats()
    for field in fields(EngineStats):
        values = [getattr(stats, field.name) for stats in each]
        if values and isinstance(values[0], (int, float)):
            setattr(total, field.name, sum(values))
        elif values and isinstance(values[0], LatencyHistogram):
            for histogram in values:
                getattr(total, field.name).add_all(histogram)
    return total


def together(each: Sequence[EngineFigures]) -> EngineFigures:
    """Figures of several engines."""
    numbers = {
        field.name: sum(getattr(figures, field.name) for figures in each)
        for field in fields(EngineFigures)
        if field.name != "r_workers"
    }
    holders = tuple(holder for figures in each for holder in figures.r_workers)
    return EngineFigures(**numbers, r_workers=holders)


def seen_to_json(stats: EngineStats, figures: EngineFigures | None) -> dict[str, Any]:
    """Totals, and figures if they are told this time."""
    values = {field.name: getattr(stats, field.name) for field in fields(EngineStats)}
    return {
        "totals": {name: x for name, x in values.items() if isinstance(x, (int, float))},
        "times": {
            name: list(x.counts.items())
            for name, x in values.items()
            if isinstance(x, LatencyHistogram)
        },
        "figures": None if figures is None else asdict(figures),
    }


def seen_from_json(said: Any) -> tuple[EngineStats, EngineFigures | None]:
    """Raises ProtocolError: nobody can have seen that."""
    try:
        return _stats(said["totals"], said["times"]), _figures(said["figures"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProtocolError(f"what should be an instance's totals is none: {error}") from None


def _stats(totals: Mapping[str, Any], times: Mapping[str, Any]) -> EngineStats:
    stats = EngineStats()
    for field in fields(EngineStats):
        usual = getattr(stats, field.name)
        if isinstance(usual, (int, float)):
            setattr(stats, field.name, type(usual)(totals[field.name]))
        elif isinstance(usual, LatencyHistogram):
            for bucket, count in times[field.name]:
                usual.add_count(bucket, count)
    return stats


def _figures(said: Mapping[str, Any] | None) -> EngineFigures | None:
    if said is None:
        return None
    holders = tuple(HolderFigures(**holder) for holder in said["r_workers"])
    return EngineFigures(**{**said, "r_workers": holders})
