"""What a KV store looks like, and whether a refusal leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rworker.blocks.kv_store import KVStore


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def snapshot(store: KVStore) -> dict[str, object]:
    pool, tables = store.pool, store.tables
    in_pool = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(pool).items()
        if name != "_returned"
    }
    rows = {
        f"row {key}": (
            tables.blocks[row].tolist(),
            tables.lengths[row].item(),
            tables.reserved[row].item(),
            tables.widths[row].item(),
        )
        for key, row in tables.row_of.items()
    }
    return in_pool | rows | {"free": pool.free.tolist(), "row of": repr(tables.row_of)}


def refuses_unchanged(
    store: KVStore, error: type[Exception], act: Callable[[], object]
) -> Exception:
    before = snapshot(store)
    with pytest.raises(error) as caught:
        act()
    assert snapshot(store) == before
    return caught.value
