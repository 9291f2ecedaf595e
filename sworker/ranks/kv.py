"""K and V of S-workers that act as one, each of which keeps its own heads on its device: what rank
0 does with its memory, the ranks behind it do with theirs.

Rank 0's R-worker decides for all: its blocks, lanes and slots in the host's memory have the same
numbers on every rank. Each call is announced before rank 0 does it, so all ranks queue the same
copies between the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

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
    Order,
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
    """Rank 0's; see ``BlockMemory``."""

    def __init__(self, memory: BlockMemory, ranks: Ranks) -> None:
        self._memory, self._ranks = memory, ranks
        self.num_slots: Final = memory.num_slots
        with ranks.peers.exchanging():
            ranks.order(KEEP_ON_HOST, number=memory.num_slots)

    def copy(self, slots: Sequence[int], blocks: Sequence[int], *, is_fetch: bool) -> None:
        with self._ranks.peers.exchanging():
            ids = torch.tensor((slots, blocks), dtype=torch.int64)
            self._ranks.order(FETCH_BLOCKS if is_fetch else STORE_BLOCKS, ints=ids)
            self._memory.copy(slots, blocks, is_fetch=is_fetch)


class LeadingLanes:
    """Rank 0's; see ``LaneMover``."""

    def __init__(self, kv: SwappedKV, ranks: Ranks) -> None:
        self._kv, self._ranks = kv, ranks
        first = kv.caches[0]
        with ranks.peers.exchanging():
            num_blocks = first.num_slots // first.kv.block_size
            ranks.order(SWAP_LANES, ints=torch.tensor((len(kv.hosts), num_blocks)))

    def enter(self, lane: int, past: Blocks) -> PagedKV:
        with self._ranks.peers.exchanging():
            self._ranks.order(ENTER_LANE, lane, ints=torch.from_numpy(past))
            return self._kv.enter(lane, past)

    def leave(self, tokens: NDArray[np.int64]) -> None:
        with self._ranks.peers.exchanging():
            self._ranks.order(LEAVE_LANE, ints=torch.from_numpy(tokens))
            self._kv.leave(tokens)

    def prefetch(self, lane: int, blocks: Blocks) -> None:
        with self._ranks.peers.exchanging():
            self._ranks.order(PREFETCH_LANE, lane, ints=torch.from_numpy(blocks))
            self._kv.prefetch(lane, blocks)


class FollowingKV:
    """K and V of a rank behind the first.

    Args:
        model: this rank's part of it.
        make: Makes the caches that rank 0 orders. None if R-workers keep K and V.
    """

    def __init__(self, model: Model, ranks: Ranks, make: KVMaker | None) -> None:
        self._sinks = shard_sinks(model.sinks, ranks.shard)
        self._make = make
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

    def obeys(self, order: Order) -> bool:
        """Do what rank 0 does with its memory. Return False for any other operation."""
        operation, lane, number, ints, _ = order
        if operation == KEEP_ON_HOST:
            self._memory = HostBlocks(self.cache, number)
        elif operation in (FETCH_BLOCKS, STORE_BLOCKS):
            slots, blocks = ints.view(2, -1).tolist()
            assert self._memory is not None, _ALL_ALIKE
            self._memory.copy(slots, blocks, is_fetch=operation == FETCH_BLOCKS)
        elif operation == SWAP_LANES:
            assert self._make is not None, _ALL_ALIKE
            num_lanes, num_blocks = ints.tolist()
            self._lanes = self._make.lanes(num_blocks, num_lanes)
            for cache in self._lanes.caches:
                cache.sinks = self._sinks
        elif operation in (ENTER_LANE, LEAVE_LANE, PREFETCH_LANE):
            assert self._lanes is not None, _ALL_ALIKE
            if operation == ENTER_LANE:
                self._cache = self._lanes.enter(lane, ints.numpy())
            elif operation == LEAVE_LANE:
                self._lanes.leave(ints.numpy())
            else:
                self._lanes.prefetch(lane, ints.numpy())
        else:
            return False
        return True

    def close(self) -> None:
        """Wait for what is being copied."""
        if self._lanes is not None:
            self._lanes.close()
