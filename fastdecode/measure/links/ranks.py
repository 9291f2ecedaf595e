"""The links of an MPI job: from its first rank to another, and between those."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from fastdecode.measure.links.caches import SEQUENCE_BYTES
from fastdecode.measure.links.rates import Raw
from fastdecode.wire.kv.chunks import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from fastdecode.wire.mpi.job import MpiJob

_TAG: Final = 7
_PEER: Final = 1
"""The rank that takes raw bytes."""


def send_raw(job: MpiJob, num_sequences: int, rounds: int) -> Raw:
    """What raw sends to the second rank take, which calls ``take_raw`` at the
    same time; before anybody has made a connection."""
    from fastdecode.wire.mpi.library import MPI

    seconds = []
    num_bytes = num_sequences * SEQUENCE_BYTES
    for _ in range(rounds + 1):
        data = np.ones(MAX_CHUNK_BYTES, np.uint8)
        started = time.perf_counter()
        for _ in range(0, num_bytes, MAX_CHUNK_BYTES):
            job.comm.Send([data, MPI.BYTE], _PEER, _TAG)
        job.comm.Recv([np.zeros(1, np.uint8), MPI.BYTE], _PEER, _TAG)
        seconds.append(time.perf_counter() - started)
    a_byte_s = statistics.median(seconds[1:]) / num_bytes
    return lambda count, size: a_byte_s * count


def take_raw(job: MpiJob, num_sequences: int, rounds: int) -> None:
    """The other side of ``send_raw``; nothing, of other ranks."""
    from fastdecode.wire.mpi.library import MPI

    if job.rank != _PEER:
        return
    for _ in range(rounds + 1):
        buffers = [np.empty(MAX_CHUNK_BYTES, np.uint8) for _ in range(2)]
        for place in range(num_sequences * SEQUENCE_BYTES // MAX_CHUNK_BYTES):
            job.comm.Recv([buffers[place % 2], MPI.BYTE], 0, _TAG)
        job.comm.Send([np.zeros(1, np.uint8), MPI.BYTE], 0, _TAG)
