"""The lower tier of a KV cache on a device: kept blocks in the host's memory. Nothing
waits for a copy: a job is over as soon as its copies are queued (``sworker.host_blocks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rworker.tiers.lower_tier import LowerTier, MoveJob
from sworker.host_blocks import BlockMemory
from sworker.paged import PagedKV


class HostTier(LowerTier):
    """Which block is in which slot; see the module, and ``LowerTier``.

    Args:
        cache: on the device.
        memory: gives the host's memory, which S-workers that act as one replace.
    """

    def __init__(self, cache: PagedKV, memory: Callable[[], BlockMemory]) -> None:
        self._memory = memory
        self.num_layers = cache.kv.num_layers
        self.stored_bytes = cache.kv.block_bytes
        self.num_slots = memory().num_slots
        self._slot_of: dict[bytes, int] = {}
        self._free = list(reversed(range(self.num_slots)))

    def begin(self, job: MoveJob) -> None:
        """See ``LowerTier``. Blocks without room, or that are not here, have failed."""
        slots, blocks = [], []
        for place, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
            slot = self._slot_of.get(key) if job.is_fetch else self._take(key)
            if slot is None:
                job.failed.add(place)
                continue
            slots.append(slot)
            blocks.append(block)
        if slots:
            self._memory().copy(slots, blocks, is_fetch=job.is_fetch)

    def drop(self, keys: Iterable[bytes]) -> None:
        """See ``LowerTier``."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def _take(self, key: bytes) -> int | None:
        """A slot for a block; None: all are taken."""
        if not self._free:
            return None
        self.drop((key,))
        slot = self._slot_of[key] = self._free.pop()
        return slot
