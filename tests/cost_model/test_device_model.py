"""What models say of the goals on a GPU: they are what the documentation says,
and a loop that never waits for the wrong thing hides what they say it hides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.simulate.device_loop import LaneCosts, cycle_s
from cost_model.simulate.grid import Cell, run, steady

ROOT = Path(__file__).parents[2]
LANE = LaneCosts(unit_s=200e-6, out_s=60e-6, back_s=40e-6, launch_s=40e-6, send_s=15e-6,
                 receive_s=35e-6)  # fmt: skip


def test_one_lane_takes_the_sum_of_its_way_and_two_hide_it() -> None:
    """Half of what a launch costs the host comes before its unit."""
    way_s = 20e-6 + 200e-6 + 60e-6 + 15e-6 + 35e-6 + 40e-6
    assert cycle_s(LANE, 1, 33) / 33 == pytest.approx(way_s, rel=0.06)
    assert cycle_s(LANE, 2, 33) / (2 * 33) == pytest.approx(200e-6, rel=0.01)


def test_a_host_that_is_slower_than_the_gpu_sets_the_pace() -> None:
    slow = replace(LANE, receive_s=300e-6)
    assert cycle_s(slow, 2, 33) / (2 * 33) == pytest.approx(355e-6, rel=0.01)


def test_the_documentation_says_what_the_models_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks/device_goals.py`` prints these rows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from device_goals import figures, grid_lines, lines

    found = figures()
    assert found["s_step_share_256"] >= 0.6 and found["prefill_share"] >= 0.5
    assert found["instant_ratio_2_lanes"] <= 1.1 < found["instant_ratio_1_lane"]
    assert found["launches_us_worst"] < 15
    page = (ROOT / "docs" / "evidence" / "device_checks.md").read_text("utf-8")
    kept = json.loads((ROOT / "benchmarks" / "results" / "hybrid_grid.json").read_text("utf-8"))
    for line in [*lines(found), *grid_lines(kept["cells"])]:
        assert line in page


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
