"""The GPU suite's measurements run, with tiny sizes, wherever they are; whole engines aside, which take long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTIONS = ("ceilings", "layers", "staging", "instant", "prefill", "decode_attention")


def test_every_section_gives_rows(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    command = [sys.executable, "benchmarks/gpu_suite.py", "--smoke", "--out", str(out), "--sections", *SECTIONS]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["smoke"] and not report["failed"]
    assert all(report["sections"][section] for section in SECTIONS)
    assert {"machine", "commit", "command"} <= report.keys()
    instant = {(row["model"], row["lanes"]): row["ratio"] for row in report["sections"]["instant"]}
    assert instant.keys() == {(model, lanes) for model in ("7b", "8b") for lanes in (1, 2)}
    assert all(ratio >= 1 for ratio in instant.values())  # compute is part of the step
