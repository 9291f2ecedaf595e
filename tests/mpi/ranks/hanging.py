"""A job whose rank 0 leaves while two others hang, or one that nobody has
noticed, beside one that has died; a third waits for its end.

Usage: hanging.py noticed|unnoticed
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])]

from fastdecode.wire.mpi import joining, launcher, leaving  # noqa: E402
from fastdecode.wire.mpi.siblings import siblings, stopped_siblings  # noqa: E402
from fastdecode.wire.waiting import look_until_found  # noqa: E402

WAIT_S = 60.0

if __name__ == "__main__":
    rank = joining.join().rank
    is_noticed = sys.argv[1] == "noticed"
    if rank == 0:
        num_stopped = 2 if is_noticed else 1
        assert look_until_found(lambda: len(stopped_siblings()) == num_stopped or None, WAIT_S)
        assert look_until_found(lambda: len(list(siblings())) == 2 + num_stopped or None, WAIT_S)
        leaving.leave(0, end_job=is_noticed, timeout_s=1.0)
    launcher.let_rank_0_stop()
    if rank == 1 and not is_noticed:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    look_until_found(lambda: "0" not in {x.rank for x in siblings()} or None, WAIT_S)
    leaving.leave(0, timeout_s=1.0)
