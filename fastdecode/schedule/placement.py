"""Sequence → R-worker; or, where long sequences are split, part → R-worker.

Placement counts the KV blocks that live sequences have reserved, so that no step can run out of them. Blocks that
siblings share are counted once for each of them: the count errs on the safe side, and needs no news from the workers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from fastdecode.core.errors import CapacityError

_NOTHING: Mapping[int, int] = {}


class BlockLedger:
    """KV blocks reserved on each R-worker.

    Args:
        worker_blocks: of each R-worker.
        block_size: tokens in a block.
        part_tokens: a sequence that may get longer than this is split into parts of so many tokens; a multiple of
            ``block_size``. None: every sequence is whole.
        max_closed_parts: most closed parts, all but the last of each sequence, on one R-worker.
    """

    def __init__(
        self,
        worker_blocks: tuple[int, ...],
        block_size: int,
        part_tokens: int | None = None,
        max_closed_parts: int = 1 << 40,
    ) -> None:
        assert worker_blocks and min(worker_blocks) >= 0 and block_size > 0
        assert part_tokens is None or (part_tokens > 0 and part_tokens % block_size == 0)
        self.block_size = block_size
        self.part_tokens = part_tokens
        self._capacity = list(worker_blocks)
        self._free = list(worker_blocks)
        self._max_closed_parts = max_closed_parts
        self._closed_parts = [0] * len(worker_blocks)
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

    def part_sizes(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each part of a sequence of ``num_tokens``; a whole sequence is a part."""
        if self.part_tokens is None or num_tokens <= self.part_tokens:
            return (num_tokens,)
        num_full, rest = divmod(num_tokens, self.part_tokens)
        return (self.part_tokens,) * num_full + ((rest,) if rest else ())

    def is_possible(self, num_tokens: int) -> bool:
        """Whether R-workers, were they empty, could hold a sequence of ``num_tokens`` tokens."""
        return self.blocks_for(num_tokens) <= self._most_blocks and len(self.part_sizes(num_tokens)) <= self._most_parts

    def check_possible(self, num_tokens: int) -> None:
        """Raises CapacityError unless ``is_possible``."""
        if self.blocks_for(num_tokens) > self._most_blocks:
            most = self._most_blocks
            if self.part_tokens is None:
                who = "the largest R-worker has"
                more = "or let several hold parts of it (--split-tokens; not with --r-partition heads)"
            else:
                who = f"in parts of {self.part_tokens} tokens R-workers together have room for"
                more = "or take smaller parts (--split-tokens)"
            raise CapacityError(
                f"the prompt and max_tokens may fill {num_tokens} cached tokens ({self.blocks_for(num_tokens)} KV "
                f"blocks), but {who} {most} blocks ({most * self.block_size} tokens): shorten one of the two, give "
                f"R-workers more memory (--kv-memory-gb), {more}"
            )
        sizes = self.part_sizes(num_tokens)
        if len(sizes) > self._most_parts:
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens, {len(sizes)} parts of {sizes[0]}, but its "
                f"queries can go to {self._most_parts} parts at most: lower max_tokens, or let parts be longer "
                "(--split-tokens)",
                code="too_many_parts",
            )

    @property
    def _most_blocks(self) -> int:
        """Of the longest sequence that empty R-workers hold: as many full parts as there is room for, and a last one
        in the largest room that these leave."""
        capacities = [c for w, c in enumerate(self._capacity) if w not in self._lost]
        if self.part_tokens is None:
            return max(capacities, default=0)
        full = self.part_tokens // self.block_size
        return sum(c // full for c in capacities) * full + max((c % full for c in capacities), default=0)

    @property
    def _most_parts(self) -> int:
        """Of any sequence: as many closed ones as R-workers may have, and a last one."""
        if self.part_tokens is None:
            return 1
        full = self.part_tokens // self.block_size
        live = (c for w, c in enumerate(self._capacity) if w not in self._lost)
        return sum(min(c // full, self._max_closed_parts) for c in live) + 1

    def capacity_tokens(self, worker: int) -> int:
        """What the R-worker holds when it is empty."""
        return self._capacity[worker] * self.block_size

    def free_blocks(self, worker: int) -> int:
        return self._free[worker]

    def workers_with_room(self, num_tokens: int, may_grow_to: int, taken: Mapping[int, int] = _NOTHING) -> list[int]:
        """The R-workers that have room for ``num_tokens`` now, and could hold ``may_grow_to`` if they were empty; those
        with most free blocks first. ``taken``: worker → blocks that are as good as reserved."""
        blocks, most = self.blocks_for(num_tokens), self.blocks_for(may_grow_to)
        free = {w: self._free[w] - taken.get(w, 0) for w in range(len(self._free)) if w not in self._lost}
        fitting = (w for w in free if free[w] >= blocks and self._capacity[w] >= most)
        return sorted(fitting, key=lambda w: (-free[w], w))

    def place_parts(
        self,
        sizes: Seq[int],
        may_grow_to: Seq[int],
        choose: Callable[[list[int], list[int]], int | None],
        fixed: Seq[int] = (),
    ) -> tuple[int, ...] | None:
        """An R-worker for each part of a sequence; None if a part has to wait, and with it the sequence.

        A part goes where fewest of the sequence's other parts are, so that as many R-workers as possible attend to it
        at once. All parts but the last are of one size, so that taking whatever worker has room never spoils it for a
        later part.

        Args:
            sizes: tokens of each part.
            may_grow_to: tokens that each may have in the end.
            choose: takes the R-workers of the parts before, and those that have room for this one; gives one of them,
                or None: not yet.
            fixed: where the first parts have to be.
        """
        placed: list[int] = []
        blocks: Counter[int] = Counter()
        for part, num_tokens in enumerate(sizes):
            fitting = self.workers_with_room(num_tokens, may_grow_to[part], blocks)
            if part < len(sizes) - 1:
                fitting = [w for w in fitting if self._closed_parts[w] + placed.count(w) < self._max_closed_parts]
            if part < len(fixed):
                fitting = [worker for worker in fitting if worker == fixed[part]]
            fitting.sort(key=placed.count)
            tiers = [list(tier) for _, tier in itertools.groupby(fitting, key=placed.count)] or [[]]
            worker = next((w for tier in tiers if (w := choose(placed, tier)) is not None), None)
            if worker is None:
                return None
            placed.append(worker)
            blocks[worker] += self.blocks_for(num_tokens)
        return tuple(placed)

    def reserve(self, workers: Seq[int], sizes: Seq[int]) -> None:
        """For a sequence's parts."""
        self._hold(workers, sizes, 1)
        assert all(self._free[worker] >= 0 for worker in workers)

    def grow(self, worker: int, num_tokens: int, to_tokens: int) -> bool:
        """Enlarge a reservation of ``num_tokens``, if there is room; says whether there was."""
        blocks = self.blocks_for(to_tokens) - self.blocks_for(num_tokens)
        if blocks > self._free[worker]:
            return False
        self._free[worker] -= blocks
        return True

    def release(self, workers: Seq[int], sizes: Seq[int]) -> None:
        """What was reserved for a sequence's parts."""
        self._hold(workers, sizes, -1)
        assert all(self._free[worker] <= self._capacity[worker] for worker in workers)

    def _hold(self, workers: Seq[int], sizes: Seq[int], sign: int) -> None:
        for worker, num_tokens in zip(workers, sizes, strict=True):
            self._free[worker] -= sign * self.blocks_for(num_tokens)
        for worker in workers[:-1]:
            self._closed_parts[worker] += sign
