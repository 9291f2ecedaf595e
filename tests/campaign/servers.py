"""Servers under load whose R-workers, HTTP process or engine are killed at random
moments, or that are told to stop, also while they start."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from asking import Answer, ask
from losses import pause
from mpi_launch import Outcome
from server_process import Server
from small_jobs import LIMIT_S, Job, SmallJobs, addresses_again, lines, words_of

STOPS = ("SIGTERM", "SIGINT", "SIGUSR1")
KILLS = ("http", "engine")
LONGEST_S = {"prompts": 0.3, "decoding": 1.5, "drain": 0.5}
"""The moment is within so long after the beginning of its phase."""
NUM_CLIENTS = 4
DRAIN = ["--drain-timeout-s", "200"]
AFTER_TOKENS = 100
"""It is decoding."""
FITS: dict[str, tuple[str, ...]] = {
    "inproc": (*STOPS, *KILLS),
    "zmq": (*STOPS, *KILLS, "R-worker", "all R-workers"),
    "launch": ("SIGTERM", "SIGINT", "http", "R-worker"),
    "mpi": ("SIGUSR1",),  # what mpirun passes on
}
"""What may befall a server by its transport."""
NEVER = (
    ("zmq", "all R-workers", "start"),  # it waits for the first
    ("zmq", "all R-workers", "drain"),
    ("launch", "R-worker", "start"),  # MPI can't begin without it: see ``losses``
)


@dataclass(frozen=True)
class Blow:
    """What happens to one server."""

    transport: str
    trouble: str
    phase: str


@dataclass(frozen=True)
class Report:
    """What became of it."""

    blow: Blow
    exit_code: int | None
    seconds: float
    became: dict[str, int]
    """How many requests were answered right, in part, refused, changed or lost."""
    untrue: list[str]
    """What the server told of itself that wasn't so."""
    orphans: list[str]
    last_words: str

    @property
    def verdict(self) -> str:
        if self.exit_code is None or self.orphans or self.became.get("hung"):
            return "hung"
        for wrong in ("changed", "lost"):
            if self.became.get(wrong):
                return wrong
        if "Traceback" in self.last_words:
            return "traceback"
        if self.untrue:
            return "untrue"
        return "right" if self.exit_code in _exit_codes(self.blow) else "other exit code"


def _exit_codes(blow: Blow) -> tuple[int, ...]:
    if blow.trouble == "http":
        return (5,)
    if blow.trouble == "engine":
        return (-signal.SIGKILL,)
    if blow.trouble in STOPS and blow.phase == "start":
        # Perhaps before Python has got as far as our code, there or in a rank.
        return 0, -signal.Signals[blow.trouble], *([130] if blow.transport == "launch" else [])
    return (0, 3) if blow.trouble in STOPS and blow.phase == "drain" else (0,)


def blows(number: int, chance: random.Random) -> list[Blow]:
    """Every sort in turn, shuffled; half of the stops come while it starts."""
    kinds = [
        Blow(transport, trouble, phase)
        for transport, troubles in FITS.items()
        for trouble in troubles
        for phase in ("start", "prompts", "decoding", "drain")
        if (transport, trouble, phase) not in NEVER
    ]
    chosen: list[Blow] = []
    while len(chosen) < number:
        chosen += chance.sample(kinds, len(kinds))
    return chosen[:number]


