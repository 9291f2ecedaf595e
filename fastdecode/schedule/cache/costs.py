"""Costs to compute a block again, by its place in its sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import AttentionSpec


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

_LENGTHS: Final = tuple(1 << bits for bits in range(6, 21))


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
