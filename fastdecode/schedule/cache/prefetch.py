"""Fetches the blocks of waiting requests ahead of their start."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from fastdecode.core.holders import HolderId, SequenceId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.cache.reuse import leading_blocks
from fastdecode.schedule.reserving.ledger import BlockLedger

MOST: Final = 4
"""Requests at the head of the queue for which that is done, and the most jobs
of a holder that fetch for some."""


class Prefetch:
    """Fetches into free blocks, and into idle ones that the lower tier has, too. Looks at each
    request once.

    Args:
        ledger: knows what is kept where, and what is free.
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self._seen: set[SequenceId] = set()

    def look(self, waiting: Iterable[Sequence]) -> None:
        """Fetch for the requests at the head of the queue."""
        if not self._ledger.cache.stock.has_lower:
            return
        head = list(islice(waiting, MOST))
        new = [sequence for sequence in head if sequence.sequence_id not in self._seen]
        self._seen = {sequence.sequence_id for sequence in head}
        for sequence in new:
            self._fetch(sequence)

    def _fetch(self, sequence: Sequence) -> None:
        ledger = self._ledger
        if len(ledger.shape.sizes(sequence.max_cached_tokens)) > 1:
            return  # where its parts will be isn't known
        chains, stock = ledger.cache.chains, ledger.cache.stock
        size, most_tokens = ledger.shape.block_size, len(sequence.token_ids) - 1
        keys = chains.keys(sequence)[: most_tokens // size] if chains.is_shared(sequence) else []

        def num_unseen(num_blocks: int) -> int:
            return stock.window.num_unseen(min(num_blocks * size, most_tokens))

        present = ledger.holders.open
        leading = {h: leading_blocks(stock[h], keys, num_unseen) for h in present}
        best = max(leading, key=lambda holder: leading[holder].stop, default=None)
        if best is None:
            return
        first = leading[best].start
        chain = keys[first : leading[best].stop]
        num_missing = sum(key not in stock[best] for key in chain)
        if num_missing and self._has_room(best, num_missing):
            ledger.cache.make_room(best, ledger.free_to_keep(best) - num_missing)
            # Unless some of these had to go for it.
            if sum(key not in stock[best] for key in chain) == num_missing:
                before = keys[first - 1] if first else None
                stock.fetch(best, chain, [before, *chain[:-1]])

    def _has_room(self, holder: HolderId, num_blocks: int) -> bool:
        jobs = self._ledger.cache.stock.jobs.values()
        if sum(job.is_fetch and job.holder == holder for job in jobs) >= MOST:
            return False
        copied = self._ledger.cache.stock[holder].idle.num_stored
        return self._ledger.free_blocks(holder) + copied >= num_blocks
