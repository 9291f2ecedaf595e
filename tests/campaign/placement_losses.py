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

from fastdecode.core.config.instances import Instances, PlacedInstance
from fastdecode.core.config.placement import PLACEMENT_FORMAT
from fastdecode.wire.mpi.roles import InstanceRanks, RankRole

TRANSPORTS = ("launch", "mpi")
SHAPES = {
    "one prefills": ("prefill:1", "decode:1", "decode:1"),
    "two prefill": ("prefill:1", "prefill:1", "decode:1"),
    "several S-workers": ("prefill:1:tp=2", "decode:2:pp=2", "decode:1"),
}
"""Instances, as ``--instances`` has them."""
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
            blows = _blows(_placed(shape), 1 if what == "one" else 2, chance)
        chosen.append(PlacementLoss(chance.choice(TRANSPORTS), shape, blows))
    return chance.sample(chosen, number)


def _placed(shape: str) -> tuple[PlacedInstance, ...]:
    return Instances(instances=SHAPES[shape]).placed


def _blows(
    placed: tuple[PlacedInstance, ...], number: int, chance: random.Random
) -> tuple[Blow, ...]:
    """A rank of each of so many instances."""
    ranks = InstanceRanks(placed)
    hit = chance.sample(range(len(placed)), number)
    phases = sorted((chance.choice(PHASES) for _ in hit), key=PHASES.index)
    found = []
    for instance, phase in zip(hit, phases, strict=True):
        of_kind = chance.choice((ranks.s_ranks(instance), ranks.r_ranks(instance)))
        rank = chance.choice(of_kind)
        kind = "R-worker" if ranks.role(rank) is RankRole.R_WORKER else "S-worker"
        whom = f"{placed[instance].role.value}'s {kind}"
        trouble = chance.choice(("SIGKILL", "SIGSTOP"))
        found.append(Blow(phase, trouble, rank, whom))
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
        placed = _placed(loss.shape)
        silence = ["--worker-silence-s", str(SILENCE_S)]
        words = [*self._jobs.words(command), *SLOW, *silence, *more]
        share = ["--r-threads", "1", *KV_MEMORY]
        if loss.transport == "launch":
            line = [*FASTDECODE, "launch", *share, "--placement", self._placement(placed)]
            line += ["--", *words]
        else:
            ranks, size = ",".join(map(str, placed)), InstanceRanks(placed).size
            line = [mpirun(), *open_mpi_options(), "-n", str(size), *FASTDECODE]
            line += [*words, "--instances", ranks, *share]
        with running(line, **PATHS) as job:
            yield Job(job, ())

    def _placement(self, placed: tuple[PlacedInstance, ...]) -> str:
        """A file."""
        instances = [
            {
                "role": each.role.value,
                "tp": each.tp,
                "pp": each.pp,
                "r_worker_sockets": each.num_r_workers,
            }
            for each in placed
        ]
        tree = {"format": PLACEMENT_FORMAT, "model": "small", "instances": instances}
        path = self._jobs.directory / "placement.json"
        path.write_text(json.dumps(tree))
        return str(path)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    about = row_of(report.loss.transport, report.loss.shape, report.loss.blows, report.blows)
    shown = {**about, **report.ended.shown(), "resumed_code": report.resumed_code}
    return {**shown, "verdict": report.verdict}
