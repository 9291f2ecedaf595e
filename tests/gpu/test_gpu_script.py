"""benchmarks/gpu.py: its steps with tiny sizes, and what it concludes from their rows."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS = ("facts", "sampler", "instant")
"""``make campaign`` runs all of them."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def test_steps_with_tiny_sizes(tmp_path: Path) -> None:
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
    of_workers = [(row["r_workers"], row["lanes"]) for row in steps["instant"]["rows"]]
    assert of_workers == [(1, 2), (4, 2)]
    assert report["right"] == {"passed": 5, "of": 5} and {"command", "commit"} <= report.keys()
    line = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"RIGHT 5/5 · FAST \d/\d · \d+:\d\d min · gpu_first\.json", line)
    assert done.returncode == 0


def test_steps_fit_into_ten_minutes(gpu: Any) -> None:
    begun_s = 0.0
    for part, end_s in gpu.PART_ENDS_S.items():
        limits = [x.limit_s for x in gpu.STEPS if x.part == part and not x.is_more]
        assert sum(limits) <= 1.5 * (end_s - begun_s) + 75, part
        begun_s = end_s
    assert begun_s < 600


def step_of(gpu: Any, source: str, tmp_path: Path, limit_s: float = 60.0) -> Any:
    """Run a step whose process has this source, and ``say`` to write a row."""
    head = """
import json, os, signal, sys
rows = open(sys.argv[sys.argv.index("--rows") + 1], "w")
def say(**row): print(json.dumps(row), file=rows, flush=True)
"""
    program = tmp_path / "step.py"
    program.write_text(head + source)
    return gpu.run_apart(limit_s, time.monotonic() + 60, [sys.executable, str(program)])


CHECKS = """
say(plan=["one", "two", "three"])
say(begin="one"); say(check="one", ok=True)
say(begin="two")
{trouble}
say(check="two", ok=True)
say(begin="three"); say(check="three", ok=True)
"""


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit('CUDA error: an illegal address')", "exit code 1: CUDA error: an illegal"),
        ("signal.pause()", "took more than"),
    ],
)
def test_a_check_that_ends_its_process(gpu: Any, trouble: str, why: str, tmp_path: Path) -> None:
    found = step_of(gpu, CHECKS.format(trouble=trouble), tmp_path, limit_s=5.5)
    assert found.oks == [True, False, None]
    assert found.checks["two"]["why"].startswith(why)
    assert not found.failed


def test_rows_errors_and_rows_without_time(gpu: Any, tmp_path: Path) -> None:
    found = step_of(gpu, "say(x=1, error='wrong by 2'); say(x=2, left_out='x: no time')", tmp_path)
    assert (found.failed, found.left_out) == (["wrong by 2"], ["x: no time"])
    found = step_of(gpu, "import a_package_that_is_not_here", tmp_path)
    assert found.failed[0].startswith("exit code 1") and "ModuleNotFound" in found.failed[0]
    late = gpu.run_apart(9.0, time.monotonic() + 1, ["false"])
    assert late.left_out == ["no time was left"]


def test_a_step_that_is_killed_while_it_writes(gpu: Any, tmp_path: Path) -> None:
    """Its whole rows stay, and the processes that it started go with it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = "import signal, sys\np = open(sys.argv[1], 'wb', 0)\np.write(b'x')\nsignal.pause()"
    source = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, {str(pipe)!r}])\n"
        'rows.write(\'{"a": 1}\\n{"a": \')\nrows.flush()\nsignal.pause()\n'
    )
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as end:
        found = step_of(gpu, source, tmp_path, limit_s=5.5)
        assert (found.rows, len(found.failed)) == ([{"a": 1}], 1)
        assert found.failed[0].startswith("took more than")
        assert end.read(1) == b"x"
        hangs_up = select.poll()
        hangs_up.register(end, 0)
        assert hangs_up.poll(10_000), "the child lives on"


SMI = """#!/bin/bash
case ${{1#--query-gpu=}} in
    mig.mode.current) exit 2;;
    compute_mode) echo {mode};;
    *) echo "<${{1#--query-gpu=}}>";;
