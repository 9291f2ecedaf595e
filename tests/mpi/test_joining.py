"""Ranks that never meet: whoever is there ends, and says who isn't. And ranks that part."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from mpi_launch import FASTDECODE, Running, mpirun, needs_mpi, run, running

pytestmark = needs_mpi

REQUIRED = ["generate", "--model", "/nonexistent", "--input", "/nonexistent"]
REQUIRED += ["--output", "/nonexistent/out"]


@pytest.mark.parametrize(
    ("s_worker", "r_worker", "code", "told"),
    [
        (["--help"], [], 0, "usage: fastdecode generate"),
        ([], ["--typo"], 2, "unknown option --typo"),
    ],
)
def test_a_rank_with_a_bad_command_keeps_nobody_waiting(
    s_worker: list[str], r_worker: list[str], code: int, told: str
) -> None:
    command = [*mpirun(1), *FASTDECODE, *REQUIRED, *s_worker, ":"]
    outcome = run([*command, "-n", "2", *FASTDECODE, "r-worker", *r_worker], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (code, []), outcome
    assert told in outcome.output and "Traceback" not in outcome.output


def test_ranks_with_one_bad_command_say_it_once() -> None:
    command = [*FASTDECODE, *REQUIRED, "--top-p", "7"]
    outcome = run([*mpirun(3), *command], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (2, []), outcome
    assert outcome.output.count("--top-p 7") == 1, outcome


THREADS = """
from fastdecode.wire.mpi.job import join, load_mpi
MPI = load_mpi()
print("loaded:", MPI.Is_initialized())
join()
print("joined:", MPI.Query_thread() == MPI.THREAD_SERIALIZED)
"""


@pytest.mark.parametrize("with_ft", [True, False])
def test_mpi_is_joined_by_us_and_not_by_whoever_loads_it(with_ft: bool) -> None:
    """For threads that take turns: jobs have hung otherwise. A script that ends hasn't failed."""
    outcome = run([*mpirun(2, with_ft=with_ft), sys.executable, "-c", THREADS])
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    told = sorted(outcome.output.splitlines())
    assert told == ["joined: True", "joined: True", "loaded: False", "loaded: False"]


# Every rank says who it is, and waits for a line before it joins.
MEET = """
import os, signal, sys
from pathlib import Path
from fastdecode.wire.mpi.job import join
rank = os.environ["OMPI_COMM_WORLD_RANK"]
trouble = sys.argv[1] if rank == "1" else ""
if trouble == "ends":
    sys.exit(3)
if trouble == "unreachable":
    os.environ["OMPI_MCA_btl"] = "self"
Path(os.environ["TMPDIR"], rank).write_text(str(os.getpid()))
if trouble == "waits":
    signal.pause()
join()
"""


def meet(trouble: str) -> list[str]:
    return [*mpirun(3), sys.executable, "-c", MEET, trouble]


def test_a_rank_that_has_ended_is_noticed() -> None:
    outcome = run(meet("ends"), timeout_s=120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome
    said = r"the MPI job can't begin: rank 1( \(process \d+\))? has ended before it joined"
    assert re.search(said, outcome.output), outcome


def test_ranks_that_cannot_reach_each_other_end_as_any_that_never_meet() -> None:
    """So does one that is killed in the middle of MPI_Init, for the others."""
    outcome = run(meet("unreachable"), timeout_s=120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome
    assert "the MPI job can't begin: " in outcome.output


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (signal.SIGKILL, "has ended before it joined"),
        (signal.SIGSTOP, "has been stopped before it joined"),
    ],
)
def test_a_rank_that_is_lost_before_it_joins_is_named(trouble: signal.Signals, told: str) -> None:
    with running(meet("waits")) as job:
        job.wait_until(lambda: all(pid_of(job, rank) for rank in (0, 1, 2)))
        victim = next(p for p in job.processes() if p.pid == pid_of(job, 1))
        job.wait_until(lambda: all(is_in_mpi(job, rank) for rank in (0, 2)))
        victim.send_signal(trouble)
        outcome = job.wait(120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome
    named = f"the MPI job can't begin: rank 1( \\(process {victim.pid}\\))? {told}"
    assert re.search(named, outcome.output), outcome.output


# Two S-workers that act as one, the second of which is stopped before they have met.
STOPPED = """
import os, signal
from types import SimpleNamespace as Values
import torch
from fastdecode.core.config.s_part import SPart
from fastdecode.engine.setup.ranks import meet_ranks
from fastdecode.wire.mpi.job import join
from fastdecode.wire.ranks import StageRanks
if join().rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
config = Values(s_part=SPart(tp=2), cluster=Values(worker_timeout_s=60.0))
meet_ranks(Values(config=config, ranks=StageRanks(1, 2, 0), device=torch.device("cpu")))
"""


def test_an_s_worker_that_is_stopped_before_they_have_met_ends_the_job() -> None:
    """Others of its stage would wait for it for ten minutes."""
    command = [*mpirun(2), sys.executable, "-c", STOPPED]
    outcome = run(command, timeout_s=120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome
    named = r"the MPI job can't begin: rank 1 \(process \d+\) has been stopped before it joined"
    assert re.search(named, outcome.output), outcome.output


@pytest.mark.parametrize(
    ("num_ranks", "num_stopped", "what"),
    [(4, 1, "unnoticed"), (4, 2, "noticed"), (4, 3, "noticed")],
    ids=["one beside a dead one", "two", "all others"],
)
def test_a_job_ends_though_ranks_hang(num_ranks: int, num_stopped: int, what: str) -> None:
    script = str(Path(__file__).with_name("ranks") / "hanging.py")
    command = [*mpirun(num_ranks), sys.executable, script, str(num_stopped), what]
    outcome = run(command, timeout_s=120)
    assert outcome.exit_code is not None and outcome.orphans == [], outcome


def pid_of(job: Running, rank: int) -> int:
    """0: it hasn't said yet."""
    said = job.directory / str(rank)
    return int(said.read_text() or 0) if said.exists() else 0


def is_in_mpi(job: Running, rank: int) -> bool:
    """It has begun to join: the library is there."""
    return "libmpi.so" in Path(f"/proc/{pid_of(job, rank)}/maps").read_text()
