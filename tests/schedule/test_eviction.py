"""Which kept blocks make room: policies, put to work on what is idle."""

from __future__ import annotations

import math

import pytest
from holdings import Holding, victim_of
from published_configs import LLAMA2_7B, MISTRAL_7B

from fastdecode.core.model.families import read_model_spec
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.cache.retention import (
    CostTable,
    LeastRecent,
    Retention,
    costs_of,
    is_short,
)

SIZE = 32
COSTS = CostTable({32: 1.0, 1024: 2.0})
MEASURED = CostTable(
    {32: 1.01, 64: 1.02, 128: 1.03, 256: 1.05, 512: 1.08, 1024: 1.15, 2048: 1.27, 4096: 1.5}
)


class Kept:
    """An index, and chains that are used one after the other."""

    def __init__(self, policy: str) -> None:
        self.index = Index(LeastRecent() if policy == "lru" else Retention(SIZE, COSTS))

    def use(
        self, name: str, num_blocks: int, now_s: float, behind: tuple[str, int] = ("", 0)
    ) -> list[bytes]:
        """A chain of so many blocks, behind the first ones of another, is used,
        and idle from now on. Gives its keys."""
        keys = [f"{behind[0]}{i}".encode() for i in range(behind[1])]
        keys += [f"{name}{i}".encode() for i in range(num_blocks)]
        before = None
        for number, key in enumerate(keys, 1):
            if key in self.index:
                self.index.use([key], as_hit=True)
            else:
                self.index.name(key, before, number * SIZE)
            before = key
        assert self.index.release(keys, now_s) == []
        return keys

    def give_up(self, count: int, now_s: float) -> list[str]:
        return [key.decode() for key in self.index.evict(count, now_s)]


def test_what_is_cheap_for_its_idle_time_goes_first_and_of_a_chain_the_end() -> None:
    """V of the ends: a 1.97/100, b 1.23/90, c 1.0/30."""
    kept = Kept("retention")
    kept.use("a", 31, 0)
    kept.use("b", 8, 10)
    kept.use("c", 1, 70)
    assert kept.give_up(3, 100) == ["b7", "b6", "b5"]
    assert kept.give_up(6, 100) == ["b4", "b3", "b2", "b1", "b0", "a30"]
    assert Kept("retention").give_up(1, 9) == []


def test_what_got_idle_last_stays_however_many_are_evicted_after_a_first_one() -> None:
    """A look at all blocks remembers only some of those that are worth least."""
    kept = Kept("retention")
    for number in range(1000):
        kept.use(f"{number}/", 1, number)
    assert kept.give_up(1, 10_000) == ["0/0"]
    kept.use("late/", 1, 9999)
    gone = [key for count in (*[1] * 300, 600) for key in kept.give_up(count, 10_000)]
    assert gone == [f"{number}/0" for number in range(1, 901)]


def test_of_a_conversation_the_blocks_that_cost_least_go_first() -> None:
    """Whoever says that it goes on needs its end as much as its beginning."""
    kept = Kept("retention")
    said, alone = kept.use("said", 3, 0), kept.use("alone", 3, 0)
    kept.index.lease(said[-1])
    assert kept.give_up(2, 100) == ["said0", "said1"]
    assert kept.give_up(4, 100)[1:] in (
        ["alone2", "alone1", "alone0"],
        ["said2", "alone1", "alone0"],
    )
    assert not {*said, *alone} & {block.key for block in kept.index}


def test_the_order_is_that_of_the_simulated_policy_block_by_block() -> None:
    """Pensieve's chunks: A [0, 1024) was last used at 40, B [512, 2048) at 80, C
    [0, 64) at 10, D [1536, 4096) at 30; it is 100."""
    policy = Retention(SIZE, MEASURED)
    index = Index(policy)
    holdings = []
    for name, first, stop, last_s in (
        ("A", 0, 1024, 40),
        ("B", 512, 2048, 80),
        ("C", 0, 64, 10),
        ("D", 1536, 4096, 30),
    ):
        keys = [f"{name}{at}".encode() for at in range(0, stop, SIZE)]
        for at, key in zip(range(0, stop, SIZE), keys, strict=True):
            index.name(key, keys[at // SIZE - 1] if at else None, at + SIZE)
        index.lease(keys[-1])
        index.release(keys, -1e9)
        assert set(index.evict(first // SIZE, -1e9 + 1)) == set(keys[: first // SIZE])
        index.use(keys[first // SIZE :], as_hit=True)
        index.release(keys[first // SIZE :], last_s)
        holdings.append(Holding(name, list(range(first // SIZE, stop // SIZE)), last_s))
    expected = []
    for _ in range(40):
        victim = victim_of(policy, holdings, 100, SIZE)
        assert victim is not None
        holding, block = victim
        holding.blocks.remove(block)
        expected.append(f"{holding.name}{block * SIZE}")
    assert expected[:8] == ["C0", "C32", "A0", "A32", "A64", "A96", "A128", "A160"]
    assert [key.decode() for key in index.evict(40, 100)] == expected


def test_what_conversations_share_is_worth_what_all_of_them_would_pay() -> None:
    kept = Kept("retention")
    shared, alone = kept.use("shared", 2, 0), kept.use("alone", 2, 10)
    kept.index.use(shared, as_hit=True)
    kept.index.lease(shared[-1])
    kept.index.lease(shared[-1])
    kept.index.release(shared, 0)
    assert kept.give_up(2, 30) == ["alone1", "alone0"], "1.03/20 against 2 × 1.03/30"
    kept.index.end_turn(shared[-1])
    again = kept.use("alone", 2, 10)
    assert again == alone and kept.give_up(1, 30) == ["shared0"]


def test_least_recently_used_ends_go_first() -> None:
    kept = Kept("lru")
    kept.use("a", 2, 0)
    kept.use("b", 2, 0)
    kept.use("a", 2, 0)
    assert kept.give_up(4, 0) == ["b1", "b0", "a1", "a0"], "though all at the same moment"


def test_costs_follow_from_the_model() -> None:
    llama, mistral = (read_model_spec(x, name="demo") for x in (LLAMA2_7B, MISTRAL_7B))
    costs = costs_of(llama)
    assert 1 < costs(64) < costs(4096)
    assert math.isclose(costs(8192) - 1, 2 * (costs(4096) - 1))
    assert costs_of(mistral)(4096) == costs_of(mistral)(8192), "its layers see no more"


def test_what_is_in_use_goes_last() -> None:
    holdings = [Holding("used", [0], 100), Holding("idle", [127], 99)]
    victim = victim_of(Retention(SIZE, MEASURED), holdings, 100, SIZE)
    assert victim is not None and victim[0].name == "idle"


def test_costs_are_linear_between_what_was_measured_and_beyond() -> None:
    assert MEASURED(96) == pytest.approx(1.025) and MEASURED(4096) == 1.5
    assert MEASURED(8192) == pytest.approx(1.96) and MEASURED(1) < MEASURED(32)


def test_the_end_of_what_was_idle_for_longest_goes_first() -> None:
    tokens = {"A": (1000, 90), "B": (300, 40), "C": (100, -20)}
    holdings = [Holding(name, list(range(n)), last) for name, (n, last) in tokens.items()]
    oldest = victim_of(LeastRecent(), holdings, 100, 1)
    assert oldest is not None and (oldest[0].name, oldest[1]) == ("C", 99)


def test_the_threshold_is_strict() -> None:
    assert [is_short(free, 1000, 0.5) for free in (500, 499, 501)] == [False, True, False]
