"""KV of many lanes on a device that has room for two: the lane that computes,
and the one that is next (DéjàVu, section 4.3).

All K and V lie in the host's memory, a lane's in blocks of its own names. A
lane's step finds the blocks that it sees in one of two **slots** on the device;
into the other one those of the lane that is due next are copied meanwhile,
layer by layer::

    compute     | lane 0: layer 0 | layer 1 | … | lane 1: layer 0 | layer 1 | …
    copies in    lane 1: layer 0 | layer 1 | …   lane 2: layer 0 | layer 1 | …
    copies out                                  | lane 0's new tokens |

A layer waits for its own copies and for no others. When a step is over, what it
has stored is gathered from all layers, and goes to the host in one copy; the
host puts it to where it belongs later. As soon as it is gathered the slot may be
filled again. Nothing else leaves the
device, since nothing else has changed. The host waits for such a copy when its
lane is to be brought back, or the memory that it came to is needed again: by
then other lanes have been computed.

What a lane finds in its slot from its step before isn't copied again.

Streams: ``in`` and ``out``, beside the one that computes. On a CPU all is done
at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.buffers import Room
from sworker.device import Event, Gpu, Stream, gpu_of
from sworker.paged import BlockKernels, PagedKV
from sworker.swap.figures import SwapFigures
from sworker.swap.host import HostKV, Staged, parts_of, row_bytes, stretches

NUM_SLOTS = 2
MAX_RUNS = 4
"""Blocks side by side are copied run by run, by the device's copy engine, where
there are so few runs."""
SCATTERED_BYTES = 32 << 20  # bytes of blocks that are gathered at a time
Blocks: TypeAlias = NDArray[np.int64]
"""Names of blocks, ascending, none twice."""


@dataclass(eq=False)
class Slot:
    """The device's room for one lane."""

    cache: PagedKV
    staging: Room  # host memory for what was stored
    lane: int | None = None
    is_here: NDArray[np.bool_] = field(init=False)
    """By block, whether the slot has what the host has, or more."""
    is_unused: NDArray[np.bool_] = field(init=False)
    """Of those, what was copied in and no step has seen."""
    arrived: list[Event | None] = field(init=False)
    """Event after the copies in of each layer, or None if they are done."""
    gathered: Event | None = None  # after what was stored has been read
    leaving: Staged | None = None
    """What is in ``staging``, until it has its place; another lane's, perhaps."""

    def __post_init__(self) -> None:
        num_blocks = self.cache.num_slots // self.cache.kv.block_size
        self.is_here = np.zeros(num_blocks, np.bool_)
        self.is_unused = np.zeros(num_blocks, np.bool_)
        self.arrived = [None] * self.cache.kv.num_layers


class LaneMover(Protocol):
    """Moves lanes' K and V between the host and the device; see ``SwappedKV``."""

    def enter(self, lane: int, past: Blocks) -> PagedKV: ...

    def prefetch(self, lane: int, blocks: Blocks) -> None: ...

    def leave(self, tokens: NDArray[np.int64]) -> None: ...


