"""The blocks of one cache: free ones, references, and promises."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Blocks: TypeAlias = NDArray[np.int32]


class BlockPool:
    """Blocks 0 … num_blocks - 1. ``rworker.blocks.kv_store`` says what a tail is, and
    keeps its promises here."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_promised = 0
        """Free blocks that sequences may take at any time."""
        # Free blocks are those given back, on a stack, and those never taken yet, from _num_taken
        # on. So memory that was touched before is used again first, also that of the arrays here.
        self._returned = np.empty(num_blocks, np.int32)
        self._num_returned = 0
        self._num_taken = 0
        self._refcount = np.zeros(num_blocks, np.int32)
        self.has_shared = False
        """Several sequences refer to some block, or have."""
        # Sequences whose tail the block is. Only of shared blocks: an append need not touch it.
        self._num_tails = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing, promised or not."""
        return self._num_returned + self.num_blocks - self._num_taken

    @property
    def num_available(self) -> int:
        """Free blocks that are not promised."""
        return self.num_free - self.num_promised

    @property
    def free(self) -> NDArray[np.int64]:
        """The free blocks, those given back first."""
        fresh = np.arange(self._num_taken, self.num_blocks)
        return np.concatenate((self._returned[: self._num_returned], fresh))

    def are_shared(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return True for each block that several sequences refer to."""
        shared: NDArray[np.bool_] = self._refcount[blocks] > 1
        return shared

    def take(self, count: int) -> Blocks:
        """Take promised blocks, each referred to once."""
        assert count <= self.num_promised <= self.num_free
        self.num_promised -= count
        num_again = min(count, self._num_returned)
        rest = self._num_returned - num_again
        blocks = np.empty(count, np.int32)
        blocks[:num_again] = self._returned[rest : self._num_returned][::-1]
        blocks[num_again:] = np.arange(self._num_taken, self._num_taken + count - num_again)
        self._num_returned = rest
        self._num_taken += count - num_again
        self._refcount[blocks] = 1
        return blocks

    def share(self, blocks: Blocks, *, had_tail: bool, has_tail: bool) -> None:
        """Let one more sequence refer to a prefix of another's blocks.

        Args:
            had_tail: the last of them is the other's tail.
            has_tail: it is a tail of the one more.
        """
        # From here on these blocks are shared, and their tails are counted.
        self.has_shared = True
        self._num_tails[blocks[self._refcount[blocks] == 1]] = 0
        last = int(blocks[-1])
        if self._refcount[last] == 1:
            self._num_tails[last] = had_tail
        self._num_tails[last] += has_tail
        self._refcount[blocks] += 1

    def leave_tail(self, block: int) -> None:
        """End the reference of a sequence that has copied its shared tail."""
        self._refcount[block] -= 1
        self._num_tails[block] -= 1

    def leave(self, blocks: Blocks, *, has_tail: bool) -> None:
        """End a sequence's references. ``has_tail``: the last block is its tail."""
        refcounts = self._refcount[blocks]
        shared = blocks[refcounts > 1]
        if shared.size:
            owed = self._num_owed_copies(shared)
            if has_tail and refcounts[-1] > 1:
                self._num_tails[blocks[-1]] -= 1
            self._refcount[shared] -= 1
            self.num_promised -= owed - self._num_owed_copies(shared)
        freed = blocks[refcounts == 1]
        self._refcount[freed] = 0
        # Reversed: the next sequence takes them in the order in which this one had them.
        self._returned[self._num_returned : self._num_returned + freed.size] = freed[::-1]
        self._num_returned += int(freed.size)

    def set_tail(self, blocks: Blocks, *, is_tail: bool) -> None:
        """Make each block a sequence's tail, or no longer. Only shared blocks are counted."""
        shared = blocks[self._refcount[blocks] > 1]
        owed = self._num_owed_copies(shared)
        self._num_tails[shared] += 1 if is_tail else -1
        self.num_promised += self._num_owed_copies(shared) - owed

    def num_lacking(self, left: Blocks, becomes_tail: Blocks) -> int:
        """Return how many blocks are lacking at most if a sequence leaves some, is promised as
        many, and has another as its tail. 0 or less if there are enough."""
        num_kept = int((self._refcount[left] > 1).sum())
        shared = becomes_tail[self._refcount[becomes_tail] > 1]
        num_owed = int((self._num_tails[shared] < self._refcount[shared] - 1).sum())
        return num_kept + num_owed - self.num_available

    def _num_owed_copies(self, shared: Blocks) -> int:
        """Count the copies that sequences with these blocks as tails may still need."""
        return int(np.minimum(self._num_tails[shared], self._refcount[shared] - 1).sum())

    def check_invariants(
        self, refcount: NDArray[np.int64], num_tails: NDArray[np.int64], growth: int
    ) -> None:
        """Compare with counts from the block tables.

        Args:
            refcount, num_tails: of each block.
            growth: blocks that sequences may still take for their own tokens.
        """
        assert (refcount == self._refcount).all(), "reference counts are off"
        shared = refcount > 1
        assert (num_tails == self._num_tails)[shared].all(), "tails of shared blocks are miscounted"
        free = self.free
        assert len(np.unique(free)) == len(free) == self.num_free, "a block is free twice"
        assert (refcount[free] == 0).all(), "a block in use is free"
        assert len(free) + np.count_nonzero(refcount) == self.num_blocks, "a block is lost"
        owed = int(np.minimum(num_tails, refcount - 1)[shared].sum())
        assert self.num_promised == growth + owed, "promises are miscounted"
        assert self.num_promised <= len(free), "more blocks are promised than free"
