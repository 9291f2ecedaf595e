"""How attention over cached tokens is divided: every key of every query exactly once, in
pieces of like length, in a list of a size that is known before."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sworker.kv_splits import (
    IS_WHOLE,
    MIN_UNITS,
    PIECE_FIELDS,
    UNIT,
    QueryTiles,
    SplitPlan,
    SplitShape,
    chunk_tiles,
    plan_decode,
    plan_splits,
)

LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 5000), st.just(100_000))
WINDOWS = st.one_of(st.none(), st.integers(1, 400), st.just(4096))
SHARES = st.sampled_from([1, 7, 17, 66, 528])


def seen_units(tiles: QueryTiles, window: int | None) -> list[range]:
    """The blocks of 64 keys that each query tile sees any key of."""
    first = tiles.positions * 0 if window is None else np.maximum(tiles.positions - window + 1, 0)
    last = tiles.positions + tiles.num_tokens - 1
    return [range(a // UNIT, b // UNIT + 1) for a, b in zip(first, last, strict=True)]


def check(plan: SplitPlan, tiles: QueryTiles, window: int | None) -> None:
    shape = plan.shape
    assert plan.num_pieces <= shape.num_pieces and plan.num_merges <= shape.num_merges
    left = {
        int(row): units for row, units in zip(tiles.rows, seen_units(tiles, window), strict=True)
    }
    pieces_of: dict[int, list[np.ndarray]] = {row: [] for row in left}
    for piece in plan.pieces:
        pieces_of[int(piece[0])].append(piece)
    merges = {int(merge[0]): merge for merge in plan.merges}
    assert len(merges) == plan.num_merges
    parts: list[int] = []
    for index, (row, units) in enumerate(left.items()):
        own = sorted(pieces_of[row], key=lambda piece: int(piece[4]))
        num_tokens, end = (
            int(tiles.num_tokens[index]),
            int((tiles.positions + tiles.num_tokens)[index]),
        )
        covered = [range(int(p[4]) // UNIT, -(-int(p[5]) // UNIT)) for p in own]
        assert [unit for piece in covered for unit in piece] == list(units)
        assert all(p[4] % UNIT == 0 and (p[5] % UNIT == 0 or p[5] == end) for p in own)
        assert own[-1][5] == end
        expected = (tiles.rows, tiles.num_tokens, tiles.positions, tiles.tables)
        assert all([int(x) for x in p[:4]] == [int(x[index]) for x in expected] for p in own)
        if len(own) == 1:
            assert own[0][6] == IS_WHOLE and row not in merges
            continue
        _, tokens, first, count = merges.pop(row).tolist()
        assert (tokens, count) == (num_tokens, len(own))
        assert [int(p[6]) for p in own] == [first + i * num_tokens for i in range(count)]
        parts += range(first, first + count * num_tokens)
    assert not merges and len(parts) == len(set(parts)) and max(parts, default=0) < shape.num_parts
    # What isn't used is empty.
    assert not plan.array.reshape(-1)[plan.num_pieces * PIECE_FIELDS :][: (
        shape.num_pieces - plan.num_pieces) * PIECE_FIELDS].any()  # fmt: skip


def balance(plan: SplitPlan, num_shares: int) -> None:
    """Handed out in order to whoever is free first, all is done within twice an equal share, or
    within that and a piece that isn't worth to be cut."""
    lengths = -(-(plan.pieces[:, 5] - plan.pieces[:, 4]) // UNIT)
    assert (np.diff(lengths) <= 0).all()
    share = max(MIN_UNITS, -(-int(lengths.sum()) // num_shares))
    assert lengths.max() <= share
    free = [0] * num_shares
    for length in lengths.tolist():
        heapq.heappush(free, heapq.heappop(free) + length)
    assert max(free) <= lengths.sum() / num_shares + share


@given(st.lists(LENGTHS, min_size=1, max_size=40), WINDOWS, SHARES, st.integers(0, 9))
def test_decoded_tokens(lengths: list[int], window: int | None, shares: int, padded: int) -> None:
    lens = np.array(lengths, np.int32)
    num_rows = len(lens) + padded
    plan = plan_decode(lens, window, shares, num_rows)
    positions = np.concatenate((lens, np.ones(padded, np.int32))) - 1
    rows = np.arange(num_rows)
    tiles = QueryTiles(rows, np.ones(num_rows, np.int32), positions, rows)
    check(plan, tiles, window)
    balance(plan, shares)


@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 5000)), min_size=1, max_size=6),
    WINDOWS,
    SHARES,
    st.sampled_from([1, 4, 32, 128]),
    st.integers(0, 50),
)
def test_chunks(
    chunks: list[tuple[int, int]], window: int | None, shares: int, tokens: int, before: int
) -> None:
    num_new, pasts = np.array(chunks).T
    num_keys = num_new + pasts
    ends = before + np.cumsum(num_new)
    tiles = chunk_tiles(ends - num_new, num_new, num_keys, tokens)
    # Every row once, in order; its position, and its chunk's place among the keys.
    of_tiles = [
        (row + j, position + j, table)
        for row, num, position, table in zip(
            tiles.rows, tiles.num_tokens, tiles.positions, tiles.tables, strict=True
        )
        for j in range(num)
    ]
    starts = np.cumsum(num_keys) - num_keys
    expected = [
        (end - new + j, past + j, start)
        for end, new, past, start in zip(ends, num_new, pasts, starts, strict=True)
        for j in range(new)
    ]
    assert of_tiles == expected and tiles.num_tokens.max() <= tokens
    shape = SplitShape(len(tiles.rows), shares, tokens)
    plan = plan_splits(tiles, window, shape)
    check(plan, tiles, window)
    balance(plan, shares)


def test_few_tokens_are_not_worth_a_merge() -> None:
    assert plan_decode(np.array([MIN_UNITS * UNIT]), None, num_shares=528).num_pieces == 1
    assert plan_decode(np.array([MIN_UNITS * UNIT + 1]), None, num_shares=528).num_pieces == 2
