"""Which KV block holds which token: block pool, block tables, reference counts,
reservations. Bookkeeping only.

A sequence's cached tokens fill its blocks in order; its block table lists them.
A block is freed when the last sequence that refers to it is closed.

**Forks share blocks.** A block that several sequences refer to is never
written: a sequence that appends into its partly filled last block (its
**tail**) first gets a copy of its own, unless it is the only one left to refer
to it.

**Reservations.** Opening a sequence promises it room for
``num_reserved_tokens``. Blocks are taken from the pool as tokens arrive, and
the pool never promises more than it has::

    num_promised = sum over sequences of (blocks for its reserved tokens - blocks it has)
                 + sum over blocks of min(num_tails, refcount - 1)         <= num_free_blocks

The second sum is the copies that forks may still cost: of the ``refcount``
sequences that refer to a block, ``num_tails`` have it as their tail and will
copy it when they append, save for the last one left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.wire.messages import MAX_BLOCKS

DEFAULT_MAX_SEQUENCES = 1 << 16

_FIRST_ROWS = 64
_FIRST_WIDTH = 16


@dataclass(frozen=True, eq=False)
class Appended:
    """Where the new tokens of a step go, and which blocks must be copied before
    anything is written."""

    slots: NDArray[np.int64]  # [T] in the order of the sequences, each sequence's tokens in order
    copy_sources: NDArray[np.int64]  # [C] block ids
    copy_targets: NDArray[np.int64]  # [C]


class KVStore:
    """KV blocks of one R-worker. Every method that raises leaves the store as
    it was.

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
        # Free blocks are those given back, on a stack, and those never taken
        # yet, from _num_taken on. So memory that was touched before is used
        # again first, both the cache's and that of the arrays here.
        self._returned = np.empty(num_blocks, np.int32)
        self._num_returned = 0
        self._num_taken = 0
        self._num_promised = 0
        self._refcount = np.zeros(num_blocks, np.int32)
        # Sequences whose tail the block is. Kept for shared blocks only: an
        # append need not touch it.
        self._num_tails = np.zeros(num_blocks, np.int32)
        # One row a sequence.
        self._row_of: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._tables = np.zeros((0, _FIRST_WIDTH), np.int32)
        self._lengths = np.zeros(0, np.int64)  # cached tokens
        self._reserved = np.zeros(0, np.int64)  # tokens
        self._widths = np.zeros(0, np.int64)  # blocks in the table

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._row_of

    @property
    def num_sequences(self) -> int:
        return len(self._row_of)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing, promised or not."""
        return self._num_returned + self.num_blocks - self._num_taken

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that are promised to nobody."""
        return self.num_free_blocks - self._num_promised

    @property
    def bookkeeping_bytes(self) -> int:
        """Memory of the store's own arrays."""
        arrays = (self._returned, self._refcount, self._num_tails, self._tables)
        return sum(x.nbytes for x in (*arrays, self._lengths, self._reserved, self._widths))

    def num_tokens(self, sequence_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cached tokens of each sequence, [N].

        Raises:
            ProtocolError: one of them is not open.
        """
        lengths: NDArray[np.int64] = self._lengths[self._rows(sequence_ids)]
        return lengths

    def block_tables(self, sequence_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """A copy of the sequences' block tables, [N, most blocks of any of
        them]; entries past a table's end are block ids, but mean nothing."""
        rows = self._rows(sequence_ids)
        width = int(self._widths[rows].max(initial=0))
        tables: NDArray[np.int32] = self._tables[:, :width][rows]
        return tables

    def open(self, sequence_id: int, num_reserved_tokens: int) -> None:
        """A new, empty sequence that may grow to ``num_reserved_tokens`` (>= 1)
        tokens.

        Raises:
            ProtocolError: the id is in use.
            CapacityError: no room for the reservation (code
                ``exceeds_capacity``: nor in an empty store).
        """
        assert num_reserved_tokens >= 1
        self._check_new(sequence_id)
        num_blocks = self._blocks_for(num_reserved_tokens)
        self._check_room(num_reserved_tokens, num_blocks, num_blocks)
        self._add_row(sequence_id, num_reserved_tokens, num_blocks)
        self._num_promised += num_blocks

    def extend(self, sequence_id: int, num_reserved_tokens: int) -> None:
        """Enlarge an open sequence's reservation to ``num_reserved_tokens``
        tokens.

        Raises:
            ProtocolError: it is not open, or has more than that reserved.
            CapacityError: no room for the rest (code ``exceeds_capacity``: nor
                in an empty store).
        """
        row = self._row(sequence_id)
        if num_reserved_tokens < self._reserved[row]:
            raise ProtocolError(
                f"sequence {sequence_id} has {self._reserved[row]} tokens reserved, more than "
                f"{num_reserved_tokens}"
            )
        num_blocks = self._blocks_for(num_reserved_tokens)
        num_needed = num_blocks - self._blocks_for(int(self._reserved[row]))
        self._check_room(num_reserved_tokens, num_blocks, num_needed)
        self._widen(num_blocks)
        self._num_promised += num_needed
        self._reserved[row] = num_reserved_tokens

    def fork(
        self, parent_id: int, sequence_id: int, num_shared_tokens: int, num_reserved_tokens: int
    ) -> None:
        """A new sequence whose first ``num_shared_tokens`` tokens are the
        parent's; it may grow to ``num_reserved_tokens`` tokens, those included.

        Raises:
            ProtocolError: the parent isn't open or has fewer tokens, the id is
                in use, or ``num_reserved_tokens < num_shared_tokens``.
            CapacityError: no room for the reservation (code
                ``exceeds_capacity``: nor in an empty store).
        """
        self._check_new(sequence_id)
        parent = self._row(parent_id)
        num_cached = int(self._lengths[parent])
        if not 1 <= num_shared_tokens <= num_cached:
            raise ProtocolError(
                f"sequence {sequence_id} would share {num_shared_tokens} tokens of sequence "
                f"{parent_id}, which has {num_cached} cached"
            )
        if num_reserved_tokens < num_shared_tokens:
            raise ProtocolError(
                f"sequence {sequence_id} reserves {num_reserved_tokens} tokens, fewer than the "
                f"{num_shared_tokens} that it shares with sequence {parent_id}"
            )
        num_blocks = self._blocks_for(num_reserved_tokens)
        num_shared = self._blocks_for(num_shared_tokens)
        has_tail = num_shared_tokens % self.block_size != 0
        num_needed = num_blocks - num_shared + has_tail
        self._check_room(num_reserved_tokens, num_blocks, num_needed)
        row = self._add_row(sequence_id, num_reserved_tokens, num_blocks)
        self._num_promised += num_needed
        shared = self._tables[parent, :num_shared]
        self._tables[row, :num_shared] = shared
        self._lengths[row] = num_shared_tokens
        self._widths[row] = num_shared
        # From here on these blocks are shared, and their tails are counted.
        self._num_tails[shared[self._refcount[shared] == 1]] = 0
        last = int(shared[-1])
        if (
            self._refcount[last] == 1
            and num_shared == self._widths[parent]
            and num_cached % self.block_size
        ):
            self._num_tails[last] = 1
        self._num_tails[last] += has_tail
        self._refcount[shared] += 1

    def close(self, sequence_id: int) -> None:
        """Forget the sequence; blocks that no other sequence refers to are free
        again.

        Raises:
            ProtocolError: it is not open.
        """
        row = self._row(sequence_id)
        width = int(self._widths[row])
        blocks = self._tables[row, :width]
        self._num_promised -= self._blocks_for(int(self._reserved[row])) - width
        refcounts = self._refcount[blocks]
        shared = blocks[refcounts > 1]
        if shared.size:
            owed = self._num_owed_copies(shared)
            if self._lengths[row] % self.block_size and self._refcount[blocks[-1]] > 1:
                self._num_tails[blocks[-1]] -= 1
            self._refcount[shared] -= 1
            self._num_promised -= owed - self._num_owed_copies(shared)
        freed = blocks[refcounts == 1]
        self._refcount[freed] = 0
        # Reversed: the next sequence takes them in the order in which this one had them.
        self._returned[self._num_returned : self._num_returned + freed.size] = freed[::-1]
        self._num_returned += int(freed.size)
        del self._row_of[sequence_id]
        self._free_rows.append(row)

    def append(self, sequence_ids: NDArray[np.int64], num_new: NDArray[np.int32]) -> Appended:
        """Make room for ``num_new`` (>= 1) more tokens in each of N distinct
        sequences.

        Raises:
            ProtocolError: one of them is not open.
            CapacityError: one of them would grow past its reservation.
        """
        rows = self._rows(sequence_ids)
        past = self._lengths[rows]
        total = past + num_new
        over = np.flatnonzero(total > self._reserved[rows])
        if over.size:
            i = int(over[0])
            raise CapacityError(
                f"sequence {sequence_ids[i]} would grow to {total[i]} tokens, but room was "
                f"reserved for {self._reserved[rows[i]]}: reserve room for all of its tokens when "
                "it is opened"
            )
        sources, targets = self._copy_shared_tails(rows, past)
        self._take_blocks(rows, total)
        self._lengths[rows] = total
        return Appended(self._slots(rows, past, num_new), sources, targets)

    def _copy_shared_tails(
        self, rows: NDArray[np.int64], past: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give every sequence that is about to write into a shared tail a block
        of its own: (sources, targets)."""
        last = np.maximum(self._widths[rows] - 1, 0)
        tails = self._tables[rows, last]
        suspects = np.flatnonzero((past % self.block_size != 0) & (self._refcount[tails] > 1))
        sources: list[int] = []
        targets: list[int] = []
        for i in suspects.tolist():
            source = int(tails[i])
            if self._refcount[source] == 1:
                continue  # all others have left it within this loop: the last one writes in place
            target = int(self._pop(1)[0])
            self._refcount[source] -= 1
            self._num_tails[source] -= 1
            self._tables[rows[i], last[i]] = target
            sources.append(source)
            targets.append(target)
        return np.array(sources, np.int64), np.array(targets, np.int64)

    def _take_blocks(self, rows: NDArray[np.int64], total: NDArray[np.int64]) -> None:
        """Lengthen the block tables so that they hold ``total`` tokens."""
        have = self._widths[rows]
        num_fresh = -(-total // self.block_size) - have
        growing = np.flatnonzero(num_fresh)
        if not growing.size:
            return
        rows, have, num_fresh = rows[growing], have[growing], num_fresh[growing]
        ends = np.cumsum(num_fresh)
        columns = np.arange(ends[-1]) + np.repeat(have + num_fresh - ends, num_fresh)
        self._tables[np.repeat(rows, num_fresh), columns] = self._pop(int(ends[-1]))
        self._widths[rows] += num_fresh

    def _slots(
        self, rows: NDArray[np.int64], past: NDArray[np.int64], num_new: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Slot of each new token, [T]."""
        ends = np.cumsum(num_new, dtype=np.int64)
        positions = np.arange(ends[-1] if ends.size else 0) + np.repeat(
            past + num_new - ends, num_new
        )
        blocks = self._tables[np.repeat(rows, num_new), positions // self.block_size]
        slots: NDArray[np.int64] = (
            blocks.astype(np.int64) * self.block_size + positions % self.block_size
        )
        return slots

    def _pop(self, count: int) -> NDArray[np.int32]:
        """Take promised blocks from the pool, each referred to once."""
        assert count <= self._num_promised <= self.num_free_blocks
        self._num_promised -= count
        num_again = min(count, self._num_returned)
        self._num_returned -= num_again
        blocks = np.empty(count, np.int32)
        blocks[:num_again] = self._returned[self._num_returned : self._num_returned + num_again][
            ::-1
        ]
        blocks[num_again:] = np.arange(self._num_taken, self._num_taken + count - num_again)
        self._num_taken += count - num_again
        self._refcount[blocks] = 1
        return blocks

    def _num_owed_copies(self, shared: NDArray[np.int32]) -> int:
        """Copies that sequences which have one of these blocks as their tail may still need."""
        return int(np.minimum(self._num_tails[shared], self._refcount[shared] - 1).sum())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _row(self, sequence_id: int) -> int:
        try:
            return self._row_of[sequence_id]
        except KeyError:
            raise ProtocolError(f"sequence {sequence_id} is not open") from None

    def _rows(self, sequence_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        try:
            rows: NDArray[np.int64] = np.fromiter(
                map(self._row_of.__getitem__, sequence_ids.tolist()), np.int64, len(sequence_ids)
            )
        except KeyError as error:
            raise ProtocolError(f"sequence {error.args[0]} is not open") from None
        return rows

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self._row_of:
            raise ProtocolError(f"sequence {sequence_id} is open already")
        if len(self._row_of) == self.max_sequences:
            raise CapacityError(
                f"{self.max_sequences} sequences are open, the most that this R-worker takes"
            )

    def _check_room(self, num_tokens: int, num_blocks: int, num_needed: int) -> None:
        asked = f"room for {num_tokens} tokens ({num_blocks} KV blocks) was asked"
        if num_blocks > self.num_blocks:
            raise CapacityError(
                f"{asked}, but all of the KV cache is {self.num_blocks} blocks of "
                f"{self.block_size} tokens: "
                "lower max_tokens, shorten the prompt, or give the R-worker more memory",
                code="exceeds_capacity",
            )
        if num_needed > self.num_available_blocks:
            raise CapacityError(
                f"{asked}, {num_needed} of them new, but {self.num_available_blocks} of "
                f"{self.num_blocks} are neither in use nor reserved: try again when running "
                "sequences have ended"
            )

    def _add_row(self, sequence_id: int, num_reserved_tokens: int, num_blocks: int) -> int:
        self._widen(num_blocks)
        if not self._free_rows:
            num_rows, width = self._tables.shape
            more_rows = max(_FIRST_ROWS, num_rows)
            self._grow(num_rows + more_rows, width)
            self._free_rows.extend(range(num_rows + more_rows - 1, num_rows - 1, -1))
        row = self._free_rows.pop()
        self._row_of[sequence_id] = row
        self._lengths[row] = self._widths[row] = 0
        self._reserved[row] = num_reserved_tokens
        return row

    def _widen(self, num_blocks: int) -> None:
        """See to it that a table has room for so many blocks."""
        num_rows, width = self._tables.shape
        while width < num_blocks:
            width *= 2
        if width > self._tables.shape[1]:
            self._grow(num_rows, width)

    def _grow(self, num_rows: int, width: int) -> None:
        more_rows, more_width = num_rows - self._tables.shape[0], width - self._tables.shape[1]
        self._tables = np.pad(self._tables, ((0, more_rows), (0, more_width)))
        self._lengths = np.pad(self._lengths, (0, more_rows))
        self._reserved = np.pad(self._reserved, (0, more_rows))
        self._widths = np.pad(self._widths, (0, more_rows))

    def check_invariants(self) -> None:
        """Recount everything from the block tables alone; for tests and
        debugging. O(blocks + table entries)."""
        refcount = np.zeros(self.num_blocks, np.int64)
        num_tails = np.zeros(self.num_blocks, np.int64)
        growth = 0
        for row in self._row_of.values():
            width, length = int(self._widths[row]), int(self._lengths[row])
            blocks = self._tables[row, :width]
            assert width == self._blocks_for(length), "a table's width doesn't fit its tokens"
            assert length <= self._reserved[row], "a sequence outgrew its reservation"
            assert len(np.unique(blocks)) == width, "a sequence has a block twice"
            refcount[blocks] += 1
            if length % self.block_size:
                num_tails[blocks[-1]] += 1
            growth += self._blocks_for(int(self._reserved[row])) - width
        assert (refcount == self._refcount).all(), "reference counts are off"
        shared = refcount > 1
        assert (num_tails == self._num_tails)[shared].all(), "tails of shared blocks are miscounted"
        free = np.concatenate(
            (self._returned[: self._num_returned], np.arange(self._num_taken, self.num_blocks))
        )
        assert len(np.unique(free)) == len(free) == self.num_free_blocks, "a block is free twice"
        assert (refcount[free] == 0).all(), "a block in use is free"
        assert len(free) + np.count_nonzero(refcount) == self.num_blocks, "a block is lost"
        owed = int(np.minimum(num_tails, refcount - 1)[shared].sum())
        assert self._num_promised == growth + owed, "promises are miscounted"
        assert self._num_promised <= len(free), "more blocks are promised than free"
        rows = [*self._row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(len(self._tables))), "a row is lost or used twice"
