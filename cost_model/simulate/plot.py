"""Load and step latency over steps, the modes side by side. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.simulation import SimulationOutcome


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
        tokens_per_s = sum(served.traced.num_output_tokens for served in outcome.served) / max(
            outcome.total_s, 1e-12
        )
        load.set_title(f"{mode}\n{tokens_per_s:.0f} tokens/s")
        load.plot([step.load_tokens for step in steps], color="tab:blue", linewidth=0.8)
        latency.plot(
            [1e3 * step.step_s for step in steps], color="lightgray", linewidth=3, label="step"
        )
        latency.plot(
            [1e3 * step.s_part_s for step in steps],
            color="tab:green",
            linewidth=0.8,
            label="S-part",
        )
        latency.plot(
            [1e3 * step.r_part_s for step in steps],
            color="tab:orange",
            linewidth=0.8,
            label="R-part",
        )
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
