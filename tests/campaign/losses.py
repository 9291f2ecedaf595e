"""R-workers that are killed, stopped or terminated at random moments of a job."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from mpi_launch import Running
from small_jobs import (
    LIMIT_S,
    PARTITIONS,
    PHASES,
    SILENCE_S,
    Ended,
    Job,
    SmallJobs,
    addresses_again,
    is_replaced,
    options_of,
)

TRANSPORTS = ("mpi", "launch", "zmq")
OF_REPLICAS = tuple(name for name in PARTITIONS if name.endswith(("replicas", "replaced")))
TIMES = 3
"""With replicas, jobs are so many times as long: caches are copied meanwhile."""
SERVED = ("greeting", "prompts", "decoding", "end")
"""The phases in which R-workers serve."""
HITS = 2
"""In each of them, of one job."""
REPLACED = ("greeting", "prompts", "copying", "prompts", "copying", "decoding", "copying")
"""When R-workers are hit that others come in the place of. ``copying``: a while
after the one before, in which whoever came is given that one's cache."""
COPYING_S = 3.0
EARLY_HITS = 6
"""Of jobs that are hit at the start, or compiling, alone."""
COMPILING_S = 15.0
EVENTS = {"compiling": "greeting", "copying": "prompts"}
"""With which phases begin that have no beginning of their own."""
TOLD = {
    "failovers": "with the replica that it has kept",
    "returns": "goes on with the cache that",
    "recomputed": "no replica of",
}


@dataclass(frozen=True)
class Hit:
    """What befalls one R-worker."""

    phase: str
    trouble: str


@dataclass(frozen=True)
class Loss:
    """What happens in one job."""

    transport: str
    partition: str
    hits: tuple[Hit, ...]
    """In their order; there is always one R-worker more."""


@dataclass(frozen=True)
class Report:
    """What became of it."""

    loss: Loss
    hits: list[Hit]
    """For which an R-worker was there, in time."""
    told: dict[str, int]
    """How often a neighbour went on for a lost one, and another in its place
    after that; and how often there was no second copy."""
    ended: Ended

    @property
    def verdict(self) -> str:
        return self.ended.verdict


def losses(
    number: int, chance: random.Random, *, replicated: bool = False, of: str = ""
) -> list[Loss]:
    """So many jobs. A round of 15 has 18 losses in every phase; of jobs with
    replicas it has twelve, with two losses in every phase that R-workers serve
    in, or while caches are copied.

    Args:
        replicated: with replicas.
        of: partitions whose names begin so; only where they are replicated.
    """
    chosen: list[Loss] = []
    while len(chosen) < number and replicated:
        phases = sorted(SERVED * HITS, key=SERVED.index)
        kinds = [
            _loss(chance, transport, name, *(REPLACED if is_replaced(name) else phases))
            for name in OF_REPLICAS
            for transport in TRANSPORTS
            if name.startswith(of)
        ]
        chosen += chance.sample(kinds, len(kinds))
    while len(chosen) < number:
        kinds = [
            _loss(chance, transport, partition, *sorted(SERVED * HITS, key=SERVED.index))
            for transport in TRANSPORTS
            for partition in PARTITIONS
            if partition not in OF_REPLICAS
        ]
        # Ranks that are lost before MPI has begun may end the job: in jobs of their own.
        for phase in ("start", "compiling"):
            for transport in TRANSPORTS:
                partition = chance.choice([name for name in PARTITIONS if name not in OF_REPLICAS])
                kinds.append(_loss(chance, transport, partition, *[phase] * EARLY_HITS))
        chosen += chance.sample(kinds, len(kinds))
    return chosen[:number]


def _loss(chance: random.Random, transport: str, partition: str, *phases: str) -> Loss:
    """Ranks that serve take no notice of SIGTERM."""
    served_ranks = transport != "zmq" and phases[0] != "start"
    troubles = ("SIGKILL", "SIGKILL", "SIGSTOP") + (() if served_ranks else ("SIGTERM",))
    return Loss(transport, partition, tuple(Hit(each, chance.choice(troubles)) for each in phases))


