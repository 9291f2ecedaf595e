"""Two ranks whose launcher hangs end the job all the same: none waits for its
answer for longer than leaving may take."""

from __future__ import annotations

import os
import signal

from fastdecode.wire.mpi.joining import join
from fastdecode.wire.mpi.leaving import leave

job = join()
job.comm.Barrier()
os.kill(os.getppid(), signal.SIGSTOP)
leave(4, end_job=True, timeout_s=1.0)
