"""A holder's kept blocks that are on their way between its tiers."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.schedule.cache.idle.blocks import IdleBlocks
from fastdecode.schedule.cache.kept import KeptBlock, KeptBlocks
from fastdecode.schedule.cache.tiers.lower import LowerTier


class MovingBlocks:
    """Of one holder. A block that moves is neither idle nor given up: it has a
    job. Who starts with one that is being fetched waits for that job.

    Args:
        blocks: that are kept.
        idle: those of them that nobody uses, and that don't move.
        lower: what the lower tier has.
    """

    def __init__(self, blocks: KeptBlocks, idle: IdleBlocks, lower: LowerTier) -> None:
        self._blocks = blocks
        self._idle = idle
        self._lower = lower

    def jobs_of(self, keys: Iterable[bytes]) -> set[int]:
        """That these blocks, all of which are kept, have yet to wait for."""
        blocks = [self._blocks[key] for key in keys]
        return {block.job for block in blocks if block.is_coming and block.job is not None}

    def begin_store(self, blocks: Iterable[KeptBlock], job: int) -> None:
        """Idle blocks are being copied down."""
        for block in blocks:
            block.resting, block.job = block.idle_since, job
            self._idle.remove(block)

    def begin_fetch(
        self, keys: Iterable[bytes], before: Iterable[bytes | None], job: int
    ) -> list[bytes]:
        """Of blocks that can be used, what isn't there is being fetched: its
        keys.

        Args:
            before: the key of the block before each in its chain.
        """
        missing: list[bytes] = []
        for key, parent in zip(keys, before, strict=True):
            if key not in self._blocks:
                block = self._blocks.add(key, parent, self._lower.num_tokens(key))
                block.was_hit = block.is_coming = block.is_copied = True
                block.job = job
                missing.append(key)
        return missing

    def end(self, job: int, keys: Iterable[bytes], failed: set[bytes], now_s: float) -> None:
        """A job is over. Of what was fetched and has failed nobody may start
        with any more; it is given up when nobody uses it (``take_void``)."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.job != job:
                continue
            is_bad = key in failed
            if block.is_coming:
                block.is_condemned |= is_bad
            elif not is_bad and not block.is_condemned:
                block.is_copied = True
                self._lower.add(block, block.resting)
            block.is_coming, block.job = False, None
            if not block.num_users and not block.is_condemned:
                self._idle.add(block, block.resting or self._blocks.new_use(now_s))
            block.resting = None

    def take_void(self, keys: Iterable[bytes]) -> list[bytes]:
        """Of these, which have moved, what nobody uses or may use."""
        blocks = [self._blocks[key] for key in keys if key in self._blocks]
        void = [b for b in blocks if b.is_condemned and not b.num_users and b.job is None]
        for block in void:
            self._idle.end_leases(block)
            self._blocks.forget(block)
        return [block.key for block in void]

    def dropped(self, keys: Iterable[bytes]) -> None:
        """The lower tier has given these up."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._idle.lose_copy(block)
