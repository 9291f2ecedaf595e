"""The KV blocks that running sequences have reserved on each holder, so that no step runs out.

Blocks that siblings share count once for each of them: that errs on the safe side, and needs no
news from holders.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Final

from fastdecode.core.holders import HolderId, Part, Residence, SequenceId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.cache.holdings import Holdings
from fastdecode.schedule.cache.retention import is_short
from fastdecode.schedule.cache.reuse import leading_blocks
from fastdecode.schedule.cache.stock import Stock
from fastdecode.schedule.holder_states import HolderState, HolderStates
from fastdecode.schedule.reserving.capacity import Capacity, PartShape

MOST_AHEAD: Final = 4
"""Requests at the head of the queue whose blocks are fetched ahead of their start, and most jobs
of a holder that do so."""
_NOTHING: Mapping[HolderId, int] = {}


class BlockLedger:
    """See the module.

    Args:
        blocks: blocks of each holder.
        block_size, part_tokens: see ``PartShape``.
        max_closed_parts, device: see ``Capacity``.
        cache: the cached blocks. None if nothing is cached.
        reserve: a sequence starts on a holder only while more than this share of its blocks is free
            or idle, since running sequences may need them. 0 if none outgrows what it reserved.
        swap_threshold: share of a holder's blocks that should be free, or in its lower tier.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        block_size: int,
        part_tokens: int | None = None,
        max_closed_parts: int = 1 << 40,
        cache: Holdings | None = None,
        reserve: float = 0.0,
        swap_threshold: float = 0.25,
        device: HolderId | None = None,
    ) -> None:
        assert blocks and min(blocks) >= 0 and block_size > 0
        assert part_tokens is None or (part_tokens > 0 and part_tokens % block_size == 0)
        self.shape: Final = PartShape(block_size, part_tokens)
        self.holders: Final = HolderStates(len(blocks))
        self.capacity: Final = Capacity(self.holders, blocks, self.shape, max_closed_parts, device)
        self._free = list(blocks)  # blocks that are not reserved, as if none were cached
        self.cache: Final = cache or Holdings(Stock(len(blocks), block_size))
        self._reserve = reserve
        self._swap_threshold = swap_threshold
        self._max_closed_parts = max_closed_parts
        self._closed_parts = [0] * len(blocks)
        self._fetched_for = set[SequenceId]()

    def lose(self, holder: HolderId, *, returns: bool = False) -> None:
        """Lose a holder. ``returns``: it is sure to be regained."""
        self.cache.lose(holder)
        self.holders.move(holder, HolderState.LOST)
        if returns:
            self.holders.returning.add(holder)

    def regain(self, holder: HolderId, num_blocks: int) -> None:
        """Put an empty replacement in a lost holder's place."""
        assert self._free[holder] == self.capacity.blocks(holder), "something is reserved there"
        self.holders.move(holder, HolderState.OPEN)
        self.capacity.regain(holder, num_blocks)
        self._free[holder] = num_blocks

    def free_blocks(self, holder: HolderId) -> int:
        """Count the blocks that are neither reserved nor cached."""
        return self._free[holder] - self.cache.num_beside(holder)

    def available_blocks(self, holder: HolderId) -> int:
        """Count the blocks that no running sequence needs: free and idle ones."""
        return self.free_blocks(holder) + len(self.cache.stock[holder].idle)

    def holders_with_room(
        self, num_tokens: int, may_grow_to: int, taken: Mapping[HolderId, int] = _NOTHING
    ) -> list[HolderId]:
        """Return the holders that have room for ``num_tokens`` now, and could hold ``may_grow_to``
        if they were empty, those with most free blocks first.

        Args:
            taken: blocks of holders that are as good as reserved.
        """
        blocks, most = self.shape.blocks_for(num_tokens), self.shape.blocks_for(may_grow_to)
        free = {
            h: self.available_blocks(h) - taken.get(h, 0)
            for h in self.holders.open
            if not self._reserve
            or self.available_blocks(h) > self._reserve * self.capacity.blocks(h)
        }
        fitting = (h for h in free if free[h] >= blocks and self.capacity.blocks(h) >= most)
        return sorted(fitting, key=lambda h: (-free[h], h))

    def candidates(
        self,
        placed: Seq[HolderId],
        sizes: Seq[int],
        may_grow_to: Seq[int],
        credit: Mapping[HolderId, int] = _NOTHING,
    ) -> list[list[HolderId]]:
        """Return where the next part of a sequence could go. Holders with fewest of its other parts
        come first, so that as many as possible attend to it at once. All parts but the last have
        one size, so a part that takes any holder's room spoils it for no later part.

        Args:
            placed: holders of its parts before this one.
            sizes: tokens of each part.
            may_grow_to: tokens that each may have in the end.
            credit: blocks of holders that need no room, since they are cached.

        Returns:
            Lists of holders with equally many of its parts. An empty list if none has room.
        """
        part = len(placed)
        taken: Counter[HolderId] = Counter()
        taken.subtract(credit)
        for holder, num_tokens in zip(placed, sizes, strict=False):
            taken[holder] += self.shape.blocks_for(num_tokens)
        fitting = self.holders_with_room(sizes[part], may_grow_to[part], taken)
        if part < len(sizes) - 1:
            fitting = [
                h
                for h in fitting
                if self._closed_parts[h] + placed.count(h) < self._max_closed_parts
            ]
        fitting.sort(key=placed.count)
        return [list(tier) for _, tier in itertools.groupby(fitting, key=placed.count)] or [[]]

    def reserve(self, residence: Residence) -> None:
        """Reserve what a sequence's parts need. The cache knows which blocks it starts with."""
        self._hold(residence, 1)
        for holder in dict.fromkeys(residence.holders):
            self.cache.make_room(holder, self._free[holder])

    def grow(self, part: Part, num_tokens: int) -> bool:
        """Enlarge a part. Return False if there is no room."""
        blocks = self.shape.blocks_for(num_tokens) - self.shape.blocks_for(part.num_tokens)
        if blocks > self.available_blocks(part.holder):
            return False
        self._free[part.holder] -= blocks
        self.cache.make_room(part.holder, self._free[part.holder])
        return True

    def move_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Move blocks between tiers before they are needed: copy down where fewer are free, or
        copied, than there should be, and fetch for the head of the queue, once for each request."""
        stock = self.cache.stock
        if not stock.has_lower:
            return
        stock.is_due = False
        stock.look_whether_fetching_pays()
        for holder in self.holders.open:
            index, num_blocks = stock[holder], self.capacity.blocks(holder)
            num_available = self.free_blocks(holder) + index.idle.num_stored
            if index.num_slots and is_short(num_available, num_blocks, self._swap_threshold):
                lacking = math.ceil(self._swap_threshold * num_blocks) - num_available
                stock.copy_down(holder, lacking, num_blocks)
        head = list(itertools.islice(waiting, MOST_AHEAD))
        new = [sequence for sequence in head if sequence.sequence_id not in self._fetched_for]
        self._fetched_for = {sequence.sequence_id for sequence in head}
        for sequence in new:
            self._fetch_ahead(sequence)

    def _fetch_ahead(self, sequence: Sequence) -> None:
        """Fetch into free blocks, and into idle ones that the lower tier has, too."""
        cache, stock, most_tokens = self.cache, self.cache.stock, len(sequence.token_ids) - 1
        is_split = len(self.shape.sizes(sequence.max_cached_tokens)) > 1  # to unknown places
        if is_split or not cache.chains.is_shared(sequence) or not self.holders.open:
            return
        keys = cache.chains.keys(sequence)[: most_tokens // self.shape.block_size]
        leading = {h: leading_blocks(stock, stock[h], keys, most_tokens) for h in self.holders.open}
        best = max(leading, key=lambda holder: leading[holder].stop)
        first = leading[best].start
        chain = keys[first : leading[best].stop]
        num_missing = sum(key not in stock[best] for key in chain)
        num_jobs = sum(job.is_fetch and job.holder == best for job in stock.jobs.values())
        room = self.free_blocks(best) + stock[best].idle.num_stored
        if not num_missing or num_jobs >= MOST_AHEAD or room < num_missing:
            return
        cache.make_room(best, self._free[best] - num_missing)
        # Unless some of these were evicted for it.
        if sum(key not in stock[best] for key in chain) == num_missing:
            stock.fetch(best, chain, [keys[first - 1] if first else None, *chain[:-1]])

    def release(self, residence: Residence, sequence: Sequence | None = None) -> None:
        """Free what a sequence's parts have reserved, and cache its blocks."""
        if sequence is not None:
            self.cache.keep(sequence)
            self.cache.end(sequence)
        self._hold(residence, -1)
        assert all(
            self._free[part.holder] <= self.capacity.blocks(part.holder) for part in residence.parts
        )

    def check_invariants(self, residences: Iterable[Residence]) -> None:
        """Recount. ``residences``: of all running sequences."""
        free = [self.capacity.blocks(HolderId(h)) for h in range(len(self._free))]
        closed = [0] * len(free)
        for residence in residences:
            for part in residence.parts:
                free[part.holder] -= self.shape.blocks_for(part.num_tokens)
            for part in residence.parts[:-1]:
                closed[part.holder] += 1
        assert free == self._free and closed == self._closed_parts, "the ledger is wrong"
        assert min(map(self.free_blocks, self.holders.open), default=0) >= 0, (
            "more is reserved than there is"
        )

    def _hold(self, residence: Residence, sign: int) -> None:
        for part in residence.parts:
            self._free[part.holder] -= sign * self.shape.blocks_for(part.num_tokens)
        for part in residence.parts[:-1]:
            self._closed_parts[part.holder] += sign
