"""A launcher that hangs once its ranks have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from mpi_launch import mpirun, needs_mpi, open_mpi_options, run

from fastdecode.wire.mpi.launcher_end import end, see_off

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


@needs_mpi
def test_a_rank_knows_its_launcher() -> None:
    outcome = run([mpirun(), *open_mpi_options(), "-n", "1", sys.executable, "-c", NAMED])
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
