"""Run by every rank of a test's MPI job: rank 0 runs the pytest file that it is
given, the others are its puppets.

Usage: main.py FILE SOCKET [PYTEST-OPTION ...]
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

import pytest  # noqa: E402
from puppet import Puppets, obey  # noqa: E402

from fastdecode.wire.mpi import job as mpi_job  # noqa: E402
from fastdecode.wire.mpi import joining, leaving  # noqa: E402


class Job:
    """What the tests of rank 0 find as the fixture ``mpi``."""

    def __init__(self, job: mpi_job.MpiJob, puppets: Puppets) -> None:
        self.job = job
        self.puppets = puppets.wait()
        self.tags = count(100, 2)
        self.end_job = False

    @pytest.fixture
    def mpi(self) -> Job:
        return self


def main(file: str, socket: str, *options: str) -> tuple[int, bool]:
    job = joining.join()
    if job.rank == 0:
        puppets = Puppets(Path(socket), list(job.r_ranks))
        job.comm.Barrier()
        args = [
            file,
            "-q",
            "--color=no",
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            *options,
        ]
        plugin = Job(job, puppets)
        code = int(pytest.main(args, plugins=[plugin]))
        puppets.close()
        return code, plugin.end_job

    def open_connection(tag: int, **options: Any) -> tuple[Any, None]:
        from fastdecode.wire.mpi.hub import connect_to_s_workers

        return connect_to_s_workers(job, tag=tag).connections[0], None

    job.comm.Barrier()  # rank 0 listens
    obey(socket, job.rank, os.getpid(), open_connection)
    return 0, False


if __name__ == "__main__":
    exit_code, end_job = main(*sys.argv[1:])
    leaving.leave(exit_code, end_job=end_job, timeout_s=3.0)
