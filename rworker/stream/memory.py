"""K and V between scattered blocks and a chunk's contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import BlockLayout
from fastdecode.core.spec import KVSpec
from fastdecode.wire.kv.chunks import ChunkForm, FetchChunk, StoreChunk
from rworker.stream.chunks import ChunkShape, head_bytes_of, layout_of

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
    chunk: FetchChunk,
    slots: NDArray[np.int64],
    data: NDArray[np.uint8],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> None:
    """Make contiguous what lies scattered over a cache's blocks.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        chunk: what to read; it fits the cache.
        slots: int64 [T], where its tokens are.
        data: uint8 [num_bytes], overwritten; bytes between its arrays are
            zeroed.
    """
    shape = ChunkShape.of(layout, chunk, len(slots))
    layers = pool[chunk.first_layer : chunk.first_layer + chunk.num_layers]
    if chunk.form is ChunkForm.BLOCKS:
        for layer, out in zip(layers, shape.blocks(data), strict=True):
            _read_blocks(layout, layer, _block_ids(layout, slots), _head_bytes(layout, chunk), out)
        return
    _clear_padding(shape, data)
    heads = range(chunk.first_head, chunk.first_head + chunk.num_heads)
    for index, layer in enumerate(layers):
        k, v, scales = shape.tokens(data, index)
        kernels.gather(
            layout, layer, slots, k, v, scales, heads=heads, num_threads=num_threads, team=team
        )


def gather(
    layout: BlockLayout,
    pool: NDArray[np.uint8],
    chunk: StoreChunk,
    slots: NDArray[np.int64],
    *,
    kernels: ChunkKernels = cpu_kernels,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
) -> None:
    """The inverse: put a chunk's data where its tokens belong.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        chunk: what to write; it fits the cache.
        slots: int64 [T], where its tokens go.
    """
    shape = ChunkShape.of(layout, chunk, len(slots))
    layers = pool[chunk.first_layer : chunk.first_layer + chunk.num_layers]
    if chunk.form is ChunkForm.BLOCKS:
        part = _head_bytes(layout, chunk)
        for layer, blocks in zip(layers, shape.blocks(chunk.data), strict=True):
            for block, block_id in zip(blocks, _block_ids(layout, slots), strict=True):
                layer[block_id, part] = block
        return
    heads = range(chunk.first_head, chunk.first_head + chunk.num_heads)
    for index, layer in enumerate(layers):
        k, v, scales = shape.tokens(chunk.data, index)
        kernels.append(
            layout, layer, k, v, slots,
            source=layout.dtype, scales=scales, heads=heads, num_threads=num_threads, team=team,
        )  # fmt: skip


def _read_blocks(
    layout: BlockLayout,
    layer: NDArray[np.uint8],
    block_ids: list[int],
    part: slice,
    out: NDArray[np.uint8],
) -> None:
    for block, block_id in zip(out, block_ids, strict=True):
        block[:] = layer[block_id, part]


def _block_ids(layout: BlockLayout, slots: NDArray[np.int64]) -> list[int]:
    ids: list[int] = (slots[:: layout.block_size] // layout.block_size).tolist()
    return ids


def _head_bytes(layout: BlockLayout, chunk: StoreChunk | FetchChunk) -> slice:
    """Where a chunk's heads are in a block."""
    head_bytes = head_bytes_of(layout)
    end = chunk.first_head + chunk.num_heads
    return slice(chunk.first_head * head_bytes, end * head_bytes)


def _clear_padding(shape: ChunkShape, data: NDArray[np.uint8]) -> None:
    """What a chunk's memory held before is nobody's business."""
    for start, end in shape.gaps:
        data[start:end] = 0
