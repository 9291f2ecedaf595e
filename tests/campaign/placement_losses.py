"""Placements as one MPI job, whose ranks are killed and stopped at random moments:
S-workers and R-workers of instances that run prompts, and of others that decode.

As long as one instance has all of its ranks, every request is answered as ever. A
job whose controller (rank 0) is killed ends; of a batch the same command goes on.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mpi_launch import mpirun, open_mpi_options, running
from rank_blows import LIMIT_S, Blow, RankBlows, row_of
from small_jobs import (
    FASTDECODE,
    KV_MEMORY,
    PATHS,
    PHASES,
    SILENCE_S,
    Ended,
    Job,
    SmallJobs,
)

from fastdecode.core.config.placement import PLACEMENT_FORMAT

TRANSPORTS = ("launch", "mpi")
SHAPES = {
    "one prefills": ("prefill", "decode", "decode"),
    "two prefill": ("prefill", "prefill", "decode"),
}
"""Instances' roles; each has one R-worker."""
SLOW = ("--fetch-gbps", "0.01")
"""A prompt takes some tenths of a second to fetch."""
SERVED = PHASES[PHASES.index("greeting") :]
CONTROLLER = "controller"
HAPPENINGS = ("one", "one", "one", "two", "two", CONTROLLER)
"""What befalls a job: one rank, one each of two instances, or its controller."""


@dataclass(frozen=True)
class PlacementLoss:
    """What happens in one job."""

    transport: str
    shape: str
    blows: tuple[Blow, ...]
    """In their order."""

    @property
    def is_of_controller(self) -> bool:
        return any(blow.whom == CONTROLLER for blow in self.blows)


@dataclass(frozen=True)
class Report:
    """What became of it."""

    loss: PlacementLoss
    blows: list[Blow]
    """For which the rank was there, in time."""
    resumed_code: int | None
    """Of the job that went on, after a controller was lost."""
    ended: Ended
    """The one that was struck; with the answers of both."""

    @property
    def verdict(self) -> str:
        if self.loss.is_of_controller and self.blows:
            if self.ended.exit_code == 0:
                return "other exit code"
            if self.resumed_code != 0:
                return "not resumed"
        return self.ended.verdict


def placement_losses(number: int, chance: random.Random) -> list[PlacementLoss]:
    """So many jobs."""
    chosen: list[PlacementLoss] = []
    for place in range(number):
        shape = chance.choice(list(SHAPES))
        what = HAPPENINGS[place % len(HAPPENINGS)]
        blows: tuple[Blow, ...] = (Blow(chance.choice(SERVED), "SIGKILL", 0, CONTROLLER),)
        if what != CONTROLLER:
            blows = _blows(SHAPES[shape], 1 if what == "one" else 2, chance)
        chosen.append(PlacementLoss(chance.choice(TRANSPORTS), shape, blows))
    return chance.sample(chosen, number)


def _blows(roles: tuple[str, ...], number: int, chance: random.Random) -> tuple[Blow, ...]:
    """A rank of each of so many instances."""
    hit = chance.sample(range(len(roles)), number)
    phases = sorted((chance.choice(PHASES) for _ in hit), key=PHASES.index)
    found = []
    for instance, phase in zip(hit, phases, strict=True):
        place = chance.randrange(2)
        whom = f"{roles[instance]}'s {'R-worker' if place else 'S-worker'}"
        trouble = chance.choice(("SIGKILL", "SIGSTOP"))
        found.append(Blow(phase, trouble, 1 + 2 * instance + place, whom))
    return tuple(found)


class PlacementLosses:
    """Runs such jobs.

    Args:
        jobs: whose model and requests these are.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._blows = RankBlows(jobs, chance)

    def lose(self, loss: PlacementLoss) -> Report:
        """One job with its losses; and, without its controller, what goes on with it."""
        command = "run-batch" if loss.is_of_controller else "generate"
        start = partial(self._start, loss, command)
        found, outcome = self._blows.strike(start, loss.blows, command)
        orphans, resumed = list(outcome.orphans), None
        if found and loss.is_of_controller:
            with self._start(loss, command, "--resume") as job:
                again = job.command.wait(LIMIT_S)
            orphans, resumed = [*orphans, *again.orphans], again.exit_code
        return Report(loss, found, resumed, replace(self._jobs.ended(outcome), orphans=orphans))

    @contextlib.contextmanager
    def _start(self, loss: PlacementLoss, command: str, *more: str) -> Iterator[Job]:
        roles = SHAPES[loss.shape]
        silence = ["--worker-silence-s", str(SILENCE_S)]
        words = [*self._jobs.words(command), *SLOW, *silence, *more]
        share = ["--r-threads", "1", *KV_MEMORY]
        if loss.transport == "launch":
            line = [*FASTDECODE, "launch", *share, "--placement", self._placement(roles)]
            line += ["--", *words]
        else:
            ranks = ",".join(f"{role}:1" for role in roles)
            line = [mpirun(), *open_mpi_options(), "-n", str(1 + 2 * len(roles)), *FASTDECODE]
            line += [*words, "--instance-ranks", ranks, *share]
        with running(line, **PATHS) as job:
            yield Job(job, ())

    def _placement(self, roles: tuple[str, ...]) -> str:
        """A file."""
        instances = [{"role": role, "tp": 1, "pp": 1, "r_worker_sockets": 1} for role in roles]
        tree = {"format": PLACEMENT_FORMAT, "model": "small", "instances": instances}
        path = self._jobs.directory / "placement.json"
        path.write_text(json.dumps(tree))
        return str(path)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    about = row_of(report.loss.transport, report.loss.shape, report.loss.blows, report.blows)
    shown = {**about, **report.ended.shown(), "resumed_code": report.resumed_code}
    return {**shown, "verdict": report.verdict}
