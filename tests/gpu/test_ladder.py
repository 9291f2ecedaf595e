"""The ladder of a first contact with a GPU (benchmarks/gpu_ladder.py): made-up
steps in real processes that crash, hang, are killed or lack a package."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAR_S = 60.0
SAY = (
    "import json, os, signal, sys\nout = open(sys.argv[1], 'a')\n"
    + """
after = sys.argv[2] if len(sys.argv) > 2 else None
def say(**row):
    print(json.dumps(row), file=out, flush=True)
"""
)
CHECKS = (
    SAY
    + """
names = ["one", "two", "three", "four"]
say(plan=names)
for name in names[0 if after is None else names.index(after) + 1:]:
    say(begin=name)
    if name == "two":
        {trouble}
    say(check=name, ok=True, max_error=0.0, bound=1.0)
"""
)


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_ladder

    monkeypatch.setattr(gpu_ladder, "LEAST_S", 0.2)
    return gpu_ladder


Run = Callable[..., Any]


@pytest.fixture
def run(ladder: Any) -> Run:
    """Run a step whose process has this source."""

    def run(source: str, *, limit_s: float = FAR_S, **more: Any) -> Any:
        def command(step: Any, rows: Path, limit_s: float, after: str | None) -> list[str]:
            return [sys.executable, "-c", source, str(rows), *([after] if after else [])]

        options = {key: more.pop(key) for key in ("probe", "has_package") if key in more}
        steps = ladder.Ladder(command, **options)
        step = ladder.Step("made up", "right", limit_s, **more)
        outcome = steps.run(step, time.monotonic() + FAR_S)
        outcome.ladder = steps
        return outcome

    return run


def oks(outcome: Any) -> dict[str, Any]:
    return {name: check["ok"] for name, check in outcome.checks.items()}


def test_rows_and_checks_come_as_they_were_said(run: Run) -> None:
    found = run(CHECKS.format(trouble="say(model='8b', tflops=1.5)"))
    assert oks(found) == dict.fromkeys(("one", "two", "three", "four"), True)
    assert found.rows == [{"model": "8b", "tflops": 1.5}]
    assert not found.failed and not found.left_out


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit('CUDA error: an illegal address')", "exit code 1: CUDA error: an illegal"),
        ("say(check=name, ok=False, why='wrong'); sys.exit(1)", "wrong"),
    ],
)
def test_behind_a_check_that_ends_its_process_a_new_one_goes_on(
    trouble: str, why: str, run: Run
) -> None:
    found = run(CHECKS.format(trouble=trouble))
    assert oks(found) == {"one": True, "two": False, "three": True, "four": True}
    assert found.checks["two"]["why"].startswith(why)
    assert not found.failed  # it is told once


def test_a_check_that_hangs_is_named_and_the_next_one_is_made(run: Run) -> None:
    found = run(CHECKS.format(trouble="signal.pause()"), case_limit_s=1.0)
    assert oks(found) == {"one": True, "two": False, "three": True, "four": True}
    assert found.checks["two"]["why"] == "took more than 1 s"


def test_what_there_was_no_time_for_is_not_called_wrong(run: Run, ladder: Any) -> None:
    found = run(CHECKS.format(trouble="signal.pause()"), limit_s=2.5)
    assert oks(found) == {"one": True, "two": False, "three": None, "four": None}
    assert found.checks["three"]["why"] == ladder.NO_TIME
    assert found.left_out == [ladder.NO_TIME]


def test_a_missing_package_costs_its_own_step_only(run: Run) -> None:
    source = CHECKS.format(trouble="pass")
    found = run(source, needs=("torch",), has_package=lambda name: name != "torch")
    assert (found.left_out, found.failed, found.checks) == (["not installed: torch"], [], {})
    assert len(run(source, needs=("json",)).checks) == 4


def test_a_process_that_fails_before_its_first_check(run: Run) -> None:
    found = run("import a_package_that_is_not_here")
    assert "ModuleNotFoundError" in found.failed[0] and found.failed[0].startswith("exit code 1")
    assert len(found.failed) == 1


def test_rows_with_errors_and_rows_for_which_no_time_was_left(run: Run) -> None:
    found = run(SAY + "say(x=1, error='wrong by 2'); say(x=2, left_out='x: no time was left')")
    assert (found.failed, found.left_out) == (["wrong by 2"], ["x: no time was left"])


def test_a_step_that_is_killed_while_it_writes(run: Run, tmp_path: Path) -> None:
    """Its whole rows stay, and the processes that it started go with it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = "import signal, sys\np = open(sys.argv[1], 'wb', 0)\np.write(b'x')\nsignal.pause()"
    source = (
        "import signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, {str(pipe)!r}])\n"
        "rows = open(sys.argv[1], 'w')\n"
        'rows.write(\'{"a": 1}\\n{"a": \')\nrows.flush()\nsignal.pause()\n'
    )
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as end:
        found = run(source, limit_s=2.5)
        assert (found.rows, len(found.failed)) == ([{"a": 1}], 1)
        assert found.failed[0].startswith("took more than")
        assert end.read(1) == b"x"
        hangs_up = select.poll()
        hangs_up.register(end, 0)
        assert hangs_up.poll(10_000), "the child lives on"


@pytest.mark.parametrize(("probe", "is_alive"), [("pass", True), ("raise SystemExit(1)", False)])
def test_after_a_time_out_the_gpu_is_asked_whether_it_computes(
    probe: str, is_alive: bool, run: Run, ladder: Any
) -> None:
    source = CHECKS.format(trouble="signal.pause()")
    found = run(source, case_limit_s=1.0, probe=[sys.executable, "-c", probe])
    assert found.ladder.hangs != is_alive
    assert oks(found) == {"one": True, "two": False} | dict.fromkeys(
        ("three", "four"), True if is_alive else None
    )
    if not is_alive:
        assert found.failed == [ladder.HANGS]
        again = found.ladder.run(ladder.Step("next", "fast", 9), time.monotonic() + FAR_S)
        assert again.left_out == [ladder.HANGS] and not again.rows


def test_a_killed_process_that_does_not_end_is_not_waited_for(ladder: Any) -> None:
    """As one does that waits for a driver that hangs."""

    waited_s: list[float | None] = []

    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            waited_s.append(timeout)
            raise subprocess.TimeoutExpired("stuck", timeout or 0)

    stuck = Stuck([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    end = ladder._watch(stuck, 0.1, lambda: 0, 1e9)
    assert end.is_stuck and waited_s[-1] == ladder.DEATH_S == 10
    assert end.why == "took more than 0 s, and can't be killed"
    assert subprocess.Popen.wait(stuck, 10) < 0
