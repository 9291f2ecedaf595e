"""A KV cache on a device as the mover of a disk tier sees it: bytes of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.paged import StoredKV

Bytes: TypeAlias = NDArray[np.uint8]


class DeviceMemory:
    """See ``rworker.tiers.mover.CacheMemory``. A block of a layer is its K and V, and
    behind them their scales, if there are any. Copies are queued behind the device's
    other work, and waited for: call this in threads that nobody waits for.

    Args:
        cache: on the device, or what such a cache has in the host's memory.
    """

    def __init__(self, cache: StoredKV) -> None:
        self._parts = [part for part in (cache.pool, cache.scales) if part is not None]
        self._block_size = cache.kv.block_size
        self.num_layers = len(cache.pool)
        self.layer_bytes = sum(self._bytes_of(part) for part in self._parts)

    def read(self, block: int, into: Bytes) -> None:
        """See ``CacheMemory``."""
        for rows, there in self._both(block, range(self.num_layers), into):
            there[:] = rows.contiguous().cpu().view(torch.uint8).reshape(len(there), -1).numpy()

    def write(self, layers: range, block: int, data: Bytes) -> None:
        """See ``CacheMemory``."""
        for rows, came in self._both(block, layers, data):
            rows.copy_(torch.from_numpy(came.copy()).view(rows.dtype).view(rows.shape))

    def clear(self, block: int) -> None:
        """See ``CacheMemory``."""
        for part in self._parts:
            self._rows(part, block).zero_()

    def slots_of(self, block: int) -> NDArray[np.int64]:
        """Of a block's tokens."""
        return np.arange(block * self._block_size, (block + 1) * self._block_size)

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