class Losses:
    """Runs such jobs.

    Args:
        jobs: starts them.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance
        self._lengths: dict[str, dict[str, float]] = {}  # by transport
        self._warm: Path | None = None

    def lose(self, loss: Loss) -> Report:
        """One job with its losses."""
        lengths = self._lengths_of(loss)
        self._jobs.clear()
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
            environ = {}
            if any(hit.phase == "compiling" for hit in loss.hits):
                environ = self._half_a_cache(Path(directory))
            options = options_of(loss.partition, loss.transport)
            comes_again = loss.transport == "zmq" and is_replaced(loss.partition)
            number = 3 if comes_again else len(loss.hits) + 1
            with (
                contextlib.ExitStack() as again,
                self._jobs.start(loss.transport, number, options, **environ) as job,
            ):
                found = list(self._hit(job, loss, lengths, again if comes_again else None))
                outcome = job.command.wait(LIMIT_S)
        told = {what: outcome.output.count(words) for what, words in TOLD.items()}
        return Report(loss, found, told, self._jobs.ended(outcome))

    def _hit(
        self,
        job: Job,
        loss: Loss,
        lengths: dict[str, float],
        again: contextlib.ExitStack | None,
    ) -> Iterator[Hit]:
        """Those that come in time. ``again``: R-workers come again where one was hit."""
        hit: set[int] = set()
        workers = list(job.r_workers)
        with contextlib.suppress(AssertionError):  # it has ended, or gone wrong: that will be seen
            for one in loss.hits:
                phase = EVENTS.get(one.phase, one.phase)
                job.command.wait_until(self._jobs.has_begun(job, phase), timeout_s=LIMIT_S)
                pause(job, self._chance.uniform(0, lengths[one.phase]))
                whole = [x for x in victims(job, workers) if x.pid not in hit]
                for victim in self._chance.sample(whole, min(1, len(whole))):
                    index = [victim in worker.processes() for worker in workers]
                    with contextlib.suppress(psutil.Error):  # it has ended
                        victim.send_signal(signal.Signals[one.trouble])
                        hit.add(victim.pid)
                        yield one
                        if again is not None:
                            self._come_again(job, workers, index.index(True), again)

    def _come_again(
        self, job: Job, workers: list[Running], index: int, again: contextlib.ExitStack
    ) -> None:
        """An R-worker in the place of one that has died; one that was stopped
        has its address, and dies when it has been given up."""
        for process in workers[index].processes():
            if process.status() == psutil.STATUS_STOPPED:
                pause(job, 1.5 * SILENCE_S)
                process.kill()
        workers[index].wait(LIMIT_S)
        pause(job, self._chance.uniform(0, 0.5))
        workers[index] = again.enter_context(addresses_again(job, index))

    def _half_a_cache(self, directory: Path) -> dict[str, str]:
        """Have kernels kept there, of which every other one is there already:
        the others are compiled. Returns what tells jobs so."""
        if self._warm is None:
            self._warm = self._jobs.directory / "kernels"
            self._measure("zmq", 1, NUMBA_CACHE_DIR=str(self._warm))
        kept = sorted(path for path in self._warm.rglob("*") if path.is_file())
        for path in self._chance.sample(kept, len(kept) // 2):
            copy = directory / path.relative_to(self._warm)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        return {"NUMBA_CACHE_DIR": str(directory)}

    def _lengths_of(self, loss: Loss) -> dict[str, float]:
        """How long each phase is, in s, in a job in which nothing happens. Hits
        of one phase share it out."""
        kind = loss.transport
        if kind not in self._lengths:
            number = len(SERVED) * HITS + 1
            self._lengths[kind] = {**self._measure(kind, number), "compiling": COMPILING_S}
        copying_s = COPYING_S * sum(hit.phase == "copying" for hit in loss.hits)
        hits = Counter(hit.phase for hit in loss.hits)
        lengths = {**self._lengths[kind], "copying": copying_s}
        return {phase: s / hits.get(phase, 1) for phase, s in lengths.items()}

    def _measure(self, transport: str, num_r_workers: int, **environ: str) -> dict[str, float]:
        self._jobs.clear()
        begins = []
        with self._jobs.start(transport, num_r_workers, **environ) as job:
            for phase in PHASES:
                job.command.wait_until(self._jobs.has_begun(job, phase), timeout_s=LIMIT_S)
                begins.append(time.monotonic())
            outcome = job.command.wait(LIMIT_S)
        assert outcome.exit_code == 0 and self._jobs.answers() == self._jobs.expected, outcome
        begins.append(time.monotonic())
        return {phase: max(0.05, begins[i + 1] - begins[i]) for i, phase in enumerate(PHASES)}


def victims(job: Job, workers: list[Running]) -> list[Any]:
    """R-workers' processes that may be hit; ``workers``: at addresses."""
    if not workers:
        return job.victims()
    return [process for worker in workers for process in worker.processes()]


def pause(job: Job, seconds: float) -> None:
    """Raises AssertionError if the job ends meanwhile."""
    end = time.monotonic() + seconds
    job.command.wait_until(lambda: time.monotonic() >= end)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    hits = [f"{hit.phase} {hit.trouble}" for hit in report.hits]
    return {**vars(report.loss), **report.ended.shown(), "hits": hits, "told": report.told}
