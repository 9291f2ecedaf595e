"""Policies of eviction, for the engine and for ``fastdecode simulate``.

``retention`` values a block by the cost to compute it again, over the time since its last use
(Pensieve, EuroSys 2025). The lowest value goes first. Leading blocks cost least, since they attend
to least. ``lru`` takes the end of what was idle for longest.

Tiers of a simulation hold whole conversations, and ask which of them evicts which blocks
(``TierPolicy``). The engine asks what each block is worth (``Policy``). Requests outside any
conversation share their beginnings with others, so their ends go first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.costs import FLAT_TO_HALF, CostTable

POLICIES: Final = ("retention", "lru")
_INSTANT_S: Final = 1e-9  # least idle time
_BEYOND_ALL_TOKENS: Final = float(1 << 25)  # more than any sequence has

Values: TypeAlias = NDArray[np.float64]


COLUMNS: Final = np.dtype(
    [
        ("cost", "f8"), ("ended_s", "f8"), ("num_leases", "f8"), ("last_use", "i8"),
        ("num_tokens", "i8"), ("is_end", "?"), ("kind", "u1"),
    ]
)  # fmt: skip
"""Blocks that may be evicted: ``Policy.cost_of``, the time and the number of the last use,
conversations that share it, tokens up to its end, and whether no other such block is behind it."""
Columns: TypeAlias = NDArray[np.void]

NumberT = TypeVar("NumberT", float, Values)


class Policy(Protocol):
    """Chooses which cached blocks of an engine are evicted next."""

    def cost_of(self, num_tokens: int) -> float:
        """Return the cost of a block that ends at ``num_tokens``."""

    def values(self, blocks: Columns, now_s: float) -> Values:
        """Return what each of ``COLUMNS`` is worth, [N]. The lowest is evicted first, of equal ones
        the leading one, and an infinite one only after others. A value depends on its own block
        alone, and never rises with time."""


class TierPolicy(Protocol):
    """Chooses which conversation of a simulated tier evicts blocks next, and which blocks."""

    def cost_of(self, num_tokens: int) -> float:
        """Return the cost of a block that ends at ``num_tokens``."""

    def score(self, first_cost: NumberT, last_s: NumberT, now_s: float) -> NumberT:
        """Score a conversation, or each of several. The lowest score evicts, of equal ones the
        first that appeared.

        Args:
            first_cost: cost of its first block in the tier.
            last_s: when it was active last.
        """

    def leaving(self, blocks: list[int]) -> list[int]:
        """Return which of its blocks it evicts: the first, or the last."""


@dataclass(frozen=True)
class Retention:
    """The block of the lowest value V = Cost(l) / T × leases."""

    block_size: int
    cost: CostTable = field(default=FLAT_TO_HALF)

    def cost_of(self, num_tokens: int) -> float:
        return self.cost(num_tokens)

    def values(self, blocks: Columns, now_s: float) -> Values:
        idle_s = np.maximum(now_s - blocks["ended_s"], _INSTANT_S)
        values = blocks["cost"] / idle_s * np.maximum(blocks["num_leases"], 1)
        return np.where(blocks["is_end"] | (blocks["num_leases"] > 0), values, np.inf)

    def score(self, first_cost: NumberT, last_s: NumberT, now_s: float) -> NumberT:
        return first_cost / (now_s - last_s + _INSTANT_S)

    def leaving(self, blocks: list[int]) -> list[int]:
        return blocks[:1]


@dataclass(frozen=True)
class LeastRecent:
    """The last block of what was idle for longest."""

    def cost_of(self, num_tokens: int) -> float:
        return 1.0

    def values(self, blocks: Columns, now_s: float) -> Values:
        values: Values = blocks["last_use"] - blocks["num_tokens"] / _BEYOND_ALL_TOKENS
        return values

    def score(self, first_cost: NumberT, last_s: NumberT, now_s: float) -> NumberT:
        return last_s

    def leaving(self, blocks: list[int]) -> list[int]:
        return blocks[-1:]


def policy_of(name: str, block_size: int, cost: CostTable = FLAT_TO_HALF) -> TierPolicy:
    """Return the policy with this name among ``POLICIES``."""
    return LeastRecent() if name == "lru" else Retention(block_size, cost)


def is_short(num_free: int, num_slots: int, threshold: float) -> bool:
    """Return True if less than this share of the slots is free, so that some have to be freed."""
    return num_free < threshold * num_slots
