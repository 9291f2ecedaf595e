"""ZeroMQ's own threads, which copy what travels and, with CURVE, encrypt it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

_NAME: Final = "ZMQbg/IO"


def io_threads_for(num_peers: int, num_cores: int) -> int:
    """Of an S-worker with so many R-workers, on a host with so many cores: one
    for each R-worker, but no more than a quarter of the cores. Connections are
    dealt out to them."""
    return max(1, min(num_peers, num_cores // 4))


def io_cpu_s() -> float:
    """CPU seconds of this process's I/O threads so far; 0 where the system doesn't
    tell (no Linux)."""
    total_ns = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if (task / "comm").read_text().startswith(_NAME):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9
