"""How messages travel between an S-worker and its R-workers, and what that costs beside the
network: ZeroMQ's I/O threads copy every byte, and with a key encrypt it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_IO_THREADS: Final = 256
_MEASURED: Final = (
    "CPU time of an I/O thread, q, k, v of 256 rows of an 8B Llama out and o back on loopback "
    "(EPYC Zen 5)"
)


@dataclass(frozen=True)
class Transport:
    name: str
    thread_bytes_per_s: float
    """Rate of one I/O thread, both directions together. Infinite if there are none."""
    work: str
    source: str
    num_threads: int = 1
    """Most I/O threads; never more than R-workers, as each connection has one."""

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.thread_bytes_per_s)

    def io_s(self, num_bytes: float, sockets: float) -> float:
        """Return seconds of the I/O threads for these bytes, out and back, of all R-workers."""
        if not self.is_bounded:
            return 0.0
        return num_bytes / (self.thread_bytes_per_s * min(self.num_threads, max(1.0, sockets)))


MPI: Final = Transport("mpi", math.inf, "", "MPI's own copies are part of what a NIC's figure says")
TRANSPORTS: Final = {
    transport.name: transport
    for transport in (
        MPI,
        Transport("zmq-encrypted", 1.9e9, "encrypt", _MEASURED),
        Transport("zmq-plain", 7.0e9, "copy", _MEASURED),
    )
}
