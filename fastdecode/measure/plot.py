"""Pictures: a plan over the number of sockets, a simulated run over its steps, and a run from its
trace. Needs matplotlib."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cost_model.plans.search import Plan
from cost_model.plans.size import Sizing
from cost_model.predict import StepPrediction
from cost_model.printing import counted, rate_text, seconds_text
from cost_model.simulate import summarise
from fastdecode.core.errors import ConfigError, Given, imports_for
from fastdecode.core.os_errors import explained
from fastdecode.measure.chrome_trace import R_WORKERS, WAIT_ROW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastdecode.schedule.simulation.simulation import SimulationOutcome

NUM_BINS: Final = 400  # parts that the time of a trace is divided into
LEVELS: Final = (("sequences", "running"), ("sequences", "waiting"), ("cached tokens W", "W"))
"""Counters of a trace: event and value."""
# Colours that stay apart in grey and for the colour-blind.
_LIMIT_COLOURS = {
    "R-part": "#fbeee2",
    "round trip": "#efedf6",
    "network": "#e6f1f8",
    "messages": "#f6eef2",
    "ZeroMQ I/O": "#f3f1e0",
    "S-part": "#eaf4e7",
}
_CURVES = (
    ("step_s", 3, "lightgray", "step"),
    ("s_part_s", 0.8, "tab:green", "S-part"),
    ("r_part_s", 0.8, "tab:orange", "R-part"),
)
_THROUGHPUT, _TPOT, _RIVAL = "#1b5e8c", "#b3541e", "#555555"
FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """
    Raises:
        ConfigError: If the file's name has no known ending.
        MissingExtraError: If matplotlib isn't installed.
    """
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


def plot_simulation(outcomes: Mapping[str, SimulationOutcome], path: Path) -> None:
    """Draw one column per mode: the load, and below it a step's time with its S-part and R-part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.2 * len(outcomes), 5), layout="constrained")
    axes = figure.subplots(2, len(outcomes), sharey="row", sharex="col", squeeze=False)
    for (mode, outcome), load, latency in zip(outcomes.items(), axes[0], axes[1], strict=True):
        steps = outcome.steps
        load.set_title(f"{mode}\n{summarise(outcome)['output_tokens_per_s']:.0f} tokens/s")
        load.plot([step.load_tokens for step in steps], color="tab:blue", linewidth=0.8)
        for name, width, color, label in _CURVES:
            times_ms = [1e3 * getattr(step, name) for step in steps]
            latency.plot(times_ms, color=color, linewidth=width, label=label)
        latency.set_xlabel("step")
    for row in axes:
        row[0].set_ylim(bottom=0)  # the row shares it
    axes[0][0].set_ylabel("load (cached tokens)")
    axes[1][0].set_ylabel("latency (ms)")
    axes[1][0].legend(loc="lower right", fontsize="small")
    _save(figure, path)


def plot_run(source: Path, target: Path) -> None:
    """Draw a file of ``--trace``. The suffix of ``target`` says as what.

    Raises:
        ConfigError: If ``source`` isn't a trace, or a file can't be read or written.
        MissingExtraError: If matplotlib isn't installed.
    """
    with imports_for("fastdecode plot"):
        from matplotlib.figure import Figure

    series = TraceSeries(source)
    figure = Figure(figsize=(8, 9), layout="constrained")
    top, middle, bottom = axes = figure.subplots(3, 1, sharex=True)
    top.plot(series.seconds, 1 - series.waited, label="S-worker computes")
    top.plot(series.seconds, series.attended, label="R-workers compute, on average")
    top.set(ylim=(0, 1.05), ylabel="share of the time")
    for key in ("running", "waiting"):
        middle.plot(series.seconds, series.levels[key], label=key)
    middle.set(ylim=(0, None), ylabel="sequences")
    bottom.plot(series.seconds, series.levels["W"], label="tokens in the KV caches (W)")
    bottom.set(ylim=(0, None), xlabel="seconds", ylabel="tokens")
    bottom.yaxis.set_major_formatter("{x:,.0f}")
    for each in axes:
        each.legend(loc="best")
        each.grid(alpha=0.3)
    _save(figure, target, "output")


class TraceSeries:
    """Values of a trace in equal parts of its time. The trace is read twice, and not kept.

    Attributes:
        seconds: Middle of each part.
        waited: Share of each part in which the S-worker waited for R-workers.
        attended: Share of each part in which an R-worker computed, on average.
        levels: Mean of each counter in each part.
    """

    def __init__(self, source: Path, num_bins: int = NUM_BINS) -> None:
        start, end = math.inf, 0.0
        for event in _events(source):
            if event.get("ph") == "X":
                start, end = min(start, event["ts"]), max(end, event["ts"] + event["dur"])
        if not start < end:
            raise ConfigError(f"{source} has no spans: give a file of --trace")
        self._start, self._width = start, (end - start) / num_bins
        self.seconds = (start + (np.arange(num_bins) + 0.5) * self._width) / 1e6
        waited, attended = np.zeros(num_bins), np.zeros(num_bins)
        self.levels = {key: np.zeros(num_bins) for _, key in LEVELS}
        now: dict[str, tuple[float, float]] = {}
        workers: set[int] = set()
        for event in _events(source):
            if event.get("ph") == "X":
                span = event["ts"], event["ts"] + event["dur"]
                if event["pid"] == R_WORKERS:
                    workers.add(event["tid"])
                    self._fill(attended, *span)
                elif event["tid"] == WAIT_ROW:
                    self._fill(waited, *span)
            for name, key in LEVELS:
                if event.get("ph") == "C" and event["name"] == name:
                    since, value = now.get(key, (event["ts"], 0.0))
                    self._fill(self.levels[key], since, event["ts"], value)
                    now[key] = event["ts"], event["args"][key]
        for key, (since, value) in now.items():  # each holds until the next
            self._fill(self.levels[key], since, end, value)
        self.waited = np.minimum(1, waited)
        self.attended = np.minimum(1, attended / (len(workers) or 1))

    def _fill(self, bins: np.ndarray, start: float, end: float, value: float = 1.0) -> None:
        """Add a value to the parts that a span covers, weighted by how much it covers."""
        low, high = (each - self._start for each in (start, end))
        first, last = max(0, int(low / self._width)), int(high / self._width) + 1
        edges = np.arange(first, min(last, len(bins)) + 1) * self._width
        if len(edges) > 1:
            covered = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
            bins[first : first + len(covered)] += value * np.maximum(0, covered) / self._width


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
    except ValueError as error:
        raise ConfigError(f"{path} is not a trace ({error}): give a file of --trace") from None
