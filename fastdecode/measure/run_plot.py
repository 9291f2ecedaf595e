"""Pictures of a run: of its summary, or of its trace. Need matplotlib."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.os_errors import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS: Final = 400
"""Most parts of the time of a trace; at least half as many are drawn."""
FIRST_WIDTH_US: Final = 1000.0
S_WORKER, R_WORKERS, WAIT_ROW = 1, 2, 0
"""Rows of a trace, as ``chrome_trace`` writes them."""
_SHARES = (("s_share", "S-part"), ("wait_share", "waiting for R-workers"))
_WAITED, _ATTENDED = "waited", "attended"
_LEVELS = (("sequences", "running"), ("sequences", "waiting"), ("cached tokens W", "W"))
"""Counters of a trace: event and value."""


def plot_run(source: Path, target: Path) -> None:
    """Draw a file of ``--summary`` or ``--trace``; the suffix of ``target`` says how.

    Raises:
        ConfigError: ``source`` is neither, or a file can't be read or written.
        MissingExtraError: matplotlib isn't installed.
    """
    with imports_for("fastdecode plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary, series = read_run(source)
    num_parts = 2 if summary is not None else 3
    figure, axes = pyplot.subplots(
        num_parts, 1, figsize=(8, 3 * num_parts), layout="constrained", sharex=summary is None
    )
    try:
        if summary is None:
            _draw_trace(series, axes)
        else:
            _draw_summary(summary, axes)
        figure.savefig(target)
    except (OSError, ValueError) as error:
        why = explained(error) if isinstance(error, OSError) else error
        raise ConfigError(f"can't write {target}: {why}") from None
    finally:
        pyplot.close(figure)


def read_run(source: Path) -> tuple[dict[str, Any] | None, TraceSeries]:
    """A summary, or else what a trace of any length says. Raises ConfigError."""
    series = TraceSeries()
    for event in read_events(source):
        if "output_tokens_per_s" in event:
            return event, series
        series.add(event)
    return None, series


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """A summary, alone; or a trace's events, whose last line a killed run may
    have left half written. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"[\n":
                file.seek(0)
                summary = json.loads(file.read())
                if not isinstance(summary, dict) or "output_tokens_per_s" not in summary:
                    raise ValueError("its keys are others")
                yield summary
                return
            for raw in file:
                line = raw.strip().rstrip(b",")
                if line.startswith(b"{") and line.endswith(b"}"):
                    yield json.loads(line)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {explained(error)}") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is neither a summary nor a trace ({error}): give a file of --summary or "
            "--trace"
        ) from None


