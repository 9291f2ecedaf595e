"""Policies on worked cases: Pensieve's two editions."""

from __future__ import annotations

import pytest
from holdings import Holding, victim_of

from cost_model.turns import Tier
from fastdecode.schedule.cache.costs import CostTable
from fastdecode.schedule.cache.retention import (
    LeastRecent,
    Retention,
    SizeIdle,
    is_short,
)

CHUNK = 32
COSTS = CostTable(
    {32: 1.01, 64: 1.02, 128: 1.03, 256: 1.05, 512: 1.08, 1024: 1.15, 2048: 1.27, 4096: 1.5}
)


def chunks(name: str, first: int, end: int, last_s: float) -> Holding:
    """A conversation whose tokens from ``first`` to ``end`` are there."""
    return Holding(name, list(range(first // CHUNK, end // CHUNK)), last_s)


def order(policy: Retention, holdings: list[Holding], count: int, now_s: float) -> list[str]:
    """Who goes first, and which of its tokens."""
    gone = []
    for _ in range(count):
        victim = victim_of(policy, holdings, now_s, CHUNK)
        assert victim is not None
        holding, (block,) = victim
        holding.blocks.remove(block)
        gone.append(f"{holding.name}{block * CHUNK}")
    return gone


def test_what_is_in_use_goes_last() -> None:
    used, idle = chunks("used", 0, 32, 100), chunks("idle", 4064, 4096, 99)
    assert order(Retention(CHUNK, COSTS), [used, idle], 2, 100) == ["idle4064", "used0"]


def test_costs_are_linear_between_what_was_measured_and_beyond() -> None:
    assert COSTS(96) == pytest.approx(1.025) and COSTS(4096) == 1.5
    assert COSTS(8192) == pytest.approx(1.96) and COSTS(1) < COSTS(32)


def test_size_and_idle_time_choose_whose_trailing_half_goes() -> None:
    """Scores 10,000, 18,000 and 12,000; the least recent is C, the largest A."""
    tokens = {"A": (1000, 90), "B": (300, 40), "C": (100, -20)}
    holdings = [Holding(name, list(range(n)), last) for name, (n, last) in tokens.items()]
    victim = victim_of(SizeIdle(), holdings, 100, 1)
    assert victim is not None and victim[0].name == "B"
    assert victim[1] == list(range(150, 300))
    odd = victim_of(SizeIdle(), [Holding("odd", [0, 1, 2], 0)], 9, 1)
    assert odd is not None and odd[1] == [1, 2], "rounded up"
    oldest = victim_of(LeastRecent(), holdings, 100, 1)
    assert oldest is not None and (oldest[0].name, oldest[1]) == ("C", [99])


def test_nobody_goes_where_nothing_is() -> None:
    for policy in (Retention(CHUNK), LeastRecent(), SizeIdle()):
        tier = Tier(policy, CHUNK)
        assert tier.leave(9) is None
        tier.hold(0, [0, 1], 3)
        tier.hold(0, [], 3)
        assert tier.leave(9) is None and tier.num_blocks == 0


def test_the_threshold_is_strict() -> None:
    assert [is_short(free, 1000, 0.5) for free in (500, 499, 501)] == [False, True, False]
