"""The kept blocks that no running sequence uses, and which of them are given up
first."""

from __future__ import annotations

import numpy as np

from fastdecode.schedule.cache.ends import EndRows
from fastdecode.schedule.cache.kept import KeptBlock, Use
from fastdecode.schedule.cache.retention import Policy


class IdleBlocks:
    """Of one holder. Whatever the policy, only ends are given up, since what
    lies behind a missing block is of no use.

    Args:
        policy: says whose end.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ends = EndRows(policy)
        self._count = 0
        self.num_unhit = 0
        """Those that were never hit."""

    def __len__(self) -> int:
        return self._count

    def add(self, block: KeptBlock, use: Use) -> None:
        """A block gets idle, as that use of it ends."""
        block.idle_since = use
        use.num_idle += 1
        self._count += 1
        self.num_unhit += not block.was_hit
        parent = block.parent
        if parent is not None:
            parent.num_idle_behind += 1
            if parent.row >= 0:
                self._ends.remove(parent)
        if not block.num_idle_behind:
            self._ends.add(block)

    def remove(self, block: KeptBlock) -> None:
        """A block is used again, or given up."""
        assert block.idle_since is not None
        block.idle_since.num_idle -= 1
        block.idle_since = None
        self._count -= 1
        self.num_unhit -= not block.was_hit
        if block.row >= 0:
            self._ends.remove(block)
        parent = block.parent
        if parent is not None:
            parent.num_idle_behind -= 1
            if parent.idle_since is not None and not parent.num_idle_behind:
                self._ends.add(parent)

    def lease(self, block: KeptBlock, count: int) -> None:
        """So many conversations more, or fewer, had their last turn end with
        this block: they share it and all before it."""
        block.num_turns += count
        each: KeptBlock | None = block
        while each is not None:
            each.num_leases += count
            if each.row >= 0:
                self._ends.count_leases(each)
            each = each.parent

    def give_up(self, count: int, now_s: float, *, only_unhit: bool = False) -> list[KeptBlock]:
        """So many of them, or more where the policy has more leave together;
        fewer, if there are no more: of those that were never hit, some may have
        others behind them."""
        gone: list[KeptBlock] = []
        ends = self._ends
        values = ends.values(now_s, only_unhit=only_unhit)
        while len(gone) < count and len(values):
            row = int(values.argmin())
            if not np.isfinite(values[row]):
                break
            leaving = self._leave(ends[row])
            gone += leaving
            if len(leaving) > 1:  # others that were used with them count for less now
                values = ends.values(now_s, only_unhit=only_unhit)
                continue
            values[row] = np.inf
            before = leaving[0].parent
            if before is not None and before.row >= 0:
                values[before.row] = ends.value(before.row, now_s, only_unhit=only_unhit)
        return gone

    def _leave(self, end: KeptBlock) -> list[KeptBlock]:
        """An end is given up, and as many before it as leave with it."""
        use, block = end.idle_since, end
        assert use is not None
        gone: list[KeptBlock] = []
        for _ in range(self._policy.num_leaving(use.num_idle)):
            self.remove(block)
            if block.num_turns:
                self.lease(block, -block.num_turns)
            gone.append(block)
            if block.parent is None or block.parent.row < 0 or block.parent.idle_since is not use:
                break
            block = block.parent
        return gone

    def check_invariants(self, idle: list[KeptBlock]) -> None:
        """Recount. ``idle``: those that are."""
        assert len(idle) == self._count and all(block.idle_since is not None for block in idle)
        assert self.num_unhit == sum(not block.was_hit for block in idle)
        behind = {id(block): 0 for block in idle}
        for block in idle:
            if id(block.parent) in behind:
                behind[id(block.parent)] += 1
        for block in idle:
            assert block.num_idle_behind == behind[id(block)], "blocks behind it are miscounted"
            assert (block.row >= 0) == (not block.num_idle_behind), "an end is none, or none is one"
            assert block.row < 0 or self._ends[block.row] is block
