"""Runs the steps of a first contact with a GPU: each in processes of its own, so
that whatever happens in one costs no other its results. Used by gpu_first.py;
needs nothing but Python.

A step's process appends lines of JSON to a file:

* ``{"plan": [names]}``: the checks that it is about to make;
* ``{"begin": name}``: it begins one of them; every check has a line of its own, so
  that the last one is known when the process ends or hangs;
* ``{"check": name, "ok": true, ...}``: how it ended; ``ok`` is false if the device
  is wrong, null if the check can't be made here (``why`` says what is lacking);
* anything else: a row of measurements; with ``error`` if it went wrong, with
  ``left_out`` if there was no time for it.

Behind a check that ended its process, the step goes on in a new one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LEAST_S = 5.0
"""With less time left nothing is started."""
DEATH_S = 10.0
"""How long a killed process may take to end. One that waits for a driver that
hangs never does."""
PROBE_S = 30.0
"""How long a GPU may take to add two numbers, in a new process."""
_LOOK_EVERY_S = 0.05
_LAST_WORDS = 2000
HANGS = "the GPU hangs: the rest isn't run"
NO_TIME = "no time was left"
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What is run together."""

    name: str
    part: str
    """facts, right, fast or engines."""
    limit_s: float
    """For all of it."""
    case_limit_s: float = 1e9
    """For a process to write nothing."""
    needs: tuple[str, ...] = ()
    """Packages without which nothing of it can be run."""
    environ: dict[str, str] = field(default_factory=dict)
    is_more: bool = False
    """It is beside the verdict."""


@dataclass
class Outcome:
    """What came of a step."""

    rows: list[Row] = field(default_factory=list)
    checks: dict[str, Row] = field(default_factory=dict)
    """By name, in the order of the plan."""
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What wasn't measured, and why: nothing is known to be wrong."""
    seconds: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a check is still to be made."""
        return any("ok" not in row for row in self.checks.values())

    def take(self, process: _Process) -> None:
        """Add what a process has come to."""
        for name, row in process.checks.items():
            if "ok" in row or name not in self.checks:
                self.checks[name] = row
        if process.ended_by is not None and process.open_check is not None:
            name = process.open_check
            self.checks[name] = {"check": name, "ok": False, "why": process.ended_by}
        elif process.ended_by is not None and not process.was_told:
            self.failed.append(process.ended_by)
        self.rows += process.rows
        self.failed += [str(row["error"]) for row in process.rows if "error" in row]
        self.left_out += [str(row["left_out"]) for row in process.rows if "left_out" in row]

    def close(self, why: str | None) -> None:
        """Say of every check that wasn't made why it wasn't."""
        why = why or (self.left_out or self.failed or ["it wasn't begun"])[0]
        for name, row in self.checks.items():
            if "ok" not in row:
                self.checks[name] = {"check": name, "ok": None, "why": why}

    @property
    def as_json(self) -> Row:
        return {
            "seconds": round(self.seconds, 1),
            "rows": self.rows,
            "checks": list(self.checks.values()),
            "failed": self.failed,
            "left_out": self.left_out,
        }


class Ladder:
    """Runs steps one after another.

    Args:
        command: of a step's process: the step, the file for its rows, seconds
            that it has, and the check behind which it goes on.
        probe: a command that ends with exit code 0 if the GPU still computes;
            None: there is none.
        has_package: whether a package is installed.
    """

    def __init__(
        self,
        command: Callable[[Step, Path, float, str | None], list[str]],
        probe: Sequence[str] | None = None,
        has_package: Callable[[str], bool] = lambda name: bool(importlib.util.find_spec(name)),
    ) -> None:
        self._command, self._probe, self._has_package = command, probe, has_package
        self.hangs = False
        """The GPU does: nothing more is run."""

    def run(self, step: Step, until_s: float) -> Outcome:
        """
        Args:
            until_s: when it has to end, on ``time.monotonic``.
        """
        started = time.monotonic()
        outcome = Outcome()
        missing = [package for package in step.needs if not self._has_package(package)]
        if missing:
            outcome.left_out.append(f"not installed: {', '.join(missing)}")
        elif self.hangs:
            outcome.left_out.append(HANGS)
        else:
            self._run(step, min(until_s, started + step.limit_s), outcome)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _run(self, step: Step, until_s: float, outcome: Outcome) -> None:
        after: str | None = None
        while True:
            left_s = until_s - time.monotonic()
            if left_s < LEAST_S:
                outcome.left_out.append(NO_TIME)
                break
            process = _Process(self._command, step, left_s, after)
            outcome.take(process)
            if process.was_killed and (process.is_stuck or not self._answers()):
                self.hangs = True
                outcome.failed.append(HANGS)
            after = process.last
            if process.ended_by is None or self.hangs or after is None or not outcome.is_open:
                break
        outcome.close(HANGS if self.hangs else None)

    def _answers(self) -> bool:
        """Whether the GPU still does."""
        if self._probe is None:
            return True
        with tempfile.TemporaryFile() as words:
            end = _watch(_start(self._probe, words, {}), PROBE_S, lambda: 0.0, 1e9)
        return end.exit_code == 0


@dataclass(frozen=True)
class _End:
    """How a process ended."""

    exit_code: int | None
    """None: it was killed."""
    why: str = ""
    is_stuck: bool = False
    """It was killed, and hasn't ended."""


