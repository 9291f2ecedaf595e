"""The MPI transport in real jobs: the transport suite, and ranks that die or hang."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mpi_launch import Outcome, mpirun, needs_mpi, run, running

from examples import TRIES_ALL

RANKS = Path(__file__).parent / "ranks"

pytestmark = needs_mpi


def run_ranks(file: str, num_ranks: int, btl: str = "self,sm", *options: str) -> Outcome:
    """Runs tests/mpi/ranks/FILE in an MPI job."""
    with running(["sleep", "0"]) as scratch:  # for a short private directory
        socket = str(scratch.directory / "puppets")
        command = mpirun(num_ranks, btl=btl)
        command += [sys.executable, str(RANKS / "main.py"), str(RANKS / file), socket, *options]
        return run(command, timeout_s=120.0)


SHARED, TCP = "self,sm", "self,tcp"


@pytest.mark.parametrize("btl", [SHARED, *[TCP] * TRIES_ALL])
def test_the_transport_suite(btl: str) -> None:
    outcome = run_ranks("suite.py", 4, btl)
    assert outcome.exit_code == 0 and not outcome.orphans, outcome.output
    assert re.search(r"^\d+ passed in", outcome.output, re.MULTILINE), outcome.output


def test_r_workers_that_read_each_other() -> None:
    """A first message that is a greeting opens a connection, also before the other rank has a hub;
    one too many is refused, and another first message is dropped."""
    command = [*mpirun(3), sys.executable]
    outcome = run([*command, str(RANKS / "greetings.py")], timeout_s=120.0)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert outcome.output.count("has read and been read") == 2, outcome.output


@pytest.mark.parametrize(
    ("name", "btl"), [("killed_while_a_large_message_is_under_way", SHARED), ("stopped", TCP)]
)
def test_an_r_worker_that_was(name: str, btl: str) -> None:
    outcome = run_ranks("failures.py", 4, btl, "-k", f"test_{name}", "-x")
    assert "1 passed" in outcome.output, outcome.output
    assert outcome.exit_code is not None and not outcome.orphans, outcome


def test_a_job_that_mpi_keeps_ends_and_says_whom_it_waited_for() -> None:
    outcome = run_ranks(
        "failures.py", 4, "self,sm", "-k", "kept_until_the_end", "-s", "-p", "no:logging"
    )
    assert outcome.exit_code not in (0, None) and not outcome.orphans, outcome
    stopped = re.search(r"process (\d+) was stopped", outcome.output)
    assert stopped is not None, outcome.output
    assert (
        f"MPI hasn't returned for 15 s: rank 2 (process {stopped[1]}) has been stopped"
        in outcome.output
    )
    assert "the last act, before exit code 4" in outcome.output


def test_an_r_worker_that_hangs_is_killed_in_the_end() -> None:
    outcome = run_ranks("failures.py", 4, "self,sm", "-k", "left_stopped")
    assert "1 passed" in outcome.output, outcome.output
    assert outcome.exit_code not in (0, None) and not outcome.orphans, outcome


def test_r_workers_end_when_the_s_worker_dies() -> None:
    outcome = run_ranks("failures.py", 4, "self,sm", "-k", "s_worker_dies")
    assert outcome.exit_code is not None and not outcome.orphans, outcome


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("met", r"met: (/.*/ranks)\n(.*\n)*met: \1\n"),
        ("late", "late: tp_connect_failed: .* rank 1 sent nothing for 0.1 s"),
        ("gone", "gone: tp_rank_lost: .* rank 1 has closed the connection"),
        ("other", "other: tp_rank_lost: .* or was started as an R-worker"),
    ],
)
def test_s_workers_meet_or_say_why_not(how: str, told: str) -> None:
    outcome = run([*mpirun(2), sys.executable, str(RANKS / "meeting.py"), how], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert re.search(told, outcome.output), outcome.output
