"""A launcher that hangs once its ranks have ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from mpi_launch import mpirun, needs_mpi, run

from fastdecode.wire.mpi import launcher, launcher_end
from fastdecode.wire.mpi.launcher_end import end, ranks_of, see_off, wait_for

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
NAMED = """
import sys
from fastdecode.wire.mpi.launcher_end import see_off
sys.exit(0 if see_off() is not None else 9)
"""


@pytest.fixture
def hanging(request: pytest.FixtureRequest) -> Iterator[psutil.Popen]:
    """A process that ends by nothing but signals, of which it hears some."""
    code = getattr(request, "param", "print(flush=True); input()")
    with psutil.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # it has begun
        yield process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    ("hanging", "ended_by"),
    [("print(flush=True); input()", signal.SIGTERM), (DEAF, signal.SIGKILL)],
    indirect=["hanging"],
)
def test_it_is_terminated_then_killed(hanging: psutil.Popen, ended_by: signal.Signals) -> None:
    end(hanging, patience_s=0.05, terminating_s=1.0)
    assert hanging.wait(30.0) == -ended_by


def test_one_that_somebody_stopped_is_left_alone(hanging: psutil.Popen) -> None:
    hanging.suspend()
    while hanging.status() != psutil.STATUS_STOPPED:
        os.sched_yield()
    end(hanging, patience_s=0.05)
    hanging.resume()
    hanging.stdin.write(b"\n")
    hanging.stdin.close()
    assert hanging.wait(30.0) == 0


def test_one_that_ends_by_itself_is_waited_for(hanging: psutil.Popen) -> None:
    hanging.stdin.write(b"\n")
    hanging.stdin.close()
    end(hanging, patience_s=60.0)
    assert hanging.wait(30.0) == 0


def test_what_started_us_is_not_ended_unless_it_is_a_launcher() -> None:
    assert see_off(names=()) is None and see_off() is None


def test_ranks_are_known_by_the_same_variables_everywhere() -> None:
    assert launcher_end.RANK_VARIABLES == launcher.RANK_VARIABLES


RANKS = """
import os, subprocess, sys
wait = "import sys; print(flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
for environ in ({"OMPI_COMM_WORLD_RANK": "1"}, {"PATH": os.environ["PATH"]}):
    subprocess.Popen([sys.executable, "-c", wait], env=environ, **pipes).stdout.readline()
print(flush=True)
if sys.stdin.readline() == "hang\\n":
    sys.stdin.read()
os._exit(0)
"""


@pytest.mark.parametrize("says", [b"hang\n", b"end\n"])
@pytest.mark.parametrize("hanging", [RANKS], indirect=True)
def test_its_ranks_end_whether_it_hangs_or_not(says: bytes, hanging: psutil.Popen) -> None:
    """Stopped ones, too; and no other process that it has started."""
    children = psutil.Process(hanging.pid).children()
    (rank,) = ranks_of(psutil.Process(hanging.pid))
    (other,) = (child for child in children if child != rank)
    rank.suspend()
    hanging.stdin.write(says)
    hanging.stdin.flush()
    try:
        end(hanging, patience_s=1.0, terminating_s=1.0, ranks=[rank])
        assert hanging.wait(30.0) == (-signal.SIGTERM if says == b"hang\n" else 0)
        psutil.wait_procs([rank], 30.0)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    finally:
        for process in (rank, other):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


JOB = """
import os, subprocess, sys
wait = "import sys; print(flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
ranks = [
    subprocess.Popen([sys.executable, "-c", wait], env={"OMPI_COMM_WORLD_RANK": rank}, **pipes)
    for rank in "01"
]
for rank in ranks:
    rank.stdout.readline()
print(flush=True)
sys.exit([rank.wait() for rank in ranks][0])
"""


def test_a_rank_that_is_stopped_after_rank_0_has_ended_is_not_waited_for() -> None:
    """As long as rank 0 lives it is left alone: somebody may continue it."""
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline()
        leading, other = ranks_of(psutil.Process(job.pid))
        other.suspend()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ended = pool.submit(wait_for, job, 0.1)
            with pytest.raises(concurrent.futures.TimeoutError):
                ended.result(1.0)
            assert other.status() == psutil.STATUS_STOPPED
            leading.kill()
            assert ended.result(30.0) == 256 - signal.SIGKILL


@needs_mpi
def test_a_rank_knows_its_launcher() -> None:
    outcome = run([*mpirun(1), sys.executable, "-c", NAMED])
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