class _Process:
    """One process of a step, run to its end."""

    def __init__(
        self,
        command: Callable[[Step, Path, float, str | None], list[str]],
        step: Step,
        left_s: float,
        after: str | None,
    ) -> None:
        self.rows: list[Row] = []
        self.checks: dict[str, Row] = {}
        self.last: str | None = None
        """The last check that was begun."""
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as words:
            file = Path(directory, "rows.jsonl")
            file.touch()
            # It is told of a nearer end than it has, so that it can say what it leaves out.
            process = _start(command(step, file, 0.9 * left_s, after), words, step.environ)
            end = _watch(process, left_s, lambda: file.stat().st_size, step.case_limit_s)
            self._read(file.read_text(errors="replace"))
            words.seek(0)
            said = words.read().decode(errors="replace").strip()[-_LAST_WORDS:]
        self.is_stuck, self.was_killed = end.is_stuck, end.exit_code is None
        self.ended_by = None if end.exit_code == 0 else f"{end.why}: {said}" if said else end.why

    @property
    def open_check(self) -> str | None:
        """Begun, and not ended."""
        return None if self.last is None or "ok" in self.checks[self.last] else self.last

    @property
    def was_told(self) -> bool:
        """It has said itself what went wrong."""
        return self.last is not None and not self.was_killed

    def _read(self, text: str) -> None:
        for row in _whole_lines(text):
            if "plan" in row:
                self.checks = {name: {"check": name} for name in row["plan"]}
            elif "begin" in row:
                self.last = row["begin"]
                self.checks.setdefault(row["begin"], {"check": row["begin"]})
            elif "check" in row:
                self.checks[row["check"]] = row
            else:
                self.rows.append(row)


def _whole_lines(text: str) -> Iterator[Row]:
    """A process that is killed while it writes leaves half a line."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _start(
    command: Sequence[str], words: IO[bytes], environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=words,
        start_new_session=True,
        env={**os.environ, **environ},
    )


def _watch(
    process: subprocess.Popen[bytes],
    limit_s: float,
    progress: Callable[[], float],
    quiet_s: float,
    death_s: float = DEATH_S,
) -> _End:
    """Wait for a process, but no longer than it may take, and no longer than it
    may be quiet. Nothing that it started outlives it."""
    began = heard = time.monotonic()
    so_far = progress()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _end_of(process.wait(_LOOK_EVERY_S))
            now = time.monotonic()
            if progress() != so_far:
                so_far, heard = progress(), now
            if now - began > limit_s or now - heard > quiet_s:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
    why = f"took more than {limit_s if now - began > limit_s else quiet_s:.0f} s"
    try:
        process.wait(death_s)
    except subprocess.TimeoutExpired:
        return _End(None, f"{why}, and can't be killed", is_stuck=True)
    return _End(None, why)


def _end_of(exit_code: int) -> _End:
    if exit_code >= 0:
        return _End(exit_code, f"exit code {exit_code}")
    return _End(exit_code, f"killed by {signal.Signals(-exit_code).name}")
