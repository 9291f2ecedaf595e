"""K and V between scattered blocks and a chunk's contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import BlockLayout
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.codec import Array
from rworker.instructions import PlaceChunk, ReadChunk
from rworker.stream.chunks import ChunkShape

if TYPE_CHECKING:
    from cpu_kernels.team import OpenMPTeam


class ChunkMemory(Protocol):
    """Reads and writes K and V in the memory of an R-worker's caches."""

    def read(self, read: ReadChunk) -> Array: ...

    def place(self, place: PlaceChunk) -> None: ...


class ChunkKernels(Protocol):
    """``cpu_kernels``, or their NumPy twins in ``cpu_kernels.reference``."""

    @property
    def append(self) -> Callable[..., None]: ...

    @property
    def gather(self) -> Callable[..., None]: ...


def read_chunk(
    shape: ChunkShape,
    pool: NDArray[np.uint8],
    places: NDArray[np.int64],
    take: Callable[[int], NDArray[np.uint8]],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> NDArray[np.uint8]:
    """Return a chunk's data, uint8 [num_bytes], from where it lies scattered over a cache's
    blocks. Bytes between its arrays are zero.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        places: as ``PlaceChunk`` has them.
        take: gives uint8 [num_bytes] of memory, which is overwritten.
    """
    if shape.form is ChunkForm.BLOCKS:
        rows, some = _head_rows(shape, pool), _rows_of(shape.layout, places, shape.heads)
        data = take(len(rows) * some.size * rows.shape[2])
        # "clip": as they are in the pool, without a buffer in between
        np.take(rows, some, 1, data.reshape(len(rows), *some.shape, -1), "clip")
        return data
    data = take(shape.num_bytes)
    for start, end in shape.gaps:  # what the memory held before must not leave
        data[start:end] = 0
    for index, layer in enumerate(shape.layers):
        k, v, scales = shape.tokens(data, index)
        kernels.gather(
            shape.layout, pool[layer], places, k, v, scales,
            heads=shape.heads, num_threads=num_threads, team=team,
        )  # fmt: skip
    return data


def place_chunk(
    shape: ChunkShape,
    pool: NDArray[np.uint8],
    places: NDArray[np.int64],
    data: NDArray[np.uint8],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> None:
    """Write a chunk's data where its tokens belong: the inverse of ``read_chunk``."""
    if shape.form is ChunkForm.BLOCKS:
        rows, some = _head_rows(shape, pool), _rows_of(shape.layout, places, shape.heads)
        rows[:, some] = data.reshape(len(rows), *some.shape, -1)
        return
    for index, layer in enumerate(shape.layers):
        k, v, scales = shape.tokens(data, index)
        kernels.append(
            shape.layout, pool[layer], k, v, places, source=shape.layout.dtype, scales=scales,
            heads=shape.heads, num_threads=num_threads, team=team,
        )  # fmt: skip


def _head_rows(shape: ChunkShape, pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a view, [layers, num_blocks * num_kv_heads, head_bytes]."""
    some = pool[shape.layers.start : shape.layers.stop]
    return some.reshape(len(some), -1, some.shape[2] // shape.layout.num_kv_heads)


def _rows_of(layout: BlockLayout, block_ids: NDArray[np.int64], heads: range) -> NDArray[np.int64]:
    """Return where blocks' heads are in ``_head_rows``, [num_blocks, heads]."""
    firsts = block_ids[:, None] * layout.num_kv_heads
    rows: NDArray[np.int64] = firsts + np.array(heads)
    return rows
