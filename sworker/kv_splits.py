"""How attention over cached tokens is divided among a GPU's programs: by length.

A **query tile** is one decoded token, or a few tokens of a prompt chunk that follow each other. It
sees a range of its sequence's tokens, and that range is cut into **pieces** of like length. A
program takes one piece and one KV head; pieces of one query tile are merged by their log-sum-exp.
No piece is longer than an equal share of all work (or than ``MIN_UNITS``, below which a merge
costs more than it gives), so that one long sequence among short ones is spread over the whole GPU.
The longest pieces come first: a GPU hands programs out in order, as its multiprocessors fall free.

The list lies in one array of a size that doesn't depend on lengths, so that a CUDA graph can read
it from fixed memory. After FlashInfer's plan (arXiv 2501.01005) and stream-K (arXiv 2301.03598).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.buffers import to_device

UNIT = 64
"""Tokens. Pieces begin and end at multiples of it, or at the end of what is seen."""
MIN_UNITS = 4
PIECE_FIELDS = 8
"""First row of q, number of tokens (0: there is no such piece), position of the first, its
sequence's place in the tables, first and past-the-last key, first row of partial results
(or ``IS_WHOLE``), and nothing."""
MERGE_FIELDS = 4
"""First row of q, number of tokens (0: there is no such merge), first row of partial
results, number of pieces. Piece i's token j is in row first + i · tokens + j."""
IS_WHOLE = -1  # a query tile in one piece writes its result, and is not merged

Ints: TypeAlias = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class QueryTiles:
    """What attends: arrays [N], one entry a query tile."""

    rows: Ints  # first row of q
    num_tokens: Ints
    positions: Ints
    """Of the first token. Token j sees the tokens up to positions + j."""
    tables: Ints  # its sequence's place in the block tables


@dataclass(frozen=True)
class SplitShape:
    """How large a list of pieces may get: what fixed memory is taken for.

    Args:
        num_shares: into how many equal shares all work is divided, of one KV head.
        tile_tokens: tokens of a query tile at most.
    """

    num_tiles: int
    num_shares: int
    tile_tokens: int = 1

    @property
    def num_pieces(self) -> int:
        """At most: N pieces, and one more for each share of the work."""
        return self.num_tiles + self.num_shares

    @property
    def num_merges(self) -> int:
        """At most: a query tile that is cut is longer than a share."""
        return min(self.num_tiles, self.num_shares)

    @property
    def num_parts(self) -> int:
        """Rows of partial results at most: of u units fewer than 2 · u / share pieces are cut."""
        return 2 * self.num_shares * self.tile_tokens

    @property
    def size(self) -> int:
        """Of the list, in int32."""
        return self.num_pieces * PIECE_FIELDS + self.num_merges * MERGE_FIELDS


@dataclass(frozen=True)
class SplitPlan:
    """A list of pieces and merges, int32 [shape.size], and how many of them there are."""

    shape: SplitShape
    array: NDArray[np.int32]
    num_pieces: int
    num_merges: int

    @property
    def pieces(self) -> NDArray[np.int32]:
        """[num_pieces, PIECE_FIELDS], the longest first."""
        return self.array[: self.num_pieces * PIECE_FIELDS].reshape(-1, PIECE_FIELDS)

    @property
    def merges(self) -> NDArray[np.int32]:
        """[num_merges, MERGE_FIELDS]."""
        first = self.shape.num_pieces * PIECE_FIELDS
        return self.array[first:][: self.num_merges * MERGE_FIELDS].reshape(-1, MERGE_FIELDS)


def plan_decode(
    context_lens: Ints, window: int | None, num_shares: int, num_rows: int | None = None
) -> SplitPlan:
    """A plan for decoded tokens, each a query tile and the last of its sequence.

    Args:
        context_lens: [N], >= 1; the tokens that each row sees, its own included.
        window: of a sliding window; None: a row sees all of them.
        num_shares: see ``SplitShape``.
        num_rows: rows of the step, N or more: rows past N fill a bucket up, and see one token.
    """
    lens = np.ones(num_rows or len(context_lens), np.int64)
    lens[: len(context_lens)] = context_lens
    rows = np.arange(len(lens))
    tiles = QueryTiles(rows, np.ones_like(lens), lens - 1, rows)
    return plan_splits(tiles, window, SplitShape(len(lens), num_shares))


