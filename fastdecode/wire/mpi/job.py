"""This process's part in an MPI job, and what S-workers tell each other when it
begins. How it joins and leaves: ``joining``, ``leaving``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fastdecode.core.errors import WorkerError
from fastdecode.wire.waiting import look_until_found

if TYPE_CHECKING:
    from mpi4py import MPI

S_RANK: Final = 0
"""The rank that leads a job: an S-worker, and unless others are named the only
one that R-workers have as a peer."""
DEFAULT_TAG: Final = 64
"""Of the connections between S-worker and R-workers."""
LINK_TAGS: Final = range(68, 32_768)
"""Of links between R-workers, two each. MPI has all of these, at least."""
MEETING_TAG: Final = 62
"""Of what S-workers tell each other when the job begins."""
CONTROL_TAG: Final = 60
"""Of the connections between the controller of instances and these; and the next."""
KNOCK_TAG: Final = 58
"""Of R-workers that tell others over which line they are going to read."""


@dataclass(frozen=True)
class MpiJob:
    """This process's part in an MPI job."""

    comm: MPI.Intracomm
    rank: int
    size: int
    library: str
    """Name and version of the MPI library."""
    host: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held around every MPI call: MPI was asked for calls by several threads,
    one at a time (MPI_THREAD_SERIALIZED)."""
    hanging: set[int] = field(default_factory=set)
    """Ranks that were given up though nobody says that they are dead."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set, under the lock, when this process is about to leave: nobody may call
    MPI from then on."""
    peers: set[int] = field(default_factory=set)
    """Ranks that this one has, or had, a connection to."""
    dead: set[int] = field(default_factory=set)
    """Ranks that MPI says have died."""
    abandoned: list[object] = field(default_factory=list)
    """Requests that never ended, and their memory, which MPI may still touch."""
    threads_may_take_turns: bool = True
    """Whether it granted that; if not, only the thread that joined may call MPI."""

    @property
    def r_ranks(self) -> range:
        return range(1, self.size)


joined: Final[list[MpiJob]] = []
"""A process is in one MPI job, from joining it to its end: MPI says so, and
this is where we remember it."""


def takes_calls_of_one_thread() -> bool:
    """Whether this process has joined a job whose MPI library takes calls of
    the thread alone that joined it."""
    return bool(joined) and not joined[0].threads_may_take_turns


def send_text(job: MpiJob, rank: int, text: str) -> None:
    """A short text for another S-worker's rank, when the job begins. Waits
    until it is on its way."""
    with job.lock:
        job.comm.Send(bytearray(text.encode()), rank, MEETING_TAG)


def receive_text(job: MpiJob, rank: int, timeout_s: float) -> str:
    """The text that a rank sends by ``send_text``; waits for it.

    Raises:
        WorkerError: the rank has ended without sending it, or it didn't come in
            time.
    """
    text = look_until_found(lambda: _look_for_text(job, rank), timeout_s)
    if text is None:
        raise WorkerError(
            f"rank {rank} hasn't come to meet the other S-workers in {timeout_s:g} s: does it "
            "hang, or was it started "
            "with other options than rank 0?",
            code="tp_connect_failed",
        )
    return text


def _look_for_text(job: MpiJob, rank: int) -> str | None:
    from fastdecode.wire.mpi.library import MPI

    status = MPI.Status()
    with job.lock:
        try:
            if job.comm.Iprobe(rank, MEETING_TAG, status):
                buffer = bytearray(status.Get_count())
                job.comm.Recv(buffer, rank, MEETING_TAG)
                return buffer.decode()
            has_left = job.comm.Iprobe(rank, DEFAULT_TAG)  # its goodbye
        except MPI.Exception:  # it was killed
            has_left = True
    if has_left:
        raise WorkerError(
            f"rank {rank} has ended before it met the other S-workers, as its own output then "
            "says, or was started as "
            "an R-worker: the first tp ranks are S-workers",
            code="tp_rank_lost",
        )
    return None
