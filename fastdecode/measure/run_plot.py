"""Pictures of a run: of its summary, or of its trace. Need matplotlib."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.os_errors import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS: Final = 200
"""Of the time of a trace."""
S_WORKER, R_WORKERS, WAIT_ROW = 1, 2, 0
"""Rows of a trace, as ``chrome_trace`` writes them."""
_SHARES = (("s_share", "S-part"), ("wait_share", "waiting for R-workers"))


def plot_run(source: Path, target: Path) -> None:
    """Draw a file of ``--summary`` or ``--trace``; the suffix of ``target`` says how.

    Raises:
        ConfigError: ``source`` is neither, or a file can't be read or written.
        MissingExtraError: matplotlib isn't installed.
    """
    events = list(read_events(source))
    with imports_for("fastdecode plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    summary = events[0] if len(events) == 1 and "output_tokens_per_s" in events[0] else None
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 6), layout="constrained")
    try:
        if summary is None:
            _draw_trace(events, axes)
        else:
            _draw_summary(summary, axes)
        figure.savefig(target)
    except (OSError, ValueError) as error:
        why = explained(error) if isinstance(error, OSError) else error
        raise ConfigError(f"can't write {target}: {why}") from None
    finally:
        pyplot.close(figure)


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


def shares_over_time(
    events: list[dict[str, Any]], num_bins: int = NUM_BINS
) -> tuple[list[float], list[float], list[float]]:
    """Of a trace: seconds [num_bins], and the shares of the time in which the
    S-worker computed, and in which an R-worker did, on average."""
    spans = [e for e in events if e.get("ph") == "X"]
    end_us = max((e["ts"] + e["dur"] for e in spans), default=0)
    if not end_us:
        return [], [], []
    width_us = end_us / num_bins
    waited, attended = [0.0] * num_bins, [0.0] * num_bins
    num_workers = len({e["tid"] for e in spans if e["pid"] == R_WORKERS}) or 1
    for event in spans:
        if event["pid"] == R_WORKERS:
            _fill(attended, event["ts"], event["dur"], width_us)
        elif event["tid"] == WAIT_ROW:
            _fill(waited, event["ts"], event["dur"], width_us)
    seconds = [(place + 0.5) * width_us / 1e6 for place in range(num_bins)]
    s_shares = [1 - min(1.0, us / width_us) for us in waited]
    return seconds, s_shares, [min(1.0, us / width_us / num_workers) for us in attended]


def _fill(bins: list[float], start_us: float, length_us: float, width_us: float) -> None:
    """Share a span among the bins that it covers."""
    end_us = start_us + length_us
    for place in range(int(start_us / width_us), min(int(end_us / width_us) + 1, len(bins))):
        low, high = place * width_us, (place + 1) * width_us
        bins[place] += max(0.0, min(high, end_us) - max(low, start_us))


def _draw_trace(events: list[dict[str, Any]], axes: Any) -> None:
    top, bottom = axes
    seconds, s_shares, r_shares = shares_over_time(events)
    top.plot(seconds, s_shares, label="S-worker computes")
    top.plot(seconds, r_shares, label="R-workers compute, on average")
    top.set(ylim=(0, 1.05), ylabel="share of the time")
    top.legend()
    for name, key in (("sequences", "running"), ("sequences", "waiting")):
        found = [(e["ts"] / 1e6, e["args"][key]) for e in events if _is_counter(e, name)]
        bottom.step(*(zip(*found, strict=True) if found else ((), ())), label=key, where="post")
    bottom.set(xlabel="seconds", ylabel="sequences")
    bottom.legend()


def _is_counter(event: Mapping[str, Any], name: str) -> bool:
    return event.get("ph") == "C" and event.get("name") == name


def _draw_summary(summary: Mapping[str, Any], axes: Any) -> None:
    top, bottom = axes
    _draw_shares(summary, top)
    _draw_latencies(summary, bottom)


def _draw_shares(summary: Mapping[str, Any], axes: Axes) -> None:
    shares = [(label, summary[key]) for key, label in _SHARES]
    if summary.get("r_workers"):
        shares.append(("busiest R-worker", summary["r_share"]))
    axes.barh([label for label, _ in shares], [share for _, share in shares])
    axes.set(xlim=(0, 1), xlabel="share of a step's time")
    rate = summary["output_tokens_per_s"]
    axes.set_title(f"{rate:.0f} output tokens/s, {summary['output_tokens']} in all")


def _draw_latencies(summary: Mapping[str, Any], axes: Axes) -> None:
    for name, label in (("ttft_s", "time to first token"), ("tpot_s", "time per token")):
        found = {key: value for key, value in summary[name].items() if value}
        axes.plot(list(found), list(found.values()), marker="o", label=label)
    axes.set(yscale="log", ylabel="seconds")
    axes.legend()
