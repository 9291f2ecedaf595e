"""Ranks that die or hang, as the S-worker sees them. Each test has the job to itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
from messages_for_tests import attend
from transport_suite import WAIT_S, code_of

from fastdecode.wire.mpi import hub as mpi_transport
from fastdecode.wire.mpi.hub import connect_workers
from fastdecode.wire.mpi.leaving import before_leaving_stuck
from fastdecode.wire.transport import CLOSED, TIMEOUT

STUCK_AFTER_S = 0.2
STUCK_THOUGH_ALL_RUN_S = 4 * STUCK_AFTER_S


@pytest.fixture
def hub(mpi: Any) -> Any:
    for puppet in mpi.puppets:
        puppet.call("open", 64)
    return connect_workers(mpi.job)


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
    mpi.end_job = True
    os.kill(mpi.puppets[2].pid, signal.SIGSTOP)
    hub.connections[2].send(attend(4000))
    assert code_of(lambda: hub.connections[2].receive(0.1), "rank 3") == TIMEOUT
    hub.close()


@pytest.fixture
def kept(mpi: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Holds the lock as a thread has it that MPI keeps, so that whoever calls
    MPI next is kept too."""
    monkeypatch.setattr(mpi_transport, "STUCK_AFTER_S", STUCK_THOUGH_ALL_RUN_S)
    for puppet in mpi.puppets:
        puppet.call("open", 64)
    hub = connect_workers(mpi.job, stuck_after_s=STUCK_AFTER_S)
    with mpi.job.lock:
        yield hub.connections[0]


def test_kept_by_mpi(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of MPI's that doesn't return is noticed though all ranks run: they may be
    busy, so not at once."""
    waited: Queue[float] = Queue()
    monkeypatch.setattr(mpi_transport, "leave_stuck", waited.put)
    threading.Thread(target=lambda: kept.send(attend(1)), daemon=True).start()
    assert waited.get(timeout=WAIT_S) == pytest.approx(STUCK_THOUGH_ALL_RUN_S)


def test_kept_until_the_end(mpi: Any, kept: Any) -> None:
    """The job ends, and says whom it waited for."""
    before_leaving_stuck(
        lambda exit_code: print(f"the last act, before exit code {exit_code}", flush=True)
    )
    os.kill(mpi.puppets[1].pid, signal.SIGSTOP)
    print(f"process {mpi.puppets[1].pid} was stopped", flush=True)
    kept.poll()


def test_s_worker_dies(mpi: Any, hub: Any) -> None:
    for puppet in mpi.puppets:
        puppet.start("receive", WAIT_S)
    print("the S-worker dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
