"""S-workers that are killed at random moments of a job, and others that go on
with its session: R-workers at addresses outlive them."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from mpi_launch import Running, running
from small_jobs import (
    FASTDECODE,
    LIMIT_S,
    PARTITIONS,
    PATHS,
    SmallJobs,
    addresses,
    is_replaced,
)

PHASES = ("start", "greeting", "running", "running", "running")
"""In which the S-workers of one job are killed, one after another. ``start`` is
all before R-workers are greeted; ``greeting``: those that are greeted, and are
asked what they have kept."""
TIMES = 6
"""Longer than jobs that are hit once: so many S-workers have to be killed before
the end."""
GREETING_S = 0.4
PARTING_S = 25.0
_KEPT = re.compile(r"R-workers have kept (\d+) of (\d+) tokens of (\d+) unfinished")


@dataclass(frozen=True)
class Return:
    """What happens in one job."""

    partition: str
    phases: tuple[str, ...]


@dataclass
class Report:
    """What became of it."""

    job: Return
    kills: list[str] = field(default_factory=list)
    """Phases in which an S-worker was there to be killed."""
    kept: list[tuple[int, int] | None] = field(default_factory=list)
    """Of each S-worker: tokens that R-workers had kept, of those that were
    known; None: it knew none, or was killed before it had asked."""
    exit_code: int | None = None
    seconds: float = 0.0
    num_missing: int = 0
    num_changed: int = 0
    orphans: list[str] = field(default_factory=list)
    last_words: str = ""

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.orphans:
            return "hung"
        if self.num_changed:
            return "changed"
        return "right" if self.exit_code == 0 and not self.num_missing else "lost"


def returns(number: int, chance: random.Random) -> list[Return]:
    """Jobs whose S-workers are killed so often together."""
    chosen: list[Return] = []
    partitions = [name for name in PARTITIONS if not is_replaced(name)]
    while sum(len(job.phases) for job in chosen) < number:
        partition = partitions[len(chosen) % len(partitions)]
        chosen.append(Return(partition, tuple(chance.sample(PHASES, len(PHASES)))))
    return chosen


class Returns:
    """Runs such jobs; see ``losses.Losses``."""

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance
        self._lengths: dict[str, float] = {}

    def kill(self, job: Return) -> Report:
        """One job."""
        lengths = self._measured()
        report, began = Report(job), time.monotonic()
        self._jobs.clear()
        with addresses(2, PATHS) as (workers, at):
            for phase in job.phases:
                self._kill_one(report, phase, at, lengths)
            with running(self._command(job, at), **PATHS) as command:
                outcome = command.wait(LIMIT_S)
            _note_kept(report, outcome.output)
            report.orphans = outcome.orphans + _left(workers)
        report.exit_code, report.seconds = outcome.exit_code, time.monotonic() - began
        answers, expected = self._jobs.answers(), self._jobs.expected
        report.num_missing = len(expected) - len(answers)
        report.num_changed = sum(answers[key] != expected[key] for key in answers)
        report.last_words = outcome.output.strip()[-3000:]
        return report

    def _command(self, job: Return, at: Sequence[str]) -> list[str]:
        words = [*self._jobs.words("run-batch"), "--resume", *PARTITIONS[job.partition]]
        return [*FASTDECODE, *words, *at]

    def _kill_one(
        self, report: Report, phase: str, at: Sequence[str], lengths: dict[str, float]
    ) -> None:
        with running(self._command(report.job, at), **PATHS) as command:
            with contextlib.suppress(AssertionError):  # it has ended
                if phase != "start":
                    command.wait_until(lambda: "greeting" in command.output(), timeout_s=LIMIT_S)
                end = time.monotonic() + self._chance.uniform(0, lengths[phase])
                command.wait_until(lambda: time.monotonic() >= end)
                command.process.send_signal(signal.SIGKILL)
                report.kills.append(phase)
            _note_kept(report, command.wait(LIMIT_S).output)

    def _measured(self) -> dict[str, float]:
        """How long each phase is, in s, in a job in which nothing happens."""
        if not self._lengths:
            self._jobs.clear()
            with addresses(2, PATHS) as (_, at):
                began = time.monotonic()
                with running(self._command(Return("sequences", ()), at), **PATHS) as command:
                    command.wait_until(lambda: "greeting" in command.output(), timeout_s=LIMIT_S)
                    greeted = time.monotonic()
                    outcome = command.wait(LIMIT_S)
                assert outcome.exit_code == 0, outcome
                assert self._jobs.answers() == self._jobs.expected
            running_s = max(0.5, time.monotonic() - greeted) / PHASES.count("running")
            start_s = greeted - began
            self._lengths = {"start": start_s, "greeting": GREETING_S, "running": running_s}
        return self._lengths


def _note_kept(report: Report, output: str) -> None:
    found = _KEPT.search(output)
    report.kept.append(None if found is None else (int(found[1]), int(found[2])))


def _left(workers: Sequence[Running]) -> list[str]:
    """R-workers that go on though their S-worker has taken its leave."""
    processes = [process for worker in workers for process in worker.processes()]
    left = psutil.wait_procs(processes, PARTING_S)[1]
    return [" ".join(process.cmdline()) for process in left]


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    shown = {"partition": report.job.partition, **vars(report), "verdict": report.verdict}
    del shown["job"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
