"""The lower tiers of an R-worker's caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import MOST_MOVED, Inventory, words_of
from rworker.tiers.disk import Disk, open_slots
from rworker.tiers.format import Entry, SlotShape
from rworker.tiers.slots import SlotFile
from rworker.tiers.tier import CacheMemory, DiskTier, Tier

if TYPE_CHECKING:
    from rworker.instructions import OpenTier

logger = logging.getLogger(__name__)

POLL_S: Final = 0.002
"""Between two looks at what moves, while an R-worker waits for messages."""


class Tiers:
    """Tiers by holder. One thread calls.

    Args:
        disk: where cached blocks may go. None if nowhere.
        make_tier: makes the tier of a file and a cache.
    """

    def __init__(
        self,
        disk: Disk | None = None,
        make_tier: Callable[[SlotFile, CacheMemory], DiskTier] = DiskTier,
    ) -> None:
        self._disk = disk
        self.directory: Final = None if disk is None else disk.directory
        self._make_tier = make_tier
        self._tiers: dict[HolderId, Tier] = {}

    def open(self, wanted: OpenTier, memory: CacheMemory) -> Iterator[Inventory]:
        """Open a holder's tier, and report what it has. No slots if there is none, or it can't be
        opened."""
        self.close(wanted.holder)
        slots = None
        if self._disk is not None:
            shape = SlotShape(wanted.identity, memory.num_layers, memory.layer_bytes)
            try:
                slots = open_slots(self._disk.directory, shape, self._disk.num_bytes)
            except FastDecodeError as error:
                logger.warning("no KV blocks are kept on disk: %s", error.message)
        if slots is None:
            return _pages(wanted.holder, 0, ())
        logger.info(
            "%s: room for %d KV blocks, %d there; %s", slots.path, slots.num_slots, len(slots),
            "direct" if slots.is_direct else "through the page cache",
        )  # fmt: skip
        entries = slots.entries
        return self.use(wanted.holder, self._make_tier(slots, memory), slots.num_slots, entries)

    def use(
        self, holder: HolderId, tier: Tier, num_slots: int, entries: Sequence[Entry] = ()
    ) -> Iterator[Inventory]:
        """Use a tier for a holder, and report what it has."""
        self._tiers[holder] = tier
        return _pages(holder, num_slots, entries)

    def of(self, holder: HolderId) -> Tier | None:
        return self._tiers.get(holder)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until some job has come further than was reported."""
        for tier in self._tiers.values():
            tier.wait(timeout_s if len(self._tiers) == 1 else POLL_S)

    def wait_for_layer(self, holder: HolderId, numbers: tuple[int, ...], layer: int) -> None:
        """Wait until these jobs have fetched a layer. What has not come then has failed."""
        tier = self._tiers.get(holder)
        if tier is not None:
            tier.wait_for_layer(numbers, layer)

    def close(self, holder: HolderId) -> None:
        """End all moves of a holder's cache."""
        tier = self._tiers.pop(holder, None)
        if tier is not None:
            tier.close()

    def close_all(self) -> None:
        for holder in list(self._tiers):
            self.close(holder)


def _pages(holder: HolderId, num_slots: int, entries: Sequence[Entry]) -> Iterator[Inventory]:
    """Report a tier's blocks in messages of bounded size."""
    for end in range(MOST_MOVED, max(len(entries), 1) + MOST_MOVED, MOST_MOVED):
        page = entries[end - MOST_MOVED : end]
        num_tokens = np.array([entry.num_tokens for entry in page], np.int32)
        keys = words_of([entry.key for entry in page])
        yield Inventory(holder, num_slots, keys, num_tokens, is_last=end >= len(entries))
