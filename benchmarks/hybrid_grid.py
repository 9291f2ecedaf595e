"""KV on both sides in every cell of the grid that it has goals for, on a virtual
clock: contexts of 1k, 4k and 16k tokens; all KV fits the GPU, or 2 or 10 times
as much is asked for; 1 R-worker or 4; requests all at once, or at random times.

    python benchmarks/hybrid_grid.py --out benchmarks/results/hybrid_grid.json

Llama-3 8B on an H200, R-workers on a socket of EPYC 9654 each, by the cost
model's data file: nothing of it was measured. The scheduler, the lifecycle and
the rule are the engine's (``benchmarks/hybrid_cells.py``). Ratios are tokens a
second over those of the GPU alone, prompts and ends of jobs included: once with
the rule told the truth, once with R-workers and the way to them 20% slower, and
the device 20% faster than it is told. ``steady``: what a closed form says of
decoding for ever on a GPU that is full. Exit code 1 if a cell is below its
goal: 1.0, 0.99 where all fits, 0.97 where the rule is told wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybrid_cells import Cell, GridRun, run, steady
from provenance import provenance

NUM_REQUESTS = {1024: 232, 4096: 58, 16384: 57}
"""By context. Those of 16k fill the whole GPU, the others a quarter of it: more
of them would take long to simulate."""
DEMANDS = (1, 2, 10)
R_WORKERS = (1, 4)
ERROR = 0.2
GOAL, ALL_FITS_GOAL, GOAL_OFF = 1.0, 0.99, 0.97
_ROUNDING = 1e-9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=list(NUM_REQUESTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests (default: 1)")
    parser.add_argument("--join", type=Path, nargs="+", help="files of some contexts each")
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for path in options.join or []:
        cells += json.loads(path.read_text("utf-8"))["cells"]
    for context, demand in itertools.product(() if cells else options.contexts, DEMANDS):
        for row in rows(context, demand, round(options.share * NUM_REQUESTS[context])):
            cells.append(row)
            print(shown(row), flush=True)
    num_missed = sum(not row["goal_met"] for row in cells)
    found = {"provenance": provenance(), "cells": cells, "num_missed": num_missed}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(f"{len(cells)} cells, {num_missed} below their goals")
    return 1 if num_missed else 0


def rows(context: int, demand: float, num_requests: int) -> Iterator[dict[str, Any]]:
    """The cells of one context and one demand: the GPU alone is run once for all."""
    first = Cell(context, demand, R_WORKERS[0], num_requests=num_requests)
    at_once = run(first, alone=True)
    at_random = run(first, alone=True, within_s=at_once.total_s / 2)
    for num_r_workers in R_WORKERS:
        cell = Cell(context, demand, num_r_workers, True, num_requests)
        off = run(cell, alone=False, error=ERROR)
        # All that the GPU alone does takes so much less then.
        ratio_off = (1 - ERROR) * at_once.total_s / off.total_s
        yield row_of(cell, at_once, run(cell, alone=False), ratio_off)
        cell = replace(cell, all_at_once=False)
        both = run(cell, alone=False, within_s=at_once.total_s / 2)
        yield row_of(cell, at_random, both, None)


def row_of(cell: Cell, alone: GridRun, both: GridRun, ratio_off: float | None) -> dict[str, Any]:
    """A cell, as it is kept; ``ratio_off``: where the rule is told wrong."""
    ratio = alone.total_s / both.total_s
    goal = ALL_FITS_GOAL if cell.demand == 1 else GOAL
    is_met = ratio >= goal - _ROUNDING
    return {
        "context": cell.context,
        "demand": cell.demand,
        "r_workers": cell.num_r_workers,
        "requests": len(cell.requests),
        "arrivals": "at once" if cell.all_at_once else "random",
        "gpu_only_tokens_per_s": alone.tokens_per_s,
        "hybrid_tokens_per_s": both.tokens_per_s,
        "ratio": ratio,
        "ratio_costs_off": ratio_off,
        "tpot_p50_ratio": both.tpot_p50_s / alone.tpot_p50_s,
        "modes": both.modes,
        "steady": asdict(steady(replace(cell, num_requests=None))),
        "goal_met": is_met and (ratio_off is None or ratio_off >= GOAL_OFF),
    }


def shown(row: dict[str, Any]) -> str:
    modes = " ".join(f"{name} {num}" for name, num in sorted(row["modes"].items()))
    return (
        f"{row['context']:6,} x{row['demand']:<3g} {row['r_workers']} R-workers "
        f"{row['arrivals']:8} {row['gpu_only_tokens_per_s']:8,.0f} tokens/s alone, "
        f"ratio {row['ratio']:.3f}, costs off {row['ratio_costs_off'] or math.nan:.3f}, "
        f"steady {row['steady']['ratio']:.2f} ({modes})"
        + ("" if row["goal_met"] else "  BELOW ITS GOAL")
    )


if __name__ == "__main__":
    sys.exit(main())
