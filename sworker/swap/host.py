"""A lane's K and V in the host's memory, in the layout that they have on the
device, so that blocks side by side are one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import CapacityError, Given, WorkerError
from sworker.device import Event, Gpu
from sworker.paged import PagedKV, copy_rows, store_rows


def parts_of(cache: PagedKV) -> list[Tensor]:
    """What a cache consists of, those of the larger elements first: of int8 its
    scales, [layers, 2, slots, Hkv], and K and V, [layers, 2, slots, Hkv, D]."""
    return [cache.pool] if cache.scales is None else [cache.scales, cache.pool]


class HostKV:
    """Room for as many blocks as a cache on the device has.

    Args:
        gpu: the device's driver; None: the device is the host.

    Raises:
        CapacityError: the host hasn't the memory.
    """

    def __init__(self, like: PagedKV, gpu: Gpu | None) -> None:
        self.kv, self.dtype = like.kv, like.dtype
        self.parts: list[Tensor] = []
        """As ``parts_of``, pinned."""
        self.mapped: list[Tensor] | None = None
        """The same memory as the device reads it; None: it can't."""
        self._rows: list[NDArray[np.uint8]] = []  # [layers · 2, slots, bytes of one]
        for part in parts_of(like):
            memory = _taken(part.nbytes, gpu)
            self.parts.append(memory.view(part.dtype).view(part.shape))
            self._rows.append(memory.numpy().reshape(-1, part.shape[2], row_bytes(part)))
        views = [None if gpu is None else gpu.mapped(part) for part in self.parts]
        if all(view is not None for view in views):
            self.mapped = [view for view in views if view is not None]

    @property
    def pool(self) -> Tensor:
        return self.parts[-1]

    @property
    def scales(self) -> Tensor | None:
        return self.parts[0] if len(self.parts) > 1 else None

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        store_rows(self, layer, k, v, slots)

    def copy_blocks(self, source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
        copy_rows(self, source_ids, target_ids)

    def place(self, tokens: NDArray[np.int64], staged: Staged) -> None:
        """Take in what has come of tokens' slots [T], each at its own."""
        for rows, came in zip(self._rows, staged.rows, strict=True):
            for there, here in zip(rows, came, strict=True):
                there[tokens] = here


@dataclass
class Staged:
    """What was stored in a step, on its way to the host: in one copy.

    Args:
        tokens: slots [T].
        rows: of each part, uint8 [layers · 2, T, bytes of one], on the host.
        event: when it is there; None: it is.
    """

    lane: int
    tokens: NDArray[np.int64]
    rows: list[NDArray[np.uint8]]
    event: Event | None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


def row_bytes(part: Tensor) -> int:
    """Of one slot, in one layer: of K, or of V."""
    return part[0, 0, 0].nbytes


def stretches(blocks: NDArray[np.int64], block_size: int) -> Iterator[slice]:
    """Slots of blocks, which ascend: one slice for those side by side."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    for run in np.split(blocks, breaks):
        yield slice(int(run[0]) * block_size, (int(run[-1]) + 1) * block_size)


def _taken(num_bytes: int, gpu: Gpu | None) -> Tensor:
    try:
        if gpu is not None:
            return gpu.pinned(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)
    except (RuntimeError, WorkerError, OSError, MemoryError) as error:
        raise CapacityError(
            f"{num_bytes / 1e9:.2f} GB of the host's memory for a lane's KV can't be had "
            f"({error}): lower ",
            Given("kv_memory_gb"),
            " or ",
            Given("lanes"),
        ) from None
