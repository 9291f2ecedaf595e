"""The outcome of a simulated run as numbers, as text, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cost_model.printing import picked, table
from cost_model.quantities import times_text
from fastdecode.schedule.simulation.simulation import SimulationOutcome

_PERCENTILES = (50, 90, 99)
_COLUMNS = "started_s step_s s_part_s r_part_s load_tokens num_running num_tokens"


def summarise(outcome: SimulationOutcome) -> dict[str, Any]:
    """What a run gave. Seconds of virtual time; shares of its whole length; tokens of load."""
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
    """Each mode's summary, and its steps as columns."""
    modes = {}
    for mode, outcome in outcomes.items():
        steps = [picked(step, _COLUMNS) for step in outcome.steps]
        columns = {name: [step[name] for step in steps] for name in _COLUMNS.split()}
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
    found = np.percentile(values or [0.0], _PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(_PERCENTILES, found, strict=True)}
    return {**named, "max": max(values, default=0.0)}


def _typical_and_worst(percentiles: Mapping[str, float]) -> str:
    return times_text((percentiles["p50"], percentiles["p99"]), " / ")
