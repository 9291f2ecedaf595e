"""What gpu_first.py makes of what its steps have found: counts, goals, the last
line, the exit code; and its steps, run with tiny sizes wherever they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = ("facts", "graphs", "instant")
"""``make campaign`` runs all of them."""


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_first

    return gpu_first


def test_steps_run_with_tiny_sizes(tmp_path: Path) -> None:
    out = tmp_path / "gpu_first.json"
    command = ["bash", "benchmarks/gpu_first.sh", "--smoke", "--out", str(out), "--only", *STEPS]
    environ = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=290
    )
    report = json.loads(out.read_text())
    steps = report["steps"]
    assert not any(step["failed"] for step in steps.values()), done.stdout + done.stderr
    assert set(steps) == set(STEPS)
    for name, step in steps.items():
        assert step["rows"] or step["checks"], name
        assert all(check["ok"] is not False for check in step["checks"]), step["checks"]
        if step["part"] == "fast":
            assert all(row["max_error"] < 0.1 for row in step["rows"]), name
    of_workers = [(row["r_workers"], row["lanes"]) for row in steps["instant"]["rows"]]
    assert of_workers == [(1, 2), (4, 2)]
    assert report["right"]["passed"] > 0 and {"command", "commit"} <= report.keys()
    line = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"RIGHT \d+/\d+ · FAST \d/\d · \d+:\d\d min · gpu_first\.json", line)
    assert done.returncode == 0


def test_checks_and_rates_need_torch_and_numpy_alone() -> None:
    """A GPU's machine may have nothing else."""
    source = """
import sys
for name in ("numba", "psutil", "zmq", "mpi4py", "transformers", "tokenizers", "pytest"):
    sys.modules[name] = None
import gpu_engines, gpu_fast, gpu_right, gpu_swap
"""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    subprocess.run([sys.executable, "-c", source], env=environ, check=True, timeout=100)


def test_the_steps_fit_into_ten_minutes(first: Any) -> None:
    ends = list(first.PART_ENDS_S.values())
    assert list(first.PART_ENDS_S) == ["facts", "right", "fast", "engines"]
    assert ends == sorted(ends) and ends[-1] < 600 and first.MORE_END_S < 600
    parts = [step.part for step in first.STEPS if not step.is_more]
    assert parts == sorted(parts, key=list(first.PART_ENDS_S).index)
    begun_s = 0.0
    for part, end_s in first.PART_ENDS_S.items():
        # A step that takes all of its time leaves some to those behind it.
        limits = [x.limit_s for x in first.STEPS if x.part == part and not x.is_more]
        assert sum(limits) <= 1.5 * (end_s - begun_s) + 50, part
        begun_s = end_s


def test_every_step_has_what_makes_it(first: Any) -> None:
    import gpu_step

    assert set(gpu_step.MAKERS) == {step.name for step in first.STEPS}


def outcome(**fields: Any) -> Any:
    import gpu_ladder

    return gpu_ladder.Outcome(**fields)


def check(name: str, ok: bool | None) -> dict[str, Any]:
    return {name: {"check": name, "ok": ok, "why": "w"}}


def report_of(first: Any, tmp_path: Path, **outcomes: Any) -> Any:
    report = first._Report(tmp_path / "r.json", smoke=False)
    steps = {step.name: step for step in first.STEPS}
    for name, found in outcomes.items():
        report.add(steps[name], found)
    return report


def test_right_counts_checks_that_were_not_made_and_steps_that_could_not_begin(
    first: Any, tmp_path: Path
) -> None:
    kernels = outcome(checks={**check("a", True), **check("b", False), **check("c", None)})
    report = report_of(
        first, tmp_path, kernels=kernels, sampler=outcome(left_out=["not installed: torch"])
    )
    assert report.right == (1, 4)
    assert report.verdict().startswith("RIGHT 1/4 · FAST 0/6 · 0:00 min · r.json")
    assert report.exit_code == 1
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["fast_though_not_right"] and written["steps"]["kernels"]["checks"]


@pytest.mark.parametrize(
    ("found", "exit_code"),
    [({}, 0), ({"left_out": ["no time was left"]}, 3), ({"failed": ["exit code 1"]}, 1)],
)
def test_what_was_not_measured_is_not_a_failure(
    first: Any, tmp_path: Path, found: dict[str, Any], exit_code: int
) -> None:
    kernels = outcome(checks=check("a", True))
    report = report_of(first, tmp_path, kernels=kernels, layers=outcome(**found))
    assert report.exit_code == exit_code
    assert ("not measured: no time was left" in report.table()) == ("left_out" in found)


