"""The kept blocks that no running sequence uses, and which of them are given up
first."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Final

import numpy as np

from fastdecode.schedule.cache.idle.copying import blocks_to_copy
from fastdecode.schedule.cache.idle.eviction_queue import CandidateHeap, EvictionQueue
from fastdecode.schedule.cache.idle.leases import Leases
from fastdecode.schedule.cache.idle.rows import Among, IdleRows
from fastdecode.schedule.cache.idle.worth import Worth
from fastdecode.schedule.cache.kept import KeptBlock, Use
from fastdecode.schedule.cache.retention import Policy

_FEWEST_AHEAD: Final = 256


class IdleBlocks:
    """Of one holder.

    Args:
        policy: says which goes.
        only_ends: whatever the policy, what has idle blocks behind it stays:
            they would be of no use.
        window: of the layer that sees most tokens; None: it sees all.
        fewest_ahead: of blocks that go next, so many are found at a time.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        only_ends: bool = False,
        window: int | None = None,
        fewest_ahead: int = _FEWEST_AHEAD,
    ) -> None:
        self._policy = policy
        self.leases: Final = Leases(window)
        self._rows = IdleRows(policy)
        is_apart = policy.num_leaving(1) is None
        # What leaves together is an end, and some of what is before it.
        self._worth = Worth(self._rows, policy, only_ends=only_ends or not is_apart)
        self._candidates = EvictionQueue(self._rows, self._worth, fewest_ahead if is_apart else 0)
        self._count = 0
        self.num_unhit = 0
        """Those that were never hit."""
        self.num_copied = 0
        """Those that the lower tier has, too."""

    def __len__(self) -> int:
        return self._count

    def add(self, block: KeptBlock, use: Use) -> None:
        """A block gets idle, as that use of it ends."""
        block.idle_since = use
        use.num_idle += 1
        self._count += 1
        self.num_unhit += not block.was_hit
        self.num_copied += block.is_copied
        if block.parent is not None:
            block.parent.num_idle_behind += 1
            self._changed(block.parent)
        self._rows.add(block)
        self._candidates.changed(block.row)

    def remove(self, block: KeptBlock) -> None:
        """A block is used again, or given up."""
        assert block.idle_since is not None
        block.idle_since.num_idle -= 1
        block.idle_since = None
        self._count -= 1
        self.num_unhit -= not block.was_hit
        self.num_copied -= block.is_copied
        self._rows.remove(block)
        if block.parent is not None:
            block.parent.num_idle_behind -= 1
            self._changed(block.parent)

    def lease(self, block: KeptBlock, count: int) -> None:
        """So many conversations more, or fewer, had their last turn end with
        this block: they share it, and of those before it all that their next
        tokens see."""
        for each in self.leases.add(block, count):
            self._changed(each)

    def end_leases(self, block: KeptBlock) -> bool:
        """A block is kept no more: whose last turn ended with it shares nothing
        from now on. Returns whether there were any."""
        if not block.num_turns:
            return False
        self.lease(block, -block.num_turns)
        return True

    def lose_copy(self, block: KeptBlock) -> None:
        """The lower tier hasn't got a block any more."""
        self.num_copied -= block.is_copied and block.idle_since is not None
        block.is_copied = False
        self._changed(block)

    def least_value(self, now_s: float) -> float:
        """Of what is given up first; infinite: there is nothing."""
        return float(self._worth.values(now_s).min(initial=np.inf))

    def to_copy(self, count: int, now_s: float, more_than: float) -> list[KeptBlock]:
        """So many of those that the lower tier should have and hasn't, those
        first that will be given up first; all are worth more than that."""
        return blocks_to_copy(self._rows, self._worth, count, now_s, more_than)

    def give_up(self, count: int, now_s: float, *, only_unhit: bool = False) -> list[KeptBlock]:
        """So many of them, or more where the policy has more leave together;
        fewer, if there are no more that may go. What the lower tier has, too,
        goes before all else."""
        among = [Among.UNHIT] if only_unhit else [Among.COPIED, Among.ALL]
        gone: list[KeptBlock] = []
        for some in among:
            if some is Among.COPIED and not self.num_copied:
                continue
            while len(gone) < count:
                leaving = self._leave(count - len(gone), now_s, some)
                if not leaving:
                    break
                gone += leaving
        return gone

    def _leave(self, count: int, now_s: float, among: Among) -> list[KeptBlock]:
        """Some of the next that go: as many as can be told from what there is."""
        queue = self._candidates.lowest(count, now_s, among)
        if not queue.heap:
            return []
        use = self._rows[queue.heap[0][2]].idle_since
        assert use is not None
        if self._policy.num_leaving(use.num_idle) is not None:
            return self._leave_together(use, among)
        return self._leave_in_turn(queue, count, now_s, among)

    def _leave_in_turn(
        self, queue: CandidateHeap, count: int, now_s: float, among: Among
    ) -> list[KeptBlock]:
        """The lowest of a queue, as long as nothing else may be lower."""
        heap, gone = queue.heap, list[KeptBlock]()
        latest = {row: value for value, _, row in heap}
        while heap and len(gone) < count:
            value, _, row = heapq.heappop(heap)
            if latest.get(row) != value:
                continue  # it has gone, or is worth something else now
            del latest[row]
            block = self._rows[row]
            gone.append(block)
            self.remove(block)
            # Others are worth less now, or the block before it may be an end.
            are_shared_less = self.end_leases(block)
            changed = _rows_before(block) if are_shared_less else _new_end(block, latest)
            for candidate in self._worth.candidates(changed, now_s, among):
                latest.pop(candidate[2], None)
                if candidate[0] < queue.bound:
                    latest[candidate[2]] = candidate[0]
                    heapq.heappush(heap, candidate)
        return gone

    def _leave_together(self, use: Use, among: Among) -> list[KeptBlock]:
        """The end of what is idle since a use, as much as leaves at a time, but
        for what others have behind them that stays."""
        gone: list[KeptBlock] = []
        blocks = self._rows.of_use(use.number, among)
        most = self._policy.num_leaving(len(blocks))
        for block in blocks:
            if len(gone) == most:
                break
            if not block.num_idle_behind:
                self.remove(block)
                self.end_leases(block)
                gone.append(block)
        return gone

    def _changed(self, block: KeptBlock) -> None:
        """Something about a block has; it needn't be idle."""
        if block.row >= 0:
            self._rows.update(block)
            self._candidates.changed(block.row)

    def check_invariants(self, idle: list[KeptBlock]) -> None:
        """Recount. ``idle``: those that are."""
        assert len(idle) == self._count and all(block.idle_since is not None for block in idle)
        assert self.num_unhit == sum(not block.was_hit for block in idle)
        assert self.num_copied == sum(block.is_copied for block in idle)
        behind = {id(block): 0 for block in idle}
        for block in idle:
            if id(block.parent) in behind:
                behind[id(block.parent)] += 1
        for block in idle:
            assert block.num_idle_behind == behind[id(block)], "blocks behind it are miscounted"
            assert block.row >= 0 and self._rows[block.row] is block


def _rows_before(block: KeptBlock) -> list[int]:
    """Of those before a block, what is idle."""
    rows, before = [], block.parent
    while before is not None:
        rows.append(before.row)
        before = before.parent
    return [row for row in rows if row >= 0]


def _new_end(block: KeptBlock, queued: Container[int]) -> list[int]:
    """The one before a block that leaves, if it is idle, and wasn't to be had."""
    before = block.parent
    if before is None or before.row < 0 or before.row in queued:
        return []
    return [before.row]