def chunk_tiles(rows: Ints, num_new: Ints, num_keys: Ints, tile_tokens: int) -> QueryTiles:
    """Query tiles of prompt chunks, whose keys stand one chunk after the other.

    Args:
        rows: [C] first row of q of each chunk.
        num_new: [C] its tokens, which are the last of its keys.
        num_keys: [C] all tokens that its last token sees.
        tile_tokens: tokens of a query tile at most.
    """
    counts = -(-num_new // tile_tokens)  # [C] tiles
    chunk = np.repeat(np.arange(len(counts)), counts)  # [N]
    first = (np.arange(len(chunk)) - (np.cumsum(counts) - counts)[chunk]) * tile_tokens
    return QueryTiles(
        rows=rows[chunk] + first,
        num_tokens=np.minimum(num_new[chunk] - first, tile_tokens),
        positions=(num_keys - num_new)[chunk] + first,
        tables=(np.cumsum(num_keys) - num_keys)[chunk],
    )


def plan_splits(tiles: QueryTiles, window: int | None, shape: SplitShape) -> SplitPlan:
    """Cut what query tiles see into pieces; every key that a tile sees is in exactly one."""
    ends = tiles.positions + tiles.num_tokens  # [N] past the last key
    first = np.zeros_like(ends)  # [N] in units
    if window is not None:
        first = np.maximum(tiles.positions - (window - 1), 0) // UNIT
    units = -(-ends // UNIT) - first  # [N]
    share = max(MIN_UNITS, -(-int(units.sum()) // shape.num_shares))
    counts = -(-units // share)  # [N] pieces
    tile = np.repeat(np.arange(len(counts)), counts)  # [P]
    number = np.arange(len(tile)) - (np.cumsum(counts) - counts)[tile]  # of the tile's pieces
    is_cut = counts > 1
    parts = np.where(is_cut, counts * tiles.num_tokens, 0)
    parts = np.cumsum(parts) - parts  # [N] first row of partial results

    begin, end = ((units[tile] * (number + i) // counts[tile] + first[tile]) * UNIT for i in (0, 1))
    place = np.where(is_cut[tile], parts[tile] + number * tiles.num_tokens[tile], IS_WHOLE)
    fields = (
        tiles.rows[tile], tiles.num_tokens[tile], tiles.positions[tile], tiles.tables[tile],
        begin, np.minimum(end, ends[tile]), place,
    )  # fmt: skip
    array = np.zeros(shape.size, np.int32)
    cut = np.flatnonzero(is_cut)
    plan = SplitPlan(shape, array, len(tile), len(cut))
    order = np.argsort(begin - end, kind="stable")
    for column, field in enumerate(fields):
        plan.pieces[:, column] = field[order]
    for column, field in enumerate((tiles.rows, tiles.num_tokens, parts, counts)):
        plan.merges[:, column] = field[cut]
    return plan


@dataclass(frozen=True)
class Splits:
    """A plan on the device.

    Args:
        array: int32 [shape.size]; see ``SplitPlan``.
        num_pieces, num_merges: how many are looked at. All that the shape has room for, where
            a CUDA graph reads the array: entries that aren't used are empty.
    """

    shape: SplitShape
    array: Tensor
    num_pieces: int
    num_merges: int

    @classmethod
    def of_any_plan(cls, shape: SplitShape, array: Tensor) -> Splits:
        """Of whatever plan of the shape the array will hold."""
        return cls(shape, array, shape.num_pieces, shape.num_merges)

    @classmethod
    def upload(cls, plan: SplitPlan, device: torch.device) -> Splits:
        array = to_device(torch.from_numpy(plan.array), device)
        return cls(plan.shape, array, plan.num_pieces, plan.num_merges)

    @property
    def pieces(self) -> Tensor:
        """Flat."""
        return self.array[: self.num_pieces * PIECE_FIELDS]

    @property
    def merges(self) -> Tensor:
        """Flat."""
        return self.array[self.shape.num_pieces * PIECE_FIELDS :]
