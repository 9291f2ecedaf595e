"""Chunks of K and V (``fastdecode.wire.kv.chunks``) out of a KV cache on a device, and into it.

A chunk's bytes are those of an R-worker's cache, so R-workers and devices read from
one another. Copies are queued behind the device's other work, and waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import cpu_kernels
from cpu_kernels import BlockLayout
from cpu_kernels.layout import CARRIERS
from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.kv.chunks import ChunkForm, FetchChunk, StoreChunk
from rworker.stream.chunks import ChunkShape, layout_of
from sworker.buffers import to_device
from sworker.device import Gpu
from sworker.dtypes import pack_int4, torch_dtype, unpack_int4
from sworker.paged import PagedKV

_SIGN = 0x80
"""An R-worker stores int8 as value + 128."""


class DeviceChunks:
    """Reads and writes chunks.

    Args:
        cache: on the device.
        gpu: the device's driver, in place of torch's.
    """

    def __init__(self, cache: PagedKV, gpu: Gpu | None = None) -> None:
        self._cache, self._gpu = cache, gpu
        self._layout = layout_of(cache.kv)
        self._buffers = BufferPool()

    def read(self, request: FetchChunk, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A chunk's data, uint8 [B]. It holds for as long as somebody refers to it.

        Args:
            request: fits the cache.
            slots: int64 [T], of its tokens.
        """
        shape = ChunkShape.of(self._layout, request, len(slots))
        data = self._buffers.take(shape.num_bytes)
        data[:] = 0
        rows, scales = self._rows(request, slots)
        for layer in range(shape.num_layers):
            k, v = rows[layer]
            both = None if scales is None else np.ascontiguousarray(scales[layer].transpose(1, 2, 0))
            if request.form is ChunkForm.BLOCKS:
                layout, places = self._blocks_of(request, len(slots))
                cpu_kernels.append(
                    layout, shape.blocks(data)[layer], k, v, places,
                    source=layout.dtype, scales=both,
                )  # fmt: skip
                continue
            there = shape.tokens(data, layer)
            there.k[:], there.v[:] = k, v
            if there.scales is not None:
                there.scales[:] = both
        return data

    def place(self, chunk: StoreChunk, slots: NDArray[np.int64]) -> None:
        """Write a chunk.

        Args:
            chunk: fits the cache.
            slots: int64 [T], where its tokens go.
        """
        shape = ChunkShape.of(self._layout, chunk, len(slots))
        stored = [self._stored(shape, chunk, layer) for layer in range(shape.num_layers)]
        rows = torch.from_numpy(np.stack([(k, v) for k, v, _ in stored]))
        self._write(self._cache.pool, chunk, slots, _held(rows, self._cache.kv))
        if self._cache.scales is not None:
            scales = np.stack([s for _, _, s in stored if s is not None])  # [L, T, H, 2]
            self._write(
                self._cache.scales, chunk, slots, torch.from_numpy(scales).permute(0, 3, 1, 2)
            )

    def _stored(
        self, shape: ChunkShape, chunk: StoreChunk, layer: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32] | None]:
        """A chunk's layer as stored rows: k, v [T, heads, row_length], scales [T, heads, 2]."""
        if chunk.form is ChunkForm.TOKENS:
            return shape.tokens(chunk.data, layer)
        layout, places = self._blocks_of(chunk, shape.num_tokens)
        rows = cpu_kernels.allocate_tokens(layout, shape.num_tokens)
        blocks = shape.blocks(chunk.data)[layer]
        cpu_kernels.gather(layout, blocks, places, rows.k, rows.v, rows.scales)
        return rows

    def _blocks_of(
        self, chunk: FetchChunk | StoreChunk, num_tokens: int
    ) -> tuple[BlockLayout, NDArray[np.int64]]:
        """How a chunk's blocks lie, which have its heads alone; and where its tokens
        are in them, int64 [T]."""
        layout = layout_of(replace(self._cache.kv, num_kv_heads=chunk.num_heads))
        return layout, np.arange(num_tokens, dtype=np.int64)

    def _rows(
        self, request: FetchChunk, slots: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Stored rows [layers, 2, T, heads, row_length] and scales [layers, 2, T, heads]."""
        there, cache = self._there(slots), self._cache
        layers, heads = _sides(request)
        rows = cache.pool[layers, :, there, heads].cpu()
        scales = None if cache.scales is None else cache.scales[layers, :, there, heads].cpu()
        return _as_stored(rows, cache.kv), None if scales is None else scales.numpy()

    def _write(
        self, part: Tensor, chunk: StoreChunk, slots: NDArray[np.int64], rows: Tensor
    ) -> None:
        layers, heads = _sides(chunk)
        part[layers, :, self._there(slots), heads] = rows.to(part.device)

    def _there(self, slots: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(slots), self._cache.pool.device, self._gpu)


def _sides(chunk: FetchChunk | StoreChunk) -> tuple[slice, slice]:
    """Its layers and heads."""
    return (
        slice(chunk.first_layer, chunk.first_layer + chunk.num_layers),
        slice(chunk.first_head, chunk.first_head + chunk.num_heads),
    )


def _as_stored(rows: Tensor, kv: KVSpec) -> NDArray[Any]:
    """Rows of a pool on the host as an R-worker stores them."""
    if kv.dtype is DType.INT8:
        return rows.view(torch.uint8).numpy() ^ _SIGN
    if kv.dtype is DType.INT4:
        return _as_cells(unpack_int4(rows, kv.head_dim).numpy())
    carrier = CARRIERS[kv.dtype.value]
    bits = rows if carrier == np.float32 else rows.view(torch.uint16)
    return bits.numpy()


def _held(rows: Tensor, kv: KVSpec) -> Tensor:
    """The inverse of ``_as_stored``."""
    if kv.dtype is DType.INT8:
        return (rows ^ _SIGN).view(torch.int8)
    if kv.dtype is DType.INT4:
        low, high = rows & 15, rows >> 4
        cells = torch.stack((low.unflatten(-1, (-1, 4)), high.unflatten(-1, (-1, 4))), dim=-2)
        return pack_int4(cells.flatten(-3)[..., : kv.head_dim].to(torch.int8) - 8)
    return rows.view(torch_dtype(kv.dtype))


def _as_cells(whole: NDArray[np.int8]) -> NDArray[np.uint8]:
    """int4 [..., D] as cells of eight, uint8 [..., 4 * ceil(D / 8)]: byte i holds element
    i in its lower and element i + 4 in its upper half."""
    pad = [(0, 0)] * (whole.ndim - 1) + [(0, -whole.shape[-1] % 8)]
    biased = np.pad((whole + 8).astype(np.uint8), pad)
    cells = biased.reshape(*whole.shape[:-1], -1, 2, 4)
    packed = cells[..., 0, :] | cells[..., 1, :] << 4
    return np.ascontiguousarray(packed.reshape(*whole.shape[:-1], -1))
