"""Whose cached blocks go down a tier, or are given up: policies over
conversations and their blocks. Pure, with time passed in.

``retention`` values a block by what it would cost to compute it again, over the
time since anybody has used it (Pensieve, EuroSys 2025): the lowest value goes
first. Leading blocks cost least, since they attend to least. ``lru`` takes the
end of whatever was idle for longest. ``size-idle`` (Pensieve's first edition)
takes the trailing half of the conversation with most blocks × idle time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

POLICIES: Final = ("retention", "lru", "size-idle")


@dataclass(frozen=True)
class CostTable:
    """What a block costs to compute, by the tokens up to its end: measured at
    some lengths, linear between, and beyond the last as between the last two.

    Args:
        costs: tokens → cost, of two lengths at least; only ratios matter.
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
"""Attention to 4,096 tokens costs half of what all else does that a token costs."""


@dataclass(eq=False)
class Holding:
    """What a tier has of a conversation."""

    name: str
    blocks: list[int]
    """Numbers of its blocks there, in order."""
    last_s: float
    """When it was last active."""
    num_leases: int = 1
    """Conversations that share them."""


@dataclass(frozen=True)
class Victim:
    """What is to leave a tier."""

    holding: Holding
    blocks: tuple[int, ...]


class Policy(Protocol):
    """Chooses who leaves a tier next."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        """Of those that have blocks, in the order in which they appeared first;
        None: nobody has any."""


@dataclass(frozen=True)
class Retention:
    """The block of the lowest value V = Cost(l) / T × leases."""

    block_size: int
    cost: CostTable = field(default=FLAT_TO_HALF)

    def value(self, holding: Holding, block: int, now_s: float) -> float:
        """Of a block; infinite: it is being used."""
        idle_s = now_s - holding.last_s
        if idle_s <= 0:
            return float("inf")
        return self.cost((block + 1) * self.block_size) / idle_s * holding.num_leases

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        lowest = min(filled, key=lambda each: self.value(each, each.blocks[0], now_s))
        return Victim(lowest, (lowest.blocks[0],))


@dataclass(frozen=True)
class LeastRecent:
    """The last block of whoever was idle for longest."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        oldest = min(filled, key=lambda each: each.last_s)
        return Victim(oldest, (oldest.blocks[-1],))


@dataclass(frozen=True)
class SizeIdle:
    """The trailing half, rounded up, of the largest blocks × idle time."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        largest = max(filled, key=lambda each: len(each.blocks) * (now_s - each.last_s))
        kept = len(largest.blocks) // 2
        return Victim(largest, tuple(largest.blocks[kept:]))


def policy_of(name: str, block_size: int, cost: CostTable = FLAT_TO_HALF) -> Policy:
    """By its name among ``POLICIES``."""
    if name == "lru":
        return LeastRecent()
    if name == "size-idle":
        return SizeIdle()
    assert name == "retention", name
    return Retention(block_size, cost)


def is_short(num_free: int, num_slots: int, threshold: float) -> bool:
    """Whether fewer slots than this share of them are free, so that some have
    to be given up."""
    return num_free < threshold * num_slots
