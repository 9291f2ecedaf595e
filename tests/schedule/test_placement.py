"""The ledger of reserved KV blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import HolderId, Part, PartId, Residence, new_residence
from fastdecode.schedule.reserving.ledger import BlockLedger

Choose: TypeAlias = "Callable[[list[int], list[int]], int | None]"


def part(holder: int, num_tokens: int) -> Part:
    return Part(PartId(0), HolderId(holder), 0, num_tokens)


def whole(holder: int, num_tokens: int) -> Residence:
    return Residence((part(holder, num_tokens),))


def in_parts(holders: tuple[int, ...], sizes: tuple[int, ...]) -> Residence:
    return new_residence(
        [HolderId(holder) for holder in holders], sizes, map(PartId, itertools.count())
    )


def place(
    ledger: BlockLedger, sizes: tuple[int, ...], choose: Choose, fixed: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """A holder for each part, as ``choose`` says, which takes those of the
    parts before, and the candidates."""
    placed: list[HolderId] = []
    while len(placed) < len(sizes):
        tiers = ledger.candidates(placed, sizes, sizes)
        if len(placed) < len(fixed):
            tiers = [[holder for tier in tiers for holder in tier if holder == fixed[len(placed)]]]
        chosen = next((h for tier in tiers if (h := choose(placed, tier)) is not None), None)
        if chosen is None:
            return None
        placed.append(HolderId(chosen))
    return tuple(placed)


BLOCKS = st.lists(st.integers(0, 7), min_size=1, max_size=4)


@given(
    BLOCKS,
    st.integers(1, 3),
    st.integers(1, 60),
    st.sets(st.integers(0, 3), max_size=2),
    st.integers(1, 4),
)
def test_parts_are_placed_if_and_only_if_some_way_fits(
    blocks: list[int], part_blocks: int, num_tokens: int, lost: set[int], most_closed: int
) -> None:
    ledger = BlockLedger(
        tuple(blocks), block_size=4, part_tokens=4 * part_blocks, max_closed_parts=most_closed
    )
    for worker in lost & set(range(len(blocks))):
        ledger.lose(worker)
    sizes = ledger.shape.sizes(num_tokens)
    assert sum(sizes) == num_tokens and all(size == sizes[0] for size in sizes[:-1])
    needed = [ledger.shape.blocks_for(size) for size in sizes]
    # Full parts are all alike: what counts is how many of them go where, and
    # where the last one goes.
    free = [0 if worker in lost else x for worker, x in enumerate(blocks)]
    is_possible = any(
        sum(
            min((x - (needed[-1] if w == last else 0)) // part_blocks, most_closed)
            for w, x in enumerate(free)
        )
        >= len(sizes) - 1
        for last, room in enumerate(free)
        if room >= needed[-1]
    )
    assert ledger.capacity.is_possible(num_tokens) == is_possible
    placed = place(ledger, sizes, lambda placed, fitting: fitting[-1] if fitting else None)
    assert (placed is not None) == is_possible
    if placed is not None:
        assert lost.isdisjoint(placed)
        assert all(placed[:-1].count(worker) <= most_closed for worker in placed)
        ledger.reserve(in_parts(placed, sizes))  # asserts that there is room


def test_what_never_fits_is_told_what_would() -> None:
    with pytest.raises(
        CapacityError, match=r"the largest R-worker has 6 blocks \(24 tokens\).*split_tokens"
    ):
        BlockLedger((6, 6), block_size=4).capacity.check_possible(25)
    in_parts = BlockLedger((6, 6), block_size=4, part_tokens=32)
    with pytest.raises(
        CapacityError, match=r"in parts of 32 tokens.* 6 blocks \(24 tokens\).*take smaller parts"
    ):
        in_parts.capacity.check_possible(25)
    BlockLedger((6, 6), block_size=4, part_tokens=8).capacity.check_possible(48)


def test_nothing_starts_within_the_reserve_and_what_runs_may_take_it() -> None:
    """A tenth of 20 blocks: with exactly two free, nobody starts."""
    ledger = BlockLedger((20,), block_size=4, reserve=0.1)
    ledger.reserve(whole(0, 68))
    assert ledger.holders_with_room(8, may_grow_to=8) == [0], "three are free"
    ledger.reserve(whole(0, 4))
    assert ledger.holders_with_room(4, may_grow_to=4) == []
    assert ledger.grow(part(0, 4), 12), "it runs"
    small = BlockLedger((1,), block_size=4, reserve=0.9)
    assert small.holders_with_room(4, may_grow_to=4) == [0], "nobody waits for an empty holder"
