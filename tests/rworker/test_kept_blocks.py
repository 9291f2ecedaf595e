"""The KV store: blocks that outlive their sequences; rows and tables that grow; and what its
books take. ``test_mirror.py`` plays all that happens to one at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from state_machine import BLOCK_SIZE, NUM_LAYERS, Worker, attend, step_of
from store_checks import counts, ids, refuses_unchanged
from values import replace

from cpu_kernels import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import Forget, Name
from fastdecode.wire.messages import Accepted, Close, Open, Refused
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
        (Name(1, 0, keys(1)), "sequence 1 is not open"),
        (Name(0, 1, keys(1, 2)), "has 8 tokens in every layer"),
        (Name(0, -1, keys(1)), "first_block"),
        (Name(0, 0, keys(1, 1)), "another block's"),
        (Name(0, 0, keys(9)), "another block's"),
        (Name(0, 1, keys(1)), "kept by another key"),
        (Name(0, 0, keys()), "none"),
        (Name(0, 0, np.zeros((1, 3), np.int64)), "[1, 3] stands where"),
        (Name(0, 0, np.zeros((1, 2), np.int32)), "int64"),
        (Open(1, 9, 8, keys(9, 1)), "no block is kept"),
        (Open(1, 9, 5, keys(9)), "would resume 5 tokens"),
        (Open(1, 3, 4, keys(9)), "would resume 4 tokens"),
        (Open(0, 9, 4, keys(9)), "is open already"),
        (Open(1, 20, 8, keys(9), 0, 5), "which isn't whole blocks"),
        (Open(1, 20, 8, keys(9), 4, 8), "which isn't whole blocks"),
        (Open(1, 20, 8, keys(9), -4, 4), "gap_start"),
        (Open(1, 20, 12, keys(9), 0, 4), "would resume 12 tokens"),
        (Close(1, tail=keys(1).tobytes().hex()), "sequence 1 is not open"),
        (Close(0, tail=keys(1).tobytes().hex()), "no last block that isn't full"),
        (Forget(keys(1)), "no block is kept"),
        (Forget(keys(9, 9)), "twice"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(message: Any, reason: str, worker: Worker) -> None:
    worker.answer(Open(0, 20))
    worker.run_step(step_of((0, 0, 8)))
    worker.tell(Name(0, 1, keys(9)))
    worker.fails(message, reason)


def test_a_block_is_kept_only_when_it_is_there_in_every_layer(worker: Worker) -> None:
    worker.answer(Open(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE)))
    worker.fails(Name(0, 0, keys(1)), "has 0 tokens in every layer")


def test_a_resumed_sequence_steps_from_where_its_blocks_end(worker: Worker) -> None:
    worker.answer(Open(0, 20))
    worker.run_step(step_of((0, 0, 2 * BLOCK_SIZE)))
    worker.tell(Name(0, 0, keys(1, 2)))
    worker.tell(Close(0))
    resume = Open(1, 20, 2 * BLOCK_SIZE - 1, keys(1, 2))
    assert worker.answer(resume) == Accepted(1) and resume.undo() == Close(1)
    copy, *_ = worker.tell(step_of((1, 2 * BLOCK_SIZE - 1, 1), step=1))
    assert (copy.source_ids, copy.target_ids) == ([1], [2]), "what is kept isn't written"
    far = replace(resume, sequence_id=2, num_reserved_tokens=1 << 20)
    refused = worker.answer(far)
    assert isinstance(refused, Refused) and refused.code == "exceeds_capacity"


@pytest.fixture
def gapped(worker: Worker) -> Worker:
    """Sequence 1 has blocks 0 and 2 of another, and misses tokens 4 to 7."""
    worker.answer(Open(0, 20))
    worker.run_step(step_of((0, 0, 3 * BLOCK_SIZE)))
    worker.tell(Name(0, 0, keys(1, 2, 3)))
    worker.tell(Close(0))
    worker.tell(Forget(keys(2)))
    assert worker.answer(Open(1, 20, 11, keys(1, 3), 4, 8)) == Accepted(1)
    return worker


def test_a_gap_is_filled_before_its_sequence_continues_behind_it(gapped: Worker) -> None:
    (first, *_) = gapped.run_step(step_of((1, 4, 3), step=1))
    assert first.plan.slots.tolist() == [4, 5, 6]
    begin = step_of((1, 11, 2), (1, 7, 1), step=2)  # in any order
    copy, *_ = gapped.tell(begin)
    assert (copy.source_ids, copy.target_ids) == ([2], [3]), "what is kept isn't written"
    for layer in range(NUM_LAYERS):
        (compute,) = gapped.tell(attend(begin, layer))
    plan = compute.plan
    assert plan.slots.tolist() == [3 * 4 + 3, 4 * 4, 7]
    assert plan.context_lens.tolist() == [13, 8] and plan.query_positions.tolist() == [11, 7]
    gapped.run_step(step_of((1, 13, 1), step=3))


def test_a_token_that_another_row_sees_is_written_before_attention(gapped: Worker) -> None:
    gapped.run_step(step_of((1, 4, 3), step=1))
    begin = step_of((1, 7, 1), (1, 11, 1), step=2)
    gapped.tell(begin)
    computes = [gapped.tell(attend(begin, layer))[0] for layer in range(NUM_LAYERS)]
    plan = computes[0].plan
    assert (plan.num_single, plan.num_last) == (2, 0)
    assert gapped.run_step(step_of((1, 12, 1), step=3))[0].plan.num_last == 1


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
        (Open(2, 20, 4, parent_id=1), "has a gap"),
        (Name(1, 1, keys(9)), "has 4 tokens in every layer"),
        (Close(1, tail=keys(9).tobytes().hex()), "has a gap"),
    ],
    ids=str,
)
def test_no_token_comes_behind_an_open_gap(message: Any, reason: str, gapped: Worker) -> None:
    if "reserved for" in reason:
        gapped.fails(message, reason, code="out_of_capacity")
    else:
        gapped.fails(message, reason)


def test_a_last_block_is_kept_only_when_it_is_there_in_every_layer(worker: Worker) -> None:
    worker.answer(Open(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE - 1)))
    worker.fails(Close(0, tail=keys(1).tobytes().hex()), "is in an open step")


def test_rows_and_tables_grow_and_are_used_again() -> None:
    store = KVStore(8000, 1)
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    for i, length in enumerate(lengths):
        store.open(i, length)
        store.append(ids(i), counts(length))
    tables = {i: store.block_tables(ids(i)).tolist() for i in range(1, 200, 2)}
    for i in range(0, 200, 2):
        store.close(i)
    num_rows = len(store.tables.blocks)
    for i in range(200, 300):
        store.open(i, 3)
        store.append(ids(i), counts(3))
    assert len(store.tables.blocks) == num_rows
    for i, table in tables.items():
        assert store.block_tables(ids(i)).tolist() == table
    store.check_invariants()


@pytest.mark.parametrize(("mean_tokens", "num_sequences"), [(96, 2000), (1024, 500), (16384, 40)])
def test_kv_memory_overhead(mean_tokens: int, num_sequences: int) -> None:
    """All that the cache takes, bookkeeping included, over the raw K and V
    bytes: at most 5% and a block a sequence."""
    kv = KVSpec(num_layers=8, num_kv_heads=4, head_dim=64, dtype=DType.FLOAT16, block_size=32)
    rng = np.random.default_rng(mean_tokens)
    lengths = rng.integers(1, 2 * mean_tokens, num_sequences)
    num_blocks = int(sum(map(kv.num_blocks_for, lengths.tolist())))
    store = KVStore(num_blocks, kv.block_size)
    for i, length in enumerate(lengths.tolist()):
        store.open(i, length)
    store.append(np.arange(num_sequences), lengths.astype(np.int32))
    layout = BlockLayout(kv.num_kv_heads, kv.head_dim, kv.dtype.value, kv.block_size)
    num_used = num_blocks - store.pool.num_free
    books = [*vars(store.pool).values(), *vars(store.tables).values()]
    used_bytes = num_used * kv.num_layers * layout.block_bytes
    used_bytes += sum(x.nbytes for x in books if isinstance(x, np.ndarray))
    raw_bytes = int(lengths.sum()) * kv.token_bytes
    assert used_bytes <= 1.05 * raw_bytes + num_sequences * kv.block_bytes
