"""Blocks that outlive their sequences, by key, and the jobs that move them. Bookkeeping only.

The cache refers to each of its blocks as a sequence does that never appends. So a cached block is
neither freed nor written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.blocks import MOST_MOVED, Fetch, Retain
from rworker.blocks.block_pool import BlockPool, Blocks
from rworker.checks import checked_keys
from rworker.tiers.tier import MoveJob


@dataclass(eq=False, slots=True)
class _Cached:
    block: int
    num_tokens: int
    job: MoveJob | None = None
    """The job that moves it."""
    is_void: bool = False
    """True if its K and V have not arrived, or never will."""


class CachedBlocks:
    """The cached blocks of one cache. Every method that raises changes nothing.

    Args:
        pool: counts the references to blocks.
        block_size: tokens of a full block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._cached: dict[bytes, _Cached] = {}
        self._held: set[int] = set()  # their blocks, and forgotten ones that a job still moves
        self.jobs: Final[dict[int, MoveJob]] = {}
        """Jobs that are not over, by number."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._cached)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """All blocks to which the cache refers."""
        return np.fromiter(self._held, np.int64, len(self._held))

    def num_tokens(self, key: bytes) -> int:
        """Return the tokens of a block whose K and V are here, else 0."""
        cached = self._cached.get(key)
        return 0 if cached is None or cached.is_void else cached.num_tokens

    def is_there(self, key: bytes) -> bool:
        """Return True if a block has this key, and its K and V are here."""
        return self.num_tokens(key) > 0

    def is_coming(self, key: bytes) -> bool:
        """Return True if a job fetches the block with this key."""
        cached = self._cached.get(key)
        return cached is not None and cached.is_void and cached.job is not None

    def key_of(self) -> dict[int, bytes]:
        """Return the key of each block whose K and V are here."""
        return {cached.block: key for key, cached in self._cached.items() if not cached.is_void}

    def of_keys(self, keys: Iterable[bytes]) -> Blocks:
        """Return the blocks with these keys, [N]. They may still be fetched, or have failed: the
        peer that asks gets the report of that before its answer.

        Raises:
            ProtocolError: If no block has one of the keys.
        """
        try:
            return np.array([self._cached[key].block for key in keys], np.int32)
        except KeyError as error:
            raise ProtocolError(f"no block is kept by the key {error.args[0].hex()}") from None

    def keep(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        """Cache full blocks of one sequence, [N], each once.

        Raises:
            ProtocolError: If a key is in use, or given twice; or a block is cached already.
        """
        self._add(keys, blocks)
        self._pool.share(blocks, had_tail=False, has_tail=False)

    def adopt(self, key: bytes, block: Blocks, num_tokens: int) -> None:
        """Cache a block, [1], which is not full, in place of a sequence that refers to it.

        Raises:
            ProtocolError: As ``keep``.
        """
        self._add([key], block)
        self._cached[key].num_tokens = num_tokens

    def forget(self, keys: Sequence[bytes]) -> None:
        """Cache these blocks no longer.

        Raises:
            ProtocolError: If one is not cached, is named twice, or is moved.
        """
        blocks = self.of_keys(keys)
        if len(set(keys)) < len(keys):
            raise ProtocolError("a block is to be forgotten twice")
        if any(self._cached[key].job is not None for key in keys):
            raise ProtocolError("a block is to be forgotten that is on its way")
        for key in keys:
            del self._cached[key]
        self._free(blocks)

    def abandon(self, keys: Iterable[bytes]) -> None:
        """Cache these blocks, each of which is cached, no longer. One that is moved takes up
        memory until its job ends."""
        idle = []
        for key in keys:
            if self._cached[key].job is None:
                idle.append(key)
            else:
                del self._cached[key]
        self.forget(idle)

    def begin(self, message: Retain | Fetch) -> MoveJob:
        """Begin the job that a message asks for. The blocks of a fetch are taken, and
        have their keys, immediately.

        Raises:
            ProtocolError: If the job's number is in use, a block to store is not here, a block to
                fetch is here, or no blocks are free for it.
        """
        number, keys = message.job, tuple(checked_keys(message.keys))
        if number in self.jobs or not 1 <= len(keys) <= MOST_MOVED:
            raise ProtocolError(f"job {number} of {len(keys)} blocks: its number or size is wrong")
        if isinstance(message, Retain):
            job = self._store(number, keys, message.num_tokens)
        else:
            job = self._fetch(number, keys, message.tail_tokens)
        self.jobs[number] = job
        for key in keys:
            self._cached[key].job = job
        return job

    def _store(self, number: int, keys: tuple[bytes, ...], ends: NDArray[np.int32]) -> MoveJob:
        blocks = self.of_keys(keys)
        if (ends < 1).any():
            raise ProtocolError("num_tokens of blocks to be stored must be at least 1")
        if not all(map(self.is_there, keys)):
            raise ProtocolError("the block to copy down is missing")
        if len(set(keys)) < len(keys) or any(self._cached[key].job is not None for key in keys):
            raise ProtocolError("a block is to be moved twice at a time")
        return MoveJob(number, False, keys, tuple(blocks.tolist()), tuple(ends.tolist()))

    def _fetch(self, number: int, keys: tuple[bytes, ...], tail_tokens: int) -> MoveJob:
        if tail_tokens >= self._block_size:
            raise ProtocolError(f"tail_tokens={tail_tokens} fill a block")
        if len(set(keys)) < len(keys) or not self._cached.keys().isdisjoint(keys):
            raise ProtocolError("a block is to be fetched that is cached already, or twice")
        if len(keys) > self._pool.num_available:
            raise ProtocolError(
                f"{len(keys)} blocks are to be fetched, and {self._pool.num_available} are free"
            )
        self._pool.num_promised += len(keys)
        blocks = self._pool.take(len(keys))
        self._add(keys, blocks)
        for key in keys:
            self._cached[key].is_void = True
        self._cached[keys[-1]].num_tokens = tail_tokens or self._block_size
        return MoveJob(number, True, keys, tuple(blocks.tolist()))

    def end(self, number: int, failed: Collection[int] = ()) -> None:
        """End a job. ``failed``: places of its blocks that were not moved."""
        job = self.jobs.pop(number)
        forgotten = []
        for place, (key, block) in enumerate(zip(job.keys, job.blocks, strict=True)):
            cached = self._cached.get(key)
            if cached is None or cached.job is not job:
                forgotten.append(block)
                continue
            cached.job = None
            cached.is_void = job.is_fetch and place in failed
        self._free(np.array(forgotten, np.int32))

    def give_up(self) -> None:
        """End all jobs. Nothing that they fetch has arrived."""
        for number, job in list(self.jobs.items()):
            self.end(number, range(len(job.keys)))

    def forget_all(self) -> None:
        self.forget(list(self._cached))

    def fetching(self, blocks: NDArray[np.int64]) -> list[MoveJob]:
        """Return the jobs that fetch any of these blocks."""
        fetches = (job for job in self.jobs.values() if job.is_fetch)
        return [job for job in fetches if np.isin(job.blocks, blocks).any()]

    def _add(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        ids: list[int] = blocks.tolist()
        if len(set(keys)) < len(keys) or not self._cached.keys().isdisjoint(keys):
            raise ProtocolError("a key of the blocks to keep is another block's")
        if not self._held.isdisjoint(ids):
            raise ProtocolError("one of the blocks to keep is kept by another key")
        for key, block in zip(keys, ids, strict=True):
            self._cached[key] = _Cached(block, self._block_size)
        self._held.update(ids)

    def _free(self, blocks: Blocks) -> None:
        if blocks.size:
            self._pool.leave(blocks, has_tail=False)
            self._held.difference_update(blocks.tolist())
