"""Run by every rank of a test's MPI job: rank 0 runs the pytest file that it is given, the others
are its puppets.

Usage: main.py FILE SOCKET [PYTEST-OPTION ...]"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

import pytest  # noqa: E402
from puppet import Puppets, obey  # noqa: E402

from fastdecode.wire.mpi.job import join, leave  # noqa: E402


class Job:
    """What the tests of rank 0 find as the fixture ``mpi``."""

    def __init__(self, job: Any, puppets: Puppets) -> None:
        self.job = job
        self.puppets = puppets.wait()
        self.lines = count(2**15 - 400, 2)
        self.hung = False

    @pytest.fixture
    def mpi(self) -> Job:
        return self


def main(file: str, socket: str, *options: str) -> tuple[int, bool]:
    job = join()
    if job.rank == 0:
        puppets = Puppets(Path(socket), [*range(1, job.size)])
        job.comm.Barrier()
        args = [file, "-q", "--color=no", "-p", "no:cacheprovider", "--import-mode=importlib"]
        plugin = Job(job, puppets)
        code = int(pytest.main([*args, *options], plugins=[plugin]))
        puppets.close()
        return code, plugin.hung

    def open_connection(line: int, **options: Any) -> tuple[Any, None]:
        from fastdecode.wire.mpi.hub import TO_R_WORKER, MpiHub

        hub: MpiHub[Any, Any] = MpiHub(job, TO_R_WORKER)
        return hub.connect(0, "the S-worker (rank 0)", line=line), None

    job.comm.Barrier()  # rank 0 listens
    obey(socket, job.rank, os.getpid(), open_connection)
    return 0, False


if __name__ == "__main__":
    exit_code, hung = main(*sys.argv[1:])
    leave(exit_code, hung=hung)
