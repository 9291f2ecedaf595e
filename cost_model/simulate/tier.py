"""What a tier has of conversations, and who gives up blocks next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fastdecode.schedule.cache.retention import TierPolicy

_FIRST_ROWS: Final = 64


@dataclass(eq=False)
class _Held:
    """What the tier has of a conversation."""

    row: int
    blocks: list[int]
    last_s: float


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
        if not self._held:
            return None
        scores = self._policy.score(self._first_costs, self._counts, self._last_s, now_s)
        scores = np.where(self._counts > 0, scores, np.inf)
        return int(self._conversations[scores == scores.min()].min())

    def _changed(self, conversation: int, held: _Held) -> None:
        """What is there of a conversation, or when it was active."""
        row = held.row
        self._counts[row] = len(held.blocks)
        if not held.blocks:
            del self._held[conversation]
            self._free.append(row)
            return
        self._first_costs[row], self._last_s[row] = self._cost(held.blocks[0]), held.last_s

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
