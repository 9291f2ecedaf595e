"""Room for the new tokens of a step: blocks that tables are lengthened by, and
copies of tails that others refer to, too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import CapacityError
from rworker.blocks.block_pool import BlockPool
from rworker.blocks.block_tables import BlockTables, Rows

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Appended:
    """Where the new tokens of a step go, and which blocks must be copied before
    anything is written."""

    slots: NDArray[np.int64]  # [T] in the order of the sequences, each sequence's tokens in order
    copy_sources: NDArray[np.int64]  # [C] block ids
    copy_targets: NDArray[np.int64]  # [C]


def append(
    tables: BlockTables,
    pool: BlockPool,
    sequence_ids: NDArray[np.int64],
    num_new: NDArray[np.int32],
) -> Appended:
    """See ``KVStore.append``."""
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
    """Give every sequence that is about to write into a shared tail a block of
    its own: (sources, targets)."""
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