def test_rates_of_a_device_that_is_not_right_are_marked(first: Any, tmp_path: Path) -> None:
    layers = outcome(rows=[{"model": "8b", "tflops": 1.0, "max_error": 0.0}])
    wrong = report_of(first, tmp_path, kernels=outcome(checks=check("a", False)), layers=layers)
    assert "layers  (read with care: not all checks are right)" in wrong.table()
    right = report_of(first, tmp_path, kernels=outcome(checks=check("a", True)), layers=layers)
    assert "read with care" not in right.table()


def test_a_row_whose_result_is_wrong_shows_no_rate(first: Any) -> None:
    from gpu_setup import Found, measured

    right = measured({"rows": 8}, Found(0.01, 0.02), tflops=100.0)
    assert right == {"rows": 8, "tflops": 100.0, "max_error": 0.01}
    for error in (0.03, float("nan"), float("inf")):
        wrong = measured({"rows": 8}, Found(error, 0.02), tflops=100.0)
        assert "tflops" not in wrong and "no rate is shown" in wrong["error"]
        json.dumps(wrong, allow_nan=False)


def layer(rows: int, how: str, tflops: float, host_us: float) -> dict[str, Any]:
    return {"model": "8b", "rows": rows, "how": how, "tflops": tflops, "host_us": host_us}


def instant(num_r_workers: int, rows: int, ratio: float) -> dict[str, Any]:
    return {"r_workers": num_r_workers, "lanes": 2, "rows_a_lane": rows, "ratio": ratio}


def test_goals_are_judged_by_the_worst_that_an_engine_would_run(first: Any) -> None:
    steps = {
        "ceilings": [{"what": "matmul", "tflops": 100.0}],
        "layers": [
            layer(64, "graph", 20.0, 14.0), layer(256, "graph", 61.0, 9.0),
            layer(256, "graph, unfused", 50.0, 99.0), layer(256, "eager", 40.0, 99.0),
            layer(1024, "eager", 80.0, 99.0), {"model": "8b", "what": "a graph"},
        ],
        "instant": [
            instant(1, 256, 1.0), instant(16, 256, 2.7), instant(16, 64, 4.0),
            {**instant(1, 256, 2.0), "lanes": 1},
        ],
    }  # fmt: skip
    found = [(goal["measured"], goal["met"]) for goal in first.goals(steps)]
    assert found == [(0.61, True), (2.7, False), (14.0, True), *[(None, None)] * 3]
    # A goal isn't met by the rows that came out right.
    steps["instant"][1] = {"lanes": 2, "rows_a_lane": 256, "max_error": 1.0, "error": "wrong"}
    assert list(first.goals(steps))[1]["met"] is None


def test_both_sides_are_held_against_the_gpu_alone(first: Any) -> None:
    from gpu_goals import shown_goal

    def row(engine: str, rate: float, **more: float) -> dict[str, Any]:
        return {"engine": engine, "tokens_per_s": rate, "requests": 64, "prompt": 512, "new": 64,
                **more}  # fmt: skip

    alone, both = "KV on the GPU", "KV on both sides"
    rows = [
        row(alone, 100.0), row(both, 98.0), row("R-workers", 20.0),
        row(alone, 10.0, asked_kv_share=0.1), row(both, 15.0, asked_kv_share=0.1),
        {"engine": both, "error": "took more than 75 s"},
    ]  # fmt: skip
    fits, short = list(first.goals({"engines": rows}))[4:6]
    assert (fits["measured"], fits["met"]) == (0.98, False)
    assert (short["measured"], short["met"]) == (1.5, True)
    assert shown_goal(fits).endswith(">= 0.99  model 1  measured 0.98: MISSED")
    assert shown_goal(short).endswith(">= 1  model 1.4  measured 1.5: met")


def test_a_tenth_of_the_kv_is_a_tenth_in_bytes(first: Any) -> None:
    """Not a fraction of the GPU's memory, beside which most of it fitted."""
    import torch
    from gpu_engines import USUAL, _first_engines
    from gpu_setup import Setup

    setup = Setup(torch.device("cuda"), torch.bfloat16, smoke=False, deadline_s=0.0)
    kv_gb = USUAL.num_tokens * 2 * 2 * 32 * 8 * 128 / 1e9
    alone, both = (each.options for each in _first_engines(setup, USUAL) if each.kv_share)
    assert alone["kv_memory_gb"] == pytest.approx(kv_gb / 10)
    assert both["device_kv_gb"] == pytest.approx(kv_gb / 10)
    assert "gpu_memory_fraction" not in {**alone, **both}
    fits, _, fits_both = (each.options for each in _first_engines(setup, USUAL)[:3])
    assert "kv_memory_gb" not in fits and "device_kv_gb" not in fits_both
