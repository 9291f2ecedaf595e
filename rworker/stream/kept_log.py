"""Which of a cache's kept blocks its replica has, and what brings it the others.

A kept block comes with a sequence that has it, once its tokens have been sent.
What no open sequence brings is **lacking**: it is sent by itself, by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.blocks import Name, words_of
from rworker.blocks.cached_blocks import CachedBlocks


class KeptLog:
    """Of one cache and its replica.

    Args:
        cached: the cache's kept blocks, as they are now.
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
        """Keys of at most so many blocks that the replica hasn't, and that no sequence
        brings."""
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
        """A sequence's blocks from ``first_block`` on are kept by these keys."""
        for block, key in enumerate(keys, first_block):
            if key not in self._there and key not in self._origins:
                self._lacking.pop(key, None)
                self._origins[key] = sequence, block
                self._brought.setdefault(sequence, {})[block] = key

    def keep_tail(self, key: bytes) -> None:
        """The last block of a sequence that is closed is kept."""
        if key not in self._there:
            self._lacking[key] = None

    def sent(self, sequence: int, num_tokens: int) -> Iterator[Name]:
        """So many tokens of a sequence have been sent: what the replica keeps of it now."""
        brought = self._brought.get(sequence, {})
        full = sorted(block for block in brought if (block + 1) * self._block_size <= num_tokens)
        for _, run in groupby(enumerate(full), lambda each: each[1] - each[0]):
            blocks = [block for _, block in run]
            keys = [brought.pop(block) for block in blocks]
            self._arrive(keys)
            yield Name(sequence, blocks[0], words_of(keys))

    def leave(self, sequence: int, num_tokens: int = 0) -> None:
        """A sequence brings only blocks within its first ``num_tokens`` any more."""
        brought = self._brought.get(sequence, {})
        for block in [b for b in brought if (b + 1) * self._block_size > num_tokens]:
            key = brought.pop(block)
            del self._origins[key]
            self._lacking[key] = None
        if not brought:
            self._brought.pop(sequence, None)

    def carried(self, sequence: int, keys: Sequence[bytes]) -> Name:
        """These have been sent, as the blocks of a sequence of their own."""
        self._arrive(keys)
        return Name(sequence, 0, words_of(keys))

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """The cache keeps these no more. Returns the keys that the replica keeps, too."""
        gone: list[bytes] = []
        for key in keys:
            self._lacking.pop(key, None)
            if key in self._there:
                self._there.remove(key)
                gone.append(key)
            elif key in self._origins:
                sequence, block = self._origins.pop(key)
                del self._brought[sequence][block]
        return gone

    def has(self, keys: Iterable[bytes]) -> bool:
        """Whether the replica has all of these."""
        return self._there.issuperset(keys)

    def parent(self, keys: Sequence[bytes]) -> int | None:
        """The sequence that has, or brings, these as its first blocks; None: the
        replica needs others for some."""
        origin = self._origins.get(keys[-1])
        if origin is None or origin[1] != len(keys) - 1:
            return None
        sequence = origin[0]
        for block, key in enumerate(keys):
            if key not in self._there and self._origins.get(key) != (sequence, block):
                return None
        return sequence

    def to_carry(self, keys: Iterable[bytes]) -> list[bytes] | None:
        """Of these, what can be read and has to be sent by itself; None: one is on
        its way from the lower tier."""
        missing = [key for key in keys if key not in self._there and key not in self._origins]
        if any(self._cached.is_coming(key) for key in missing):
            return None
        return [key for key in missing if self._cached.is_there(key)]

    def places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Ids of these blocks in the cache, [B]."""
        return self._cached.of_keys(keys).astype(np.int64)

    def _arrive(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._origins.pop(key, None)
            self._lacking.pop(key, None)
            self._there.add(key)
