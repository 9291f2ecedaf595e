"""A job whose rank 0 leaves while others hang, which it may have noticed, beside one that has
died; the last waits for the end of rank 0.

Usage: hanging.py NUM_STOPPED noticed|unnoticed"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])]

from fastdecode.wire.mpi.job import join, leave  # noqa: E402
from fastdecode.wire.ranks import let_rank_0_stop, ranks_here  # noqa: E402
from fastdecode.wire.waiting import look_until_found  # noqa: E402

WAIT_S = 60.0

if __name__ == "__main__":
    job = join()
    num_stopped, is_noticed = int(sys.argv[1]), sys.argv[2] == "noticed"
    dies = int(not is_noticed)
    if job.rank == 0:
        assert look_until_found(
            lambda: len(ranks_here(only_stopped=True)) == num_stopped or None, WAIT_S
        )
        assert look_until_found(lambda: len(ranks_here()) == job.size - dies or None, WAIT_S)
        leave(0, hung=is_noticed)
    let_rank_0_stop()
    if job.rank <= dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank <= dies + num_stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    look_until_found(lambda: 0 not in ranks_here() or None, WAIT_S)
    leave(0)
