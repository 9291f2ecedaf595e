"""Kept blocks on their way between one cache and its lower tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastdecode.wire.blocks import Done, Progress, words_of
from rworker.instructions import MoveBlocks
from rworker.tiers.lower_tier import LowerTier


class BlockTransfer:
    """See the module, and ``Transfer``: the tier copies by itself, this reports.

    Args:
        order: what was asked for.
        tier: None: there is none.
    """

    def __init__(self, order: MoveBlocks, tier: LowerTier | None) -> None:
        self.to: Final = order.to
        self._order = order
        self._tier = tier
        self._job = order.move
        self._num_there = 0  # leading layers

    def begin(self) -> bool:
        """False: there is no lower tier. What a device raises is no failure of this alone."""
        if self._tier is None:
            return False
        self._tier.begin(self._job)
        return True

    def advance(self) -> Iterator[Progress]:
        """See ``Transfer``."""
        if self._tier is None:
            return
        before, self._num_there = self._num_there, self._tier.progress(self._job)
        if before < self._num_there and not self.is_done:
            at = self._order.holder, self._job.number, self._num_there, self._tier.num_layers
            yield Progress(*at, self._job.seconds)

    @property
    def is_done(self) -> bool:
        """See ``Transfer``."""
        return self._tier is not None and self._num_there == self._tier.num_layers

    def end(self, reason: str) -> Done:
        """See ``Transfer``. What failed of a fetch isn't kept any more."""
        job, tier = self._job, self._tier
        failed = set(range(len(job.keys))) if reason else job.failed
        self._order.books.moving.end(job.number, failed)
        words = words_of([job.keys[place] for place in sorted(failed)])
        num_bytes = 0 if tier is None else (len(job.keys) - len(failed)) * tier.stored_bytes
        faults = (0, 0, 0, 0) if tier is None else tier.take_faults()
        at = self._order.holder, job.number, words, num_bytes, job.seconds
        return Done(*at, *faults)

    def close(self) -> None:
        """See ``Transfer``: with its cache, a tier is closed, too."""
