"""The stream suite over MPI: rank 0 runs it, rank 1 is the R-worker."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

import pytest  # noqa: E402
from stream_suite import MakePlace, StreamSuite, Worker  # noqa: E402

from cpu_kernels import reference  # noqa: E402
from fastdecode.wire.mpi import job as mpi_job  # noqa: E402
from fastdecode.wire.mpi import joining, leaving  # noqa: E402


class TestMpi(StreamSuite):
    """Its last test ends the connection."""

    @pytest.fixture
    def make_place(self, mpi: Any) -> MakePlace:
        return lambda kv: contextlib.nullcontext(Worker(mpi.connections[0], kv))


class Job:
    """What the tests find as the fixture ``mpi``."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub

    @pytest.fixture
    def mpi(self) -> Any:
        return self._hub


def main() -> int:
    job = joining.join()
    if job.rank == mpi_job.S_RANK:
        from fastdecode.wire.mpi.hub import connect_workers

        hub = connect_workers(job)
        options = ["-q", "--color=no", "-p", "no:cacheprovider", "--import-mode=importlib"]
        code = int(pytest.main([__file__, *options, "--rootdir", "."], plugins=[Job(hub)]))
        hub.close()
        return code
    from fastdecode.wire.mpi.hub import connect_to_s_workers
    from rworker.attention import AttentionExecutor
    from rworker.state import RWorkerState
    from rworker.worker import serve

    peers = connect_to_s_workers(job)
    state = RWorkerState("r0", kv_bytes=16 << 20)
    serve(peers, state, AttentionExecutor(kernels=reference))
    peers.close()
    return 0


if __name__ == "__main__":
    leaving.leave(main())
