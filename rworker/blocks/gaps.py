"""Sequences that have a gap: it gets its blocks when they are resumed. New
tokens fill it from its start; and go behind it, where the same step fills it."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from rworker.blocks.appending import Appended, append
from rworker.blocks.block_pool import BlockPool
from rworker.blocks.block_tables import BlockTables, Rows

Counts: TypeAlias = "NDArray[np.int32] | NDArray[np.int64]"


def check_gap(sequence_id: int, gap: range, num_tokens: int, block_size: int) -> None:
    """
    Args:
        gap: of the ``num_tokens`` that a sequence is resumed with, those that no
            kept block has; empty: none.

    Raises:
        ProtocolError: it isn't whole blocks, with tokens behind them.
    """
    is_whole = gap.start % block_size == 0 == gap.stop % block_size
    if gap and not (is_whole and 0 <= gap.start < gap.stop < num_tokens):
        raise ProtocolError(
            f"sequence {sequence_id} would resume {num_tokens} tokens with a gap from "
            f"{gap.start} to {gap.stop}, which isn't whole blocks of {block_size} before others"
        )


def open_gap(tables: BlockTables, pool: BlockPool, sequence_id: int, gap: range) -> None:
    """Put blocks of its own between those that a sequence was resumed with, in
    place of ``gap``. They are among those that it was promised."""
    row = tables.row(sequence_id)
    first, stop = tables.blocks_for(gap.start), tables.blocks_for(gap.stop)
    width = int(tables.widths[row])
    behind = tables.blocks[row, first:width].copy()
    tables.blocks[row, first:stop] = pool.take(stop - first)
    tables.blocks[row, stop : stop + len(behind)] = behind
    tables.widths[row] = width + stop - first
    tables.gaps[row] = gap


def past_of(tables: BlockTables, rows: Rows, num_past: Counts) -> NDArray[np.int64]:
    """Tokens that come before the new ones of each sequence, [N], where some
    have gaps.

    Args:
        num_past: [N] what the peer says: where it is all tokens of a sequence
            with a gap, it is about those behind the gap.
    """
    past: NDArray[np.int64] = tables.lengths[rows]
    for index, row in enumerate(rows.tolist()):
        if row in tables.gaps and num_past[index] != past[index]:
            past[index] = tables.gaps[row].start
    return past


def append_beside_gaps(
    tables: BlockTables,
    pool: BlockPool,
    sequence_ids: NDArray[np.int64],
    num_new: NDArray[np.int32],
    num_past: Counts,
) -> Appended:
    """See ``KVStore.append``: ``num_new`` more tokens of each sequence, [N]."""
    rows = tables.rows(sequence_ids)
    past = past_of(tables, rows, num_past)
    fills = np.array([row in tables.gaps for row in rows.tolist()]) & (past != tables.lengths[rows])
    ends = _check_fills(tables, sequence_ids, rows, past, num_new, fills)
    slots = np.empty(int(num_new.sum()), np.int64)
    is_filling = np.repeat(fills, num_new)
    slots[is_filling] = tables.slots(rows[fills], past[fills], num_new[fills])
    appended = append(tables, pool, sequence_ids[~fills], num_new[~fills])
    slots[~is_filling] = appended.slots
    for row, end in ends.items():
        stop = tables.gaps.pop(row).stop
        if end < stop:
            tables.gaps[row] = range(end, stop)
    return Appended(slots, appended.copy_sources, appended.copy_targets)


def _check_fills(
    tables: BlockTables,
    sequence_ids: NDArray[np.int64],
    rows: Rows,
    past: NDArray[np.int64],
    num_new: NDArray[np.int32],
    fills: NDArray[np.bool_],
) -> dict[int, int]:
    """Row → up to where its gap is filled.

    Args:
        sequence_ids, rows, past, num_new: [N] of the step's rows.
        fills: [N] whether a row's tokens go into its sequence's gap.

    Raises:
        ProtocolError: more is to be filled than is missing, or something comes
            behind a gap that isn't filled.
    """
    ends: dict[int, int] = {}
    for index in np.flatnonzero(fills).tolist():
        row, end = int(rows[index]), int(past[index] + num_new[index])
        if row in ends or end > tables.gaps[row].stop:
            raise ProtocolError(
                f"sequence {sequence_ids[index]} would append {num_new[index]} tokens to its gap, "
                f"of which {len(tables.gaps[row])} are missing"
            )
        ends[row] = end
    for index in np.flatnonzero(~fills).tolist():
        gap = tables.gaps.get(int(rows[index]))
        if gap is not None and ends.get(int(rows[index])) != gap.stop:
            raise ProtocolError(
                f"sequence {sequence_ids[index]} would append behind its gap, of which "
                f"{gap.stop - ends.get(int(rows[index]), gap.start)} tokens are missing"
            )
    return ends
