"""KV on both sides by the grid: the kept cells met their goals, and a small grid
runs with the scheduler and the rule as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from hybrid_cells import Cell, run, steady

ROOT = Path(__file__).parents[2]


def test_every_cell_of_the_grid_was_run_and_met_its_goal() -> None:
    path = ROOT / "benchmarks" / "results" / "hybrid_grid.json"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    every = {
        (context, demand, num, arrivals)
        for context in (1024, 4096, 16384)
        for demand in (1, 2, 10)
        for num in (1, 4)
        for arrivals in ("at once", "random")
    }
    assert len(cells) == len(every)
    assert {
        (row["context"], row["demand"], row["r_workers"], row["arrivals"]) for row in cells
    } == every
    assert all(row["ratio"] >= (0.99 if row["demand"] == 1 else 1.0) - 1e-9 for row in cells)


def test_a_small_grid() -> None:
    """With the scheduler and the rule as they are."""
    fits, short = (Cell(256, demand, 2, num_requests=10) for demand in (1, 10))
    alone = run(fits, alone=True)
    assert run(fits, alone=False).total_s == alone.total_s
    assert set(run(fits, alone=False).modes) == {"gpu-only"}
    alone, both = (run(short, alone=alone) for alone in (True, False))
    assert both.total_s <= alone.total_s * (1 + 1e-9)
    assert set(both.modes) > {"gpu-only"}
    assert steady(fits).ratio == 1.0 and steady(short).ratio > 1.2
    assert steady(short).home_tpot_ratio > 1
