"""Cached blocks that a replica has, and what brings it the others.

A cached block comes with a sequence that has it, once its tokens have been sent.
A block that no open sequence brings is **lacking**: it is sent by itself, by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.blocks import NO_PARENT, Name, words_of
from rworker.blocks.cached_blocks import CachedBlocks


class KeptLog:
    """The cached blocks of one cache and its replica.

    Args:
        cached: the cache's blocks, as they are now.
        block_size: tokens in a block.
    """

    def __init__(self, cached: CachedBlocks, block_size: int) -> None:
        self._cached = cached
        self._block_size = block_size
        self._there: set[bytes] = set()
        self._lacking = dict.fromkeys(key for key in cached if cached.is_there(key))
        self._origins: dict[bytes, tuple[int, int]] = {}  # sequence and block that brings it
        self._brought: dict[int, dict[int, bytes]] = {}  # sequence → block → key

    def lacking(self, most: int) -> list[bytes]:
        """Return the keys of up to ``most`` lacking blocks."""
        found: list[bytes] = []
        unreadable: list[bytes] = []
        for key in self._lacking:
            if len(found) == most:
                break
            (found if self._cached.is_there(key) else unreadable).append(key)
        for key in unreadable:
            del self._lacking[key]
        return found

    def keep(self, sequence: int, first_block: int, keys: Iterable[bytes]) -> None:
        """Note that a sequence's blocks from ``first_block`` on are cached under these keys."""
        for block, key in enumerate(keys, first_block):
            if key not in self._there and key not in self._origins:
                self._lacking.pop(key, None)
                self._origins[key] = sequence, block
                self._brought.setdefault(sequence, {})[block] = key

    def keep_tail(self, key: bytes) -> None:
        """Note that the last block of a closed sequence is cached."""
        if key not in self._there:
            self._lacking[key] = None

    def sent(self, sequence: int, num_tokens: int) -> Iterator[Name]:
        """Name the blocks that a sequence's first ``num_tokens`` tokens have brought."""
        brought = self._brought.get(sequence, {})
        full = sorted(block for block in brought if (block + 1) * self._block_size <= num_tokens)
        for _, run in groupby(enumerate(full), lambda each: each[1] - each[0]):
            blocks = [block for _, block in run]
            yield self.carried(sequence, [brought[block] for block in blocks], blocks[0])

    def leave(self, sequence: int, num_tokens: int = 0) -> None:
        """Note that a sequence brings only blocks within its first ``num_tokens``."""
        brought = self._brought.get(sequence, {})
        for block in [b for b in brought if (b + 1) * self._block_size > num_tokens]:
            key = brought[block]
            self._leave_origin(key)
            self._lacking[key] = None
        if not brought:
            self._brought.pop(sequence, None)

    def carried(self, sequence: int, keys: Sequence[bytes], first_block: int = 0) -> Name:
        """Name blocks of a sequence that have been sent."""
        for key in keys:
            self._leave_origin(key)
            self._lacking.pop(key, None)
            self._there.add(key)
        return Name(sequence, first_block, words_of(keys))

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Note that blocks are evicted. Return the keys of those that the replica has, too."""
        gone: list[bytes] = []
        for key in keys:
            self._lacking.pop(key, None)
            self._leave_origin(key)
            if key in self._there:
                self._there.remove(key)
                gone.append(key)
        return gone

    def has(self, keys: Iterable[bytes]) -> bool:
        """Return True if the replica has all of these blocks."""
        return self._there.issuperset(keys)

    def needed(
        self, keys: Iterable[bytes], brings: Callable[[int], bool]
    ) -> tuple[dict[int, int], list[bytes]] | None:
        """Return what the replica lacks of these blocks, which a sequence starts with.

        Args:
            brings: true for a sequence whose tokens can be sent.

        Returns:
            How many tokens of sequences bring some, and the keys of those to be sent by
            themselves. None if one is on its way from the lower tier.
        """
        ends: dict[int, int] = {}
        alone: list[bytes] = []
        for key in keys:
            sequence, block = self._origins.get(key, (NO_PARENT, 0))
            if key in self._there:
                continue
            if brings(sequence):
                ends[sequence] = max(ends.get(sequence, 0), (block + 1) * self._block_size)
            elif self._cached.is_coming(key):
                return None
            elif self._cached.is_there(key):
                alone.append(key)
        return ends, alone

    def places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the ids of these blocks in the cache, [B]."""
        return self._cached.of_keys(keys).astype(np.int64)

    def _leave_origin(self, key: bytes) -> None:
        """Note that no sequence brings a block any more."""
        sequence, block = self._origins.pop(key, (NO_PARENT, 0))
        self._brought.get(sequence, {}).pop(block, None)