class TraceSeries:
    """A trace's values over time, in memory that doesn't grow with its length: sums
    in equal parts of the time, each of which gets twice as long whenever the trace
    goes on past the last.

    Args:
        num_bins: most parts; an even number.
        width_us: of a part at first.
    """

    def __init__(self, num_bins: int = NUM_BINS, width_us: float = FIRST_WIDTH_US) -> None:
        self._num_bins = num_bins
        self._width_us = width_us
        self._start_us = math.inf
        self._end_us = 0.0
        self._sums: dict[str, list[float]] = {}
        self._workers: set[int] = set()
        self._levels: dict[str, tuple[float, float]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """One more. Other events than spans and counters say nothing here."""
        if event.get("ph") == "X":
            self._add_span(event)
        elif event.get("ph") == "C":
            for name, key in _LEVELS:
                if event["name"] == name:
                    self._set_level(key, event["ts"], event["args"][key])

    def _add_span(self, event: Mapping[str, Any]) -> None:
        start_us, end_us = event["ts"], event["ts"] + event["dur"]
        self._start_us = min(self._start_us, start_us)
        self._end_us = max(self._end_us, end_us)
        if event["pid"] == R_WORKERS:
            self._workers.add(event["tid"])
            self._fill(_ATTENDED, start_us, end_us, 1.0)
        elif event["tid"] == WAIT_ROW:
            self._fill(_WAITED, start_us, end_us, 1.0)

    def _set_level(self, key: str, at_us: float, value: float) -> None:
        """It holds until the next."""
        if key in self._levels:
            since_us, before = self._levels[key]
            self._fill(key, since_us, at_us, before)
        self._levels[key] = (at_us, value)

    def _fill(self, key: str, start_us: float, end_us: float, weight: float) -> None:
        """Share a span among the parts that it covers."""
        while end_us > self._num_bins * self._width_us:
            self._double()
        bins = self._sums.setdefault(key, [0.0] * self._num_bins)
        width_us = self._width_us
        for place in range(int(start_us / width_us), min(int(end_us / width_us) + 1, len(bins))):
            low, high = place * width_us, (place + 1) * width_us
            bins[place] += weight * max(0.0, min(high, end_us) - max(low, start_us))

    def _double(self) -> None:
        self._width_us *= 2
        for bins in self._sums.values():
            pairs = [sum(bins[place : place + 2]) for place in range(0, len(bins), 2)]
            bins[:] = pairs + [0.0] * (len(bins) - len(pairs))

    def _covered_us(self) -> list[float]:
        """Of each part that the trace reaches, how much lies within it."""
        num = min(self._num_bins, math.ceil(self._end_us / self._width_us))
        lows = (place * self._width_us for place in range(num))
        return [
            max(0.0, min(low + self._width_us, self._end_us) - max(low, self._start_us))
            for low in lows
        ]

    def _means(self, key: str) -> list[float]:
        bins = self._sums.get(key, [0.0] * self._num_bins)
        parts = zip(bins, self._covered_us(), strict=False)
        return [us / max(covered, 1e-9) for us, covered in parts]

    def seconds(self) -> list[float]:
        """The middle of each part."""
        num = len(self._covered_us())
        return [(place + 0.5) * self._width_us / 1e6 for place in range(num)]

    def s_shares(self) -> list[float]:
        """Of each part, in which the S-worker didn't wait."""
        return [1 - min(1.0, share) for share in self._means(_WAITED)]

    def r_shares(self) -> list[float]:
        """Of each part, in which an R-worker computed, on average."""
        num = len(self._workers) or 1
        return [min(1.0, share / num) for share in self._means(_ATTENDED)]

    def levels(self, key: str) -> list[float]:
        """A counter's mean in each part."""
        if key in self._levels and self._levels[key][0] < self._end_us:
            self._set_level(key, self._end_us, self._levels[key][1])
        return self._means(key)


def _draw_trace(series: TraceSeries, axes: Any) -> None:
    top, middle, bottom = axes
    seconds = series.seconds()
    top.plot(seconds, series.s_shares(), label="S-worker computes")
    top.plot(seconds, series.r_shares(), label="R-workers compute, on average")
    top.set(ylim=(0, 1.05), ylabel="share of the time")
    for key in ("running", "waiting"):
        middle.plot(seconds, series.levels(key), label=key)
    middle.set(ylim=(0, None), ylabel="sequences")
    bottom.plot(seconds, series.levels("W"), label="tokens in the KV caches (W)")
    bottom.set(ylim=(0, None), xlabel="seconds", ylabel="tokens")
    bottom.yaxis.set_major_formatter("{x:,.0f}")
    for each in axes:
        each.legend(loc="best")
        each.grid(alpha=0.3)


def _draw_summary(summary: Mapping[str, Any], axes: Any) -> None:
    top, bottom = axes
    _draw_shares(summary, top)
    _draw_latencies(summary, bottom)


def _draw_shares(summary: Mapping[str, Any], axes: Axes) -> None:
    shares = [(label, summary[key]) for key, label in _SHARES]
    if summary.get("r_workers"):
        shares.append(("busiest R-worker", summary["r_share"]))
    bars = axes.barh([label for label, _ in shares], [share for _, share in shares])
    axes.bar_label(bars, labels=[f"{share:.0%}" for _, share in shares], padding=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1), xticks=[0, 0.25, 0.5, 0.75, 1], xlabel="share of a step's time")
    rate = summary["output_tokens_per_s"]
    axes.set_title(f"{rate:,.0f} output tokens/s, {summary['output_tokens']:,} in all")


def _draw_latencies(summary: Mapping[str, Any], axes: Axes) -> None:
    for name, label in (("ttft_s", "time to first token"), ("tpot_s", "time per token")):
        found = {key: value for key, value in summary[name].items() if value}
        axes.plot(list(found), list(found.values()), marker="o", label=label)
        for place, value in enumerate(found.values()):
            axes.annotate(
                _duration(value), (place, value), xytext=(0, 6), textcoords="offset points",
                ha="center",
            )  # fmt: skip
    axes.set(yscale="log", ylabel="seconds")
    axes.margins(x=0.1, y=0.25)
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
