"""The lower tier of a KV cache on the device: kept blocks in the host's memory.

All copies are queued where the device's other work is, so each sees what was
written before it, and what comes after sees what it wrote: nobody waits for
them on the host. In memory that CUDA knows (pinned) they go at the bus's speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdecode.core.errors import CapacityError, Given
from sworker.device import Gpu, gpu_of
from sworker.paged import PagedKV


class HostTier:
    """See the module.

    Args:
        cache: on the device.
        num_bytes: that blocks here may take.
        gpu: the device's driver, in place of the one that torch has.

    Raises:
        CapacityError: the host hasn't the memory.
    """

    def __init__(self, cache: PagedKV, num_bytes: int, gpu: Gpu | None = None) -> None:
        self._cache = cache
        self._gpu = gpu or gpu_of(cache.pool.device)
        self.block_bytes = cache.kv.block_bytes
        self.num_slots = num_bytes // self.block_bytes
        self._blocks = self._room(cache.pool)
        self._scales = None if cache.scales is None else self._room(cache.scales)
        self._slot_of: dict[bytes, int] = {}
        self._free = list(reversed(range(self.num_slots)))

    def _room(self, pool: Tensor) -> Tensor:
        """[num_slots, num_layers, 2, block_size, …] for blocks of a pool."""
        size = self._cache.kv.block_size
        shape = (self.num_slots, *pool.shape[:2], size, *pool.shape[3:])
        try:
            if self._gpu is None or not self.num_slots:
                return torch.empty(shape, dtype=pool.dtype)
            memory = self._gpu.pinned(math.prod(shape) * pool.element_size())
            return memory.view(pool.dtype).view(shape)
        except (RuntimeError, OSError, MemoryError):
            raise CapacityError(
                f"{self.num_slots} KV blocks of {self.block_bytes} bytes don't fit in this host's "
                "memory: lower ",
                Given("cache_memory_gb"),
            ) from None

    def store(self, keys: Sequence[bytes], blocks: Sequence[int]) -> set[int]:
        """Copy blocks down; which there was no room for, by their place."""
        failed = set()
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if not self._free:
                failed.add(place)
                continue
            self.drop(key)
            slot = self._slot_of[key] = self._free.pop()
            for here, there in self._both(slot, block):
                here.copy_(there, non_blocking=True)
        return failed

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[int]) -> set[int]:
        """Copy blocks up; which aren't there, by their place."""
        failed = set()
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            slot = self._slot_of.get(key)
            if slot is None:
                failed.add(place)
                continue
            for here, there in self._both(slot, block):
                there.copy_(here, non_blocking=True)
        return failed

    def drop(self, key: bytes) -> None:
        """A block isn't kept here any more, if it was."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def _both(self, slot: int, block: int) -> list[tuple[Tensor, Tensor]]:
        """What a slot holds, here, and its place in the cache."""
        size = self._cache.kv.block_size
        rows = slice(block * size, (block + 1) * size)
        pairs = [(self._blocks[slot], self._cache.pool[:, :, rows])]
        if self._scales is not None and self._cache.scales is not None:
            pairs.append((self._scales[slot], self._cache.scales[:, :, rows]))
        return pairs
