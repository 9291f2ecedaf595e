"""A KV store that knows what was written where."""

from __future__ import annotations

import numpy as np

from fastdecode.core.holders import Part
from rworker.blocks.kv_store import KVStore

BLOCK_SIZE = 4


class Store:
    """An R-worker's real KV store, one sequence at a time, and a memory that
    remembers what each slot was written for."""

    def __init__(self, num_blocks: int) -> None:
        self._store = KVStore(num_blocks, BLOCK_SIZE)
        self._cells = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)
        self.open, self.fork, self.extend = self._store.open, self._store.fork, self._store.extend

    def append(self, sequence_id: int, contexts: list[int]) -> None:
        """``contexts``: of each new token, what tells all tokens up to it."""
        appended = self._store.append(np.array([sequence_id]), np.array([len(contexts)], np.int32))
        self._cells[appended.copy_targets] = self._cells[appended.copy_sources]
        self._cells.reshape(-1)[appended.slots] = contexts

    def contexts(self, sequence_id: int) -> list[int]:
        """What is in the slots of a sequence's tokens."""
        table = self._store.block_tables(np.array([sequence_id]))[0]
        contexts: list[int] = (
            self._cells[table].reshape(-1)[: self.num_cached(sequence_id)].tolist()
        )
        return contexts

    def num_cached(self, sequence_id: int) -> int:
        return int(self._store.num_tokens(np.array([sequence_id]))[0])

    @property
    def num_available(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return self._store.pool.num_available

    @property
    def num_touched(self) -> int:
        """Blocks that were ever written."""
        return int((self._cells >= 0).any(axis=1).sum())

    def close(self, sequence_id: int, tail: bytes | None) -> None:
        self._store.close(sequence_id, tail)

    def keep(self, sequence_id: int, first_block: int, keys: tuple[bytes, ...]) -> None:
        table = self._store.tables.of_row(self._store.tables.row(sequence_id))
        assert first_block + len(keys) <= self.num_cached(sequence_id) // BLOCK_SIZE
        self._store.cached.keep(list(keys), table[first_block : first_block + len(keys)].copy())

    def resume(self, part: Part, keys: tuple[bytes, ...], num_tokens: int) -> None:
        blocks = self._store.cached.of_keys(keys)
        self._store.resume(part.part_id, blocks, num_tokens, part.num_tokens)

    def forget(self, keys: tuple[bytes, ...]) -> None:
        self._store.cached.forget(list(keys))
