"""Sequence → R-worker.

Placement counts KV blocks that live sequences have reserved. A sequence reserves room for all the tokens that it may
ever cache, so a step can't run out of blocks. Blocks that siblings share are counted once for each of them: the count
errs on the safe side, and needs no news from the workers.
"""

from __future__ import annotations

from fastdecode.core.errors import CapacityError


class BlockLedger:
    """KV blocks reserved on each R-worker."""

    def __init__(self, worker_blocks: tuple[int, ...], block_size: int) -> None:
        assert worker_blocks and min(worker_blocks) >= 0 and block_size > 0
        self.block_size = block_size
        self._capacity = worker_blocks
        self._free = list(worker_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` cached tokens fills; a sequence always takes one."""
        return max(1, -(-num_tokens // self.block_size))

    def check_possible(self, num_tokens: int) -> None:
        """Raises CapacityError if no R-worker, were it empty, could hold a sequence of ``num_tokens`` tokens."""
        blocks, most = self.blocks_for(num_tokens), max(self._capacity)
        if blocks > most:
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens ({blocks} KV blocks), but the largest R-worker "
                f"has {most} blocks ({most * self.block_size} tokens): lower max_tokens, or give R-workers more "
                "memory (--kv-memory-gb)"
            )

    def free_blocks(self, worker: int) -> int:
        return self._free[worker]

    def choose(self, num_tokens: int) -> int | None:
        """The R-worker with the most free blocks, lowest index first, if it has room for ``num_tokens`` tokens."""
        worker = max(range(len(self._free)), key=lambda w: (self._free[w], -w))
        return worker if self._free[worker] >= self.blocks_for(num_tokens) else None

    def has_room(self, worker: int, num_tokens: int) -> bool:
        return self._free[worker] >= self.blocks_for(num_tokens)

    def reserve(self, worker: int, num_tokens: int) -> None:
        self._free[worker] -= self.blocks_for(num_tokens)
        assert self._free[worker] >= 0

    def release(self, worker: int, num_tokens: int) -> None:
        self._free[worker] += self.blocks_for(num_tokens)
        assert self._free[worker] <= self._capacity[worker]
