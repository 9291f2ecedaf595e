"""Which kept blocks make room: policies, put to work on what is idle."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import LLAMA2_7B, MISTRAL_7B

from examples import examples
from fastdecode.core.model.families import read_model_spec
from fastdecode.schedule.cache.costs import CostTable, costs_of
from fastdecode.schedule.cache.index import BlockIndex
from fastdecode.schedule.cache.retention import POLICIES, Holding, Retention, policy_of

SIZE = 32
COSTS = CostTable({32: 1.0, 1024: 2.0})


class Kept:
    """An index, and chains that are used one after the other."""

    def __init__(self, policy: str) -> None:
        self.index = BlockIndex(policy_of(policy, SIZE, COSTS))

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
                self.index.add(key, before, number * SIZE)
            before = key
        assert self.index.release(keys, now_s) == []
        return keys

    def give_up(self, count: int, now_s: float) -> list[str]:
        return [key.decode() for key in self.index.give_up(count, now_s)]


def test_what_is_cheap_for_its_idle_time_goes_first_and_of_a_chain_the_end() -> None:
    """V of the ends: a 1.97/100, b 1.23/90, c 1.0/30."""
    kept = Kept("retention")
    kept.use("a", 31, 0)
    kept.use("b", 8, 10)
    kept.use("c", 1, 70)
    assert kept.give_up(3, 100) == ["b7", "b6", "b5"]
    assert kept.give_up(6, 100) == ["b4", "b3", "b2", "b1", "b0", "a30"]
    assert Kept("retention").give_up(1, 9) == []


def test_the_value_is_that_of_the_simulated_policy() -> None:
    """Of chains of one block each nobody can tell the two apart."""
    kept, policy = Kept("retention"), Retention(SIZE, COSTS)
    holdings = [Holding(name, [0], last_s) for name, last_s in (("a", 3), ("b", 1), ("c", 2))]
    for holding in holdings:
        kept.use(holding.name, 1, holding.last_s)
    for _ in holdings:
        victim = policy.victim(holdings, 9)
        assert victim is not None
        holdings.remove(victim.holding)
        assert kept.give_up(1, 9) == [f"{victim.holding.name}0"]


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
    assert again == alone and kept.give_up(1, 30) == ["shared1"]


def test_a_conversation_whose_end_is_given_up_shares_nothing_any_more() -> None:
    kept = Kept("retention")
    first = kept.use("first", 2, 0, ("system", 2))
    second = kept.use("second", 2, 0, ("system", 2))
    for chain in (first, second):
        kept.index.lease(chain[-1])
    assert kept.give_up(4, 9) == ["first1", "first0", "second1", "second0"]
    assert kept.give_up(2, 9) == ["system1", "system0"]


def test_the_trailing_half_of_the_largest_for_its_idle_time_goes_together() -> None:
    kept = Kept("size-idle")
    kept.use("a", 9, 50)
    kept.use("b", 5, 0)
    assert kept.give_up(1, 100) == ["b4", "b3", "b2"], "5 × 100, rounded up"
    assert kept.give_up(4, 100) == ["a8", "a7", "a6", "a5", "a4"]


def test_least_recently_used_ends_go_first() -> None:
    kept = Kept("lru")
    kept.use("a", 2, 0)
    kept.use("b", 2, 0)
    kept.use("a", 2, 0)
    assert kept.give_up(4, 0) == ["b1", "b0", "a1", "a0"], "though all at the same moment"


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 4)), max_size=12),
    st.lists(st.integers(1, 6), max_size=6),
    st.sampled_from(POLICIES),
)
def test_whatever_the_policy_only_ends_go_and_all_of_them_in_the_end(
    uses: list[tuple[int, int, int]], counts: list[int], policy: str
) -> None:
    """Chains branch off from another's first blocks."""
    kept = Kept(policy)
    for now_s, (name, num_blocks, num_common) in enumerate(uses):
        branch = f"c{name}-{num_common}-" if num_common else f"c{name}-"
        kept.use(branch, num_blocks, now_s, ("root", num_common))
        if counts:
            kept.give_up(min(counts.pop(), len(kept.index.idle)), now_s + 1)
        kept.index.check_invariants(Counter())
        assert not any(block.num_users for block in kept.index)
        assert all(block.parent is None or block.parent.key in kept.index for block in kept.index)
    num_idle = len(kept.index.idle)
    assert len(kept.give_up(num_idle, 99)) == num_idle and not kept.index.idle


def test_costs_follow_from_the_model() -> None:
    llama, mistral = (read_model_spec(x, name="demo") for x in (LLAMA2_7B, MISTRAL_7B))
    costs = costs_of(llama)
    assert 1 < costs(64) < costs(4096)
    assert math.isclose(costs(8192) - 1, 2 * (costs(4096) - 1))
    assert costs_of(mistral)(4096) == costs_of(mistral)(8192), "its layers see no more"
