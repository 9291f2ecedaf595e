"""What idle blocks are worth, by a policy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.idle.rows import Among, IdleRows, Rows
from fastdecode.schedule.cache.retention import Policy, Values

Candidate: TypeAlias = "tuple[float, int, int]"
"""What a block is worth, tokens to its end, and its row: the lowest goes first."""


class Worth:
    """Of one holder's. No value is as high as that of a row that isn't to be
    had: it is infinite.

    Args:
        rows: what is idle.
        policy: what it is worth.
        only_ends: what has idle blocks behind it isn't to be had.
    """

    def __init__(self, rows: IdleRows, policy: Policy, *, only_ends: bool) -> None:
        self._rows = rows
        self._policy = policy
        self._only_ends = only_ends

    def values(self, now_s: float, among: Among = Among.ALL, rows: Rows = slice(None)) -> Values:
        """Of some rows, or of all."""
        columns = self._rows.columns(rows, now_s)
        is_out = ~self._rows.are_among(rows, among)
        if self._only_ends:
            is_out |= ~columns.is_end
        return np.where(is_out, np.inf, self._policy.values(columns))

    def candidates(self, rows: list[int], now_s: float, among: Among) -> list[Candidate]:
        """Some rows; infinite values, too."""
        if not rows:
            return []
        some = np.array(rows)
        return self._candidates(some, self.values(now_s, among, some))

    def lowest(self, values: Values, count: int) -> list[Candidate]:
        """Of all rows, by their values, so many of the lowest, and those that
        are worth as much."""
        if count < len(values):
            most = np.partition(values, count - 1)[count - 1]
            rows = np.flatnonzero((values <= most) & np.isfinite(values))
        else:
            rows = np.flatnonzero(np.isfinite(values))
        return self._candidates(rows, values[rows])

    def below(
        self, bound: float, rows: NDArray[np.int64], now_s: float, among: Among, count: int
    ) -> tuple[list[Candidate], float]:
        """Of some rows, those that are worth less than a bound: all, or where
        there are many more than are asked for some of the lowest. Gives, too,
        what all others are worth at least."""
        values = self.values(now_s, among, rows)
        if count < len(values):
            nearer = min(bound, float(np.partition(values, count)[count]))
            is_below = values < nearer
            if is_below.any():
                return self._candidates(rows[is_below], values[is_below]), nearer
        is_below = values < bound
        return self._candidates(rows[is_below], values[is_below]), bound

    def _candidates(self, rows: NDArray[np.int64], values: Values) -> list[Candidate]:
        num_tokens = [self._rows[row].num_tokens for row in rows.tolist()]
        return list(zip(values.tolist(), num_tokens, rows.tolist(), strict=True))
