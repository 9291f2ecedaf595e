"""The KV store. ``test_mirror.py`` plays all that happens to one at random."""

from __future__ import annotations

import numpy as np
import pytest
from store_checks import counts, ids

from cpu_kernels import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from rworker.blocks.kv_store import KVStore


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
    used_bytes = (
        num_used * kv.num_layers * layout.block_bytes + store.pool.nbytes + store.tables.nbytes
    )
    raw_bytes = int(lengths.sum()) * kv.token_bytes
    assert used_bytes <= 1.05 * raw_bytes + num_sequences * kv.block_bytes
