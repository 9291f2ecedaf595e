"""Blocks on their way between the tiers of R-workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from remembering_store import Store

from fastdecode.schedule.life.events import Fetching, Moved
from fastdecode.schedule.plan import Offload as StoreDown
from fastdecode.schedule.plan import Restore


@dataclass
class Moves:
    """They arrive one job after the other."""

    fail: Callable[[], bool] = lambda: False
    """Asked for each block."""
    tell: Callable[[], bool] = lambda: False
    """Asked while blocks are fetched, whether it is told how far that is."""
    num_fetched: int = 0
    under_way: list[tuple[StoreDown | Restore, np.ndarray]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.under_way)

    def begin(self, order: StoreDown | Restore, store: Store) -> None:
        blocks = store.begin_move(order.keys, is_fetch=isinstance(order, Restore))
        self.under_way.append((order, blocks))

    def next(self, stores: Sequence[Store]) -> Fetching | Moved | None:
        """What is longest on its way arrives, or comes half of the way; None:
        nothing is."""
        if not self.under_way:
            return None
        order, blocks = self.under_way[0]
        is_fetch = isinstance(order, Restore)
        if is_fetch and self.tell():
            return Fetching(order.holder, order.job, 0.5, 0.5)
        self.under_way.pop(0)
        failed = {key for key in order.keys if self.fail()}
        failed = stores[order.holder].end_move(order.keys, blocks, is_fetch=is_fetch, failed=failed)
        self.num_fetched += (len(order.keys) - len(failed)) * is_fetch
        return Moved(order.holder, order.job, tuple(failed), 1, 1.0)

    def lose(self, worker: int) -> None:
        self.under_way = [move for move in self.under_way if move[0].holder != worker]