esac
"""


@pytest.mark.parametrize("mode", ["Default", "Exclusive_Process", None])
def test_facts(mode: str | None, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that the driver does not know costs no other, nor does a missing driver."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    if mode is not None:
        (tmp_path / "nvidia-smi").write_text(SMI.format(mode=mode))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    setup = gpu.Setup(torch.device("cpu"), smoke=True)
    rows = {row["fact"]: row for row in gpu.facts(setup)}
    assert rows["host"]["note"].startswith("NVIDIA_TF32_OVERRIDE")
    if mode is None:
        assert rows["GPU"]["value"] is None and "nvidia-smi" in rows["GPU"]["why"]
        return
    values = rows["GPU"]["value"]
    assert values["name"] == "<name>" and "mig.mode.current" not in values
    assert ("note" in rows["GPU"]) == (mode != "Default")


@pytest.mark.parametrize(
    ("checks", "layers", "right", "exit_code"),
    [
        ([True], {}, (1, 1), 0),
        ([True], {"left_out": ["no time was left"]}, (1, 1), 3),
        ([True], {"failed": ["exit code 1"]}, (1, 1), 1),
        ([True, False, None], {"left_out": ["not installed: pytest"]}, (1, 3), 1),
    ],
)
def test_verdict_and_exit_code(
    gpu: Any, tmp_path: Path, checks: list[bool | None], layers: dict[str, Any],
    right: tuple[int, int], exit_code: int,
) -> None:  # fmt: skip
    """A check that was not run is not right."""
    report = gpu.Report(tmp_path / "r.json", smoke=False)
    steps = {step.name: step for step in gpu.STEPS}
    rows = {str(i): {"check": str(i), "ok": ok, "why": "w"} for i, ok in enumerate(checks)}
    report.add(steps["kernels"], gpu.Outcome(checks=rows))
    report.add(steps["layers"], gpu.Outcome(**layers))
    assert (report.right, report.exit_code) == (right, exit_code)
    shown = rf"RIGHT {right[0]}/{right[1]} · FAST 0/6 · \d:\d\d min · r\.json"
    assert re.fullmatch(shown, report.verdict)
    assert json.loads((tmp_path / "r.json").read_text())["steps"]["kernels"]["checks"]


def test_a_wrong_result_shows_no_rate(gpu: Any) -> None:
    right = gpu.measured({"rows": 8}, 0.01, 0.02, tflops=100.0)
    assert right == {"rows": 8, "tflops": 100.0, "max_error": 0.01}
    for error in (0.03, float("nan"), float("inf")):
        wrong = gpu.measured({"rows": 8}, error, 0.02, tflops=100.0)
        assert "tflops" not in wrong and "no rate is shown" in wrong["error"]
        json.dumps(wrong, allow_nan=False)


def layer(rows: int, how: str, tflops: float, host_us: float) -> dict[str, Any]:
    return {"model": "8b", "rows": rows, "how": how, "tflops": tflops, "host_us": host_us}


def instant(num_r_workers: int, rows: int, ratio: float) -> dict[str, Any]:
    return {"r_workers": num_r_workers, "lanes": 2, "rows_a_lane": rows, "ratio": ratio}


def engine(name: str, share: float, rate: float) -> dict[str, Any]:
    return {"engine": name, "tokens_per_s": rate, "asked_kv_share": share}


def test_goals_are_judged_by_the_worst_row_that_an_engine_would_run(gpu: Any) -> None:
    steps = {
        "ceilings": [{"what": "matmul", "tflops": 100.0}],
        "layers": [
            layer(64, "graph", 20.0, 14.0), layer(256, "graph", 61.0, 9.0),
            layer(256, "eager", 40.0, 99.0), layer(512, "graph", 80.0, 9.0),
        ],
        "instant": [
            instant(1, 256, 1.0), instant(16, 256, 2.7), instant(16, 64, 4.0),
            {**instant(1, 256, 2.0), "lanes": 1},
        ],
        "engines": [
            engine(gpu.ON_GPU, 1.0, 100.0), engine(gpu.BOTH_SIDES, 1.0, 98.0),
            engine(gpu.ON_GPU, 0.1, 10.0), engine(gpu.BOTH_SIDES, 0.1, 15.0),
        ],
    }  # fmt: skip
    found = list(gpu.goals(steps))
    assert [(goal["measured"], goal["met"]) for goal in found] == [
        (0.61, True), (2.7, False), (14.0, True), (None, None), (0.98, False), (1.5, True),
    ]  # fmt: skip
    assert gpu.shown_goal(found[4]).endswith(">= 0.99  model 1  measured 0.98: MISSED")
    # A goal isn't met by the rows that came out right.
    steps["instant"][1] = {"lanes": 2, "rows_a_lane": 256, "max_error": 1.0, "error": "wrong"}
    assert list(gpu.goals(steps))[1]["met"] is None
