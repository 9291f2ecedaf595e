"""R-workers that have less room than they said."""

from __future__ import annotations

import pytest

from fastdecode.core.errors import CapacityError
from rworker.blocks.kv_store import KVStore


def keep_one_sequence_each(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on every R-worker refuses a second sequence. Returns the ids
    that were refused, as they are."""
    refused: list[int] = []
    really_open = KVStore.open

    def open_one(store: KVStore, sequence_id: int, num_reserved: int) -> None:
        if store.tables.row_of:
            refused.append(sequence_id)
            raise CapacityError("no room for a second sequence")
        really_open(store, sequence_id, num_reserved)

    monkeypatch.setattr(KVStore, "open", open_one)
    return refused
