"""Room in the host's memory for blocks of a KV cache on a device.

All copies are queued where the device's other work is: each sees what was written before it, and
what comes after sees what it wrote. Nothing on the host waits for them. Memory that CUDA knows
(pinned) is copied at the speed of the bus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastdecode.core.errors import CapacityError, Given
from sworker.device import Gpu, gpu_of
from sworker.paged import PagedKV


class BlockMemory(Protocol):
    """Where copies of a cache's blocks are kept."""

    @property
    def num_slots(self) -> int:
        """Blocks that it has room for."""

    def copy(self, slots: Sequence[int], blocks: Sequence[int], *, is_fetch: bool) -> None:
        """Copy blocks of the cache to slots, one to each; ``is_fetch``: the other way."""


class HostBlocks:
    """See the module, and ``BlockMemory``.

    Args:
        num_slots: blocks to have room for.
        gpu: the device's driver, in place of torch's.

    Raises:
        CapacityError: the host lacks the memory.
    """

    def __init__(self, cache: PagedKV, num_slots: int, gpu: Gpu | None = None) -> None:
        self.num_slots = num_slots
        self._block_size, self._block_bytes = cache.kv.block_size, cache.kv.block_bytes
        self._gpu = gpu or gpu_of(cache.pool.device)
        pools = [pool for pool in (cache.pool, cache.scales) if pool is not None]
        self._pairs = [(self._room(pool), pool) for pool in pools]

    def copy(self, slots: Sequence[int], blocks: Sequence[int], *, is_fetch: bool) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            rows = slice(block * self._block_size, (block + 1) * self._block_size)
            for stored, pool in self._pairs:
                host, device = stored[slot], pool[:, :, rows]
                target, source = (device, host) if is_fetch else (host, device)
                target.copy_(source, non_blocking=True)

    def _room(self, pool: Tensor) -> Tensor:
        """[num_slots, num_layers, 2, block_size, …] for blocks of a pool."""
        shape = (self.num_slots, *pool.shape[:2], self._block_size, *pool.shape[3:])
        try:
            if self._gpu is None or not self.num_slots:
                return torch.empty(shape, dtype=pool.dtype)
            memory = self._gpu.pinned(math.prod(shape) * pool.element_size())
            return memory.view(pool.dtype).view(shape)
        except (RuntimeError, OSError, MemoryError):
            raise CapacityError(
                f"{self.num_slots} KV blocks of {self._block_bytes} bytes do not fit in this "
                "host's memory: lower ",
                Given("cache_memory_gb"),
            ) from None
