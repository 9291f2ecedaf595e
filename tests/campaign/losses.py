"""R-workers that are killed, stopped or terminated at random moments of a job."""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from small_jobs import LIMIT_S, PARTITIONS, PHASES, Job, SmallJobs

TROUBLES = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
TRANSPORTS = ("mpi", "launch", "zmq")
COMPILING_S = 15.0
NOBODY_CAN = ("the MPI job can't begin", "MPI hasn't returned")
"""Said by jobs that end because MPI can't go on, as docs/cluster.md says."""


@dataclass(frozen=True)
class Loss:
    """What happens in one job."""

    transport: str
    partition: str
    trouble: str
    phase: str
    num_hit: int


@dataclass(frozen=True)
class Report:
    """What became of it."""

    loss: Loss
    num_hit: int
    """R-workers that were there to be hit, in time."""
    exit_code: int | None
    seconds: float
    num_missing: int
    num_changed: int
    orphans: list[str]
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.orphans:
            return "hung"
        if self.num_changed:
            return "changed"
        if not self.num_missing:
            return "right"
        told = self.exit_code == 4 and any(words in self.last_words for words in NOBODY_CAN)
        return "ended by MPI" if told else "lost"


def losses(number: int, chance: random.Random) -> list[Loss]:
    """Every transport, partition, trouble and phase in turn, shuffled; in one
    of ten jobs, kernels are compiled meanwhile."""
    kinds = [
        Loss(transport, partition, trouble.name, phase, chance.choice((1, 1, 2)))
        for transport in TRANSPORTS
        for partition in PARTITIONS
        for trouble in TROUBLES
        for phase in PHASES
    ]
    compiling = [
        Loss(transport, "sequences", trouble.name, "compiling", 1)
        for transport in TRANSPORTS
        for trouble in TROUBLES
    ]
    chosen: list[Loss] = []
    while len(chosen) < number:
        chosen += chance.sample(kinds, len(kinds))
    for place, loss in enumerate(chance.sample(compiling, len(compiling))):
        chosen.insert(10 * place + 9, loss)
    return chosen[:number]


class Losses:
    """Runs such jobs.

    Args:
        jobs: starts them.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance
        self._lengths: dict[tuple[str, str], dict[str, float]] = {}

    def lose(self, loss: Loss) -> Report:
        """One job with its loss: always one R-worker more than are hit."""
        longest = self._longest(loss)
        self._jobs.clear()
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as nothing:
            fresh = {"NUMBA_CACHE_DIR": nothing} if loss.phase == "compiling" else {}
            options = PARTITIONS[loss.partition]
            with self._jobs.start(loss.transport, loss.num_hit + 1, options, **fresh) as job:
                phase = "greeting" if loss.phase == "compiling" else loss.phase
                hit = self._hit(job, loss, phase, longest)
                outcome = job.command.wait(LIMIT_S)
        answers, expected = self._jobs.answers(), self._jobs.expected
        changed = sum(answers[key] != expected[key] for key in answers)
        return Report(
            loss,
            hit,
            outcome.exit_code,
            outcome.seconds,
            len(expected) - len(answers),
            changed,
            outcome.orphans,
            outcome.output.strip()[-3000:],
        )

    def _hit(self, job: Job, loss: Loss, phase: str, longest_s: float) -> int:
        hit: set[int] = set()
        with contextlib.suppress(AssertionError):  # it has ended, or gone wrong: that will be seen
            job.command.wait_until(self._jobs.has_begun(job, phase), timeout_s=LIMIT_S)
            for _ in range(loss.num_hit):
                pause(job, self._chance.uniform(0, longest_s))
                whole = [process for process in job.victims() if process.pid not in hit]
                for victim in self._chance.sample(whole, min(1, len(whole))):
                    with contextlib.suppress(Exception):  # it has ended
                        victim.send_signal(signal.Signals[loss.trouble])
                        hit.add(victim.pid)
        return len(hit)

    def _longest(self, loss: Loss) -> float:
        """How long a phase is, in s, in a job in which nothing happens."""
        if loss.phase == "compiling":
            return COMPILING_S
        kind = loss.transport, loss.partition
        if kind not in self._lengths:
            self._lengths[kind] = self._measure(*kind)
        return self._lengths[kind][loss.phase]

    def _measure(self, transport: str, partition: str) -> dict[str, float]:
        self._jobs.clear()
        begins = []
        with self._jobs.start(transport, 2, PARTITIONS[partition]) as job:
            for phase in PHASES:
                job.command.wait_until(self._jobs.has_begun(job, phase), timeout_s=LIMIT_S)
                begins.append(time.monotonic())
            outcome = job.command.wait(LIMIT_S)
        assert outcome.exit_code == 0 and self._jobs.answers() == self._jobs.expected, outcome
        begins.append(time.monotonic())
        return {phase: max(0.05, begins[i + 1] - begins[i]) for i, phase in enumerate(PHASES)}


def pause(job: Job, seconds: float) -> None:
    """Raises AssertionError if the job ends meanwhile."""
    end = time.monotonic() + seconds
    job.command.wait_until(lambda: time.monotonic() >= end)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    shown = {**vars(report.loss), **vars(report), "verdict": report.verdict}
    del shown["loss"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
