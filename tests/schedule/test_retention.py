"""Policies on worked cases: Pensieve's two editions."""

from __future__ import annotations

import pytest

from fastdecode.schedule.cache.costs import CostTable
from fastdecode.schedule.cache.retention import (
    Holding,
    LeastRecent,
    Retention,
    SizeIdle,
    is_short,
)

CHUNK = 32
COSTS = CostTable(
    {32: 1.01, 64: 1.02, 128: 1.03, 256: 1.05, 512: 1.08, 1024: 1.15, 2048: 1.27, 4096: 1.5}
)


def chunks(name: str, first: int, end: int, last_s: float, leases: int = 1) -> Holding:
    """A conversation whose tokens from ``first`` to ``end`` are there."""
    return Holding(name, list(range(first // CHUNK, end // CHUNK)), last_s, leases)


def order(policy: Retention, holdings: list[Holding], count: int, now_s: float) -> list[str]:
    """Who goes first, and which of its tokens."""
    gone = []
    for _ in range(count):
        victim = policy.victim(holdings, now_s)
        assert victim is not None
        (block,) = victim.blocks
        victim.holding.blocks.remove(block)
        gone.append(f"{victim.holding.name}{block * CHUNK}")
    return gone


def test_the_lowest_value_goes_first_and_of_one_conversation_its_beginning() -> None:
    holdings = [
        chunks("A", 0, 1024, 40),
        chunks("B", 512, 2048, 80),
        chunks("C", 0, 64, 10),
        chunks("D", 1536, 4096, 30),
    ]
    policy = Retention(CHUNK, COSTS)
    assert policy.value(holdings[2], 0, 100) == pytest.approx(1.01 / 90)
    expected = ["C0", "C32", "A0", "A32", "A64", "A96", "A128", "A160"]
    assert order(policy, holdings, 8, 100) == expected


def test_what_many_share_is_worth_what_all_of_them_would_pay() -> None:
    shared, own = chunks("system", 0, 32, 0, leases=5), chunks("own", 2048, 4096, 50)
    assert order(Retention(CHUNK, COSTS), [shared, own], 1, 100) == ["own2048"]


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
    victim = SizeIdle().victim(holdings, 100)
    assert victim is not None and victim.holding.name == "B"
    assert victim.blocks == tuple(range(150, 300))
    odd = SizeIdle().victim([Holding("odd", [0, 1, 2], 0)], 9)
    assert odd is not None and odd.blocks == (1, 2), "rounded up"
    oldest = LeastRecent().victim(holdings, 100)
    assert oldest is not None and (oldest.holding.name, oldest.blocks) == ("C", (99,))


def test_nobody_goes_where_nothing_is() -> None:
    for policy in (Retention(CHUNK), LeastRecent(), SizeIdle()):
        assert policy.victim([Holding("a", [], 0)], 9) is None


def test_the_threshold_is_strict() -> None:
    assert [is_short(free, 1000, 0.5) for free in (500, 499, 501)] == [False, True, False]
