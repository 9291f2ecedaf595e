"""Load and step latency over steps, the modes side by side. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cost_model.simulate.report import summarise
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.simulation import SimulationOutcome

_CURVES = (
    ("step_s", 3, "lightgray", "step"),
    ("s_part_s", 0.8, "tab:green", "S-part"),
    ("r_part_s", 0.8, "tab:orange", "R-part"),
)


def plot(outcomes: Mapping[str, SimulationOutcome], path: Path) -> None:
    """Draw one column a mode: the load above; below, what a step takes, and the
    S-part's and the R-part's share in it.

    Raises:
        ConfigError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.2 * len(outcomes), 5), layout="constrained")
    axes = figure.subplots(2, len(outcomes), sharey="row", sharex="col", squeeze=False)
    for (mode, outcome), load, latency in zip(outcomes.items(), axes[0], axes[1], strict=True):
        steps = outcome.steps
        tokens_per_s = summarise(outcome)["output_tokens_per_s"]
        load.set_title(f"{mode}\n{tokens_per_s:.0f} tokens/s")
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
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"can't write the plot {path}: {error.strerror}") from None
