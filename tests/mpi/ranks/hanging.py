"""A job whose rank 0 leaves while two others hang, and a third waits for its end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])]

from fastdecode.wire.mpi import joining, launcher, leaving  # noqa: E402
from fastdecode.wire.mpi.siblings import siblings, stopped_siblings  # noqa: E402
from fastdecode.wire.patience import look_until_found  # noqa: E402

WAIT_S = 60.0

if __name__ == "__main__":
    rank = joining.join().rank
    if rank == 0:
        assert look_until_found(lambda: len(stopped_siblings()) == 2 or None, WAIT_S)
        leaving.leave(0, end_job=True, timeout_s=1.0)
    launcher.let_rank_0_stop()
    if rank < 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    look_until_found(lambda: "0" not in {x.rank for x in siblings()} or None, WAIT_S)
    leaving.leave(0, timeout_s=1.0)
