"""A rank of an MPI job: an R-worker that answers NaN, from some layer on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from trouble import NotFinite  # noqa: E402

from fastdecode.wire.mpi import joining, launcher, leaving  # noqa: E402
from fastdecode.wire.mpi.hub import connect_to_s_workers  # noqa: E402
from rworker.state import RWorkerState  # noqa: E402
from rworker.worker import serve  # noqa: E402

if __name__ == "__main__":
    launcher.let_rank_0_stop()
    hub = connect_to_s_workers(joining.join())
    serve(hub, RWorkerState("liar", kv_bytes=10_000_000), NotFinite())
    hub.close()
    leaving.leave(0)
