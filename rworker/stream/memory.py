"""K and V between scattered blocks and a chunk's contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import BlockLayout
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm, FetchChunk, ReadBlocks, StoreChunk
from rworker.stream.chunks import ChunkShape, layout_of, sides_of

if TYPE_CHECKING:
    from cpu_kernels.team import OpenMPTeam


def new_pool(kv: KVSpec, num_blocks: int) -> NDArray[np.uint8]:
    """Memory for so many blocks: uint8 [num_layers, num_blocks, block_bytes]. It
    is committed as it is written."""
    return cpu_kernels.allocate_pool(layout_of(kv), kv.num_layers, num_blocks)


class ChunkKernels(Protocol):
    """``cpu_kernels``, or their NumPy twins in ``cpu_kernels.reference``."""

    @property
    def append(self) -> Callable[..., None]: ...

    @property
    def gather(self) -> Callable[..., None]: ...


def scatter(
    layout: BlockLayout,
    pool: NDArray[np.uint8],
    chunk: FetchChunk | ReadBlocks,
    places: NDArray[np.int64],
    take: Callable[[int], NDArray[np.uint8]],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> NDArray[np.uint8]:
    """Make contiguous what lies scattered over a cache's blocks: a chunk's data, uint8
    [num_bytes]; bytes between its arrays are zero.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        chunk: what to read; it fits the cache.
        places: where that is, as ``PlaceChunk`` has it.
        take: gives uint8 [num_bytes] of memory, which is overwritten.
    """
    layers, heads = sides_of(chunk)
    if chunk.form is ChunkForm.BLOCKS:
        rows, some = _head_rows(layout, pool, layers), _rows_of(layout, places, heads)
        data = take(len(rows) * some.size * rows.shape[2])
        # "clip": as they are in the pool, without a buffer in between
        np.take(rows, some, 1, data.reshape(len(rows), *some.shape, -1), "clip")
        return data
    shape = ChunkShape.of(layout, chunk, len(places))
    data = take(shape.num_bytes)
    for start, end in shape.gaps:  # what the memory held before is nobody's business
        data[start:end] = 0
    of_heads = range(heads.start, heads.stop)
    for index, layer in enumerate(pool[layers]):
        k, v, scales = shape.tokens(data, index)
        kernels.gather(
            layout, layer, places, k, v, scales,
            heads=of_heads, num_threads=num_threads, team=team,
        )  # fmt: skip
    return data


def gather(
    layout: BlockLayout,
    pool: NDArray[np.uint8],
    chunk: StoreChunk,
    places: NDArray[np.int64],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> None:
    """The inverse: put a chunk's data where its tokens belong.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        chunk: what to write; it fits the cache.
        places: where it goes, as ``PlaceChunk`` has it.
    """
    layers, heads = sides_of(chunk)
    if chunk.form is ChunkForm.BLOCKS:
        rows, some = _head_rows(layout, pool, layers), _rows_of(layout, places, heads)
        rows[:, some] = chunk.data.reshape(len(rows), *some.shape, -1)
        return
    shape = ChunkShape.of(layout, chunk, len(places))
    of_heads = range(heads.start, heads.stop)
    for index, layer in enumerate(pool[layers]):
        k, v, scales = shape.tokens(chunk.data, index)
        kernels.append(
            layout, layer, k, v, places,
            source=layout.dtype, scales=scales, heads=of_heads, num_threads=num_threads, team=team,
        )  # fmt: skip


def _head_rows(layout: BlockLayout, pool: NDArray[np.uint8], layers: slice) -> NDArray[np.uint8]:
    """[layers, num_blocks * num_kv_heads, head_bytes], a view."""
    some = pool[layers]
    return some.reshape(len(some), -1, some.shape[2] // layout.num_kv_heads)


def _rows_of(layout: BlockLayout, block_ids: NDArray[np.int64], heads: slice) -> NDArray[np.int64]:
    """Where blocks' heads are in ``_head_rows``, [num_blocks, heads]."""
    firsts = block_ids[:, None] * layout.num_kv_heads
    rows: NDArray[np.int64] = firsts + np.arange(heads.start, heads.stop)
    return rows
