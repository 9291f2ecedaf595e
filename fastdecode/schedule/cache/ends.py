"""Ends of what is idle, as columns, so that a policy can look at all at once."""

from __future__ import annotations

from functools import partial

import numpy as np

from fastdecode.schedule.cache.kept import KeptBlock
from fastdecode.schedule.cache.retention import Ends, Policy, Values

_FIRST_ROWS = 64
_TAKEN = float("inf")
"""No value is as high: a row that is free, or isn't asked for."""


class EndRows:
    """Of one holder.

    Args:
        policy: says what computing a block costs, and what it is worth.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._blocks: list[KeptBlock | None] = []
        self._free: list[int] = []
        self._costs = np.ones(0)
        self._ended_s = np.zeros(0)
        self._num_leases = np.ones(0)
        self._last_uses = np.zeros(0)
        self._is_hit = np.zeros(0, np.bool_)

    def add(self, block: KeptBlock) -> None:
        """A block is an end from now on."""
        assert block.idle_since is not None and block.row < 0
        if not self._free:
            self._lengthen()
        row = block.row = self._free.pop()
        self._blocks[row] = block
        self._costs[row] = self._policy.cost_of(block.num_tokens)
        self._ended_s[row] = block.idle_since.ended_s
        self._last_uses[row] = block.idle_since.number
        self._is_hit[row] = block.was_hit
        self.count_leases(block)

    def count_leases(self, block: KeptBlock) -> None:
        """Those of an end have changed."""
        self._num_leases[block.row] = max(1, block.num_leases)

    def remove(self, block: KeptBlock) -> None:
        """It is none any more."""
        self._blocks[block.row] = None
        self._free.append(block.row)
        block.row = -1

    def __getitem__(self, row: int) -> KeptBlock:
        block = self._blocks[row]
        assert block is not None
        return block

    def values(self, now_s: float, *, only_unhit: bool) -> Values:
        """What each row is worth; infinite where there is none to be had."""
        values = self._worth(slice(None), now_s)
        values[self._free] = _TAKEN
        if only_unhit:
            values[self._is_hit] = _TAKEN
        return values

    def value(self, row: int, now_s: float, *, only_unhit: bool) -> float:
        """The same of one row, in which there is one."""
        if only_unhit and self._is_hit[row]:
            return _TAKEN
        return float(self._worth(slice(row, row + 1), now_s)[0])

    def _worth(self, rows: slice, now_s: float) -> Values:
        """Whatever is in those rows."""
        ends = Ends(
            self._costs[rows],
            now_s - self._ended_s[rows],
            self._num_leases[rows],
            self._last_uses[rows],
            partial(self._num_owned, rows),
        )
        return self._policy.values(ends).copy()

    def _num_owned(self, rows: slice) -> Values:
        """Of each row, how many blocks are idle since its last use."""
        uses = [None if block is None else block.idle_since for block in self._blocks[rows]]
        return np.array([0 if use is None else use.num_idle for use in uses], np.float64)

    def _lengthen(self) -> None:
        """As many rows as there are."""
        num_rows = len(self._blocks)
        more = max(_FIRST_ROWS, num_rows)
        self._blocks += [None] * more
        self._costs = np.pad(self._costs, (0, more), constant_values=1)
        self._ended_s = np.pad(self._ended_s, (0, more))
        self._num_leases = np.pad(self._num_leases, (0, more), constant_values=1)
        self._last_uses = np.pad(self._last_uses, (0, more))
        self._is_hit = np.pad(self._is_hit, (0, more))
        self._free.extend(range(num_rows + more - 1, num_rows - 1, -1))
