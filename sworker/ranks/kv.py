"""K and V of S-workers that act as one, each of which keeps its own heads on its device:
what rank 0 does with its memory, the ranks behind it do with theirs.

Rank 0's R-worker decides for all: its blocks, lanes and slots in the host's memory have
the same numbers on every rank. Each call is announced before rank 0 does it, so all ranks
queue the same copies between the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.host_blocks import BlockMemory, HostBlocks
from sworker.model.skeleton import Model
from sworker.paged import PagedKV
from sworker.ranks.group import (
    ENTER_LANE,
    FETCH_BLOCKS,
    KEEP_ON_HOST,
    LEAVE_LANE,
    PREFETCH_LANE,
    STORE_BLOCKS,
    SWAP_LANES,
    Ranks,
)
from sworker.ranks.sharding import shard_sinks
from sworker.swap.swapped import Blocks, SwappedKV

_ALL_ALIKE: Final = "all ranks have the same options"


class KVMaker(Protocol):
    """Makes a rank's share of what rank 0 keeps.

    Raises:
        CapacityError: the device lacks the memory, or the host.
    """

    def cache(self, num_blocks: int) -> PagedKV: ...

    def lanes(self, num_blocks: int, num_lanes: int) -> SwappedKV: ...


class LeadingBlocks:
    """Rank 0's; see ``BlockMemory``.

    Args:
        memory: its own.
        ranks: it, and the others.
    """

    def __init__(self, memory: BlockMemory, ranks: Ranks) -> None:
        self._memory, self._ranks = memory, ranks
        self.num_slots: Final = memory.num_slots
        with ranks.peers.exchanging():
            ranks.tell(KEEP_ON_HOST, 0, memory.num_slots)

    def copy(self, slots: Sequence[int], blocks: Sequence[int], *, is_fetch: bool) -> None:
        """See ``BlockMemory``."""
        with self._ranks.peers.exchanging():
            self._ranks.tell(FETCH_BLOCKS if is_fetch else STORE_BLOCKS, 0, len(slots))
            self._ranks.share(torch.tensor((slots, blocks), dtype=torch.int64))
            self._memory.copy(slots, blocks, is_fetch=is_fetch)


class LeadingLanes:
    """Rank 0's; see ``LaneMover``.

    Args:
        kv: its own.
        ranks: it, and the others.
    """

    def __init__(self, kv: SwappedKV, ranks: Ranks) -> None:
        self._kv, self._ranks = kv, ranks
        first = kv.caches[0]
        with ranks.peers.exchanging():
            ranks.tell(SWAP_LANES, len(kv.hosts), first.num_slots // first.kv.block_size)

    def enter(self, lane: int, past: Blocks) -> PagedKV:
        """See ``SwappedKV``."""
        with self._ranks.peers.exchanging():
            self._tell(ENTER_LANE, lane, past)
            return self._kv.enter(lane, past)

    def leave(self, tokens: NDArray[np.int64]) -> None:
        """See ``SwappedKV``."""
        with self._ranks.peers.exchanging():
            self._tell(LEAVE_LANE, 0, tokens)
            self._kv.leave(tokens)

    def prefetch(self, lane: int, blocks: Blocks) -> None:
        """See ``SwappedKV``."""
        with self._ranks.peers.exchanging():
            self._tell(PREFETCH_LANE, lane, blocks)
            self._kv.prefetch(lane, blocks)

    def _tell(self, operation: int, lane: int, ids: NDArray[np.int64]) -> None:
        self._ranks.tell(operation, lane, len(ids))
        self._ranks.share(torch.from_numpy(ids))


class FollowingKV:
    """Of a rank behind the first.

    Args:
        model: this rank's part of it.
        ranks: it, and the others.
        make: makes what rank 0 says; None: R-workers keep K and V.
    """

    def __init__(self, model: Model, ranks: Ranks, make: KVMaker | None) -> None:
        self._sinks = shard_sinks(model.sinks, ranks.shard)
        self._ranks, self._make = ranks, make
        self._cache: PagedKV | None = None
        self._memory: HostBlocks | None = None
        self._lanes: SwappedKV | None = None

    @property
    def cache(self) -> PagedKV:
        """That a step attends in; of lanes that are swapped, the present one's."""
        assert self._cache is not None, "a cache comes first"
        return self._cache

    @property
    def lanes(self) -> SwappedKV | None:
        """Of lanes that are swapped; None: they are not."""
        return self._lanes

    def keep(self, num_blocks: int) -> PagedKV:
        """A cache of so many blocks."""
        assert self._make is not None, _ALL_ALIKE
        self._cache = self._make.cache(num_blocks)
        self._cache.sinks = self._sinks
        return self._cache

    def obeys(self, operation: int, lane: int, number: int) -> bool:
        """Do what rank 0 does with its memory. False: the operation is another one."""
        if operation == KEEP_ON_HOST:
            self._memory = HostBlocks(self.cache, number)
        elif operation in (FETCH_BLOCKS, STORE_BLOCKS):
            slots, blocks = self._shared(2, number).tolist()
            assert self._memory is not None, _ALL_ALIKE
            self._memory.copy(slots, blocks, is_fetch=operation == FETCH_BLOCKS)
        elif operation == SWAP_LANES:
            self._swap(lane, number)
        elif operation in (ENTER_LANE, LEAVE_LANE, PREFETCH_LANE):
            self._do_swap(operation, lane, self._shared(number).numpy())
        else:
            return False
        return True

    def close(self) -> None:
        """Wait for what is being copied."""
        if self._lanes is not None:
            self._lanes.close()

    def _swap(self, num_lanes: int, num_blocks: int) -> None:
        assert self._make is not None, _ALL_ALIKE
        self._lanes = self._make.lanes(num_blocks, num_lanes)
        for cache in self._lanes.caches:
            cache.sinks = self._sinks

    def _do_swap(self, operation: int, lane: int, ids: NDArray[np.int64]) -> None:
        assert self._lanes is not None, _ALL_ALIKE
        if operation == ENTER_LANE:
            self._cache = self._lanes.enter(lane, ids)
        elif operation == LEAVE_LANE:
            self._lanes.leave(ids)
        else:
            self._lanes.prefetch(lane, ids)

    def _shared(self, *shape: int) -> Tensor:
        return self._ranks.share(torch.empty(shape, dtype=torch.int64))
