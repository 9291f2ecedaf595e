"""What several engines have done together, and how one reports its status over a
connection. Whatever is read there is typed, finite and bounded: it is summed with
what others report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from fastdecode.core.errors import ProtocolError
from fastdecode.engine.stats import EngineFigures, EngineStats, HolderFigures, LatencyHistogram
from fastdecode.schedule.cache.rates import TierCounts
from fastdecode.schedule.life.adoption import AdoptionCounts

_MOST: Final = 1 << 53  # of what is counted, and of seconds
_MOST_R_WORKERS: Final = 1 << 16
_COUNTS: Final = (AdoptionCounts, TierCounts)
"""Totals that have totals of their own."""


def sum_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Totals of several engines."""
    total = EngineStats()
    _sum_into(total, each)
    for name in _names_of(LatencyHistogram):
        for stats in each:
            getattr(total, name).add_all(getattr(stats, name))
    return total


def _sum_into(total: Any, each: Sequence[Any]) -> None:
    for field in fields(total):
        values = [getattr(one, field.name) for one in each]
        if values and isinstance(values[0], (int, float)):
            setattr(total, field.name, sum(values))
        elif values and isinstance(values[0], _COUNTS):
            _sum_into(getattr(total, field.name), values)


def _names_of(kinds: type | tuple[type, ...]) -> list[str]:
    """The totals that are of one of these types."""
    usual = EngineStats()
    return [field.name for field in fields(usual) if isinstance(getattr(usual, field.name), kinds)]


def sum_figures(each: Sequence[EngineFigures]) -> EngineFigures:
    """Figures of several engines."""
    holders = tuple(holder for figures in each for holder in figures.r_workers)
    return EngineFigures(sum(figures.lanes for figures in each), holders)


def status_of(running: Any) -> dict[str, Any]:
    """Return the report of a ``RunningEngine``, in its thread and between two steps."""
    return status_to_json(running.engine.stats, running.engine.figures())


def status_to_json(stats: EngineStats, figures: EngineFigures | None) -> dict[str, Any]:
    """Totals by their names, and figures if they are reported this time: the one form of status
    files, ``/status.json``, metrics and instances' reports."""
    histograms = {name: getattr(stats, name) for name in _names_of(LatencyHistogram)}
    return {
        **{name: getattr(stats, name) for name in _names_of((int, float))},
        **{name: asdict(getattr(stats, name)) for name in _names_of(_COUNTS)},
        "s_compute_s": stats.s_compute_s,
        "times": {name: list(x.counts.items()) for name, x in histograms.items()},
        **({} if figures is None else asdict(figures)),
    }


def status_from_json(said: Any) -> tuple[EngineStats, EngineFigures | None]:
    """Raises ProtocolError: no instance can have seen that."""
    try:
        return _stats(said, said["times"]), _figures(said)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ProtocolError(f"what should be an instance's totals is none: {error}") from None


def _stats(totals: Mapping[str, Any], times: Mapping[str, Any]) -> EngineStats:
    stats = EngineStats()
    _set(stats, totals)
    for name in _names_of(LatencyHistogram):
        for bucket, count in times[name]:
            getattr(stats, name).add_count(_whole(bucket), _whole(count))
    return stats


def _set(counts: Any, totals: Mapping[str, Any]) -> None:
    for field in fields(counts):
        usual = getattr(counts, field.name)
        if isinstance(usual, (int, float)):
            setattr(counts, field.name, _CHECKS[type(usual).__name__](totals[field.name]))
        elif isinstance(usual, _COUNTS):
            _set(usual, totals[field.name])


def _figures(said: Mapping[str, Any]) -> EngineFigures | None:
    if "r_workers" not in said:
        return None
    holders = said["r_workers"]
    if not isinstance(holders, (list, tuple)) or len(holders) > _MOST_R_WORKERS:
        raise ValueError("its R-workers are no list of that length")
    return EngineFigures(_whole(said["lanes"]), tuple(map(_holder, holders)))


def _holder(said: Mapping[str, Any]) -> HolderFigures:
    values = {
        field.name: _CHECKS[str(field.type)](said[field.name]) for field in fields(HolderFigures)
    }
    return HolderFigures(**values)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.80} is not a whole number from 0 to {_MOST}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST:  # nor is a NaN
        raise ValueError(f"{value!r:.80} is not a number from 0 to {_MOST}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    value.encode()
    return value


_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": _whole,
    "float": _number,
    "str": _text,
    "str | None": lambda value: None if value is None else _text(value),
}
"""By a field's type."""
