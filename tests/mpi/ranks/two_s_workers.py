"""A job of two S-workers that share an R-worker, each with a cache of its own.
One leaves first, and the other goes on.

Every rank runs this; the last is the R-worker.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from state_machine import HELLO, NUM_LAYERS, attend, step_of  # noqa: E402

from cpu_kernels import reference  # noqa: E402
from fastdecode.core.errors import WorkerError  # noqa: E402
from fastdecode.wire.messages import Accepted, AttendResult, Failed, OpenSequence, Shutdown, Welcome  # noqa: E402
from fastdecode.wire.mpi import job as mpi_job  # noqa: E402
from fastdecode.wire.mpi import joining, leaving  # noqa: E402
from fastdecode.wire.mpi.hub import RankRoles, connect_to_s_workers, connect_workers  # noqa: E402
from rworker.attention import AttentionExecutor  # noqa: E402
from rworker.state import RWorkerState  # noqa: E402
from rworker.worker import serve  # noqa: E402

ROLES = RankRoles(3, peers=(0, 1, 2))
WAIT_S = 60.0


def decode(connection: Any, past: int, step: int) -> None:
    begin = step_of((1, past, 1), step=step)
    connection.send(begin)
    for layer in range(NUM_LAYERS):
        connection.send(attend(begin, layer, v=np.full((1, 2, 16), past + 1, np.float32)))
        result = connection.receive(WAIT_S)
        assert isinstance(result, AttendResult), result
        assert np.allclose(result.o, (past + 2) / 2), result.o  # the mean of 1 … past + 1


def s_worker(job: mpi_job.MpiJob) -> None:
    hub = connect_workers(job, roles=ROLES)
    connection = hub.connections[0]
    if job.rank == 2:
        mpi_job.receive_text(job, 1, WAIT_S)  # both caches are open by now
        connection.send(replace(HELLO, holder=1, max_blocks=8))
        refused = connection.receive(WAIT_S)
        assert isinstance(refused, Failed) and refused.code == "busy", refused
        mpi_job.send_text(job, 1, "refused")
        print("the third is refused", flush=True)
        return
    connection.send(replace(HELLO, holder=job.rank, max_blocks=8))
    welcome = connection.receive(WAIT_S)
    assert isinstance(welcome, Welcome) and welcome.num_blocks == 8, welcome
    connection.send(OpenSequence(1, 20))
    assert connection.receive(WAIT_S) == Accepted(1)
    decode(connection, 0, 0)
    if job.rank == 0:
        mpi_job.send_text(job, 1, "open")
        mpi_job.receive_text(job, 1, WAIT_S)  # an R-worker ends with the last cache
        connection.send(Shutdown())
        try:
            connection.receive(WAIT_S)
        except WorkerError:
            print("the first has left", flush=True)
        return
    mpi_job.send_text(job, 0, "open")
    mpi_job.receive_text(job, 0, WAIT_S)
    mpi_job.send_text(job, 2, "open")
    mpi_job.receive_text(job, 2, WAIT_S)
    for past in range(1, 10):
        decode(connection, past, past)
    print("the second has decoded", flush=True)
    connection.send(Shutdown())
    hub.close()


def main() -> None:
    job = joining.join(min_ranks=4)
    if job.rank < 3:
        s_worker(job)
    else:
        hub = connect_to_s_workers(job, roles=ROLES)
        serve(hub, RWorkerState("r", kv_bytes=200_000), AttentionExecutor(kernels=reference))  # type: ignore[arg-type]
        hub.close()
        print("the R-worker has ended", flush=True)
    leaving.leave(0)


if __name__ == "__main__":
    main()
