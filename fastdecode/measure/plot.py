"""Pictures: a plan over the number of sockets, and a run from its trace. Needs matplotlib."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cost_model.plans.search import Plan
from cost_model.plans.size import Sizing
from cost_model.predict import StepPrediction
from cost_model.printing import counted, rate_text, seconds_text
from fastdecode.core.errors import ConfigError, Given, imports_for
from fastdecode.core.os_errors import explained
from fastdecode.measure.chrome_trace import R_WORKERS, WAIT_ROW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_PARTS: Final = 400  # equal parts of the time of a trace
COUNTERS: Final = ("running", "waiting", "W")
# Colours that stay apart in grey and for the colour-blind.
_LIMIT_COLOURS = {
    "R-part": "#fbeee2",
    "round trip": "#efedf6",
    "network": "#e6f1f8",
    "messages": "#f6eef2",
    "ZeroMQ I/O": "#f3f1e0",
    "S-part": "#eaf4e7",
}
_THROUGHPUT, _TPOT, _RIVAL = "#1b5e8c", "#b3541e", "#555555"
FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises ConfigError: If the file's name has no known ending, or matplotlib isn't installed."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(Given("plot", str(path)), ": the name must end in .png, .svg or .pdf")
    with imports_for("--plot"):
        import matplotlib  # noqa: F401


def _save(figure: Figure, path: Path, option: str = "plot") -> None:
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        why = explained(error) if isinstance(error, OSError) else error
        raise ConfigError(Given(option, str(path)), f": can't write there: {why}") from None


def save_plot(sizing: Sizing, path: Path) -> None:
    """Draw the plan's batch from one socket to twice the plan's."""
    plan, system, setup = sizing.plan, sizing.system, sizing.setup
    if plan is None:
        raise ConfigError(Given("plot"), ": there is no plan to draw")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = [plan.on(system, count) for count in range(1, 2 * plan.sockets + 1)]
    with rc_context({"font.size": 11, "axes.spines.top": False, "svg.hashsalt": "fastdecode"}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        _shade_limits(axes, steps)
        _throughput(axes, sizing, plan, steps)
        _tpot(axes.twinx(), sizing, steps)
        title = (
            f"{setup.spec.name} on {system.s.name}, R-workers on {system.r.name}, "
            f"{system.link.name}\n{counted(plan.batch, 'sequence')} in "
            f"{counted(plan.lanes, 'lane')}, {setup.workload.peak_context_tokens:,} tokens each"
        )
        axes.set_title(title, loc="left", fontsize=12)
        _save(figure, path)


def _shade_limits(axes: Axes, steps: list[StepPrediction]) -> None:
    """Draw a band for each stretch of sockets with one limit, its name at the top."""
    for limit, group in itertools.groupby(steps, key=lambda step: step.limit):
        stretch = list(group)
        left, right = stretch[0].sockets - 0.5, stretch[-1].sockets + 0.5
        axes.axvspan(left, right, color=_LIMIT_COLOURS[limit], linewidth=0, zorder=0)
        wide = right - left >= len(steps) / 12
        name, angle, at = f"{limit} binds" if wide else limit, 0 if wide else 90, (left + right) / 2
        text = axes.text(at, 0.98, name, transform=axes.get_xaxis_transform(), rotation=angle)
        text.set(ha="center", va="top", color="#333333")
    axes.set_xlim(0.5, len(steps) + 0.5)


def _throughput(axes: Axes, sizing: Sizing, plan: Plan, steps: list[StepPrediction]) -> None:
    from matplotlib.ticker import MaxNLocator

    sockets = [step.sockets for step in steps]
    slow, fast = (
        [plan.on(sizing.system.scaled(sign), count).tokens_per_s for count in sockets]
        for sign in (+1, -1)
    )
    axes.fill_between(sockets, slow, fast, color=_THROUGHPUT, alpha=0.15, linewidth=0)
    axes.plot(sockets, [step.tokens_per_s for step in steps], color=_THROUGHPUT, linewidth=2.2)
    at = (plan.sockets, plan.expected.tokens_per_s)
    axes.plot(*at, "o", color=_THROUGHPUT, markersize=9)
    best = f"{counted(plan.sockets, 'socket')}: {rate_text(plan.expected.tokens_per_s)} tokens/s"
    axes.annotate(best, at, color=_THROUGHPUT, xytext=(8, -16), textcoords="offset points")
    rival = 0.0
    if sizing.gpu_only is not None:
        rival = sizing.gpu_only.tokens_per_s
        axes.axhline(rival, color=_RIVAL, linestyle="--", linewidth=1.2)
        alone = f"GPU alone: {rate_text(rival)} tokens/s"
        words = axes.annotate(alone, (len(steps) + 0.4, rival), (0, 4), textcoords="offset points")
        words.set(ha="right", color=_RIVAL)
    axes.set_ylim(0, 1.25 * max(*fast, rival))
    axes.set_xlabel("R-worker sockets")
    axes.set_ylabel("tokens/s", color=_THROUGHPUT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _tpot(axes: Axes, sizing: Sizing, steps: list[StepPrediction]) -> None:
    from matplotlib.ticker import LogLocator

    sockets, times_ms = [s.sockets for s in steps], [1e3 * s.tpot_s for s in steps]
    axes.plot(sockets, times_ms, color=_TPOT, linewidth=1.6, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("ms a token", color=_TPOT)
    if sizing.goal.tpot_s is not None:
        axes.axhline(1e3 * sizing.goal.tpot_s, color=_TPOT, linewidth=0.8)
        words = f"asked: {seconds_text(sizing.goal.tpot_s)}"
        axes.annotate(words, (0.6, 1e3 * sizing.goal.tpot_s), color=_TPOT)


def plot_run(source: Path, target: Path) -> None:
    """Draw a file of ``--trace``. The suffix of ``target`` says as what."""
    with imports_for("fastdecode plot"):
        from matplotlib.figure import Figure

    seconds, means = trace_series(source)
    figure = Figure(figsize=(8, 9), layout="constrained")
    top, middle, bottom = axes = figure.subplots(3, 1, sharex=True)
    top.plot(seconds, 1 - means["waited"], label="S-worker computes")
    top.plot(seconds, means["attended"], label="R-workers compute, on average")
    top.set(ylim=(0, 1.05), ylabel="share of the time")
    for key in ("running", "waiting"):
        middle.plot(seconds, means[key], label=key)
    middle.set(ylim=(0, None), ylabel="sequences")
    bottom.plot(seconds, means["W"], label="tokens in the KV caches (W)")
    bottom.set(ylim=(0, None), xlabel="seconds", ylabel="tokens")
    bottom.yaxis.set_major_formatter("{x:,.0f}")
    for each in axes:
        each.legend(loc="best")
        each.grid(alpha=0.3)
    _save(figure, target, "output")


def trace_series(
    source: Path, num_parts: int = NUM_PARTS
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the middles of equal parts of a trace's time in seconds, and means over the parts.

    ``waited`` is the share in which the S-worker waited for R-workers, ``attended`` that in which
    an R-worker computed, on average. The others are the counters.
    """
    changes = {key: (array("d"), array("d")) for key in ("waited", "attended", *COUNTERS)}
    values, workers = Counter[str](), set[int]()
    start, end = math.inf, 0.0
    for event in _events(source):
        if event.get("ph") == "C":
            for key in event["args"].keys() & set(COUNTERS):
                changes[key][0].append(event["ts"])
                changes[key][1].append(event["args"][key] - values[key])
                values[key] = event["args"][key]
        elif event.get("ph") == "X":
            span = event["ts"], event["ts"] + event["dur"]
            start, end = min(start, span[0]), max(end, span[1])
            key = "attended" if event["pid"] == R_WORKERS else "waited"
            if key == "attended" or event["tid"] == WAIT_ROW:
                changes[key][0].extend(span)
                changes[key][1].extend((1.0, -1.0))
                workers |= {event["tid"]} if key == "attended" else set()
    if not start < end:
        raise ConfigError(f"{source} has no spans: give a file of --trace")
    edges, means = np.linspace(start, end, num_parts + 1), {}
    for key, (times, steps) in changes.items():
        order = np.argsort(times, kind="stable")
        at = np.array(times)[order]
        at = np.append(at, max((end, *at[-1:])))
        levels = np.cumsum(np.array(steps)[order])
        totals = np.append(0.0, np.cumsum(levels * np.diff(at)))
        means[key] = np.diff(np.interp(edges, at, totals)) / np.diff(edges)
    means["attended"] /= len(workers) or 1
    return (edges[1:] + edges[:-1]) / 2e6, means


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a trace's events. A run that was killed may have left the last line incomplete."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"[\n":
                raise ValueError("it does not begin like one")
            for raw in file:
                line = raw.strip().rstrip(b",")
                if line.startswith(b"{") and line.endswith(b"}"):
                    yield json.loads(line)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {explained(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a trace ({error}): give a file of --trace") from None
