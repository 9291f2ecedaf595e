"""Carries out an R-worker's instructions on a device: KV caches as torch tensors.

``rworker.state`` decides, as for any R-worker. What differs: no message carries q,
k and v. The S-worker attends in the cache by itself (``fastdecode.engine.step.device``),
once the executor has prepared its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.core.model.block_keys import tier_identity
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step.device_memory import DeviceMemory
from fastdecode.wire.blocks import Inventory
from fastdecode.wire.codec import Array
from fastdecode.wire.messages import AttendResult, BeginStep
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.instructions import (
    Compute,
    CopyBlocks,
    Drop,
    OpenTier,
    PlaceChunk,
    Prepare,
    ReadChunk,
)
from rworker.tiers.disk import Disk
from rworker.tiers.tier import MoveJob, Tier
from rworker.tiers.tiers import Tiers
from sworker.device import Gpu
from sworker.dtypes import torch_dtype
from sworker.host_blocks import BlockMemory, HostBlocks
from sworker.paged import BlockKernels, PagedKV, PagedStep, StoredKV

AttendPaged: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, PagedStep, "Tensor | None"], Tensor]
"""Attends in a cache as ``PagedKV.attend`` does."""


class TorchExecutor:
    """See the module, and ``rworker.worker.RWorkerExecutor``.

    Args:
        device: where K and V are kept.
        gpu: the device's driver, in place of torch's.
        kernels: see ``PagedKV``.
        host_bytes: Memory of the host for cached blocks. 0 if there is none.
        disk: Where cached blocks go else. None if they are not offloaded to disk.
    """

    def __init__(
        self,
        device: torch.device,
        gpu: Gpu | None = None,
        kernels: BlockKernels | None = None,
        host_bytes: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self.device, self.gpu, self._kernels = device, gpu, kernels
        self._host_bytes = host_bytes
        self.tiers = Tiers(disk)
        self.has_tier = host_bytes > 0 or disk is not None
        """Whether kept blocks may go to the host's memory, or to disk."""
        self.caches: dict[HolderId, PagedKV] = {}
        self.memories: dict[HolderId, BlockMemory] = {}
        """In the host's memory, where kept blocks go there."""
        self._memory: dict[HolderId, DeviceMemory] = {}

    def prepare(self, prepare: Prepare) -> None:
        """See ``RWorkerExecutor``.

        Raises:
            CapacityError: If the device lacks the memory, or the host.
        """
        holder = prepare.holder
        self._forget(holder)
        cache = self.caches[holder] = PagedKV(
            kv_spec_of(prepare), prepare.attention, prepare.num_blocks, self.device,
            self._kernels, torch_dtype(prepare.activation_dtype),
        )  # fmt: skip
        if self._host_bytes:
            num_slots = self._host_bytes // cache.kv.block_bytes
            self.memories[holder] = HostBlocks(cache, num_slots, self.gpu)

    def begin_step(
        self, holder: HolderId, begin: BeginStep, appended: Appended, store: KVStore
    ) -> AttendPaged:
        """Prepare a holder's cache for a step: its own copies of blocks that others share. Return
        what attends in the cache."""
        cache = self.caches[holder]
        if appended.copy_sources.size:
            cache.copy_blocks(appended.copy_sources, appended.copy_targets)
        return cache.attend

    def end_step(self, holder: HolderId) -> None:
        """End a step, all layers of which are done, or queued on the device."""

    def copy_blocks(self, copy: CopyBlocks) -> None:
        self._stored(copy.holder)().copy_blocks(copy.source_ids, copy.target_ids)
        self.is_new(copy.holder, copy.target_ids)

    def compute(self, compute: Compute) -> AttendResult:
        """Refuse it: the S-worker stores and attends by itself."""
        raise ProtocolError("a KV cache on a device cannot do Compute")

    def place(self, place: PlaceChunk) -> None:
        self._memory_of(place.holder).place_chunk(place.shape, place.places, place.data)

    def read(self, read: ReadChunk) -> Array:
        return self._memory_of(read.holder).read_chunk(read.shape, read.places)

    def _stored(self, holder: HolderId) -> Callable[[], StoredKV]:
        """Return what gives a holder's K and V, between two steps."""
        cache = self.caches[holder]
        return lambda: cache

    def _memory_of(self, holder: HolderId) -> DeviceMemory:
        """Return a holder's cache, as others read and write it."""
        if holder not in self._memory:
            written = partial(self.is_new, holder)
            self._memory[holder] = DeviceMemory(self._stored(holder), self.gpu, written)
        return self._memory[holder]

    def is_new(self, holder: HolderId, blocks: NDArray[np.integer]) -> None:
        """Note that blocks [B] were written outside of steps."""

    def drop(self, drop: Drop) -> None:
        self._forget(drop.holder)

    def open_tier(self, wanted: OpenTier) -> Iterable[Inventory]:
        """See ``RWorkerExecutor``: the host's memory, with nothing in it, or a file."""
        self.tiers.close(wanted.holder)
        if not self._host_bytes:  # R-workers cannot read blocks that lie as tensors
            wanted = replace(wanted, identity=tier_identity(f"{wanted.identity}/tensors"))
            return self.tiers.open(wanted, self._memory_of(wanted.holder))
        cache = self.caches[wanted.holder]
        tier = HostTier(cache, partial(self.memories.__getitem__, wanted.holder))
        return self.tiers.use(wanted.holder, tier, tier.num_slots)

    def drop_all(self) -> None:
        """Free every cache."""
        for holder in {*self.caches, *self._memory}:
            self._forget(holder)

    def _forget(self, holder: HolderId) -> None:
        self.tiers.close(holder)
        self.caches.pop(holder, None)
        self.memories.pop(holder, None)
        self._memory.pop(holder, None)


class HostTier(Tier):
    """The lower tier in the host's memory. Nothing waits for a copy: a job is over as soon as
    its copies are queued (``sworker.host_blocks``).

    Args:
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
        """Begin a job. Blocks without room, or that are not here, have failed."""
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
        """Free the slots of blocks."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def _take(self, key: bytes) -> int | None:
        """Take a slot for a block. Return None if all are taken."""
        if not self._free:
            return None
        self.drop((key,))
        slot = self._slot_of[key] = self._free.pop()
        return slot


def kv_spec_of(prepare: Prepare) -> KVSpec:
    """What a cache is to hold."""
    layout = prepare.layout
    return KVSpec(
        num_layers=len(prepare.attention),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=DType(layout.dtype),
        block_size=layout.block_size,
    )
