"""KV that is swapped (``--swap``): every lane's is in the host's memory, and two
lanes' are on the device.

To the engine each lane's KV is a holder of its own, with as many blocks as one
of the device's two slots has; sequences of a lane go to its own holder
(``fastdecode.schedule.reserving.own_holders``), so a step sees one holder, as
with any KV on the device. Which lane is next is foreseen: the one whose last
step began longest ago, of those that have anything to bring.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.holders import Holder
from fastdecode.engine.fleet.pool import HolderPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.local import LocalConnection, LocalStep
from fastdecode.engine.step.pipeline import begin_pass
from fastdecode.engine.step.remote import Attention
from fastdecode.wire.messages import BeginStep, Hello
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import blocks_within
from sworker.device import Gpu
from sworker.dtypes import torch_dtype
from sworker.paged import BlockKernels, PagedKV
from sworker.swap.figures import SwapFigures
from sworker.swap.swapped import NUM_SLOTS, Blocks, SwappedKV
from sworker.worker import Pass, SWorker


class LaneSwap:
    """What lanes share: the device's memory, and turns."""

    def __init__(
        self,
        device: torch.device,
        kv_bytes: int,
        num_lanes: int,
        gpu: Gpu | None = None,
        kernels: BlockKernels | None = None,
        most_tokens: int = 0,
    ) -> None:
        self._device, self._gpu, self._kernels = device, gpu, kernels
        self._slot_bytes, self._most_tokens = kv_bytes // NUM_SLOTS, most_tokens
        self.connections = [LaneConnection(self, lane, device, gpu) for lane in range(num_lanes)]
        self._order = list(range(num_lanes))  # whose last step began longest ago first
        self._kv: SwappedKV | None = None

    @property
    def kv(self) -> SwappedKV:
        assert self._kv is not None, "not greeted, or closed"
        return self._kv

    def open(self, hello: Hello) -> int:
        """How many blocks each lane has.

        Raises:
            CapacityError: there is no memory for any.
        """
        num_blocks = blocks_within(self._slot_bytes, hello.kv.block_bytes, hello)
        if self._kv is None:
            self._kv = SwappedKV(
                hello.kv, hello.attention, num_blocks, len(self.connections), self._device,
                self._gpu, self._kernels, most_tokens=self._most_tokens,
                dtype=torch_dtype(hello.activation_dtype),
            )  # fmt: skip
        return num_blocks

    def close(self) -> None:
        if self._kv is not None:
            self._kv.close()
        for connection in self.connections:
            connection.close()
        self._kv = None

    def enter(self, lane: int, past: Blocks) -> PagedKV:
        """A lane's step begins; see ``SwappedKV.enter``."""
        self._order.remove(lane)
        self._order.append(lane)
        return self.kv.enter(lane, past)

    def leave(self, tokens: NDArray[np.int64]) -> None:
        """All of it is queued: what it has stored goes to the host, and the next
        lane's KV comes."""
        self.kv.leave(tokens)
        for lane in self._order[:-1]:
            blocks = self.connections[lane].stored_blocks
            if blocks.size:
                self.kv.prefetch(lane, blocks)
                return


class LaneConnection(LocalConnection):
    """A lane's KV. Where it is on the device is known while a step of the lane
    is under way."""

    def __init__(
        self, swap: LaneSwap, lane: int, device: torch.device, gpu: Gpu | None = None
    ) -> None:
        super().__init__(device, 0, gpu)
        self.peer = f"lane {lane}'s KV cache on {device}"
        self._swap, self._lane = swap, lane
        self._stored = np.empty(0, np.int64)

    @property
    def stored_blocks(self) -> Blocks:
        """That hold tokens of its sequences."""
        if self._books is None:
            return np.empty(0, np.int64)
        store = self._books.store
        ids = np.fromiter(store.tables.row_of, np.int64, len(store.tables.row_of))
        return blocks_of(store, ids, store.num_tokens(ids))

    def wait(self, layer: int) -> None:
        """What is computed from now on finds what this layer's past is."""
        self._swap.kv.wait(layer)

    def end_step(self) -> None:
        """All of the step is queued."""
        self._cache = None
        self._swap.leave(self._stored)

    def _take_memory(self, hello: Hello) -> int:
        return self._swap.open(hello)

    def _prepare(self, begin: BeginStep, appended: Appended) -> None:
        store = self.books.store
        past = blocks_of(store, begin.sequence_ids, begin.num_past)
        self._stored = appended.slots
        if appended.copy_targets.size:
            past = np.union1d(np.setdiff1d(past, appended.copy_targets), appended.copy_sources)
            filled = filled_slots(store, begin, appended.copy_targets)
            self._stored = np.concatenate((appended.slots, filled))
        self._cache = self._swap.enter(self._lane, past)
        if appended.copy_targets.size:
            self._swap.kv.wait_for_all()
        super()._prepare(begin, appended)


class SwappedAttention:
    """Makes a lane's ``attend`` of every step; see ``fastdecode.engine.step.remote.Attention``."""

    def __init__(
        self, swap: LaneSwap, fleet: HolderPool, device: Holder, s_worker: SWorker
    ) -> None:
        self.fleet = fleet
        self.holders: Seq[Holder] = (device,) * len(swap.connections)
        self.swap = swap
        for slot in swap.kv.slots:
            slot.cache.sinks = s_worker.model.sinks

    def begin(self, batch: StepBatch) -> SwappedStep:
        (span,) = batch.spans
        return SwappedStep(self.swap.connections[span.holder], batch)


def swap_figures(attention: Attention) -> SwapFigures | None:
    """What was copied so far, kept up to date; None: nothing is swapped."""
    return attention.swap.kv.figures if isinstance(attention, SwappedAttention) else None


class SwappedStep(LocalStep):
    """A lane's step, layer by layer: each waits for its own copies."""

    def __init__(self, connection: LaneConnection, batch: StepBatch) -> None:
        super().__init__(connection, batch)
        self._connection = connection

    @torch.inference_mode()
    def run_through(self, s_worker: SWorker) -> Pass:
        """See ``LaneAttention``."""
        begin = self._begin
        self._books.steps.finish(begin.lane, begin.step)
        forward = begin_pass(s_worker, self.batch, begin.lane)
        goes_on = True
        while goes_on:
            o = self._attend(forward.layer, forward.q, forward.k, forward.v, forward.place)
            goes_on = forward.advance(o)
        forward.is_over = True
        self._connection.end_step()
        return forward

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor:
        self._connection.wait(layer)
        return super()._attend(layer, q, k, v, place)


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
