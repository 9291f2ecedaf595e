"""KV that is swapped (``--kv-placement swap``): every lane's is in the host's memory, and two
lanes' are on the device.

To the engine each lane's KV is a holder, with the blocks of one of the device's two slots.
Sequences of a lane go to its holder (``OwnHolders``), so a step sees one holder, as with any KV on
the device. The next lane is foreseen: of those that have anything to bring, it is the one whose
last step began longest ago.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.holders import HolderId
from fastdecode.engine.step.torch_executor import AttendPaged, TorchExecutor, kv_spec_of
from fastdecode.wire.messages import BeginStep
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.instructions import Prepare
from rworker.tiers.disk import Disk
from sworker.device import Gpu
from sworker.dtypes import torch_dtype
from sworker.paged import BlockKernels, PagedKV, PagedStep, StoredKV
from sworker.swap.host import HostKV
from sworker.swap.swapped import Blocks, LaneMover, SwappedKV
from sworker.worker import SWorker


class SwappedLanes:
    """Caches of lanes. A lane's cache is on the device while a step of the lane is under
    way; the lane whose last step began longest ago is brought next.

    Args:
        device, gpu, kernels: see ``TorchExecutor``.
        num_lanes: how many lanes there are.
    """

    def __init__(
        self,
        device: torch.device,
        num_lanes: int,
        gpu: Gpu | None = None,
        kernels: BlockKernels | None = None,
        most_tokens: int = 0,
    ) -> None:
        self.device, self.gpu, self.kernels = device, gpu, kernels
        self._most_tokens = most_tokens
        self.caches: dict[HolderId, PagedKV] = {}
        """Of the lane whose step is under way."""
        self._order = list(range(num_lanes))  # whose last step began longest ago first
        self._stores: dict[int, KVStore] = {}  # of lanes that have begun a step
        self._kv: SwappedKV | None = None
        self._mover: LaneMover | None = None
        self._moving = threading.Lock()  # other threads read and write what is on the host
        self._stored_slots = np.empty(0, np.int64)  # slots, by the step under way

    @property
    def kv(self) -> SwappedKV:
        """K and V of all lanes."""
        assert self._kv is not None, "not greeted, or closed"
        return self._kv

    @property
    def mover(self) -> LaneMover:
        """What brings a lane's K and V, on all S-workers that act as one."""
        assert self._mover is not None, "not shared"
        return self._mover

    def share(self, s_worker: SWorker) -> None:
        """S-workers that act as one bring lanes' caches together."""
        self._mover = s_worker.swap(self.kv)

    def prepare(self, prepare: Prepare) -> None:
        """Memory for all lanes, when the first one asks.

        Raises:
            CapacityError: see ``SwappedKV``.
        """
        if self._kv is None:
            self._kv = SwappedKV(
                kv_spec_of(prepare), prepare.attention, prepare.num_blocks, len(self._order),
                self.device, self.gpu, self.kernels, most_tokens=self._most_tokens,
                dtype=torch_dtype(prepare.activation_dtype),
            )  # fmt: skip

    def close(self) -> None:
        """Wait for what is being copied."""
        if self._kv is not None:
            self._kv.close()
        self._kv = None

    def begin_step(
        self, lane: HolderId, begin: BeginStep, appended: Appended, store: KVStore
    ) -> None:
        """Bring what a lane's step sees; see ``SwappedKV.enter``."""
        self._stores[lane] = store
        past = blocks_of(store, begin.sequence_ids, begin.num_past)
        self._stored_slots = appended.slots
        if appended.copy_targets.size:
            past = np.union1d(np.setdiff1d(past, appended.copy_targets), appended.copy_sources)
            filled = filled_slots(store, begin, appended.copy_targets)
            self._stored_slots = np.concatenate((appended.slots, filled))
        self._order.remove(lane)
        self._order.append(lane)
        with self._moving:
            self.caches[lane] = self.mover.enter(lane, past)
        if appended.copy_targets.size:
            self.kv.wait_for_all()

    def end_step(self, lane: HolderId) -> None:
        """All of the step is queued: what it has stored goes to the host, and the next
        lane's KV comes."""
        del self.caches[lane]
        with self._moving:
            self.mover.leave(self._stored_slots)
            for other in (x for x in self._order[:-1] if x in self._stores):
                store = self._stores[other]
                ids = np.fromiter(store.tables.row_of, np.int64, len(store.tables.row_of))
                blocks = blocks_of(store, ids, store.num_tokens(ids))
                if blocks.size:
                    self.mover.prefetch(other, blocks)
                    return

    def settle(self, lane: HolderId) -> HostKV:
        """What the host has of a lane, with all that its ended steps have stored."""
        with self._moving:
            return self.kv.settle(lane)

    def is_new(self, lane: HolderId, blocks: NDArray[np.integer]) -> None:
        """Blocks [B] of a lane were written on the host: the device has what was there before."""
        with self._moving:
            self.kv.is_new(lane, blocks)


class LaneExecutor(TorchExecutor):
    """A lane's cache, which is a holder; see ``TorchExecutor``.

    Args:
        disk: where the lane's kept blocks go; None: nowhere.
    """

    def __init__(self, lanes: SwappedLanes, disk: Disk | None = None) -> None:
        super().__init__(lanes.device, lanes.gpu, lanes.kernels, disk=disk)
        self._lanes, self.caches = lanes, lanes.caches

    def prepare(self, prepare: Prepare) -> None:
        self._lanes.prepare(prepare)

    def drop_all(self) -> None:
        """See ``TorchExecutor``. Lanes' memory on the host is free, too."""
        super().drop_all()
        self._lanes.close()

    def begin_step(
        self, holder: HolderId, begin: BeginStep, appended: Appended, store: KVStore
    ) -> AttendPaged:
        self._lanes.begin_step(holder, begin, appended, store)
        attend, wait = super().begin_step(holder, begin, appended, store), self._lanes.kv.wait

        def attend_when_here(
            layer: int, q: Tensor, k: Tensor, v: Tensor, step: PagedStep, out: Tensor | None
        ) -> Tensor:
            wait(layer)
            return attend(layer, q, k, v, step, out)

        return attend_when_here

    def end_step(self, holder: HolderId) -> None:
        self._lanes.end_step(holder)

    def is_new(self, holder: HolderId, blocks: NDArray[np.integer]) -> None:
        self._lanes.is_new(holder, blocks)

    def _stored(self, holder: HolderId) -> Callable[[], StoredKV]:
        return partial(self._lanes.settle, holder)


def blocks_of(
    store: KVStore, sequence_ids: NDArray[np.int64], num_tokens: NDArray[np.integer]
) -> Blocks:
    """Blocks that hold the first tokens of each sequence [N]."""
    tables = store.block_tables(sequence_ids)  # [N, W]
    num_blocks = -(-num_tokens.astype(np.int64) // store.block_size)
    is_used = np.arange(tables.shape[1]) < num_blocks[:, None]
    return np.unique(tables[is_used]).astype(np.int64)


def filled_slots(store: KVStore, begin: BeginStep, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of blocks that were copied for a step, the slots that its sequences have
    filled: nobody but the device has that copy."""
    num_filled = begin.num_past % store.block_size
    first = begin.num_past - num_filled
    members = np.flatnonzero(num_filled)
    tables = store.block_tables(begin.sequence_ids[members])
    own = tables[np.arange(len(members)), first[members] // store.block_size]
    members = members[np.isin(own, targets)]
    return store.slots(
        begin.sequence_ids[members], first[members].astype(np.int32), num_filled[members]
    )
