"""The block table of every open sequence, a row of one array each."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError

Rows: TypeAlias = NDArray[np.int64]
IntsT = TypeVar("IntsT", int, NDArray[np.int64])

_FIRST_ROWS = 64
_FIRST_WIDTH = 16


class BlockTables:
    """Open sequences by id. Each has a row of the arrays."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.row_of: dict[int, int] = {}
        self._free_rows: list[int] = []
        self.blocks = np.zeros((0, _FIRST_WIDTH), np.int32)
        self.widths = np.zeros(0, np.int64)
        """Blocks in the table."""
        self.lengths = np.zeros(0, np.int64)
        """Cached tokens."""
        self.reserved = np.zeros(0, np.int64)
        """Tokens that the sequence may grow to."""
        self.gaps: dict[int, range] = {}
        """Missing tokens with others behind them, by row."""

    def row(self, sequence_id: int) -> int:
        """Return a sequence's row. Raises: ProtocolError: If it is not open."""
        try:
            return self.row_of[sequence_id]
        except KeyError:
            raise ProtocolError(f"sequence {sequence_id} is not open") from None

    def rows(self, sequence_ids: NDArray[np.int64]) -> Rows:
        """Return sequences' rows. Raises: ProtocolError: If one is not open."""
        try:
            found = map(self.row_of.__getitem__, sequence_ids.tolist())
            rows: Rows = np.fromiter(found, np.int64, len(sequence_ids))
        except KeyError as error:
            raise ProtocolError(f"sequence {error.args[0]} is not open") from None
        return rows

    def leading(self, row: int) -> int:
        """Count the tokens that a sequence has before its gap, or all."""
        gap = self.gaps.get(row)
        return int(self.lengths[row]) if gap is None else gap.start

    def of_row(self, row: int) -> NDArray[np.int32]:
        table: NDArray[np.int32] = self.blocks[row, : self.widths[row]]
        return table

    def blocks_for(self, num_tokens: IntsT) -> IntsT:
        return -(-num_tokens // self.block_size)

    def growth(self, row: int) -> int:
        """Count the blocks that a sequence may still take for its own tokens."""
        num_blocks: int = self.blocks_for(int(self.reserved[row]))
        return num_blocks - int(self.widths[row])

    def slots(
        self, rows: Rows, past: NDArray[np.int64], num_new: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Return the slot of each new token, [T], behind ``past`` tokens of each sequence."""
        ends = np.cumsum(num_new, dtype=np.int64)
        num_tokens = ends[-1] if ends.size else 0
        positions = np.arange(num_tokens) + np.repeat(past + num_new - ends, num_new)
        blocks = self.blocks[np.repeat(rows, num_new), positions // self.block_size]
        slots: NDArray[np.int64] = (
            blocks.astype(np.int64) * self.block_size + positions % self.block_size
        )
        return slots

    def add(self, sequence_id: int, num_reserved_tokens: int, num_blocks: int) -> int:
        """Add an empty table with room for ``num_blocks``. Return its row."""
        if not self._free_rows:
            self._add_rows()
        self.widen(num_blocks)
        row = self._free_rows.pop()
        self.row_of[sequence_id] = row
        self.lengths[row] = 0
        self.widths[row] = 0
        self.reserved[row] = num_reserved_tokens
        return row

    def remove(self, sequence_id: int) -> None:
        row = self.row_of.pop(sequence_id)
        self.gaps.pop(row, None)
        self._free_rows.append(row)

    def lengthen(self, rows: Rows, num_fresh: NDArray[np.int64], fresh: NDArray[np.int32]) -> None:
        """Add ``num_fresh`` (>= 1) blocks to each table, from ``fresh`` in order."""
        ends = np.cumsum(num_fresh)
        starts = self.widths[rows] + num_fresh - ends
        columns = np.arange(len(fresh)) + np.repeat(starts, num_fresh)
        self.blocks[np.repeat(rows, num_fresh), columns] = fresh
        self.widths[rows] += num_fresh

    def widen(self, num_blocks: int) -> None:
        before = width = self.blocks.shape[1]
        while width < num_blocks:
            width *= 2
        if width > before:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, width - before)))

    def _add_rows(self) -> None:
        num_rows = len(self.blocks)
        more = max(_FIRST_ROWS, num_rows)
        self.blocks = np.pad(self.blocks, ((0, more), (0, 0)))
        self.widths = np.pad(self.widths, (0, more))
        self.lengths = np.pad(self.lengths, (0, more))
        self.reserved = np.pad(self.reserved, (0, more))
        self._free_rows.extend(range(num_rows + more - 1, num_rows - 1, -1))

    def check_invariants(self) -> None:
        rows = [*self.row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(len(self.blocks))), "a row is lost or used twice"
        assert self.gaps.keys() <= set(self.row_of.values()), "a gap of nobody's"
        for row, gap in self.gaps.items():
            assert 0 <= gap.start < gap.stop < self.lengths[row], "a gap with nothing behind it"
            assert gap.stop % self.block_size == 0, "a gap ends within a block"
