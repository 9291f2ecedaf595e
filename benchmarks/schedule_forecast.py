"""Where does the load-stabilizing schedule gain over greedy starts? By simulation:
how long R-workers need for the mean load, over the S-part; how much output
lengths differ; and how many generations of sequences there are.

    python benchmarks/schedule_forecast.py --out benchmarks/results/schedule_forecast.json

Two lanes of 16 sequences, 128 tokens each on average, known lengths, an instant
link. Ratios are tokens a second of ``stabilized`` and of ``auto`` over ``greedy``,
from the first step to the last.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

from provenance import provenance

from cost_model.simulate.tables import Table, TabledTimes
from fastdecode.core.config.groups import Batching
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.resources import Rounds
from fastdecode.schedule.simulation.simulation import Simulation
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest

BATCH, LENGTH, LANES, BLOCK_SIZE = 32, 128, 2, 16
S_PART_S = 0.005
BLOCKS = (1 << 20,)
BALANCES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SPREADS = (0.0, 0.1, 0.25, 0.5)
GENERATIONS = (1, 4, 16)


def total_s(mode: str, lengths: list[int], times: TabledTimes) -> float:
    """How long all of it takes."""
    batching = Batching(
        schedule=mode,  # type: ignore[arg-type]
        max_num_sequences=BATCH,
        max_step_tokens=BATCH + 512,
        lanes=LANES,
        expected_output_tokens=LENGTH,
    )
    scheduler = make_scheduler(ScheduleOptions(batching), BLOCKS, BLOCK_SIZE, times)
    simulation = Simulation(
        RequestTrace(tuple(TracedRequest(1, length, length) for length in lengths)),
        scheduler,
        Rounds(times, 1),
        worker_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_lanes=LANES,
    )
    return simulation.run().total_s


def cell(balance: float, spread: float, generations: int) -> dict[str, Any]:
    """One ratio.

    Args:
        balance: the R-part of the mean load over the S-part, both of a lane.
        spread: lengths are evenly spread within so much of the mean, up or down.
    """
    random = Random(1)
    low, high = LENGTH * (1 - spread), LENGTH * (1 + spread)
    lengths = [round(random.uniform(low, high)) for _ in range(BATCH * generations)]
    token_s = balance * S_PART_S / (BATCH / LANES * LENGTH / 2)
    times = TabledTimes(Table(((0, S_PART_S),)), (Table(((0, 0.0), (1, token_s))),))
    greedy_s = total_s("greedy", lengths, times)
    return {
        "balance": balance,
        "spread": spread,
        "generations": generations,
        "stabilized": greedy_s / total_s("stabilized", lengths, times),
        "auto": greedy_s / total_s("auto", lengths, times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = [cell(*each) for each in itertools.product(BALANCES, SPREADS, GENERATIONS)]
    print("R / S   spread  " + "".join(f"{g:>4} generations" for g in GENERATIONS))
    for balance, spread in itertools.product(BALANCES, SPREADS):
        rows = [row for row in cells if (row["balance"], row["spread"]) == (balance, spread)]
        shown = (f"{row['stabilized']:.2f}, {row['auto']:.2f}" for row in rows)
        print(f"{balance:<7g} {spread:<7g}" + "".join(f"{each:>16}" for each in shown))
    if options.out is not None:
        text = json.dumps({"provenance": provenance(), "cells": cells}, indent=1)
        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
