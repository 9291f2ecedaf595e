"""Streams and the raw thing in turns, and what share of it they reach.

The **raw** thing is as many bytes in buffers of the same size over the same
library: two copies in memory, one into the buffer and one out of it; ``write``
and ``fsync``; ``zmq`` sockets; MPI sends. The other side gets them all and
answers once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fastdecode.measure.links.caches import HERE, THERE, Target
from fastdecode.wire.kv.chunks import MAX_CHUNK_BYTES
from rworker.stream.chunk_endpoints import ChunkSource
from rworker.stream.pieces import Piece
from rworker.stream.streams import expect_pieces, stream_out

Raw: TypeAlias = Callable[[int, int], float]
"""(bytes in all, bytes of a buffer) → seconds."""


@dataclass(frozen=True)
class LinkRate:
    """Of one link."""

    link: str
    chunk_bytes: int
    num_bytes: int
    """That were streamed at a time."""
    seconds: float
    """The median."""
    raw_s: float | None
    """Of as many raw bytes; None: nobody is at the other side who takes them."""
    share: float | None
    """Of the raw rate that streams reach: the median over pairs of raw seconds
    over ours; 1 is as fast."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


def stream(
    source: ChunkSource, target: Target, some: Sequence[Piece], chunk_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, float]:
    """Bytes, and the seconds that they took."""
    sink = target.begin()
    expect_pieces(some, {THERE: sink})
    started = time.perf_counter()
    num_bytes = stream_out(some, {HERE: source}, {THERE: sink}, chunk_bytes)
    target.end()
    return num_bytes, time.perf_counter() - started


def measure(
    link: str,
    act: Callable[[int], tuple[int, float]],
    raw: Raw | None,
    rounds: int,
    chunk_bytes: int = MAX_CHUNK_BYTES,
) -> LinkRate:
    """A link's rate, by turns with the raw thing. The first turn isn't counted.

    Args:
        act: streams in chunks of so many bytes: bytes in all, and seconds.
    """
    ours: list[float] = []
    theirs: list[float] = []
    num_bytes = 0
    for _ in range(rounds + 1):
        num_bytes, seconds = act(chunk_bytes)
        ours.append(seconds)
        if raw is not None:
            theirs.append(raw(num_bytes, chunk_bytes))
    seconds = statistics.median(ours[1:])
    if raw is None:
        return LinkRate(link, chunk_bytes, num_bytes, seconds, None, None)
    pairs = zip(theirs[1:], ours[1:], strict=True)
    share = statistics.median(one / other for one, other in pairs)
    raw_s = statistics.median(theirs[1:])
    return LinkRate(link, chunk_bytes, num_bytes, seconds, raw_s, share)


def copy_twice(num_bytes: int, size: int) -> float:
    """Into a buffer, and out of it."""
    one, buffer, other = (np.ones(x, np.uint8) for x in (num_bytes, size, num_bytes))
    started = time.perf_counter()
    for at in range(0, num_bytes, size):
        count = min(size, num_bytes - at)
        buffer[:count] = one[at : at + count]
        other[at : at + count] = buffer[:count]
    return time.perf_counter() - started


def write_file(path: Path) -> Raw:
    """Into a new file of this name, and on to the disk."""

    def write(num_bytes: int, size: int) -> float:
        data = np.ones(size, np.uint8)
        path.unlink(missing_ok=True)
        started = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        for at in range(0, num_bytes, size):
            os.write(fd, data[: min(size, num_bytes - at)].data)
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - started

    return write
