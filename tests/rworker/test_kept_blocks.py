"""Blocks that outlive their sequences, against a memory that remembers what
each slot was written for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from state_machine import BLOCK_SIZE, HELLO, NUM_LAYERS, Worker, attend, step_of
from store_checks import counts, ids, refuses_unchanged
from values import replace

from fastdecode.core.errors import CapacityError
from fastdecode.wire.blocks import EndSequence, ForgetBlocks, KeepBlocks, ResumeSequence
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ForkSequence,
    OpenSequence,
    Refused,
)
from rworker.blocks.kv_store import KVStore


def key(number: int) -> bytes:
    return bytes([number]) * 16


def keys(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, numbers)), np.int64).reshape(-1, 2)


def test_a_store_without_room_for_the_rest_refuses_to_resume() -> None:
    store = KVStore(4, 4)
    store.open(0, 8)
    store.append(ids(0), counts(8))
    store.cached.keep([key(1), key(2)], store.tables.of_row(store.tables.row(0)).copy())
    store.close(0)
    assert store.pool.num_available == 2 and len(store.cached) == 2
    blocks = store.cached.of_keys([key(1), key(2)])
    refuses_unchanged(store, CapacityError, lambda: store.resume(1, blocks, 8, 17))
    refuses_unchanged(store, CapacityError, lambda: store.resume(1, blocks, 7, 16)), "the tail's"
    store.resume(1, blocks, 8, 16)
    assert store.pool.num_available == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KeepBlocks(1, 0, keys(1)), "sequence 1 is not open"),
        (KeepBlocks(0, 1, keys(1, 2)), "has 8 tokens in every layer"),
        (KeepBlocks(0, -1, keys(1)), "first_block"),
        (KeepBlocks(0, 0, keys(1, 1)), "another block's"),
        (KeepBlocks(0, 0, keys(9)), "another block's"),
        (KeepBlocks(0, 1, keys(1)), "kept by another key"),
        (KeepBlocks(0, 0, keys()), "none"),
        (KeepBlocks(0, 0, np.zeros((1, 3), np.int64)), "[1, 3] stands where"),
        (KeepBlocks(0, 0, np.zeros((1, 2), np.int32)), "int64"),
        (ResumeSequence(1, 9, 8, keys(9, 1)), "no block is kept"),
        (ResumeSequence(1, 9, 5, keys(9)), "would resume 5 tokens"),
        (ResumeSequence(1, 3, 4, keys(9)), "would resume 4 tokens"),
        (ResumeSequence(0, 9, 4, keys(9)), "is open already"),
        (ResumeSequence(1, 20, 8, keys(9), 0, 5), "which isn't whole blocks"),
        (ResumeSequence(1, 20, 8, keys(9), 4, 8), "which isn't whole blocks"),
        (ResumeSequence(1, 20, 8, keys(9), -4, 4), "gap_start"),
        (ResumeSequence(1, 20, 12, keys(9), 0, 4), "would resume 12 tokens"),
        (EndSequence(1, keys(1)), "sequence 1 is not open"),
        (EndSequence(0, keys(1)), "no last block that isn't full"),
        (EndSequence(0, keys(1, 2)), "one key"),
        (ForgetBlocks(keys(1)), "no block is kept"),
        (ForgetBlocks(keys(9, 9)), "twice"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(message: Any, reason: str) -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 8)))
    worker.tell(KeepBlocks(0, 1, keys(9)))
    worker.fails(message, reason)


def test_a_block_is_kept_only_when_it_is_there_in_every_layer() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE)))
    worker.fails(KeepBlocks(0, 0, keys(1)), "has 0 tokens in every layer")


def test_a_resumed_sequence_steps_from_where_its_blocks_end() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 2 * BLOCK_SIZE)))
    worker.tell(KeepBlocks(0, 0, keys(1, 2)))
    worker.tell(CloseSequence(0))
    resume = ResumeSequence(1, 20, 2 * BLOCK_SIZE - 1, keys(1, 2))
    assert worker.answer(resume) == Accepted(1) and resume.undo() == CloseSequence(1)
    copy, *_ = worker.tell(step_of((1, 2 * BLOCK_SIZE - 1, 1), step=1))
    assert (copy.source_ids, copy.target_ids) == ([1], [2]), "what is kept isn't written"
    far = replace(resume, sequence_id=2, num_reserved_tokens=1 << 20)
    refused = worker.answer(far)
    assert isinstance(refused, Refused) and refused.code == "exceeds_capacity"


def gapped() -> Worker:
    """Sequence 1 has blocks 0 and 2 of another, and misses tokens 4 to 7."""
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 3 * BLOCK_SIZE)))
    worker.tell(KeepBlocks(0, 0, keys(1, 2, 3)))
    worker.tell(CloseSequence(0))
    worker.tell(ForgetBlocks(keys(2)))
    assert worker.answer(ResumeSequence(1, 20, 11, keys(1, 3), 4, 8)) == Accepted(1)
    return worker


def test_a_gap_is_filled_first_and_with_its_end_the_sequence_goes_on_behind_it() -> None:
    worker = gapped()
    (first, *_) = worker.run_step(step_of((1, 4, 3), step=1))
    assert first.plan.slots.tolist() == [4, 5, 6]
    begin = step_of((1, 11, 2), (1, 7, 1), step=2)  # in any order
    copy, *_ = worker.tell(begin)
    assert (copy.source_ids, copy.target_ids) == ([2], [3]), "what is kept isn't written"
    for layer in range(NUM_LAYERS):
        (compute,) = worker.tell(attend(begin, layer))
    plan = compute.plan
    assert plan.slots.tolist() == [3 * 4 + 3, 4 * 4, 7]
    assert plan.context_lens.tolist() == [13, 8] and plan.query_positions.tolist() == [11, 7]
    worker.run_step(step_of((1, 13, 1), step=3))


def test_a_token_that_another_row_of_its_step_sees_is_written_before_attention() -> None:
    worker = gapped()
    worker.run_step(step_of((1, 4, 3), step=1))
    begin = step_of((1, 7, 1), (1, 11, 1), step=2)
    worker.tell(begin)
    computes = [worker.tell(attend(begin, layer))[0] for layer in range(NUM_LAYERS)]
    plan = computes[0].plan
    assert (plan.num_single, plan.num_last) == (2, 0)
    assert worker.run_step(step_of((1, 12, 1), step=3))[0].plan.num_last == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (step_of((1, 11, 1)), "behind its gap, of which 4 tokens are missing"),
        (step_of((1, 4, 3), (1, 11, 1)), "behind its gap, of which 1 tokens are missing"),
        (step_of((1, 4, 5)), "would append 5 tokens to its gap, of which 4"),
        (step_of((1, 4, 2), (1, 4, 2)), "to its gap"),
        (step_of((1, 4, 4), (1, 11, 1), (1, 11, 1)), "is in the step twice"),
        (step_of((1, 0, 1)), "num_past must equal the 4 tokens"),
        (step_of((1, 4, 4), (1, 11, 30)), "room was reserved for 20"),
        (step_of((1, 11, 0), queries=[1], num_beyond=counts(1)), "must equal the 4 tokens"),
        (ForkSequence(1, 2, 4, 20), "has a gap"),
        (KeepBlocks(1, 1, keys(9)), "has 4 tokens in every layer"),
        (EndSequence(1, keys(9)), "has a gap"),
    ],
    ids=str,
)
def test_nobody_gets_behind_a_gap_that_is_not_filled(message: Any, reason: str) -> None:
    worker = gapped()
    if "reserved for" in reason:
        worker.fails(message, reason, code="out_of_capacity")
    else:
        worker.fails(message, reason)


def test_a_sequence_is_closed_with_its_gap_and_all_is_free() -> None:
    worker = gapped()
    worker.tell(CloseSequence(1))
    worker.tell(ForgetBlocks(keys(1, 3)))
    (cache,) = worker.state._caches
    store = cache.books.store
    assert store.pool.num_available == store.num_blocks


def test_the_last_block_of_a_sequence_that_ends_is_kept_as_it_is() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    num_tokens = 2 * BLOCK_SIZE - 3
    worker.run_step(step_of((0, 0, num_tokens)))
    worker.tell(KeepBlocks(0, 0, keys(1)))
    worker.tell(EndSequence(0, keys(2)))
    assert worker.answer(ResumeSequence(1, 20, num_tokens, keys(1, 2))) == Accepted(1)
    copy, *_ = worker.tell(step_of((1, num_tokens, 1), step=1))
    assert (copy.source_ids, copy.target_ids) == ([1], [2]), "what is kept isn't written"


def test_a_sequence_ends_with_its_last_block_only_when_that_is_there_in_every_layer() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE - 1)))
    worker.fails(EndSequence(0, keys(1)), "is in an open step")
