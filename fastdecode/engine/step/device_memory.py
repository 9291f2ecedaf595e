"""A KV cache on a device, as others see it: bytes of blocks to the mover of a disk tier,
chunks (``fastdecode.wire.blocks``) to peers that read from it or write to it.

A chunk's bytes are those of an R-worker's cache, so R-workers and devices read from
one another. Copies are queued behind the device's other work, and waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Array
from rworker.stream.chunks import ChunkShape
from rworker.stream.stored_rows import StoredRows
from sworker.buffers import to_device
from sworker.device import Gpu
from sworker.dtypes import pack_int4, torch_dtype, unpack_int4
from sworker.paged import StoredKV

Bytes: TypeAlias = NDArray[np.uint8]

_SIGN = 0x80  # an R-worker stores int8 as value + 128
_CELL = 8  # elements of int4 that share 4 bytes in a stored row


class DeviceMemory:
    """A cache on a device as a ``rworker.tiers.tier.CacheMemory``. A layer's block is its K and V,
    then their scales, if any. Call the methods that move blocks in background threads only.

    Args:
        stored: Returns the cache with all that ended steps have stored: on the device, or what
            such a cache has in the host's memory.
        gpu: The device's driver, in place of torch's.
        on_write: Called with the blocks [B] that were written.
    """

    def __init__(
        self,
        stored: Callable[[], StoredKV],
        gpu: Gpu | None,
        on_write: Callable[[NDArray[np.integer]], None],
    ) -> None:
        self._stored, self._gpu, self._on_write = stored, gpu, on_write
        cache = stored()
        self._device, self._block_size = cache.pool.device, cache.kv.block_size
        self.num_layers = len(cache.pool)
        self.layer_bytes = sum(map(self._bytes_of, self._parts))
        self._buffers = BufferPool()

    def read(self, block: int, into: Bytes) -> None:
        for rows, there in self._both(block, range(self.num_layers), into):
            there[:] = rows.contiguous().cpu().view(torch.uint8).reshape(len(there), -1).numpy()

    def write(self, layers: range, block: int, data: Bytes) -> None:
        for rows, came in self._both(block, layers, data):
            rows.copy_(torch.from_numpy(came.copy()).view(rows.dtype).view(rows.shape))
        self._on_write(np.array([block]))

    def clear(self, block: int) -> None:
        for part in self._parts:
            self._rows(part, block).zero_()
        self._on_write(np.array([block]))

    def read_chunk(self, shape: ChunkShape, places: NDArray[np.int64]) -> Array:
        """Return a chunk's data, uint8 [B]. It holds for as long as it is referred to.

        Args:
            places: as ``PlaceChunk`` has them.
        """
        cache = self._stored()
        layers, heads, there = self._there(shape, places)
        rows = _as_stored(cache.pool[layers, :, there, heads].cpu(), cache.kv)
        scales = None
        if cache.scales is not None:
            scales = cache.scales[layers, :, there, heads].cpu().numpy()
        data = self._buffers.take(shape.num_bytes)
        StoredRows(rows, scales).write(shape, data)
        return data

    def place_chunk(self, shape: ChunkShape, places: NDArray[np.int64], data: Array) -> None:
        """Write a chunk. ``places``: as ``PlaceChunk`` has them."""
        cache = self._stored()
        layers, heads, there = self._there(shape, places)
        stored = StoredRows.of(shape, data)
        rows = _as_held(torch.from_numpy(stored.rows), cache.kv)
        cache.pool[layers, :, there, heads] = rows.to(cache.pool.device)
        if cache.scales is not None and stored.scales is not None:
            scales = torch.from_numpy(stored.scales)
            cache.scales[layers, :, there, heads] = scales.to(cache.pool.device)
        is_whole = shape.form is ChunkForm.BLOCKS
        self._on_write(places if is_whole else places // self._block_size)

    @property
    def _parts(self) -> list[Tensor]:
        cache = self._stored()
        return [part for part in (cache.pool, cache.scales) if part is not None]

    def _both(self, block: int, layers: range, data: Bytes) -> Iterator[tuple[Tensor, Bytes]]:
        """A block's rows of each part in some layers, and their bytes of ``data``
        [layers, layer_bytes]."""
        at = 0
        for part in self._parts:
            end = at + self._bytes_of(part)
            yield self._rows(part, block)[layers.start : layers.stop], data[:, at:end]
            at = end

    def _rows(self, part: Tensor, block: int) -> Tensor:
        """[num_layers, 2, block_size, …]."""
        return part[:, :, block * self._block_size : (block + 1) * self._block_size]

    def _bytes_of(self, part: Tensor) -> int:
        """Of a block, in one layer."""
        return 2 * self._block_size * part[0, 0, 0].nbytes

    def _there(self, shape: ChunkShape, places: NDArray[np.int64]) -> tuple[slice, slice, Tensor]:
        """Return a chunk's layers and heads, and its slots on the device."""
        if shape.form is ChunkForm.BLOCKS:
            places = (places[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)
        slots = to_device(torch.from_numpy(places), self._device, self._gpu)
        layers, heads = (slice(side.start, side.stop) for side in (shape.layers, shape.heads))
        return layers, heads, slots


def _as_stored(rows: Tensor, kv: KVSpec) -> NDArray[Any]:
    """Rows of a pool, on the host, as an R-worker stores them."""
    if kv.dtype is DType.INT8:
        return rows.view(torch.uint8).numpy() ^ _SIGN
    if kv.dtype is DType.INT4:
        return _as_cells(unpack_int4(rows, kv.head_dim)).numpy()
    return (rows if kv.dtype is DType.FLOAT32 else rows.view(torch.uint16)).numpy()


def _as_held(rows: Tensor, kv: KVSpec) -> Tensor:
    """The inverse of ``_as_stored``."""
    if kv.dtype is DType.INT8:
        return (rows ^ _SIGN).view(torch.int8)
    if kv.dtype is DType.INT4:
        return pack_int4(_of_cells(rows)[..., : kv.head_dim])
    return rows.view(torch_dtype(kv.dtype))


def _as_cells(whole: Tensor) -> Tensor:
    """int4 as int8 [..., D] → uint8 [..., 4 * ceil(D / 8)]: of each eight elements byte i
    holds element i in its lower half and element i + 4 in its upper half."""
    biased = torch.nn.functional.pad(whole + 8, (0, -whole.shape[-1] % _CELL)).to(torch.uint8)
    low, high = biased.unflatten(-1, (-1, 2, _CELL // 2)).unbind(-2)
    packed: Tensor = (low | high << 4).flatten(-2)
    return packed


def _of_cells(cells: Tensor) -> Tensor:
    """The inverse of ``_as_cells``, int8 [..., 8 * ceil(D / 8)]."""
    words: Tensor = cells.unflatten(-1, (-1, _CELL // 2))
    biased: Tensor = torch.stack((words & 15, words >> 4), dim=-2).flatten(-3)
    return biased.to(torch.int8).sub_(8)
