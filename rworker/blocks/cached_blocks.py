"""Blocks that outlive their sequences, by key. Bookkeeping only.

The cache refers to each of its blocks as a sequence does that never appends: a
block that it has is neither free nor written, whoever else refers to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from rworker.blocks.block_pool import BlockPool, Blocks


class CachedBlocks:
    """The kept blocks of one cache. Every method that raises changes nothing.

    Args:
        pool: counts who refers to them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._kept: set[int] = set()
        self._moving: set[bytes] = set()
        self._void: set[bytes] = set()  # of those that aren't there yet, or never will be
        self._leaving: dict[bytes, int] = {}  # forgotten, once they have been moved
        self.tails: Final[dict[bytes, int]] = {}
        """Tokens of those blocks that are not full."""

    def __len__(self) -> int:
        return len(self._block_of) + len(self._leaving)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def __iter__(self) -> Iterator[bytes]:
        """Their keys."""
        return iter(self._block_of)

    def is_there(self, key: bytes) -> bool:
        """Whether a block is kept by this key, and has its K and V."""
        return key in self._block_of and key not in self._void

    def num_tokens(self, key: bytes, block_size: int) -> int:
        """Return the tokens of a block whose K and V are here, else 0."""
        return self.tails.get(key, block_size) if self.is_there(key) else 0

    def is_coming(self, key: bytes) -> bool:
        """Whether a block's K and V are on their way from the lower tier."""
        return key in self._void and key in self._moving

    @property
    def blocks(self) -> NDArray[np.int64]:
        """All of them."""
        return np.fromiter(self._kept, np.int64, len(self._kept))

    def key_of(self) -> dict[int, bytes]:
        """The key of each block whose K and V are there."""
        return {block: key for key, block in self._block_of.items() if key not in self._void}

    def of_keys(self, keys: Iterable[bytes]) -> Blocks:
        """The blocks of these keys, [N]. They may be on their way, or have been
        in vain: whoever asked for them may not have heard of that yet, and is
        told before the answer to what it asks now.

        Raises:
            ProtocolError: one isn't kept.
        """
        try:
            return np.array([self._block_of[key] for key in keys], np.int32)
        except KeyError as error:
            raise ProtocolError(f"no block is kept by the key {error.args[0].hex()}") from None

    def keep(self, keys: list[bytes], blocks: Blocks) -> None:
        """Keep full blocks of one sequence.

        Args:
            blocks: [N], one for each key, each once.

        Raises:
            ProtocolError: a key is used already, or given twice; or a block is
                kept already.
        """
        self._name(keys, blocks)
        self._pool.share(blocks, had_tail=False, has_tail=False)

    def adopt(self, key: bytes, block: Blocks, num_tokens: int) -> None:
        """Keep a block, [1], which is not full, in the place of a sequence that refers to it.

        Raises:
            ProtocolError: as ``keep``.
        """
        self._name([key], block)
        self.tails[key] = num_tokens

    def _name(self, keys: list[bytes], blocks: Blocks) -> None:
        ids: list[int] = blocks.tolist()
        if len(set(keys)) < len(keys) or not self._block_of.keys().isdisjoint(keys):
            raise ProtocolError("a key of the blocks to keep is another block's")
        if not self._kept.isdisjoint(ids):
            raise ProtocolError("one of the blocks to keep is kept by another key")
        self._block_of.update(zip(keys, ids, strict=True))
        self._kept.update(ids)

    def forget(self, keys: list[bytes]) -> None:
        """Keep these blocks no more.

        Raises:
            ProtocolError: one isn't kept, is named twice, or is on its way.
        """
        blocks = self.of_keys(keys)
        if len(set(keys)) < len(keys):
            raise ProtocolError("a block is to be forgotten twice")
        if not self._moving.isdisjoint(keys):
            raise ProtocolError("a block is to be forgotten that is on its way")
        self._void.difference_update(keys)
        self._pool.leave(blocks, has_tail=False)
        for key in keys:
            del self._block_of[key]
            self.tails.pop(key, None)
        self._kept.difference_update(blocks.tolist())

    def abandon(self, keys: Iterable[bytes]) -> None:
        """Keep these blocks, all of which are kept, no more; what is on its way takes
        up memory until it has been moved."""
        keys = list(keys)
        self._leaving.update((key, self._block_of.pop(key)) for key in keys if key in self._moving)
        self.forget([key for key in keys if key not in self._moving])

    def begin_store(self, keys: list[bytes]) -> Blocks:
        """These blocks, [N], are about to be copied down.

        Raises:
            ProtocolError: one isn't there, is named twice, or is on its way.
        """
        blocks = self.of_keys(keys)
        if not self._void.isdisjoint(keys):
            raise ProtocolError("the block to copy down is missing")
        self._begin_move(keys)
        return blocks

    def begin_fetch(self, keys: list[bytes]) -> Blocks:
        """Room for blocks that come by these keys: [N].

        Raises:
            ProtocolError: a key is used already, or named twice; or there is no
                room.
        """
        if not self._block_of.keys().isdisjoint(keys):
            raise ProtocolError("a block is to be fetched that is there")
        if len(keys) > self._pool.num_available:
            raise ProtocolError(
                f"{len(keys)} blocks are to be fetched, and {self._pool.num_available} are free"
            )
        self._begin_move(keys)
        self._void.update(keys)
        self._pool.num_promised += len(keys)
        blocks = self._pool.take(len(keys))
        self._name(keys, blocks)
        return blocks

    def end_move(self, keys: Iterable[bytes], failed: Iterable[bytes]) -> None:
        """These blocks aren't on their way any more; ``failed``: those that
        were to come, and didn't."""
        left = [key for key in keys if key in self._leaving]
        self._moving.difference_update(keys)
        self._void.difference_update(set(keys).difference(failed), left)
        if left:
            blocks = np.array([self._leaving.pop(key) for key in left], np.int32)
            self._pool.leave(blocks, has_tail=False)
            self._kept.difference_update(blocks.tolist())

    def _begin_move(self, keys: list[bytes]) -> None:
        if len(set(keys)) < len(keys) or not self._moving.isdisjoint(keys):
            raise ProtocolError("a block is to be moved twice at a time")
        self._moving.update(keys)

    def forget_all(self) -> None:
        """Keep none any more."""
        if self._block_of:
            self.forget(list(self._block_of))
