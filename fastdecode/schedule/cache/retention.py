"""Policies of eviction, for the engine and for ``fastdecode simulate``.

``retention`` values a block by the cost to compute it again, over the time since its last use
(Pensieve, EuroSys 2025). The lowest value goes first. Leading blocks cost least, since they attend
to least. ``lru`` takes the end of what was idle for longest.

Tiers of a simulation hold whole conversations, and ask which of them evicts which blocks
(``TierPolicy``). The engine asks what each block is worth (``Policy``). Requests outside any
conversation share their beginnings with others, so their ends go first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import AttentionSpec

POLICIES: Final = ("retention", "lru")
_INSTANT_S: Final = 1e-9  # least idle time
_BEYOND_ALL_TOKENS: Final = float(1 << 25)  # more than any sequence has
_LENGTHS: Final = tuple(1 << bits for bits in range(6, 21))  # tokens for which costs are counted

Values: TypeAlias = NDArray[np.float64]


class Columns(NamedTuple):
    """Blocks that may be evicted, [N] each."""

    cost: Values  # ``Policy.cost_of``
    ended_s: Values  # time of its last use
    last_use: Values  # number of its last use
    num_leases: Values  # conversations that share it
    num_tokens: Values  # tokens up to its end
    is_end: Values  # 1 if no other such block is behind it, else 0


NumberT = TypeVar("NumberT", float, Values)


@dataclass(frozen=True)
class CostTable:
    """Cost of a block by the tokens up to its end, measured at some lengths, else linear.

    Args:
        costs: cost by tokens, of two lengths at least. Only ratios matter.
    """

    costs: Mapping[int, float]

    def __post_init__(self) -> None:
        assert len(self.costs) >= 2 and min(self.costs.values()) > 0
        object.__setattr__(self, "costs", dict(sorted(self.costs.items())))

    def __call__(self, num_tokens: int) -> float:
        lengths = list(self.costs)
        at = min(max(1, bisect_left(lengths, num_tokens)), len(lengths) - 1)
        low, high = lengths[at - 1], lengths[at]
        slope = (self.costs[high] - self.costs[low]) / (high - low)
        return self.costs[low] + (num_tokens - low) * slope


FLAT_TO_HALF: Final = CostTable({64: 1.0078125, 4096: 1.5})
"""Attention to 4,096 tokens costs half of what the rest of a token's work costs."""


def costs_of(spec: ModelSpec) -> CostTable:
    """Return costs by a token's floating-point operations. 1 stands for all but its attention."""
    weights = 2.0 * sum(map(spec.active_layer_parameters, range(spec.num_layers)))
    costs = {}
    for length in _LENGTHS:
        attention = sum(_flops(layer, length) for layer in spec.attention)
        costs[length] = 1 + attention / weights
    return CostTable(costs)


def _flops(layer: AttentionSpec, num_tokens: int) -> float:
    """Count the operations of attending to the tokens that a layer sees."""
    seen = min(num_tokens, layer.sliding_window or num_tokens)
    return 4.0 * layer.num_q_heads * layer.head_dim * seen


class Policy(Protocol):
    """Chooses which cached blocks of an engine are evicted next."""

    def cost_of(self, num_tokens: int) -> float:
        """Return the cost of a block that ends at ``num_tokens``."""

    def values(self, blocks: Columns, now_s: float) -> Values:
        """Return what each of them is worth, [N]. The lowest is evicted first, of equal ones
        the leading one, and an infinite one only after others. A value depends on its own block
        alone, and never rises with time."""


@dataclass(frozen=True)
class Retention:
    """The block of the lowest value V = Cost(l) / T × leases."""

    block_size: int
    cost: CostTable = field(default=FLAT_TO_HALF)

    def cost_of(self, num_tokens: int) -> float:
        return self.cost(num_tokens)

    def values(self, blocks: Columns, now_s: float) -> Values:
        idle_s = np.maximum(now_s - blocks.ended_s, _INSTANT_S)
        values = blocks.cost / idle_s * np.maximum(blocks.num_leases, 1)
        return np.where(blocks.is_end + blocks.num_leases > 0, values, np.inf)

    def score(self, first_cost: NumberT, last_s: NumberT, now_s: float) -> NumberT:
        """Score a conversation of a simulated tier, or each of several. The lowest score evicts, of
        equal ones the first that appeared.

        Args:
            first_cost: cost of its first block in the tier.
            last_s: when it was active last.
        """
        return first_cost / (now_s - last_s + _INSTANT_S)

    def leaving(self, blocks: list[int]) -> int:
        """Return which of its blocks a conversation of a simulated tier evicts."""
        return blocks[0]


@dataclass(frozen=True)
class LeastRecent:
    """The last block of what was idle for longest."""

    def cost_of(self, num_tokens: int) -> float:
        return 1.0

    def values(self, blocks: Columns, now_s: float) -> Values:
        return blocks.last_use - blocks.num_tokens / _BEYOND_ALL_TOKENS

    def score(self, first_cost: NumberT, last_s: NumberT, now_s: float) -> NumberT:
        return last_s

    def leaving(self, blocks: list[int]) -> int:
        return blocks[-1]


TierPolicy: TypeAlias = Retention | LeastRecent


def policy_of(name: str, block_size: int, cost: CostTable = FLAT_TO_HALF) -> TierPolicy:
    """Return the policy with this name among ``POLICIES``."""
    return LeastRecent() if name == "lru" else Retention(block_size, cost)


def is_short(num_free: int, num_slots: int, threshold: float) -> bool:
    """Return True if less than this share of the slots is free, so that some have to be freed."""
    return num_free < threshold * num_slots
