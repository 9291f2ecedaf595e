"""Whose cached blocks go down a tier, or are given up: policies over
conversations and their blocks. Pure, with time passed in. The engine's kept
blocks and ``fastdecode simulate`` ask the same ones.

``retention`` values a block by what it would cost to compute it again, over the
time since anybody has used it (Pensieve, EuroSys 2025): the lowest value goes
first. Leading blocks cost least, since they attend to least. ``lru`` takes the
end of whatever was idle for longest. ``size-idle`` (Pensieve's first edition)
takes the trailing half of the conversation with most blocks × idle time.

What lies behind a missing block is of no use to the engine yet. So it asks
policies about the **ends** of what is kept (``values``): whose last block goes.
Tiers of a simulation have no such care (``victim``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.config.cache import CACHE_POLICIES
from fastdecode.schedule.cache.costs import FLAT_TO_HALF, CostTable

POLICIES: Final = CACHE_POLICIES
_INSTANT_S: Final = 1e-9
"""What was used this very moment was so long ago."""

Values: TypeAlias = NDArray[np.float64]


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


@dataclass(frozen=True, eq=False)
class Ends:
    """Last blocks of what is kept, [N] each."""

    costs: Values
    """To compute it again; see ``Policy.cost_of``."""
    idle_s: Values
    """Since somebody used it."""
    num_leases: Values
    """Conversations that share it, at least 1."""
    last_uses: Values
    """Number of its last use: a later one has a higher number."""
    num_owned: Callable[[], Values]
    """Asked for the blocks that are idle since that same use."""


class Policy(Protocol):
    """Chooses who leaves a tier next."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        """Of those that have blocks, in the order in which they appeared first;
        None: nobody has any."""

    def cost_of(self, num_tokens: int) -> float:
        """Of a block up to whose end there are so many tokens."""

    def values(self, ends: Ends) -> Values:
        """Of each, [N]: the lowest goes first."""

    def num_leaving(self, num_owned: int) -> int:
        """Of as many blocks that were last used together, how many leave at a time."""


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
        cost = self.cost((block + 1) * self.block_size)
        value: float = _retained(cost, idle_s, holding.num_leases)
        return value

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        lowest = min(filled, key=lambda each: self.value(each, each.blocks[0], now_s))
        return Victim(lowest, (lowest.blocks[0],))

    def cost_of(self, num_tokens: int) -> float:
        return self.cost(num_tokens)

    def values(self, ends: Ends) -> Values:
        return _retained(ends.costs, np.maximum(ends.idle_s, _INSTANT_S), ends.num_leases)

    def num_leaving(self, num_owned: int) -> int:
        return 1


@dataclass(frozen=True)
class LeastRecent:
    """The last block of whoever was idle for longest."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        oldest = min(filled, key=lambda each: each.last_s)
        return Victim(oldest, (oldest.blocks[-1],))

    def cost_of(self, num_tokens: int) -> float:
        return 1.0

    def values(self, ends: Ends) -> Values:
        return ends.last_uses

    def num_leaving(self, num_owned: int) -> int:
        return 1


@dataclass(frozen=True)
class SizeIdle:
    """The trailing half, rounded up, of the largest blocks × idle time."""

    def victim(self, holdings: Iterable[Holding], now_s: float) -> Victim | None:
        filled = [holding for holding in holdings if holding.blocks]
        if not filled:
            return None
        largest = max(filled, key=lambda each: len(each.blocks) * (now_s - each.last_s))
        kept = len(largest.blocks) - self.num_leaving(len(largest.blocks))
        return Victim(largest, tuple(largest.blocks[kept:]))

    def cost_of(self, num_tokens: int) -> float:
        return 1.0

    def values(self, ends: Ends) -> Values:
        return -ends.num_owned() * ends.idle_s

    def num_leaving(self, num_owned: int) -> int:
        return -(-num_owned // 2)


NumberT = TypeVar("NumberT", float, Values)


def _retained(cost: NumberT, idle_s: NumberT, num_leases: NumberT) -> NumberT:
    """V = Cost(l) / T × leases."""
    return cost / idle_s * num_leases


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
