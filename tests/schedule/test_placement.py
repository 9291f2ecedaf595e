"""The ledger of reserved KV blocks."""

from __future__ import annotations

from fastdecode.schedule.placement import BlockLedger


def test_candidates_have_room_now_and_could_hold_the_whole_sequence() -> None:
    ledger = BlockLedger((10, 4, 12), block_size=4)
    assert ledger.workers_with_room(8, may_grow_to=16) == [2, 0, 1]
    assert ledger.workers_with_room(8, may_grow_to=17) == [2, 0], "worker 1 would be outgrown"
    ledger.reserve(2, 30)
    assert ledger.workers_with_room(8, may_grow_to=16) == [0, 1, 2]
    assert ledger.workers_with_room(17, may_grow_to=17) == [0]
    ledger.lose(0)
    assert ledger.workers_with_room(8, may_grow_to=16) == [1, 2]


def test_a_reservation_grows_by_whole_blocks_while_there_are_any() -> None:
    ledger = BlockLedger((3,), block_size=4)
    ledger.reserve(0, 5)
    assert ledger.grow(0, 5, 8) and ledger.free_blocks(0) == 1
    assert not ledger.grow(0, 8, 13) and ledger.free_blocks(0) == 1
    assert ledger.grow(0, 8, 12) and ledger.free_blocks(0) == 0
    ledger.release(0, 12)
    assert ledger.free_blocks(0) == 3
    assert ledger.capacity_tokens(0) == 12


def test_a_replacement_is_as_large_as_it_says() -> None:
    ledger = BlockLedger((4, 2), block_size=16)
    ledger.lose(0)
    assert not ledger.is_possible(33)
    ledger.regain(0, 3)
    assert ledger.is_possible(48) and not ledger.is_possible(49)
    assert ledger.workers_with_room(1, 1) == [0, 1]
    ledger.reserve(0, 48)
    assert ledger.workers_with_room(1, 1) == [1]
