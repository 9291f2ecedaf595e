"""A KV store that knows what was written where."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from fastdecode.core.holders import Part
from fastdecode.wire.blocks import Fetch, Retain
from rworker.blocks.kv_store import KVStore
from rworker.tiers.tier import MoveJob

BLOCK_SIZE = 4


class Store:
    """An R-worker's real KV store, one sequence at a time, and a memory that
    remembers what each slot was written for."""

    def __init__(self, num_blocks: int) -> None:
        self._store = KVStore(num_blocks, BLOCK_SIZE)
        self._cells = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)
        self._disk: dict[bytes, np.ndarray] = {}
        self._coming: set[int] = set()
        # Of blocks that are coming: those that they are copied into, and how
        # many of their tokens.
        self._late: list[tuple[int, int, int]] = []
        self.open, self.fork, self.extend = self._store.open, self._store.fork, self._store.extend

    def append(self, sequence_id: int, first: int, contexts: list[int]) -> None:
        """``contexts``: of each new token, from ``first`` on, what tells all tokens up to it."""
        counts = np.array([[len(contexts)], [first]], np.int32)
        appended = self._store.append(np.array([sequence_id]), *counts)
        for source, target in zip(appended.copy_sources, appended.copy_targets, strict=True):
            if source in self._coming:
                self._late.append((int(source), int(target), first % BLOCK_SIZE))
            self._cells[target] = self._cells[source]
        self._cells.reshape(-1)[appended.slots] = contexts

    def contexts(self, sequence_id: int) -> list[int | None]:
        """What is in the slots of a sequence's tokens; None: they are to be written."""
        tables = self._store.tables
        row = tables.row(sequence_id)
        cells = self._cells[tables.of_row(row)].reshape(-1)[: tables.lengths[row]].tolist()
        return [None if i in tables.gaps.get(row, ()) else cell for i, cell in enumerate(cells)]

    def num_cached(self, sequence_id: int) -> int:
        return int(self._store.num_tokens(np.array([sequence_id]))[0])

    @property
    def num_available(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return self._store.pool.num_available

    @property
    def num_touched(self) -> int:
        return int((self._cells >= 0).any(axis=1).sum())

    def close(self, sequence_id: int, tail: bytes | None) -> None:
        self._store.close(sequence_id, tail)

    def keep(self, sequence_id: int, first_block: int, keys: Seq[bytes]) -> None:
        table = self._store.tables.of_row(self._store.tables.row(sequence_id))
        assert first_block + len(keys) <= self.num_cached(sequence_id) // BLOCK_SIZE
        self._store.cached.keep(list(keys), table[first_block : first_block + len(keys)].copy())

    def resume(self, part: Part, keys: Seq[bytes], num_tokens: int, gap: range) -> None:
        blocks = self._store.cached.of_keys(keys)
        self._store.resume(part.part_id, blocks, num_tokens, part.num_tokens, gap)

    def forget(self, keys: Seq[bytes]) -> None:
        self._store.cached.forget(list(keys))

    def begin_move(self, message: Retain | Fetch) -> MoveJob:
        job = self._store.cached.begin(message)
        self._coming.update(job.blocks if job.is_fetch else ())
        return job

    def end_move(self, job: MoveJob) -> list[bytes]:
        """Let a job's blocks arrive. Return those that have failed: the disk may lack them."""
        for place, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
            if job.is_fetch and key not in self._disk:
                job.failed.add(place)
            if job.is_fetch:
                self._cells[block] = -2 if place in job.failed else self._disk[key]
            elif place not in job.failed:
                self._disk[key] = self._cells[block].copy()
        self._store.cached.end(job.number, job.failed)
        self._coming.difference_update(job.blocks)
        for source, target, count in self._late:
            if source not in self._coming:
                self._cells[target, :count] = self._cells[source, :count]
        self._late = [late for late in self._late if late[0] in self._coming]
        return sorted(job.keys[place] for place in job.failed)

    def awaits(self, sequence_id: int) -> bool:
        """Whether any block of a sequence is coming, or was to be copied into one of its."""
        row = self._store.tables.row(sequence_id)
        coming = self._coming.union(target for _, target, _ in self._late)
        return not coming.isdisjoint(self._store.tables.of_row(row).tolist())

    def drop(self, keys: Seq[bytes]) -> None:
        """The disk gives these up, if it has them."""
        for key in keys:
            self._disk.pop(key, None)

    @property
    def num_on_disk(self) -> int:
        return len(self._disk)
