"""A picture of a run, from its trace. Needs matplotlib."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.os_errors import explained
from fastdecode.measure.chrome_trace import R_WORKERS, WAIT_ROW

NUM_BINS: Final = 400
"""Parts that the time of a trace is divided into."""
LEVELS: Final = (("sequences", "running"), ("sequences", "waiting"), ("cached tokens W", "W"))
"""Counters of a trace: event and value."""


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
    try:
        figure.savefig(target)
    except (OSError, ValueError) as error:
        why = explained(error) if isinstance(error, OSError) else error
        raise ConfigError(f"can't write {target}: {why}") from None


class TraceSeries:
    """Values of a trace in equal parts of its time. The trace is read twice, and not kept.

    Args:
        num_bins: Number of parts.

    Attributes:
        seconds: Middle of each part.
        waited: Share of each part in which the S-worker waited for R-workers.
        attended: Share of each part in which an R-worker computed, on average.
        levels: Mean of each counter in each part.

    Raises:
        ConfigError: If the file can't be read, or has no spans.
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
    """Yield a trace's events. A run that was killed may have left the last line incomplete.

    Raises:
        ConfigError: If the file can't be read, or isn't a trace.
    """
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
        raise ConfigError(f"{path} is no trace ({error}): give a file of --trace") from None
