"""Ranks that die or hang, as the S-worker sees them. Each test has the job to itself."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from messages_for_tests import attend
from transport_suite import WAIT_S, code_of

from fastdecode.wire.mpi.hub import FROM_R_WORKER, MpiHub
from fastdecode.wire.mpi.job import before_ending
from fastdecode.wire.transport import CLOSED, TIMEOUT


@pytest.fixture
def hub(mpi: Any) -> Any:
    line = next(mpi.lines)
    for puppet in mpi.puppets:
        puppet.call("open", line)
    hub: MpiHub[Any, Any] = MpiHub(mpi.job, FROM_R_WORKER)
    for rank in range(1, mpi.job.size):
        hub.connect(rank, f"R-worker rank {rank}", line=line)
    return hub


def serve(mpi: Any, hub: Any, workers: list[int], num_steps: int) -> None:
    """These R-workers still answer."""
    for worker in workers:
        mpi.puppets[worker].start("answer", num_steps)
    for step in range(num_steps):
        for worker in workers:
            hub.connections[worker].send(attend(200, step=step))
        assert sorted(hub.receive_any(WAIT_S)[0] for _ in workers) == workers
    assert [mpi.puppets[worker].result() for worker in workers] == [num_steps] * len(workers)


def test_killed_while_a_large_message_is_under_way(mpi: Any, hub: Any) -> None:
    hub.connections[0].send(attend(4000))
    os.kill(mpi.puppets[0].pid, signal.SIGKILL)
    assert code_of(lambda: hub.connections[0].receive(WAIT_S), "R-worker rank 1 is lost") == CLOSED
    serve(mpi, hub, [1, 2], 20)


def test_stopped(mpi: Any, hub: Any) -> None:
    serve(mpi, hub, [0, 1, 2], 2)
    os.kill(mpi.puppets[2].pid, signal.SIGSTOP)
    hub.connections[2].send(attend(200, step=50))
    assert code_of(lambda: hub.connections[2].receive(0.2), "R-worker rank 3", "hangs") == TIMEOUT
    serve(mpi, hub, [0, 1], 20)
    # It was only slow: what it was sent is still there.
    os.kill(mpi.puppets[2].pid, signal.SIGCONT)
    mpi.puppets[2].start("answer", 1)
    assert hub.connections[2].receive(WAIT_S).step == 50


def test_left_stopped(mpi: Any, hub: Any) -> None:
    """This rank gives it up, leaves, and has the launcher kill it."""
    os.kill(mpi.puppets[2].pid, signal.SIGSTOP)
    hub.connections[2].send(attend(4000))
    assert code_of(lambda: hub.connections[2].receive(0.1), "rank 3") == TIMEOUT
    hub.connections[2].give_up()
    hub.close()


def test_kept_until_the_end(mpi: Any, hub: Any) -> None:
    """MPI keeps a thread, and so whoever calls it next: the job ends, and says whom it waited
    for."""
    before_ending(lambda code: print(f"the last act, before exit code {code}", flush=True))
    os.kill(mpi.puppets[1].pid, signal.SIGSTOP)
    print(f"process {mpi.puppets[1].pid} was stopped", flush=True)
    with mpi.job.lock:
        signal.pause()


def test_s_worker_dies(mpi: Any, hub: Any) -> None:
    for puppet in mpi.puppets:
        puppet.start("receive", WAIT_S)
    print("the S-worker dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
