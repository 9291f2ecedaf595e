"""Idle blocks as columns, so that a policy can look at all at once."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.kept import KeptBlock
from fastdecode.schedule.cache.retention import IdleColumns, Policy

_FIRST_ROWS: Final = 64
_NOBODY: Final = -1
"""Used last what isn't there."""

Rows: TypeAlias = "slice | NDArray[np.int64]"
Mask: TypeAlias = NDArray[np.bool_]


class Among(Enum):
    """Which idle blocks."""

    ALL = "all"
    UNHIT = "unhit"
    """That were never hit."""
    COPIED = "copied"
    """That the lower tier has, too."""


class IdleRows:
    """Of one holder. Rows that no block has are found by nobody.

    Args:
        policy: says what computing a block costs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._blocks: list[KeptBlock | None] = []
        self._free: list[int] = []
        self._costs = np.ones(0)
        self._ended_s = np.zeros(0)  # infinite where no block is
        self._num_leases = np.zeros(0)
        self._last_uses = np.zeros(0, np.int64)
        self._num_tokens = np.zeros(0, np.int64)
        self._has_behind = np.zeros(0, np.bool_)
        self._is_hit = np.zeros(0, np.bool_)
        self._is_copied = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        """Of all rows, also those without a block."""
        return len(self._blocks)

    def __getitem__(self, row: int) -> KeptBlock:
        block = self._blocks[row]
        assert block is not None
        return block

    def add(self, block: KeptBlock) -> None:
        """A block is idle from now on."""
        assert block.idle_since is not None and block.row < 0
        if not self._free:
            self._lengthen()
        row = block.row = self._free.pop()
        self._blocks[row] = block
        self._costs[row] = self._policy.cost_of(block.num_tokens)
        self._ended_s[row] = block.idle_since.ended_s
        self._last_uses[row] = block.idle_since.number
        self._num_tokens[row] = block.num_tokens
        self._is_hit[row] = block.was_hit
        self.update(block)

    def update(self, block: KeptBlock) -> None:
        """What it shares, or has behind it, or whether it is copied, has changed."""
        self._num_leases[block.row] = block.num_leases
        self._is_copied[block.row] = block.is_copied
        self._has_behind[block.row] = block.num_idle_behind > 0

    def remove(self, block: KeptBlock) -> None:
        """It isn't idle any more."""
        self._blocks[block.row] = None
        self._ended_s[block.row] = np.inf
        self._last_uses[block.row] = _NOBODY
        self._free.append(block.row)
        block.row = -1

    def columns(self, rows: Rows, now_s: float) -> IdleColumns:
        """What a policy looks at."""
        return IdleColumns(
            self._costs[rows],
            now_s - self._ended_s[rows],
            self._num_leases[rows],
            self._last_uses[rows],
            self._num_tokens[rows],
            ~self._has_behind[rows],
        )

    def are_among(self, rows: Rows, among: Among) -> Mask:
        """Whether there is a block, and one of these."""
        is_there = self._last_uses[rows] != _NOBODY
        if among is Among.UNHIT:
            return is_there & ~self._is_hit[rows]
        if among is Among.COPIED:
            return is_there & self._is_copied[rows]
        return is_there

    def are_wanted(self) -> Mask:
        """Which of all rows the lower tier should have, and hasn't."""
        return (self._last_uses != _NOBODY) & self._is_hit & ~self._is_copied

    def of_use(self, number: int, among: Among) -> list[KeptBlock]:
        """What is idle since a use, from its end on."""
        is_of_it = (self._last_uses == number) & self.are_among(slice(None), among)
        rows: NDArray[np.int64] = np.flatnonzero(is_of_it)
        return [self[row] for row in rows[np.argsort(-self._num_tokens[rows])].tolist()]

    def longest_idle_s(self, now_s: float) -> float:
        """Of all; 0.0, if there are none."""
        return max(0.0, now_s - float(self._ended_s.min(initial=np.inf)))

    def _lengthen(self) -> None:
        """As many rows as there are."""
        num_rows = len(self._blocks)
        more = max(_FIRST_ROWS, num_rows)
        self._blocks += [None] * more
        self._costs = np.pad(self._costs, (0, more), constant_values=1)
        self._ended_s = np.pad(self._ended_s, (0, more), constant_values=np.inf)
        self._num_leases = np.pad(self._num_leases, (0, more))
        self._last_uses = np.pad(self._last_uses, (0, more), constant_values=_NOBODY)
        self._num_tokens = np.pad(self._num_tokens, (0, more))
        self._has_behind = np.pad(self._has_behind, (0, more))
        self._is_hit = np.pad(self._is_hit, (0, more))
        self._is_copied = np.pad(self._is_copied, (0, more))
        self._free.extend(range(num_rows + more - 1, num_rows - 1, -1))
