"""Run by a test as two ranks, which are to meet as S-workers. Rank 1 comes (``met``), doesn't
(``late``), leaves (``gone``), or is an R-worker (``other``)."""

from __future__ import annotations

import sys

from fastdecode.core.errors import WorkerError
from fastdecode.engine.setup import ranks
from fastdecode.wire.mpi.hub import r_worker_hub
from fastdecode.wire.mpi.job import join, leave

if __name__ == "__main__":
    job, how = join(), sys.argv[1]
    if job.rank == 0 or how == "met":
        if how == "late":
            ranks.JOINING_TIMEOUT_S = 0.1
        try:
            with ranks._meeting_place(job, range(2)) as place:
                print(f"met: {place}", flush=True)
        except WorkerError as error:
            print(f"{how}: {error.code}: {error}", flush=True)
    elif how != "gone":
        hub = r_worker_hub(job) if how == "other" else None
        job.wait_for_end()
    leave(0)
