"""Which idle blocks the lower tier should get a copy of."""

from __future__ import annotations

import numpy as np

from fastdecode.schedule.cache.idle.rows import IdleRows
from fastdecode.schedule.cache.idle.worth import Worth
from fastdecode.schedule.cache.kept import KeptBlock
from fastdecode.schedule.cache.retention import Values


def blocks_to_copy(
    rows: IdleRows, worth: Worth, count: int, now_s: float, more_than: float
) -> list[KeptBlock]:
    """So many of those that it should have and hasn't, those first that will be
    given up first; all are worth more than that."""
    are_wanted = rows.are_wanted()
    num_wanted = int(np.count_nonzero(are_wanted))
    if not num_wanted:
        return []
    values = worth.values(now_s)
    may_go = np.where(are_wanted & (values > more_than), values, np.inf)
    found = sorted(worth.lowest(may_go, count))
    chosen = {row: rows[row] for _, _, row in found[:count]}
    if len(chosen) < min(count, num_wanted):
        _add_before(rows, chosen, count, values, more_than)
    return list(chosen.values())


def _add_before(
    rows: IdleRows, chosen: dict[int, KeptBlock], count: int, values: Values, more_than: float
) -> None:
    """Those, too, that go when what is behind them has gone."""
    ends = np.flatnonzero((values > more_than) & np.isfinite(values))
    seen: set[int] = set()
    for row in ends[np.argsort(values[ends], kind="stable")].tolist():
        block = rows[row].parent
        while block is not None and block.row >= 0 and block.row not in seen:
            if len(chosen) == count:
                return
            seen.add(block.row)
            if block.was_hit and not block.is_copied:
                chosen.setdefault(block.row, block)
            block = block.parent
