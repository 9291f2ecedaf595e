"""Jobs that are told to stop, by a signal at a random moment."""

from __future__ import annotations

import contextlib
import random
import signal
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from mpi_launch import running
from small_jobs import FASTDECODE, KV_MEMORY, LIMIT_S, PATHS, PHASES, SmallJobs

WAYS = (
    ("zmq", "SIGINT"),
    ("zmq", "SIGTERM"),
    ("zmq", "SIGUSR1"),
    ("launch", "SIGINT"),
    ("launch", "SIGTERM"),
    ("mpi", "SIGUSR1"),  # what mpirun passes on
)
LONGEST_S = {"start": 2.5, "greeting": 0.5, "prompts": 0.3, "decoding": 1.0, "end": 0.5}
PARTING_S = 25.0
"""R-workers that were told nothing listen for an S-worker for 10 s."""


@dataclass(frozen=True)
class Stop:
    """What happens in one job."""

    command: str
    transport: str
    trouble: str
    phase: str


@dataclass(frozen=True)
class Report:
    """What became of it."""

    stop: Stop
    exit_code: int | None
    seconds: float
    num_done: int
    num_changed: int
    is_in_order: bool
    resumed: bool | None
    """Whether ``--resume`` gave the rest; None: nothing was to be resumed."""
    orphans: list[str]
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.orphans:
            return "hung"
        if self.num_changed or not self.is_in_order or self.resumed is False:
            return "changed"
        by_itself = -signal.Signals[self.stop.trouble]  # before Python has got as far as our code
        if self.exit_code == by_itself and self.stop.phase == "start":
            return "right"
        return "right" if self.exit_code in (130, 0) else "other exit code"


def stops(number: int, chance: random.Random) -> list[Stop]:
    """Every command, way and phase in turn, shuffled."""
    kinds = [
        Stop(command, transport, trouble, phase)
        for command in ("run-batch", "generate")
        for transport, trouble in WAYS
        for phase in PHASES
    ]
    chosen: list[Stop] = []
    while len(chosen) < number:
        chosen += chance.sample(kinds, len(kinds))
    return chosen[:number]


class Stops:
    """Runs such jobs; see ``losses.Losses``."""

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance

    def stop(self, stop: Stop) -> Report:
        """One job, which is told to stop once."""
        jobs = self._jobs
        jobs.clear()
        options = ["--max-num-sequences", "3"]
        with jobs.start(stop.transport, 2, options, stop.command) as job:
            name = {"launch": "launch", "mpi": "--with-ft"}.get(stop.transport, stop.command)
            with contextlib.suppress(AssertionError):  # it has ended
                if stop.phase != "start":
                    job.command.wait_until(jobs.has_begun(job, stop.phase), timeout_s=LIMIT_S)
                job.command.wait_until(lambda: job.target(name) is not None)
                self._pause(job.command, self._chance.uniform(0, LONGEST_S[stop.phase]))
                target = job.target(name)
                if target is not None:
                    target.send_signal(signal.Signals[stop.trouble])
            outcome = job.command.wait(LIMIT_S)
            left = [process for worker in job.r_workers for process in worker.processes()]
            if stop.phase not in ("start", "greeting"):  # else they still wait for the first
                left = psutil.wait_procs(left, PARTING_S)[1]
                outcome.orphans.extend(" ".join(process.cmdline()) for process in left)
        answers = jobs.answers()
        changed = sum(answers[key] != jobs.expected[key] for key in answers)
        in_order = stop.command != "generate" or list(answers) == sorted(answers, key=int)
        return Report(
            stop,
            outcome.exit_code,
            outcome.seconds,
            len(answers),
            changed,
            in_order,
            self._resumed(stop, outcome.exit_code),
            outcome.orphans,
            outcome.output.strip()[-3000:],
        )

    def _pause(self, command: Any, seconds: float) -> None:
        with contextlib.suppress(AssertionError):
            command.wait_until(lambda: False, timeout_s=seconds)

    def _resumed(self, stop: Stop, exit_code: int | None) -> bool | None:
        if stop.command != "run-batch" or exit_code in (None, 0):
            return None
        words = [*self._jobs.words("run-batch"), "--resume"]
        with running([*FASTDECODE, *words, *KV_MEMORY], **PATHS) as job:
            outcome = job.wait(LIMIT_S)
        return outcome.exit_code == 0 and self._jobs.answers() == self._jobs.expected


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    shown = {**asdict(report.stop), **vars(report), "verdict": report.verdict}
    del shown["stop"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
