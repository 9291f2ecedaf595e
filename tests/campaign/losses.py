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
from small_jobs import LIMIT_S, PARTITIONS, PHASES, Job, SmallJobs

TRANSPORTS = ("mpi", "launch", "zmq")
SERVED = ("greeting", "prompts", "decoding", "end")
"""The phases in which R-workers serve."""
HITS = 2
"""In each of them, of one job."""
EARLY_HITS = 6
"""Of jobs that are hit at the start, or compiling, alone."""
COMPILING_S = 15.0
NOBODY_CAN = ("the MPI job can't begin", "MPI hasn't returned")
"""Said by jobs that end because MPI can't go on, as docs/cluster.md says."""


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


def losses(number: int, chance: random.Random, *, replicated: bool = False) -> list[Loss]:
    """So many jobs. A round of 15 has 18 losses in every phase; of jobs with
    replicas it has three, with two losses in every phase that R-workers serve
    in."""
    chosen: list[Loss] = []
    while len(chosen) < number and replicated:
        phases = sorted(SERVED * HITS, key=SERVED.index)
        kinds = [_loss(chance, transport, "replicas", *phases) for transport in TRANSPORTS]
        chosen += chance.sample(kinds, len(kinds))
    while len(chosen) < number:
        kinds = [
            _loss(chance, transport, partition, *sorted(SERVED * HITS, key=SERVED.index))
            for transport in TRANSPORTS
            for partition in PARTITIONS
            if partition != "replicas"
        ]
        # Ranks that are lost before MPI has begun may end the job: in jobs of their own.
        for phase in ("start", "compiling"):
            for transport in TRANSPORTS:
                partition = chance.choice([name for name in PARTITIONS if name != "replicas"])
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
            number, options = len(loss.hits) + 1, PARTITIONS[loss.partition]
            with self._jobs.start(loss.transport, number, options, **environ) as job:
                found = list(self._hit(job, loss, lengths))
                outcome = job.command.wait(LIMIT_S)
        answers, expected = self._jobs.answers(), self._jobs.expected
        changed = sum(answers[key] != expected[key] for key in answers)
        return Report(
            loss,
            found,
            outcome.exit_code,
            outcome.seconds,
            len(expected) - len(answers),
            changed,
            outcome.orphans,
            outcome.output.strip()[-3000:],
        )

    def _hit(self, job: Job, loss: Loss, lengths: dict[str, float]) -> Iterator[Hit]:
        """Those that come in time."""
        hit: set[int] = set()
        with contextlib.suppress(AssertionError):  # it has ended, or gone wrong: that will be seen
            for one in loss.hits:
                phase = "greeting" if one.phase == "compiling" else one.phase
                job.command.wait_until(self._jobs.has_begun(job, phase), timeout_s=LIMIT_S)
                pause(job, self._chance.uniform(0, lengths[one.phase]))
                whole = [process for process in job.victims() if process.pid not in hit]
                for victim in self._chance.sample(whole, min(1, len(whole))):
                    with contextlib.suppress(psutil.Error):  # it has ended
                        victim.send_signal(signal.Signals[one.trouble])
                        hit.add(victim.pid)
                        yield one

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
        hits = Counter(hit.phase for hit in loss.hits)
        return {phase: s / hits.get(phase, 1) for phase, s in self._lengths[kind].items()}

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


def pause(job: Job, seconds: float) -> None:
    """Raises AssertionError if the job ends meanwhile."""
    end = time.monotonic() + seconds
    job.command.wait_until(lambda: time.monotonic() >= end)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    told = [f"{hit.phase} {hit.trouble}" for hit in report.hits]
    shown = {**vars(report.loss), **vars(report), "hits": told, "verdict": report.verdict}
    del shown["loss"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