class SwappedKV:
    """See the module. Lanes' steps come one after another: ``enter``, what
    computes (``wait`` before each layer), ``leave``.

    Args:
        kv, attention, device, kernels: see ``PagedKV``.
        num_blocks: of each lane, and of each slot.
        num_lanes: how many lanes there are.
        gpu: the device's driver, in place of the one that torch has.
        most_tokens: that a step stores, for which memory is taken now; if there
            are more, it grows.
        dtype: of activations; see ``PagedKV``.

    Raises:
        CapacityError: the device or the host hasn't the memory.
    """

    def __init__(
        self,
        kv: KVSpec,
        attention: Sequence[AttentionSpec],
        num_blocks: int,
        num_lanes: int,
        device: torch.device,
        gpu: Gpu | None = None,
        kernels: BlockKernels | None = None,
        most_tokens: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._gpu = gpu or gpu_of(device)
        self.figures = SwapFigures()
        cache_args = kv, attention, num_blocks, device, kernels, dtype
        caches = [PagedKV(*cache_args) for _ in range(NUM_SLOTS)]
        staged_bytes = most_tokens * sum(map(_token_bytes, parts_of(caches[0])))
        on_host = _on_host if self._gpu is None else self._gpu.pinned
        on_device = _on_host if self._gpu is None else self._gpu.room
        own_bytes = 0 if self._gpu is None else staged_bytes  # else there is nothing to copy
        self.slots = tuple(Slot(cache, Room(on_host, own_bytes)) for cache in caches)
        self.hosts = tuple(HostKV(caches[0], self._gpu) for _ in range(num_lanes))
        self._packed = Room(on_device, own_bytes)
        # Blocks on their way from the host to a slot.
        self._scattered = Room(on_device, 0 if self._gpu is None else _scattered_bytes(caches[0]))
        self._in: Stream | None = None
        self._out: Stream | None = None
        if self._gpu is not None:
            self._in, self._out = self._gpu.new_stream(), self._gpu.new_stream()
        self._present = 0  # the slot whose lane began last

    @property
    def caches(self) -> list[PagedKV]:
        """On the device, whichever lanes are there."""
        return [slot.cache for slot in self.slots]

    def enter(self, lane: int, past: Blocks) -> PagedKV:
        """Begin a lane's step that sees these blocks, and what it stores itself.
        Blocks that aren't on their way are copied in. Returns the cache that has
        them, and takes what is stored; ``wait`` says when they are there."""
        slot = self._slot_for(lane)
        self._present = self.slots.index(slot)
        self.figures.num_late_blocks += self._copy_in(slot, past)
        slot.is_unused[past] = False
        if self._gpu is not None and slot.gathered is not None:
            self._gpu.current_stream().wait_event(slot.gathered)
        return slot.cache

    def prefetch(self, lane: int, blocks: Blocks) -> None:
        """A lane will be next, or it is expected to be: bring blocks that it
        will see into the slot that the present one doesn't use."""
        if self.slots[self._present].lane == lane:
            return
        slot = self._slot_for(lane)
        self.figures.num_prefetches += self._copy_in(slot, blocks, is_early=True) > 0

    def wait(self, layer: int) -> None:
        """What is computed from now on comes after the copies of this layer."""
        event = self.slots[self._present].arrived[layer]
        if self._gpu is not None and event is not None:
            self._gpu.current_stream().wait_event(event)

    def wait_for_all(self) -> None:
        """``wait`` for all layers: copies of the last one come last."""
        self.wait(len(self.slots[self._present].arrived) - 1)

    def leave(self, tokens: NDArray[np.int64]) -> None:
        """Send the slots [T] that the present lane's step has stored to the host."""
        slot = self.slots[self._present]
        assert slot.lane is not None
        self._place(slot)  # or it would be overwritten
        slot.is_here[np.unique(tokens // slot.cache.kv.block_size)] = True
        slot.arrived = [None] * len(slot.arrived)
        slot.leaving = self._sent(slot, slot.lane, tokens)
        if self._gpu is None:
            self._place(slot)
        self.figures.num_steps += 1
        self.figures.num_tokens_out += len(tokens)
        self.figures.num_copies_out += 1

    def settle(self, lane: int) -> HostKV:
        """A lane's K and V on the host, with all that its ended steps have stored."""
        for slot in self.slots:
            if slot.leaving is not None and slot.leaving.lane == lane:
                self._place(slot)
        return self.hosts[lane]

    def is_new(self, lane: int, blocks: NDArray[np.integer]) -> None:
        """A lane's blocks [B] on the host were written by others: what the device has of
        them is worth nothing."""
        for slot in self.slots:
            if slot.lane == lane:
                slot.is_here[blocks] = False

    def close(self) -> None:
        """What is under way has come, so memory may be given back: its owners
        know nothing of the streams."""
        for stream in (self._in, self._out):
            if stream is not None:
                with contextlib.suppress(RuntimeError):  # a device that failed copies nothing more
                    stream.record_event().synchronize()

    def _slot_for(self, lane: int) -> Slot:
        """Return the slot that has the lane. Or give it the slot not used by the present lane."""
        for slot in self.slots:
            if slot.lane == lane:
                return slot
        slot = self.slots[1 - self._present]
        self.figures.num_unused_blocks += int(slot.is_unused.sum())
        slot.lane = lane
        slot.is_here[:] = slot.is_unused[:] = False
        return slot  # what was still to arrive there is waited for all the same

    def _copy_in(self, slot: Slot, blocks: Blocks, *, is_early: bool = False) -> int:
        """Copy those of its lane's blocks that a slot lacks. Return their number."""
        missing = blocks[~slot.is_here[blocks]]
        if not missing.size:
            return 0
        assert slot.lane is not None
        host = self.settle(slot.lane)
        slot.is_here[missing] = True
        slot.is_unused[missing] = is_early
        copy = self._copy_of(slot, host, missing)
        if self._in is not None and slot.gathered is not None:
            self._in.wait_event(slot.gathered)
        with self._on(self._in):
            for layer in range(len(slot.arrived)):
                copy(layer)
                if self._in is not None:
                    slot.arrived[layer] = self._in.record_event()
        self.figures.num_blocks_in += len(missing)
        return len(missing)

    def _copy_of(self, slot: Slot, host: HostKV, blocks: Blocks) -> Callable[[int], None]:
        """Return what copies these blocks of a layer from the host to the slot: run by run if
        runs are few; else in one gather, in which the device reads the host's memory itself. A
        copy takes 10 us to queue, and scattered blocks are thousands of runs."""
        runs = list(stretches(blocks, slot.cache.kv.block_size))
        mapped = host.mapped if len(runs) > MAX_RUNS else None
        if mapped is None or self._gpu is None:
            return partial(_copy_runs, parts_of(slot.cache), host.parts, runs)
        with self._on(self._in):
            ids = self._gpu.upload(torch.from_numpy(blocks))
        size = slot.cache.kv.block_size
        return partial(_copy_scattered, parts_of(slot.cache), mapped, ids, size, self._scattered)

    def _sent(self, slot: Slot, lane: int, tokens: NDArray[np.int64]) -> Staged:
        """Slots' tokens [T] on their way to the host."""
        parts = parts_of(slot.cache)
        sizes = [len(tokens) * _token_bytes(part) for part in parts]
        shape = torch.Size((sum(sizes),))
        if self._gpu is None or self._out is None:
            packed = self._packed.take(shape, torch.uint8)
            _gather(parts, torch.from_numpy(tokens), packed)
            return Staged(lane, tokens, _rows(parts, packed), None)
        computing = self._gpu.current_stream()
        if sum(sizes) > self._packed.nbytes:
            computing.wait_stream(self._out)  # to which the smaller memory is lent again
        packed = self._packed.take(shape, torch.uint8)
        self._out.wait_stream(computing)
        staging = slot.staging.take(packed.shape, torch.uint8)
        with self._gpu.on(self._out):
            _gather(parts, self._gpu.upload(torch.from_numpy(tokens)), packed)
            slot.gathered = self._out.record_event()
            staging.copy_(packed, non_blocking=True)
            event = self._out.record_event()
        return Staged(lane, tokens, _rows(parts, staging), event)

    def _place(self, slot: Slot) -> None:
        """Store what has left a slot in its place on the host, once it has arrived."""
        leaving, slot.leaving = slot.leaving, None
        if leaving is not None:
            leaving.wait()
            self.hosts[leaving.lane].place(leaving.tokens, leaving)

    def _on(self, stream: Stream | None) -> AbstractContextManager[object]:
        if self._gpu is None or stream is None:
            return contextlib.nullcontext()
        return self._gpu.on(stream)


def _copy_runs(
    there: Sequence[Tensor], here: Sequence[Tensor], runs: Sequence[slice], layer: int
) -> None:
    """Copy runs of a layer's slots, K and V, one by one."""
    for target, source in zip(there, here, strict=True):
        for half in range(2):
            for run in runs:
                target[layer, half, run].copy_(source[layer, half, run], non_blocking=True)


def _copy_scattered(
    there: Sequence[Tensor],
    mapped: Sequence[Tensor],
    blocks: Tensor,
    block_size: int,
    room: Room,
    layer: int,
) -> None:
    """Copy blocks [B] of a layer, K and V, some at a time, by way of memory on the
    device: ``mapped`` is the host's memory as the device reads it."""
    for target, source in zip(there, mapped, strict=True):
        to, of = (_words(part[layer], block_size) for part in (target, source))
        block_bytes = 2 * to.shape[2] * to.element_size()
        for ids in blocks.split(max(1, SCATTERED_BYTES // block_bytes)):
            found = room.take(torch.Size((2, len(ids), to.shape[2])), to.dtype)
            torch.index_select(of, 1, ids, out=found)
            to.index_copy_(1, ids, found)


def _scattered_bytes(cache: PagedKV) -> int:
    """That ``_copy_scattered`` takes at most: of all blocks, or of one at least."""
    size = cache.kv.block_size
    of_blocks = [2 * size * row_bytes(part) for part in parts_of(cache)]
    num_blocks = cache.num_slots // size
    return max(max(one, min(SCATTERED_BYTES, num_blocks * one)) for one in of_blocks)


def _words(part: Tensor, block_size: int) -> Tensor:
    """A layer's [2, slots, ...] as [2, num_blocks, words], in the largest words
    that rows divide into."""
    flat = part.view(2, part.shape[1] // block_size, -1)
    for dtype in (torch.int64, torch.int32):
        if flat.shape[2] * flat.element_size() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


def _gather(parts: Sequence[Tensor], tokens: Tensor, packed: Tensor) -> None:
    """Slots [T] of all layers, one part behind the other, into uint8 memory."""
    first = 0
    for part in parts:
        end = first + len(tokens) * _token_bytes(part)
        shape = (*part.shape[:2], len(tokens), *part.shape[3:])
        torch.index_select(part, 2, tokens, out=packed[first:end].view(part.dtype).view(shape))
        first = end


def _rows(parts: Sequence[Tensor], packed: Tensor) -> list[NDArray[np.uint8]]:
    """The same memory on the host, as ``Staged`` has it."""
    rows: list[NDArray[np.uint8]] = []
    first = 0
    num_tokens = packed.nbytes // sum(map(_token_bytes, parts))
    for part in parts:
        end = first + num_tokens * _token_bytes(part)
        rows.append(packed[first:end].numpy().reshape(-1, num_tokens, row_bytes(part)))
        first = end
    return rows


def _token_bytes(part: Tensor) -> int:
    """Of one slot, K and V of all layers."""
    return math.prod(part.shape[:2]) * row_bytes(part)


def _on_host(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
