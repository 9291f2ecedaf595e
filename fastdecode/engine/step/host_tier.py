"""The lower tier of a KV cache on a device: kept blocks in the host's memory.

All copies are queued where the device's other work is, so each sees what was
written before it, and what comes after sees what it wrote. Nothing on the host
waits for them: a job is over as soon as its copies are queued. Memory that CUDA
knows (pinned) is copied at the speed of the bus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastdecode.core.errors import CapacityError, Given
from rworker.tiers.health import Faults
from rworker.tiers.units import MoveJob
from sworker.device import Gpu, gpu_of
from sworker.paged import PagedKV


class HostTier:
    """See the module, and ``rworker.tiers.tiers.LowerTier``.

    Args:
        cache: on the device.
        num_bytes: that blocks here may take.
        gpu: the device's driver, in place of torch's.

    Raises:
        CapacityError: the host lacks the memory.
    """

    def __init__(self, cache: PagedKV, num_bytes: int, gpu: Gpu | None = None) -> None:
        self._cache = cache
        self._gpu = gpu or gpu_of(cache.pool.device)
        self.num_layers = cache.kv.num_layers
        self.stored_bytes = cache.kv.block_bytes
        self.num_slots = num_bytes // self.stored_bytes
        pools = [pool for pool in (cache.pool, cache.scales) if pool is not None]
        self._pairs = [(self._room(pool), pool) for pool in pools]
        self._slot_of: dict[bytes, int] = {}
        self._free = list(reversed(range(self.num_slots)))
        self._over: list[MoveJob] = []

    @property
    def is_busy(self) -> bool:
        """See ``LowerTier``."""
        return bool(self._over)

    def begin(self, job: MoveJob) -> None:
        """See ``LowerTier``. Blocks without room, or that are not here, have failed."""
        for place, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
            slot = self._slot_of.get(key) if job.is_fetch else self._take(key)
            if slot is None:
                job.failed.add(place)
                continue
            for stored, cached in self._both(slot, block):
                there, here = (cached, stored) if job.is_fetch else (stored, cached)
                there.copy_(here, non_blocking=True)
        self._over.append(job)

    def take_over(self) -> list[MoveJob]:
        """See ``LowerTier``."""
        over, self._over = self._over, []
        return over

    def take_progress(self) -> list[tuple[MoveJob, int]]:
        """See ``LowerTier``."""
        return []

    def take_faults(self) -> Faults:
        """See ``LowerTier``."""
        return Faults()

    def wait(self, timeout_s: float | None, *, for_progress: bool = False) -> None:
        """See ``LowerTier``."""

    def wait_for_layer(self, numbers: tuple[int, ...], layer: int) -> None:
        """See ``LowerTier``."""

    def drop(self, key: bytes) -> None:
        """See ``LowerTier``."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def close(self) -> None:
        """See ``LowerTier``."""

    def _take(self, key: bytes) -> int | None:
        """A slot for a block; None: all are taken."""
        if not self._free:
            return None
        self.drop(key)
        slot = self._slot_of[key] = self._free.pop()
        return slot

    def _room(self, pool: Tensor) -> Tensor:
        """[num_slots, num_layers, 2, block_size, …] for blocks of a pool."""
        shape = (self.num_slots, *pool.shape[:2], self._cache.kv.block_size, *pool.shape[3:])
        try:
            if self._gpu is None or not self.num_slots:
                return torch.empty(shape, dtype=pool.dtype)
            memory = self._gpu.pinned(math.prod(shape) * pool.element_size())
            return memory.view(pool.dtype).view(shape)
        except (RuntimeError, OSError, MemoryError):
            raise CapacityError(
                f"{self.num_slots} KV blocks of {self.stored_bytes} bytes do not fit in this "
                "host's memory: lower ",
                Given("cache_memory_gb"),
            ) from None

    def _both(self, slot: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A slot's memory here, and a block's in the cache."""
        size = self._cache.kv.block_size
        rows = slice(block * size, (block + 1) * size)
        for stored, pool in self._pairs:
            yield stored[slot], pool[:, :, rows]
