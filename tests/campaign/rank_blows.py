"""Ranks of MPI jobs that are killed and stopped at random moments of its phases:
what the campaign's jobs of stages and of instances have in common."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from losses import pause
from mpi_launch import Outcome
from small_jobs import PHASES, Job, SmallJobs

LIMIT_S = 150.0
"""A job that takes longer hangs: undisturbed it takes some ten seconds."""
GOING_S = 30.0
Start = Callable[[], contextlib.AbstractContextManager[Job]]
"""Starts a job."""


@dataclass(frozen=True)
class Blow:
    """What befalls one rank."""

    phase: str
    trouble: str
    rank: int
    whom: str
    """What the rank is."""


def row_of(
    transport: str, shape: str, asked: Sequence[Blow], struck: Sequence[Blow]
) -> dict[str, Any]:
    """What a table has of each such job; ``struck``: in time."""
    return {
        "transport": transport,
        "shape": shape,
        "asked": [f"{x.phase} rank {x.rank} {x.trouble}" for x in asked],
        "blows": [f"{x.phase} {x.whom} {x.trouble}" for x in struck],
    }


class RankBlows:
    """Runs jobs that are struck.

    Args:
        jobs: whose answers these are.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance
        self._lengths: dict[object, dict[str, float]] = {}

    def strike(
        self, start: Start, blows: Sequence[Blow], kind: object
    ) -> tuple[list[Blow], Outcome]:
        """One job: the blows for which the rank was there, in time, and how it ended.

        Args:
            blows: in the order of their phases.
            kind: of job; the phases of those of one kind are equally long.
        """
        lengths = self._lengths_of(start, kind)
        self._jobs.clear()
        with start() as job:
            found = list(self._strike(job, blows, lengths))
            if job.command.wait_for_end(LIMIT_S) is None and self._is_answered:
                # All is written, and the launcher waits for who was stopped on its way out.
                for blow in found:
                    for process in _of_rank(job, blow.rank):
                        process.resume()
            return found, job.command.wait(GOING_S)

    @property
    def _is_answered(self) -> bool:
        """Whether the job is over for its user."""
        return self._jobs.answers().keys() == self._jobs.expected.keys()

    def _strike(self, job: Job, blows: Sequence[Blow], lengths: dict[str, float]) -> Iterator[Blow]:
        """Those that come in time."""
        shared = Counter(blow.phase for blow in blows)
        with contextlib.suppress(AssertionError):  # it has ended, or gone wrong: that will be seen
            for blow in blows:
                begun = self._jobs.has_begun(job, blow.phase)
                job.command.wait_until(begun, timeout_s=LIMIT_S)
                pause(job, self._chance.uniform(0, lengths[blow.phase] / shared[blow.phase]))
                for victim in _of_rank(job, blow.rank):
                    with contextlib.suppress(psutil.Error):  # it has ended
                        victim.send_signal(signal.Signals[blow.trouble])
                        yield blow

    def _lengths_of(self, start: Start, kind: object) -> dict[str, float]:
        """How long each phase is, in s, in such a job in which nothing happens."""
        if kind not in self._lengths:
            self._jobs.clear()
            begins = []
            with start() as job:
                for phase in PHASES:
                    begun = self._jobs.has_begun(job, phase)
                    job.command.wait_until(begun, timeout_s=LIMIT_S)
                    begins.append(time.monotonic())
                outcome = job.command.wait(LIMIT_S)
            assert outcome.exit_code == 0 and self._jobs.answers() == self._jobs.expected, outcome
            begins.append(time.monotonic())
            self._lengths[kind] = {
                phase: max(0.05, begins[i + 1] - begins[i]) for i, phase in enumerate(PHASES)
            }
        return self._lengths[kind]


def _of_rank(job: Job, rank: int) -> list[Any]:
    """The process that is a rank of the job, if it is there."""
    found = []
    for process in job.command.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            if process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                found.append(process)
    return found
