"""What a tier has of conversations, and who gives up blocks next."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.retention import TierPolicy

_FIRST_ROWS: Final = 64
_MOST_QUEUED: Final = 64


@dataclass(eq=False)
class _Held:
    """What the tier has of a conversation."""

    row: int
    blocks: list[int]
    last_s: float


@dataclass(eq=False)
class _Queue:
    """Who is next, as of a moment: a heap of (score, conversation)."""

    now_s: float
    heap: list[tuple[float, int]]
    most: float
    """All others have no lower score."""
    latest: dict[int, float]
    """Of each that is in it, by conversation."""


class Tier:
    """Conversations are numbered as they appear.

    Args:
        policy: says who is next, and what leaves.
        block_size: tokens in a block.
    """

    def __init__(self, policy: TierPolicy, block_size: int) -> None:
        self._policy = policy
        self._size = block_size
        self.num_blocks = 0
        """Of all conversations."""
        self._held: dict[int, _Held] = {}
        self._costs: list[float] = []  # of blocks, by number
        # A row for each conversation, and some that are free.
        self._free: list[int] = []
        self._conversations = np.zeros(0, np.int64)
        self._first_costs = np.ones(0)
        self._counts = np.zeros(0)
        self._last_s = np.zeros(0)
        self._queue: _Queue | None = None

    def blocks(self, conversation: int) -> list[int]:
        """What it has of a conversation, in order; not to be changed."""
        held = self._held.get(conversation)
        return [] if held is None else held.blocks

    def hold(self, conversation: int, blocks: list[int], last_s: float) -> None:
        """From now on it has these blocks, in order, and no other of a
        conversation that was active then."""
        held = self._held.get(conversation)
        if held is None:
            held = self._held[conversation] = _Held(self._new_row(), [], last_s)
            self._conversations[held.row] = conversation
        self.num_blocks += len(blocks) - len(held.blocks)
        held.blocks, held.last_s = blocks, last_s
        self._changed(conversation, held)

    def leave(self, now_s: float) -> tuple[int, list[int]] | None:
        """Who is next gives up blocks; None: there are none."""
        conversation = self._next(now_s)
        if conversation is None:
            return None
        held = self._held[conversation]
        leaving = self._policy.leaving(held.blocks)
        self.num_blocks -= len(leaving)
        if leaving[0] == held.blocks[0]:
            del held.blocks[: len(leaving)]
        else:
            del held.blocks[len(held.blocks) - len(leaving) :]
        self._changed(conversation, held)
        return conversation, leaving

    def _next(self, now_s: float) -> int | None:
        """Who has the lowest score, and of these who appeared first."""
        queue = self._queue
        if queue is None or queue.now_s != now_s:
            queue = self._queue = self._look(now_s)
        while self._held:
            while queue.heap:
                score, conversation = queue.heap[0]
                if queue.latest.get(conversation) == score:
                    return conversation
                heapq.heappop(queue.heap)
            queue = self._queue = self._look(now_s)
        return None

    def _look(self, now_s: float) -> _Queue:
        """At all of them."""
        scores = self._policy.score(self._first_costs, self._counts, self._last_s, now_s)
        scores = np.where(self._counts > 0, scores, np.inf)
        most = math.inf
        if len(scores) > _MOST_QUEUED:
            most = float(np.partition(scores, _MOST_QUEUED)[_MOST_QUEUED])
        rows: NDArray[np.int64] = np.flatnonzero((scores <= most) & (self._counts > 0))
        columns = scores[rows].tolist(), self._conversations[rows].tolist()
        heap: list[tuple[float, int]] = list(zip(*columns, strict=True))
        heapq.heapify(heap)
        return _Queue(now_s, heap, most, {conversation: score for score, conversation in heap})

    def _changed(self, conversation: int, held: _Held) -> None:
        """What is there of a conversation, or when it was active."""
        row, queue = held.row, self._queue
        self._counts[row] = len(held.blocks)
        if queue is not None:
            queue.latest.pop(conversation, None)
        if not held.blocks:
            del self._held[conversation]
            self._free.append(row)
            return
        cost = self._cost(held.blocks[0])
        self._first_costs[row], self._last_s[row] = cost, held.last_s
        if queue is not None:
            score = self._policy.score(cost, float(len(held.blocks)), held.last_s, queue.now_s)
            if score <= queue.most:
                queue.latest[conversation] = score
                heapq.heappush(queue.heap, (score, conversation))

    def _cost(self, block: int) -> float:
        while len(self._costs) <= block:
            self._costs.append(self._policy.cost_of((len(self._costs) + 1) * self._size))
        return self._costs[block]

    def _new_row(self) -> int:
        if not self._free:
            num_rows = len(self._counts)
            more = max(_FIRST_ROWS, num_rows)
            self._conversations = np.pad(self._conversations, (0, more))
            self._first_costs = np.pad(self._first_costs, (0, more), constant_values=1)
            self._counts = np.pad(self._counts, (0, more))
            self._last_s = np.pad(self._last_s, (0, more))
            self._free.extend(range(num_rows + more - 1, num_rows - 1, -1))
        return self._free.pop()
