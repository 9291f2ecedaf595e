"""The KV store. ``test_mirror.py`` plays all that happens to one at random."""

from __future__ import annotations

import numpy as np
import pytest
from store_checks import counts, ids, refuses_unchanged

from cpu_kernels import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.spec import KVSpec
from rworker.blocks.kv_store import KVStore


class Memory:
    """What a pool of KV would hold, one number a slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cells = np.full((num_blocks, block_size), -1, np.int64)

    def append(self, store: KVStore, rows: list[tuple[int, int, list[int]]]) -> None:
        """Append tokens. Each row is a sequence, its number of tokens before, and new tokens."""
        sequences, past, new = zip(*rows, strict=True)
        appended = store.append(ids(*sequences), counts(*map(len, new)), counts(*past))
        self.cells[appended.copy_targets] = self.cells[appended.copy_sources]
        self.cells.reshape(-1)[appended.slots] = [token for tokens in new for token in tokens]

    def read(self, store: KVStore, sequence_id: int) -> list[int]:
        table = store.block_tables(ids(sequence_id))[0]
        (length,) = store.num_tokens(ids(sequence_id))
        return self.cells[table].reshape(-1)[:length].tolist()


def test_slots_fill_blocks_in_order() -> None:
    store = KVStore(8, 4)
    store.open(7, 12)
    store.open(9, 4)
    first = store.append(ids(7, 9), counts(6, 1))
    assert first.slots.dtype == np.int64
    assert first.slots.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert store.append(ids(9, 7), counts(1, 3)).slots.tolist() == [9, 6, 7, 12]
    tables = store.block_tables(ids(9, 7))
    assert tables.dtype == np.int32
    assert tables.shape == (2, 3)
    assert tables[0, 0] == 2
    assert tables[1].tolist() == [0, 1, 3]
    assert store.num_tokens(ids(9, 7)).tolist() == [2, 9]


def test_open_takes_nothing_but_promises_everything() -> None:
    store = KVStore(4, 4)
    store.open(1, 9)
    assert (store.pool.num_free, store.pool.num_available) == (4, 1)
    error = refuses_unchanged(store, CapacityError, lambda: store.open(2, 5))
    assert error.code == "out_of_capacity"  # type: ignore[attr-defined]
    assert "room for 5 tokens" in str(error)
    error = refuses_unchanged(store, CapacityError, lambda: store.open(2, 17))
    assert error.code == "exceeds_capacity"  # type: ignore[attr-defined]
    store.open(2, 4)
    assert store.pool.num_available == 0


def test_fork_of_a_full_block_costs_nothing() -> None:
    store = KVStore(4, 4)
    store.open(1, 8)
    store.append(ids(1), counts(8))
    store.fork(1, 2, 4, 4)
    store.fork(1, 3, 8, 8)
    assert store.pool.num_available == 2
    store.close(1)
    assert store.pool.num_free == 2  # both blocks live on in sequence 3
    store.close(3)
    assert store.pool.num_free == 3
    store.close(2)
    assert store.pool.num_free == 4


def test_fork_promises_the_copy_of_a_shared_tail() -> None:
    store = KVStore(2, 4)
    store.open(1, 4)
    store.append(ids(1), counts(2))
    store.fork(1, 2, 2, 4)
    assert store.pool.num_available == 0
    refuses_unchanged(store, CapacityError, lambda: store.fork(1, 3, 2, 4))
    # Both write: one copies, the other is left alone with the old block.
    appended = store.append(ids(2, 1), counts(2, 2))
    assert appended.copy_sources.tolist() == [0]
    assert appended.copy_targets.tolist() == [1]
    assert appended.slots.tolist() == [6, 7, 2, 3]
    store.check_invariants()


def test_closing_the_parent_returns_the_promised_copy() -> None:
    store = KVStore(3, 4)
    store.open(1, 4)
    store.append(ids(1), counts(4))
    store.fork(1, 2, 3, 4)  # the parent has the whole block, so the child must copy it
    assert store.pool.num_available == 1
    store.close(1)
    assert store.pool.num_available == 2  # the child alone is left, and writes in place
    assert store.append(ids(2), counts(1)).copy_sources.size == 0


def test_a_shared_tail_that_is_kept_is_no_longer_its_sequences() -> None:
    store = KVStore(4, 4)
    store.open(1, 4)
    store.append(ids(1), counts(2))
    store.fork(1, 2, 2, 4)
    store.close(1, b"k" * 16)
    store.check_invariants()


def test_ids_that_are_not_open_are_refused() -> None:
    store = KVStore(4, 4)
    store.open(1, 4)
    store.append(ids(1), counts(2))
    for act in (
        lambda: store.append(ids(1, 5), counts(1, 1)),
        lambda: store.block_tables(ids(5)),
        lambda: store.num_tokens(ids(5)),
        lambda: store.close(5),
        lambda: store.fork(5, 6, 1, 1),
        lambda: store.fork(1, 1, 1, 1),
        lambda: store.fork(1, 6, 3, 4),
        lambda: store.fork(1, 6, 0, 4),
        lambda: store.fork(1, 6, 2, 1),
        lambda: store.open(1, 1),
    ):
        assert "sequence" in str(refuses_unchanged(store, ProtocolError, act))


def test_number_of_sequences_is_bounded() -> None:
    store = KVStore(400, 4, max_sequences=100)
    for i in range(100):
        store.open(i, 1)
    refuses_unchanged(store, CapacityError, lambda: store.open(100, 1))
    store.close(3)
    store.open(100, 1)
    store.check_invariants()


def test_rows_and_tables_grow_and_are_used_again() -> None:
    store = KVStore(8000, 1)
    memory = Memory(8000, 1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200)
    for i, length in enumerate(lengths):
        store.open(i, int(length))
        memory.append(store, [(i, 0, [1000 * i + j for j in range(length)])])
    for i in range(0, 200, 2):
        store.close(i)
    num_rows = len(store.tables.blocks)
    for i in range(200, 300):
        store.open(i, 3)
        memory.append(store, [(i, 0, [1000 * i, 1000 * i + 1, 1000 * i + 2])])
    assert len(store.tables.blocks) == num_rows
    for i in range(1, 200, 2):
        assert memory.read(store, i) == [1000 * i + j for j in range(lengths[i])]
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
    used_bytes = (
        num_used * kv.num_layers * layout.block_bytes + store.pool.nbytes + store.tables.nbytes
    )
    raw_bytes = int(lengths.sum()) * kv.token_bytes
    assert used_bytes <= 1.05 * raw_bytes + num_sequences * kv.block_bytes
