"""Run by a test as two ranks: rank 1 waits for rank 0 to meet it, which comes
late, and then leaves for good."""

from __future__ import annotations

from fastdecode.core.errors import WorkerError
from fastdecode.wire.mpi.hub import MpiJob
from fastdecode.wire.mpi.job import join, leave

WAIT_S = 60.0


def refusal(job: MpiJob, rank: int, timeout_s: float) -> str:
    try:
        return f"not refused: {job.receive_text(rank, timeout_s)}"
    except WorkerError as error:
        return f"{error.code}: {error}"


if __name__ == "__main__":
    job = join()
    if job.rank == 0:
        print("late:", refusal(job, 1, 0.1), flush=True)
        job.send_text(1, "/a/meeting place")
        print("met:", job.receive_text(1, WAIT_S), flush=True)
    else:
        job.send_text(0, job.receive_text(0, WAIT_S))
        print("gone:", refusal(job, 0, WAIT_S), flush=True)
    leave(0)
