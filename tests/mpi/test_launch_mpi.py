"""Starting and ending an MPI job: launchers that don't match, roles that don't
fit, errors before anything runs."""

from __future__ import annotations

import sys

import pytest
from mpi_launch import FASTDECODE, mpirun, needs_mpi, run

from fastdecode.core.errors import ConfigError
from fastdecode.wire import ranks
from fastdecode.wire.mpi.job import join


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"HOME": "/", "OMPI_COMM_WORLD_SIZE": ""}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2),
        ({"SLURM_NTASKS": "8"}, None),  # an allocation, but no launcher
        ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "3"}, 8),
    ],
)
def test_what_launchers_say_of_the_size(environ: dict[str, str], size: int | None) -> None:
    assert ranks.launched_size(environ) == size


def test_what_launchers_say_of_this_host() -> None:
    assert ranks.local_size({}) == 1
    assert ranks.local_size({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == 3
    assert ranks.local_size({"MPI_LOCALNRANKS": "2"}) == 2


def test_ranks_of_one_command_line_are_known() -> None:
    whole = {"OMPI_COMM_WORLD_SIZE": "3"}
    parts = {**whole, "OMPI_APP_CTX_NUM_PROCS": "2 1"}
    for environs, repeats in ((whole, [False, True, True]), (parts, [False, True, False])):
        for rank, expected in enumerate(repeats):
            environ = {**environs, "OMPI_COMM_WORLD_RANK": str(rank)}
            assert ranks.repeats_other_rank(environ) is expected
    assert not ranks.repeats_other_rank({}) and not ranks.repeats_other_rank(whole)
    assert not ranks.repeats_other_rank({"PMI_RANK": "2", "PMI_SIZE": "3"})


def test_without_a_launcher_mpi_is_not_even_loaded() -> None:
    with pytest.raises(ConfigError, match="needs a launcher") as caught:
        join(environ={})
    assert caught.value.code == "no_mpi_launcher"


@needs_mpi
def test_singletons_are_told_from_a_job() -> None:
    """A launcher of another MPI starts processes that all believe that they are alone."""
    command = [sys.executable, "-c", "from fastdecode.wire.mpi.job import join; join()"]
    outcome = run(command, OMPI_COMM_WORLD_SIZE="4")
    assert outcome.exit_code == 1 and not outcome.orphans, outcome
    assert "the launcher started 4 ranks, but Open MPI" in outcome.output, outcome.output
    assert "sees 1: the launcher belongs to another MPI" in outcome.output, outcome.output


@needs_mpi
def test_an_error_of_the_s_worker_ends_a_job_without_fault_tolerance() -> None:
    command = [*mpirun(1, with_ft=False), *FASTDECODE, "generate", "--model", "/nonexistent"]
    command += ["--input", "/nonexistent", "--output", "/a/b"]
    command += [":", "-n", "2", *FASTDECODE, "r-worker"]
    outcome = run(command, timeout_s=120)
    assert outcome.exit_code == 2 and not outcome.orphans, outcome
    assert "Traceback" not in outcome.output


@needs_mpi
def test_an_r_worker_may_not_be_the_first_rank() -> None:
    outcome = run([*mpirun(2), *FASTDECODE, "r-worker"], timeout_s=120)
    assert outcome.exit_code == 2 and not outcome.orphans, outcome
    assert "started as rank 0" in outcome.output


CRASH = """
import sys
from fastdecode.wire.mpi.job import join
job = join()
if job.rank == int(sys.argv[1]):
    raise RuntimeError("a mistake")
from fastdecode.core.errors import WorkerError
from fastdecode.wire.mpi.hub import r_worker_hub, connect_stage
from fastdecode.wire.ranks import StageRanks
hub = r_worker_hub(job) if job.rank else connect_stage(job, StageRanks(1), 0, range(1, job.size))[0]
try:
    hub.receive_any(60.0)
except WorkerError as error:
    print("told:", error.message)
hub.close()
"""


@needs_mpi
@pytest.mark.parametrize(("rank", "told"), [(0, "rank 0"), (1, "R-worker rank 1")])
def test_a_rank_that_crashes_before_it_connects_keeps_nobody_waiting(rank: int, told: str) -> None:
    command = [*mpirun(3), sys.executable, "-c", CRASH, str(rank)]
    outcome = run(command, timeout_s=120)
    assert outcome.exit_code is not None and not outcome.orphans, outcome
    assert "a mistake" in outcome.output and f"told: {told}" in outcome.output, outcome.output
