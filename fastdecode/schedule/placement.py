"""Sequence → R-worker.

Placement counts the KV blocks that live sequences have reserved, so that no step can run out of them. Blocks that
siblings share are counted once for each of them: the count errs on the safe side, and needs no news from the workers.
"""

from __future__ import annotations

from fastdecode.core.errors import CapacityError


class BlockLedger:
    """KV blocks reserved on each R-worker."""

    def __init__(self, worker_blocks: tuple[int, ...], block_size: int) -> None:
        assert worker_blocks and min(worker_blocks) >= 0 and block_size > 0
        self.block_size = block_size
        self._capacity = list(worker_blocks)
        self._free = list(worker_blocks)
        self._lost: set[int] = set()

    def lose(self, worker: int) -> None:
        """The worker is gone: nothing fits on it any more."""
        self._lost.add(worker)

    def regain(self, worker: int, num_blocks: int) -> None:
        """In the place of a lost worker there is an empty one, of so many blocks."""
        assert worker in self._lost and self._free[worker] == self._capacity[worker]
        self._lost.remove(worker)
        self._free[worker] = self._capacity[worker] = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` cached tokens fills; a sequence always takes one."""
        return max(1, -(-num_tokens // self.block_size))

    def is_possible(self, num_tokens: int) -> bool:
        """Whether some R-worker, were it empty, could hold a sequence of ``num_tokens`` tokens."""
        return self.blocks_for(num_tokens) <= self._most_blocks

    def check_possible(self, num_tokens: int) -> None:
        """Raises CapacityError unless ``is_possible``."""
        if not self.is_possible(num_tokens):
            most = self._most_blocks
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens ({self.blocks_for(num_tokens)} KV blocks), but "
                f"the largest R-worker has {most} blocks ({most * self.block_size} tokens): lower max_tokens, or give "
                "R-workers more memory (--kv-memory-gb)"
            )

    @property
    def _most_blocks(self) -> int:
        return max((c for w, c in enumerate(self._capacity) if w not in self._lost), default=0)

    def capacity_tokens(self, worker: int) -> int:
        """What the R-worker holds when it is empty."""
        return self._capacity[worker] * self.block_size

    def free_blocks(self, worker: int) -> int:
        return self._free[worker]

    def workers_with_room(self, num_tokens: int, may_grow_to: int) -> list[int]:
        """The R-workers that have room for ``num_tokens`` now, and could hold ``may_grow_to`` if they were empty; those
        with most free blocks first."""
        blocks, most = self.blocks_for(num_tokens), self.blocks_for(may_grow_to)
        fitting = (w for w, capacity in enumerate(self._capacity) if self._free[w] >= blocks and capacity >= most)
        return sorted((w for w in fitting if w not in self._lost), key=lambda w: (-self._free[w], w))

    def reserve(self, worker: int, num_tokens: int) -> None:
        self._free[worker] -= self.blocks_for(num_tokens)
        assert self._free[worker] >= 0

    def grow(self, worker: int, num_tokens: int, to_tokens: int) -> bool:
        """Enlarge a reservation of ``num_tokens``, if there is room; says whether there was."""
        blocks = self.blocks_for(to_tokens) - self.blocks_for(num_tokens)
        if blocks > self._free[worker]:
            return False
        self._free[worker] -= blocks
        return True

    def release(self, worker: int, num_tokens: int) -> None:
        self._free[worker] += self.blocks_for(num_tokens)
        assert self._free[worker] <= self._capacity[worker]
