"""The GPU suite's measurements run, with tiny sizes, wherever they are; whole engines aside, which take long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTIONS = ("ceilings", "layers", "staging", "instant", "prefill", "decode_attention")


def suite(out: Path, *options: str) -> tuple[int, dict[str, dict[str, list[dict[str, object]]]], str]:
    """Exit code, report and output."""
    command = [sys.executable, "benchmarks/gpu_suite.py", "--smoke", "--out", str(out), *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_every_section_gives_rows(tmp_path: Path) -> None:
    exit_code, report, output = suite(tmp_path / "suite.json", "--sections", *SECTIONS)
    assert exit_code == 0, output
    assert report["smoke"] and not report["failed"]
    assert all(report["sections"][section] for section in SECTIONS)
    assert {"machine", "commit", "command"} <= report.keys()
    instant = {(row["model"], row["lanes"]): row["ratio"] for row in report["sections"]["instant"]}
    assert instant.keys() == {(model, lanes) for model in ("7b", "8b") for lanes in (1, 2)}
    assert all(float(str(ratio)) >= 1 for ratio in instant.values())  # compute is part of the step


def test_a_section_that_fails_is_told(tmp_path: Path) -> None:
    """Its rows so far stay, and the exit code is not that of a success."""
    exit_code, report, output = suite(tmp_path / "suite.json", "--sections", "ceilings", "--limit-s", "0.5")
    assert exit_code == 1
    assert report["failed"] == {"ceilings": ["no time was left"]} and "FAILED: ceilings" in output
