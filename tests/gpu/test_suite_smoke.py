"""The GPU suite's measurements run, with tiny sizes, wherever they are; whole
engines aside, which take long."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from examples import TRIES_ALL

ROOT = Path(__file__).parents[2]
# Each is a process that imports torch.
SECTIONS = ("layers", "instant")
MORE_SECTIONS = (
    *("prefill", "decode_attention", "ceilings", "staging", "whole_steps"),
    *("copies", "prompt_lengths", "host_turns", "swap"),
)


def suite(
    out: Path, *options: str
) -> tuple[int, dict[str, dict[str, list[dict[str, object]]]], str]:
    """Exit code, report and output."""
    command = [sys.executable, "benchmarks/gpu_suite.py", "--smoke", "--out", str(out), *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_every_section_gives_rows(tmp_path: Path) -> None:
    sections = SECTIONS + MORE_SECTIONS * TRIES_ALL
    exit_code, report, output = suite(tmp_path / "suite.json", "--sections", *sections)
    assert exit_code == 0, output
    assert report["smoke"] and not report["failed"]
    assert all(report["sections"][section] for section in sections)
    assert {"machine", "commit", "command"} <= report.keys()
    instant = [(row["model"], row["lanes"]) for row in report["sections"]["instant"]]
    assert sorted(instant) == [(model, lanes) for model in ("7b", "8b") for lanes in (1, 2)]


def test_two_calls_of_under_ten_minutes_have_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_end_to_end import LIMIT_S
    from gpu_suite import CALL_LIMIT_S, CALLS, LIMITS_S

    script = (ROOT / "benchmarks" / "gpu_suite.sh").read_text()
    tests_s, sanitizer_s = sorted(map(float, re.findall(r"timeout -k 5 (\d+)", script)))[::-1]
    assert sorted(sum(CALLS.values(), ())) == sorted(LIMITS_S)
    for call, before_s in (("measure", tests_s), ("end-to-end", 0.0), ("more", sanitizer_s)):
        assert f"--call {call}" in script
        assert before_s + sum(LIMITS_S[section] for section in CALLS[call]) <= CALL_LIMIT_S < 600
    assert LIMITS_S["end_to_end"] >= 6 * LIMIT_S


def test_a_section_that_fails_is_told(tmp_path: Path) -> None:
    """Its rows so far stay, and the exit code is not that of a success."""
    exit_code, report, output = suite(
        tmp_path / "suite.json", "--sections", "ceilings", "--limit-s", "0.5"
    )
    assert exit_code == 1
    assert report["failed"] == {"ceilings": ["no time was left"]} and "FAILED: ceilings" in output


def test_a_section_that_is_killed_while_writing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its whole rows stay, and the processes that it started go with it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_suite

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "engine.py").write_text(
        "import signal, sys\npipe = open(sys.argv[1], "
        "'w')\npipe.write('x')\npipe.flush()\nsignal.pause()\n"
    )
    (tmp_path / "gpu_sections.py").write_text(
        "import signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, {str(tmp_path / 'engine.py')!r}, {str(pipe)!r}])\n"
        "rows = open(sys.argv[sys.argv.index('--rows') + 1], 'w')\n"
        "rows.write('[1]\\n[1, ')\nrows.flush()\nsignal.pause()\n"
    )
    monkeypatch.setattr(gpu_suite, "__file__", str(tmp_path / "gpu_suite.py"))
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as engine:
        assert gpu_suite.run_section("layers", smoke=True, limit_s=5) == (
            [[1]],
            "took more than 5 s",
        )
        assert engine.read(1) == b"x"
        hangs_up = select.poll()
        hangs_up.register(engine, 0)
        assert hangs_up.poll(10_000), "the engine lives on"


def test_goals_are_judged_by_the_worst_that_an_engine_would_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_suite import goals

    def layer(rows: int, how: str, tflops: float, host_us: float) -> dict[str, object]:
        return {"model": "8b", "rows": rows, "how": how, "tflops": tflops, "host_us": host_us}

    sections = {
        "ceilings": [{"what": "matmul", "tflops": 100.0}],
        "layers": [
            layer(64, "graph", 20.0, 14.0), layer(256, "graph", 61.0, 9.0), layer(256,
                "graph, unfused", 50.0, 99.0),
            layer(256, "eager", 40.0, 99.0), layer(1024, "eager", 80.0, 99.0), {"model": "8b",
                "what": "memory"},
        ],
        "instant": [{"lanes": 1, "rows_a_lane": 256, "ratio": 2.0}, {"lanes": 2, "rows_a_lane": 256,
            "ratio": 1.2}],
    }  # fmt: skip
    found = [(goal["measured"], goal["met"]) for goal in goals(sections)]
    assert found == [(0.61, True), (1.2, False), (14.0, True), *[(None, None)] * 5]


def test_both_sides_are_held_against_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_suite import _goal, goals

    def row(engine: str, rate: float, **more: float) -> dict[str, object]:
        sizes = {"requests": 256, "prompt": 512, "new": 64}
        return {"engine": engine, "tokens_per_s": rate, **sizes, **more}

    alone, both = "KV on the GPU", "KV on both sides"
    rows = [
        row(alone, 100.0), row(both, 98.0), row("R-workers", 20.0),
        row(alone, 10.0, gpu_fraction=0.2), row(both, 15.0, gpu_fraction=0.2),
        {"engine": both, "error": "no time was left"},
    ]  # fmt: skip
    fits, short = list(goals({"end_to_end": rows}))[4:6]
    assert (fits["measured"], fits["met"], short["measured"], short["met"]) == (
        0.98, False, 1.5, True,
    )  # fmt: skip
    assert _goal(fits).endswith(">= 0.99  model 1  measured 0.98: MISSED")
    assert _goal(short).endswith(">= 1  model 1.4  measured 1.5: met")
