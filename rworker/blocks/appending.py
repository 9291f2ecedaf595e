"""Room for the new tokens of a step: blocks that tables are lengthened by, and copies of tails that
others refer to, too.

A sequence with a **gap** gets the gap's blocks when it is resumed. New tokens fill it from its
start, and go behind it where the same step fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import CapacityError, ProtocolError
from rworker.blocks.block_pool import BlockPool
from rworker.blocks.block_tables import BlockTables, Rows

Counts: TypeAlias = "NDArray[np.int32] | NDArray[np.int64]"
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Appended:
    """Where new tokens go, and which blocks must be copied before anything is written."""

    slots: NDArray[np.int64]  # [T] in the order of the sequences, each sequence's tokens in order
    copy_sources: NDArray[np.int64]  # [C] block ids
    copy_targets: NDArray[np.int64]  # [C]


def append(
    tables: BlockTables,
    pool: BlockPool,
    sequence_ids: NDArray[np.int64],
    num_new: NDArray[np.int32],
) -> Appended:
    rows = tables.rows(sequence_ids)
    past = tables.lengths[rows]
    total = past + num_new
    over = np.flatnonzero(total > tables.reserved[rows])
    if over.size:
        i = int(over[0])
        raise CapacityError(
            f"sequence {sequence_ids[i]} would grow to {total[i]} tokens, but room was "
            f"reserved for {tables.reserved[rows[i]]}: reserve room for all of its "
            "tokens when it is opened"
        )
    sources = targets = _NONE
    if pool.has_shared:
        sources, targets = _copy_shared_tails(tables, pool, rows, past)
    _take_blocks(tables, pool, rows, total)
    tables.lengths[rows] = total
    return Appended(tables.slots(rows, past, num_new), sources, targets)


def _copy_shared_tails(
    tables: BlockTables, pool: BlockPool, rows: Rows, past: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every sequence that will write into a shared tail a copy: (sources, targets)."""
    last = np.maximum(tables.widths[rows] - 1, 0)
    tails = tables.blocks[rows, last]
    suspects = np.flatnonzero((past % tables.block_size != 0) & pool.are_shared(tails))
    sources: list[int] = []
    targets: list[int] = []
    for i in suspects.tolist():
        if not pool.are_shared(tails[i]):
            continue  # all others have left it within this loop: the last one writes in place
        pool.leave_tail(tails[i])
        target = int(pool.take(1)[0])
        tables.blocks[rows[i], last[i]] = target
        sources.append(int(tails[i]))
        targets.append(target)
    return np.array(sources, np.int64), np.array(targets, np.int64)


def _take_blocks(
    tables: BlockTables, pool: BlockPool, rows: Rows, total: NDArray[np.int64]
) -> None:
    """Lengthen the block tables so that they hold ``total`` tokens."""
    num_fresh = tables.blocks_for(total) - tables.widths[rows]
    growing = np.flatnonzero(num_fresh)
    if growing.size:
        fresh = pool.take(int(num_fresh.sum()))
        tables.lengthen(rows[growing], num_fresh[growing], fresh)


def check_gap(sequence_id: int, gap: range, num_tokens: int, block_size: int) -> None:
    """Raise ProtocolError unless a gap is whole blocks, with some of ``num_tokens`` behind them."""
    is_whole = gap.start % block_size == 0 == gap.stop % block_size
    if gap and not (is_whole and 0 <= gap.start < gap.stop < num_tokens):
        raise ProtocolError(
            f"sequence {sequence_id} would resume {num_tokens} tokens with a gap from "
            f"{gap.start} to {gap.stop}, which isn't whole blocks of {block_size} before others"
        )


def open_gap(tables: BlockTables, pool: BlockPool, sequence_id: int, gap: range) -> None:
    """Put promised blocks in place of a gap, between those that a sequence was resumed with."""
    row = tables.row(sequence_id)
    first, stop = tables.blocks_for(gap.start), tables.blocks_for(gap.stop)
    width = int(tables.widths[row])
    behind = tables.blocks[row, first:width].copy()
    tables.blocks[row, first:stop] = pool.take(stop - first)
    tables.blocks[row, stop : stop + len(behind)] = behind
    tables.widths[row] = width + stop - first
    tables.gaps[row] = gap


def past_of(tables: BlockTables, rows: Rows, num_past: Counts) -> NDArray[np.int64]:
    """Return the tokens that precede the new ones of each sequence, [N], where some have gaps.

    Args:
        num_past: what the peer says, [N]: all tokens of a sequence, where the new ones go behind.
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
    """Return up to where each row's gap is filled.

    Args:
        fills: True where a row's tokens go into its sequence's gap, [N].

    Raises:
        ProtocolError: If more is to be filled than is missing, or tokens come behind a gap that is
            not filled.
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
