"""Simulated runs of a schedule: step times from given numbers, and outcomes as text or JSON."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_model.printing import table, times_text
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.simulation import SimulationOutcome
from fastdecode.schedule.times import Prompts, StepTime, num_tokens_of

_FORM = "seconds, or a table like 1:0.010,256:0.016 of size:seconds"


@dataclass(frozen=True)
class Table:
    """Seconds over a size: straight lines between the points, the first point's value before them,
    and the last line after them."""

    points: tuple[tuple[float, float], ...]
    """(size, seconds), sizes ascending, seconds never falling."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        seconds = [value for _, value in self.points]
        if not all(math.isfinite(x) and x >= 0 for x in (*sizes, *seconds)):
            raise ConfigError(f"a time table holds finite numbers of at least 0, not {self.points}")
        if not self.points or sizes != sorted(set(sizes)) or seconds != sorted(seconds):
            raise ConfigError(
                "a time table's sizes ascend and its seconds never fall; these don't: "
                f"{self.points}"
            )

    @classmethod
    def parse(cls, text: str, *, option: str, rate: bool = False) -> Table:
        """Read a table. One number is a constant, or with ``rate`` seconds per unit of size."""
        try:
            if ":" not in text:
                value = float(text)
                return cls(((0, 0.0), (1, value)) if rate else ((0, value),))
            pairs = [point.split(":") for point in text.split(",")]
            return cls(tuple((float(size), float(seconds)) for size, seconds in pairs))
        except ValueError:
            raise ConfigError(f"{option}={text!r} is not {_FORM}") from None

    def __call__(self, size: float) -> float:
        points = self.points
        after = bisect_right(points, size, key=lambda point: point[0])
        if after == 0 or len(points) == 1:
            return points[0][1]
        (x0, y0), (x1, y1) = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@dataclass(frozen=True)
class TabledTimes(StepTime):
    s_part: Table
    """Over the tokens of a lane's step."""
    r_parts: tuple[Table, ...]
    """Time of each R-worker over the load of the lane's sequences there."""
    way_s: float = 0.0
    """Time of a lane's step to R-workers and back."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        return self.s_part(num_tokens_of(num_decoding, prompts))

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.r_parts[worker](load_tokens)

    def trip_s(self, num_tokens: int) -> float:
        return self.way_s


_COLUMNS = "started_s step_s s_part_s r_part_s load_tokens num_running num_tokens"


def summarise(outcome: SimulationOutcome) -> dict[str, Any]:
    """Return seconds of virtual time, shares of its whole length, and tokens of load."""
    steps, total_s = outcome.steps, max(outcome.total_s, 1e-12)
    num_output_tokens = sum(served.traced.num_output_tokens for served in outcome.served)
    loads = [step.load_tokens for step in steps]
    tpots = [served.tpot_s for served in outcome.served if served.tpot_s is not None]
    return {
        "requests": len(outcome.served),
        "refused": outcome.num_refused,
        "suspensions": outcome.num_suspended,
        "output_tokens": num_output_tokens,
        "steps": len(steps),
        "total_s": outcome.total_s,
        "output_tokens_per_s": num_output_tokens / total_s,
        "load_mean_tokens": float(np.mean(loads)) if loads else 0.0,
        "load_peak_tokens": max(loads, default=0),
        "running_mean": float(np.mean([step.num_running for step in steps])) if steps else 0.0,
        "s_idle_share": 1 - sum(step.s_part_s for step in steps) / total_s,
        "r_idle_share": 1 - sum(step.r_parts_s for step in steps) / total_s / outcome.num_r_workers,
        "step_s": _percentiles([step.step_s for step in steps]),
        "ttft_s": _percentiles([served.ttft_s for served in outcome.served]),
        "tpot_s": _percentiles(tpots),
    }


def as_json(outcomes: Mapping[str, SimulationOutcome]) -> dict[str, Any]:
    modes = {}
    for mode, outcome in outcomes.items():
        names = _COLUMNS.split()
        columns = {name: [getattr(step, name) for step in outcome.steps] for name in names}
        modes[mode] = {"summary": summarise(outcome), "steps": columns}
    return {"modes": modes}


def as_text(outcomes: Mapping[str, SimulationOutcome]) -> str:
    summaries = {mode: summarise(outcome) for mode, outcome in outcomes.items()}
    rows = [
        ("output tokens/s", lambda s: f"{s['output_tokens_per_s']:.1f}"),
        ("time", lambda s: f"{s['total_s']:.1f} s"),
        ("steps", lambda s: f"{s['steps']}"),
        ("load, mean", lambda s: f"{s['load_mean_tokens']:.0f}"),
        ("load, peak", lambda s: f"{s['load_peak_tokens']}"),
        ("running, mean", lambda s: f"{s['running_mean']:.1f}"),
        ("S-worker idle", lambda s: f"{s['s_idle_share']:.0%}"),
        ("R-workers idle", lambda s: f"{s['r_idle_share']:.0%}"),
        ("step p50 / p99", lambda s: _typical_and_worst(s["step_s"])),
        ("TPOT p50 / p99", lambda s: _typical_and_worst(s["tpot_s"])),
        ("TTFT p50 / p99", lambda s: _typical_and_worst(s["ttft_s"])),
        ("suspensions", lambda s: f"{s['suspensions']}"),
        ("refused requests", lambda s: f"{s['refused']}"),
    ]
    lines = [[name, *map(value, summaries.values())] for name, value in rows]
    return "\n".join(table(("", *summaries), lines, indent=0))


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values or [0.0], (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(values, default=0.0)}


def _typical_and_worst(percentiles: Mapping[str, float]) -> str:
    return times_text((percentiles["p50"], percentiles["p99"]), " / ")