class Servers:
    """Runs such servers.

    Args:
        jobs: whose model and requests they get.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._chance = chance
        self._starts_s: dict[str, float] = {}
        """How long it takes to be ready, by transport."""

    def strike(self, blow: Blow) -> Report:
        """One server."""
        if blow.phase == "start" and blow.transport not in self._starts_s:
            self._starts_s[blow.transport] = self._measured(blow.transport)
        with self._jobs.start(blow.transport, 2, DRAIN, "serve") as job:
            run = _Run(job, blow, self._jobs, self._chance)
            if blow.phase == "start":
                became = run.while_it_starts(self._starts_s[blow.transport])
            else:
                became = run.under_load()
            outcome = run.end()
        return Report(
            blow,
            outcome.exit_code,
            outcome.seconds,
            dict(became),
            run.untrue,
            outcome.orphans,
            outcome.output.strip()[-3000:],
        )

    def _measured(self, transport: str) -> float:
        with self._jobs.start(transport, 2, DRAIN, "serve") as job:
            began = time.monotonic()
            _served(job).wait_until_ready()
            return time.monotonic() - began


class _Run:
    """One server under way."""

    def __init__(self, job: Job, blow: Blow, jobs: SmallJobs, chance: random.Random) -> None:
        self._job = job
        self._blow = blow
        self._jobs = jobs
        self._chance = chance
        self._stack = contextlib.ExitStack()
        self._is_struck = False
        self.untrue: list[str] = []

    def while_it_starts(self, starts_s: float) -> Counter[str]:
        """Struck before it is ready, as a rule; then it is told to stop."""
        with contextlib.suppress(AssertionError):  # it has ended
            pause(self._job, self._chance.uniform(0, starts_s))
            if self._blow.trouble == "http":
                self._job.command.wait_until(lambda: self._target() is not None)
            self._strike()
            if self._blow.trouble == "R-worker":
                _served(self._job).wait_until_ready()
        return Counter()

    def under_load(self) -> Counter[str]:
        """Struck while clients ask. Returns what became of their requests."""
        server = _served(self._job)
        server.wait_until_ready()
        is_over = threading.Event()
        every = [*enumerate(lines())] * 2
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            futures = [
                clients.submit(ask, server.port, line, i % 3 != 0, is_over) for i, line in every
            ]
            try:
                self._until(server)
                self._strike()
                self._look(server)
                wait(futures, LIMIT_S)
            except (AssertionError, OSError) as error:
                if not self._is_struck:  # else it has ended, or is about to
                    self.untrue.append(f"never struck: {type(error).__name__}: {error}"[:500])
            finally:
                is_over.set()
        return Counter(self._judged(number, each) for (number, _), each in zip(
            every, futures, strict=True))  # fmt: skip

    def end(self) -> Outcome:
        """Have it end, if nothing has yet, and wait for that."""
        with self._stack:
            is_told = self._is_struck and (
                self._blow.trouble in (*STOPS, *KILLS) or self._blow.phase == "drain"
            )
            if not is_told:
                self._tell("SIGUSR1" if self._blow.transport == "mpi" else "SIGTERM")
            return self._job.command.wait(LIMIT_S, grace_s=30)

    def _until(self, server: Server) -> None:
        """Until the moment has come. Raises AssertionError: the server has ended."""
        phase = self._blow.phase
        begun: Callable[[], bool] = lambda: server.status()["generation_tokens"] >= AFTER_TOKENS  # noqa: E731
        if phase == "prompts":
            begun = lambda: server.status()["num_open"] > 0  # noqa: E731
        server.wait_until(begun, LIMIT_S)
        if phase == "drain":
            self._tell("SIGUSR1" if self._blow.transport == "mpi" else "SIGTERM")
        pause(self._job, self._chance.uniform(0, LONGEST_S[phase]))

    def _strike(self) -> None:
        self._is_struck = True
        if self._blow.trouble in STOPS:
            self._tell(self._blow.trouble)
            return
        victims = [self._target()] if self._blow.trouble in KILLS else self._r_workers()
        for victim in victims:
            with contextlib.suppress(psutil.Error, AttributeError):
                victim.kill()

    def _r_workers(self) -> list[Any]:
        every = self._job.victims()
        return every if self._blow.trouble == "all R-workers" else every[:1]

    def _look(self, server: Server) -> None:
        """Whether health and status tell what has happened."""
        if self._blow.trouble == "R-worker" and self._blow.phase != "drain":
            server.wait_until(lambda: server.status()["num_live_r_workers"] == 1, LIMIT_S)
            if "degraded" not in server.get("/health"):
                self.untrue.append("an R-worker is gone, and /health doesn't say so")
        if self._blow.trouble == "all R-workers":
            server.wait_until(lambda: server.status()["state"] == "no_r_worker", LIMIT_S)
            status, _, raw = server.ask("GET", "/health")
            if status != 503 or b"no_r_worker" not in raw:
                self.untrue.append(f"all R-workers are gone, and /health says {status}")
            self._stack.enter_context(addresses_again(self._job))
            server.wait_until(lambda: server.status()["state"] == "ready", LIMIT_S)

    def _judged(self, number: int, asked: Future[Answer]) -> str:
        """What became of a request."""
        answer = asked.result()
        expected = self._jobs.expected[str(number)]
        if answer.token_ids != expected[: len(answer.token_ids)]:
            return "changed"
        if answer.is_whole:
            return "right" if answer.token_ids == expected else "changed"
        if answer.error == "timeout":
            return "hung"
        if self._blow.trouble in KILLS or self._is_cut:
            return "in part" if answer.token_ids else "refused"
        is_stopped = self._blow.trouble in STOPS or self._blow.phase == "drain"
        is_refused = answer.error in ("draining", "no connection") and not answer.token_ids
        return "refused" if is_stopped and is_refused else "lost"

    @property
    def _is_cut(self) -> bool:
        """Whether it was told to stop twice."""
        return self._blow.trouble in STOPS and self._blow.phase == "drain"

    def _target(self) -> Any | None:
        """The HTTP process, or the engine's."""
        is_http = self._blow.trouble == "http"
        for process in self._job.command.processes():
            line = " ".join(words_of(process))
            is_either = "child_main" not in line and " serve" in line.replace("server.", " server.")
            if is_either and ("server.frontend" in line) == is_http:
                return process
        return None

    def _tell(self, name: str) -> None:
        word = {"launch": "launch", "mpi": "--with-ft"}.get(self._blow.transport, "serve")
        with contextlib.suppress(psutil.Error, AttributeError):
            target = self._job.target(word)
            target.send_signal(signal.Signals[name])  # type: ignore[union-attr]


def _served(job: Job) -> Server:
    command = job.command
    command.wait_until(
        lambda: "listening at" in command.output() and command.output().endswith("\n"), LIMIT_S
    )
    return Server(command)


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    shown = {**asdict(report.blow), **vars(report), "verdict": report.verdict}
    del shown["blow"]
    if report.verdict == "right":
        del shown["last_words"]
    return shown
