"""Which KV block holds which token: a pool of blocks, a block table of every sequence, and
reservations. Bookkeeping only.

A sequence's cached tokens fill its blocks in order. One that was resumed with a **gap** has the
gap's blocks from the start, and tokens behind it before those in it. A block is freed when the last
sequence that refers to it is closed, unless it is cached (``rworker.blocks.cached_blocks``).

**Forks share blocks.** A block that several sequences refer to is never written. A sequence that
appends into its partly filled last block, its **tail**, first gets its own copy, unless it is the
only one left to refer to it.

**Reservations.** Opening a sequence promises it room for ``num_reserved_tokens``. Blocks are taken
from the pool as tokens arrive, and the pool never promises more than it has::

    num_promised = sum over sequences of (blocks for its reserved tokens - blocks it has)
                 + sum over blocks of min(num_tails, refcount - 1)         <= num_free

The second sum is the copies that forks may still cost: of the ``refcount`` sequences that refer to
a block, ``num_tails`` have it as their tail and will copy it when they append, except the last one
left. The cache counts as a sequence that refers to its blocks, none of which is its tail.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.sequence import NOTHING
from fastdecode.wire.messages import MAX_BLOCKS
from rworker.blocks.appending import Appended, append, append_beside_gaps, check_gap, open_gap
from rworker.blocks.block_pool import BlockPool, Blocks
from rworker.blocks.block_tables import BlockTables
from rworker.blocks.cached_blocks import CachedBlocks

DEFAULT_MAX_SEQUENCES = 1 << 16


class KVStore:
    """KV blocks of one cache. A method that raises changes nothing. ProtocolError says that a
    message does not fit the store, CapacityError that there is no room (``exceeds_capacity``: nor
    in an empty store).

    Args:
        num_blocks: block ids are 0 … num_blocks - 1.
        block_size: tokens a block holds.
        max_sequences: most sequences open at once.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, max_sequences: int = DEFAULT_MAX_SEQUENCES
    ) -> None:
        assert 1 <= num_blocks <= MAX_BLOCKS and block_size >= 1 and max_sequences >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.pool: Final = BlockPool(num_blocks)
        self.tables: Final = BlockTables(block_size)
        self.cached: Final = CachedBlocks(self.pool, block_size)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self.tables.row_of

    def num_tokens(self, sequence_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cached tokens of each sequence, [N], those before its gap if it has one."""
        rows = self.tables.rows(sequence_ids)
        lengths: NDArray[np.int64] = self.tables.lengths[rows]
        if self.tables.gaps:
            return np.array([self.tables.leading(row) for row in rows.tolist()], np.int64)
        return lengths

    def num_tokens_of(self, sequence_id: int) -> int:
        """As ``num_tokens``, of one sequence."""
        return self.tables.leading(self.tables.row(sequence_id))

    def block_tables(self, sequence_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Copy the sequences' block tables, [N, most blocks of any of them]. Entries past a table's
        end are meaningless block ids."""
        rows = self.tables.rows(sequence_ids)
        width = int(self.tables.widths[rows].max(initial=0))
        blocks: NDArray[np.int32] = self.tables.blocks[:, :width][rows]
        return blocks

    def slots(
        self,
        sequence_ids: NDArray[np.int64],
        first_tokens: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """Return where tokens of each sequence are, [T]. There are blocks for all of them."""
        rows = self.tables.rows(sequence_ids)
        return self.tables.slots(rows, first_tokens.astype(np.int64), num_tokens)

    def open(self, sequence_id: int, num_reserved_tokens: int) -> None:
        """Open an empty sequence that may grow to ``num_reserved_tokens`` (>= 1) tokens."""
        assert num_reserved_tokens >= 1
        self._check_new(sequence_id)
        num_blocks = self.tables.blocks_for(num_reserved_tokens)
        _check_room(self, num_reserved_tokens, num_blocks, num_blocks)
        self.tables.add(sequence_id, num_reserved_tokens, num_blocks)
        self.pool.num_promised += num_blocks

    def extend(self, sequence_id: int, num_reserved_tokens: int) -> None:
        """Enlarge an open sequence's reservation to ``num_reserved_tokens`` tokens."""
        row = self.tables.row(sequence_id)
        if num_reserved_tokens < self.tables.reserved[row]:
            raise ProtocolError(
                f"sequence {sequence_id} has {self.tables.reserved[row]} tokens reserved, more "
                f"than {num_reserved_tokens}"
            )
        num_blocks = self.tables.blocks_for(num_reserved_tokens)
        num_needed = num_blocks - self.tables.blocks_for(int(self.tables.reserved[row]))
        _check_room(self, num_reserved_tokens, num_blocks, num_needed)
        self.tables.widen(num_blocks)
        self.pool.num_promised += num_needed
        self.tables.reserved[row] = num_reserved_tokens

    def fork(
        self, parent_id: int, sequence_id: int, num_shared_tokens: int, num_reserved_tokens: int
    ) -> None:
        """Open a sequence whose first ``num_shared_tokens`` tokens are the parent's. It may grow to
        ``num_reserved_tokens`` tokens, those included."""
        self._check_new(sequence_id)
        tables = self.tables
        parent = tables.row(parent_id)
        num_cached = int(tables.lengths[parent])
        if not 1 <= num_shared_tokens <= num_cached:
            raise ProtocolError(
                f"sequence {sequence_id} would share {num_shared_tokens} tokens of sequence "
                f"{parent_id}, which has {num_cached} cached"
            )
        if parent in tables.gaps:
            raise ProtocolError(f"sequence {parent_id} has a gap, and can't be forked before")
        if num_reserved_tokens < num_shared_tokens:
            raise ProtocolError(
                f"sequence {sequence_id} reserves {num_reserved_tokens} tokens, fewer than the "
                f"{num_shared_tokens} that it shares with sequence {parent_id}"
            )
        num_shared = tables.blocks_for(num_shared_tokens)
        had_tail = num_shared == tables.widths[parent] and num_cached % self.block_size != 0
        shared = tables.blocks[parent, :num_shared].copy()
        self._begin_with(sequence_id, shared, num_shared_tokens, num_reserved_tokens, had_tail)

    def resume(
        self,
        sequence_id: int,
        blocks: Blocks,
        num_tokens: int,
        num_reserved_tokens: int,
        gap: range = NOTHING,
    ) -> None:
        """Open a sequence that starts with the first ``num_tokens`` tokens of cached blocks, as
        many blocks as those fill. It may grow to ``num_reserved_tokens``, those included.

        Args:
            gap: those of the tokens that no cached block has, whole blocks, with others behind
                them. They are appended first.
        """
        self._check_new(sequence_id)
        check_gap(sequence_id, gap, num_tokens, self.block_size)
        num_missing = len(gap) // self.block_size
        num_blocks = len(set(blocks.tolist()))
        fits = num_blocks == len(blocks) == self.tables.blocks_for(num_tokens) - num_missing
        if not fits or not 1 <= num_tokens <= num_reserved_tokens:
            raise ProtocolError(
                f"sequence {sequence_id} would resume {num_tokens} tokens, with "
                f"{num_reserved_tokens} reserved, in {num_blocks} different blocks of {len(blocks)}"
            )
        self._begin_with(sequence_id, blocks, num_tokens, num_reserved_tokens, had_tail=False)
        if gap:
            open_gap(self.tables, self.pool, sequence_id, gap)

    def _begin_with(
        self,
        sequence_id: int,
        shared: Blocks,
        num_tokens: int,
        num_reserved_tokens: int,
        had_tail: bool,
    ) -> None:
        tables = self.tables
        num_blocks = tables.blocks_for(num_reserved_tokens)
        has_tail = num_tokens % self.block_size != 0
        num_needed = num_blocks - len(shared) + has_tail
        _check_room(self, num_reserved_tokens, num_blocks, num_needed)
        row = tables.add(sequence_id, num_reserved_tokens, num_blocks)
        self.pool.num_promised += num_needed
        tables.blocks[row, : len(shared)] = shared
        tables.lengths[row] = num_tokens
        tables.widths[row] = len(shared)
        self.pool.share(shared, had_tail=had_tail, has_tail=has_tail)

    def close(self, sequence_id: int, tail_key: bytes | None = None) -> None:
        """Close a sequence, and free blocks that no other refers to.

        Args:
            tail_key: key under which its last block, which is not full, is cached.
        """
        row = self.tables.row(sequence_id)
        if tail_key is not None and row in self.tables.gaps:
            raise ProtocolError(f"sequence {sequence_id} has a gap, and can't leave its last block")
        blocks = self.tables.of_row(row)
        has_tail = self.tables.lengths[row] % self.block_size != 0
        if tail_key is not None:
            if not has_tail:
                raise ProtocolError(f"sequence {sequence_id} has no last block that isn't full")
            tail, blocks, has_tail = blocks[-1:].copy(), blocks[:-1], False
            num_tokens = int(self.tables.lengths[row]) % self.block_size
            self.cached.adopt(tail_key, tail, num_tokens)
            self.pool.set_tail(tail, is_tail=False)  # the cache's reference appends nothing
        self.pool.num_promised -= self.tables.growth(row)
        self.pool.leave(blocks, has_tail=has_tail)
        self.tables.remove(sequence_id)

    def truncate(self, sequence_id: int, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens, none of them behind a gap. The
        reservation stays, for which room may lack where others keep blocks that it leaves."""
        tables = self.tables
        row = tables.row(sequence_id)
        length, width = int(tables.lengths[row]), int(tables.widths[row])
        if not 0 <= num_tokens <= tables.leading(row):
            raise ProtocolError(
                f"sequence {sequence_id} has {tables.leading(row)} tokens cached, and can't keep "
                f"{num_tokens}"
            )
        kept = tables.blocks_for(num_tokens)
        left = tables.blocks[row, kept:width]
        had_tail = length % self.block_size != 0
        has_tail = num_tokens % self.block_size != 0
        stays = kept == width
        new_tail = tables.blocks[row, kept - 1 : kept] if has_tail else tables.blocks[row, :0]
        becomes_tail = new_tail[: 0 if stays and had_tail else 1]
        if self.pool.num_lacking(left, becomes_tail) > 0:
            raise CapacityError(
                f"sequence {sequence_id} can't be cut to {num_tokens} tokens: others share blocks "
                "that it would leave, and none are free for what it has reserved"
            )
        self.pool.num_promised += width - kept
        self.pool.leave(left, has_tail=had_tail and not stays)
        self.pool.set_tail(becomes_tail, is_tail=True)
        if stays and had_tail and not has_tail:
            self.pool.set_tail(tables.blocks[row, kept - 1 : kept], is_tail=False)
        tables.widths[row] = kept
        tables.lengths[row] = num_tokens
        tables.gaps.pop(row, None)

    def append(
        self,
        sequence_ids: NDArray[np.int64],
        num_new: NDArray[np.int32],
        num_past: NDArray[np.int32] | None = None,
    ) -> Appended:
        """Make room for ``num_new`` (>= 1) more tokens in each of N sequences, distinct except for
        those that fill a gap and continue behind it.

        Args:
            num_past: tokens that come before those, [N]. None for those before a sequence's gap, if
                it has one, else all.
        """
        if not self.tables.gaps:
            return append(self.tables, self.pool, sequence_ids, num_new)
        past = self.num_tokens(sequence_ids) if num_past is None else num_past
        return append_beside_gaps(self.tables, self.pool, sequence_ids, num_new, past)

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self.tables.row_of:
            raise ProtocolError(f"sequence {sequence_id} is open already")
        if len(self.tables.row_of) == self.max_sequences:
            raise CapacityError(
                f"{self.max_sequences} sequences are open, the most that this R-worker takes"
            )

    def check_invariants(self) -> None:
        """Recount everything from the block tables alone, in O(blocks + table entries)."""
        refcount = np.zeros(self.num_blocks, np.int64)
        num_tails = np.zeros(self.num_blocks, np.int64)
        growth = 0
        tables = self.tables
        refcount[self.cached.blocks] += 1
        for row in tables.row_of.values():
            blocks = tables.of_row(row)
            length = int(tables.lengths[row])
            assert len(blocks) == tables.blocks_for(length), (
                "a table's width doesn't fit its tokens"
            )
            assert length <= tables.reserved[row], "a sequence outgrew its reservation"
            assert len(np.unique(blocks)) == len(blocks), "a sequence has a block twice"
            refcount[blocks] += 1
            if length % self.block_size:
                num_tails[blocks[-1]] += 1
            growth += tables.growth(row)
        self.pool.check_invariants(refcount, num_tails, growth)
        self.tables.check_invariants()


def _check_room(store: KVStore, num_tokens: int, num_blocks: int, num_needed: int) -> None:
    asked = f"room for {num_tokens} tokens ({num_blocks} KV blocks) was asked"
    if num_blocks > store.num_blocks:
        raise CapacityError(
            f"{asked}, but all of the KV cache is {store.num_blocks} blocks of "
            f"{store.block_size} tokens: lower max_tokens, shorten the prompt, or give the "
            "R-worker more memory",
            code="exceeds_capacity",
        )
    if num_needed > store.pool.num_available:
        raise CapacityError(
            f"{asked}, {num_needed} of them new, but {store.pool.num_available} of "
            f"{store.num_blocks} are neither in use nor reserved: try again when running "
            "sequences have ended"
        )
