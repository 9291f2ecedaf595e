"""Who keeps whose replica, and what a loss comes to: worked cases, and what
holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.schedule.ring import (
    Copy,
    ResumePoint,
    neighbour,
    num_offered,
    num_shared,
    plan_recovery,
)


def holders(*numbers: int) -> list[HolderId]:
    return [HolderId(number) for number in numbers]


def copy(source: int, target: int, owner: int) -> Copy:
    return Copy(*holders(source, target, owner))


def test_one_of_four_is_lost() -> None:
    """Lane 0 is acked to step 2, the others to step 1: the next that runs is
    lane 1's step 2."""
    plan = plan_recovery(4, holders(1), [2, 1, 1, 1])
    assert plan.adopted == {1: 2}
    assert plan.recomputed == ()
    assert plan.copies == (copy(2, 1, 1), copy(0, 1, 0))
    assert plan.resume == ResumePoint(lane=1, step=2)
    assert plan.tell == (0, 1, 2, 3)


def test_two_neighbours_are_lost() -> None:
    """Holder 1's cache and its replica on 2 are both gone; 2's replica is on 3."""
    plan = plan_recovery(5, holders(1, 2), [4, 4])
    assert plan.recomputed == (1,)
    assert plan.adopted == {2: 3}
    assert plan.copies == (copy(0, 1, 0), copy(3, 2, 2))


def test_two_that_are_apart_are_lost() -> None:
    plan = plan_recovery(4, holders(3, 1), [7, 7])
    assert plan.adopted == {1: 2, 3: 0}
    assert plan.recomputed == ()
    assert plan.resume == ResumePoint(lane=0, step=8)


def test_of_two_holders_each_is_the_others_neighbour() -> None:
    plan = plan_recovery(2, holders(0), [-1])
    assert plan.adopted == {0: 1}
    assert plan.resume == ResumePoint(lane=0, step=0)
    assert plan.copies == (copy(1, 0, 0), copy(1, 0, 1))


def test_before_a_copy_is_whole_it_is_recomputed() -> None:
    plan = plan_recovery(3, holders(0), [5], without_replica=holders(0))
    assert (plan.adopted, plan.recomputed, plan.resume) == ({}, (0,), None)
    assert plan.tell == ()


def test_all_are_lost() -> None:
    plan = plan_recovery(3, holders(0, 1, 2), [5])
    assert (plan.adopted, plan.recomputed, plan.copies) == ({}, (0, 1, 2), ())


def test_one_holder_has_no_neighbour() -> None:
    for act in (lambda: neighbour(HolderId(0), 1), lambda: num_offered([10])):
        with pytest.raises(ConfigError, match=r"second R-worker.* r_workers=2 .*replicas=0"):
            act()
    with pytest.raises(ConfigError, match="second R-worker"):
        plan_recovery(1, holders(0), [0])


def test_capacities_fit_on_both_sides() -> None:
    assert num_offered([10, 10, 10]) == (5, 5, 5)
    assert num_offered([100, 11, 40]) == (5, 5, 20)
    with pytest.raises(ConfigError, match="R-worker 0 and its neighbour have 1 KV block"):
        num_offered([9, 1])


@given(st.lists(st.integers(2, 1000), min_size=2, max_size=9))
def test_a_cache_and_a_replica_fit_everywhere(blocks: list[int]) -> None:
    try:
        offered = num_offered(blocks)
    except ConfigError:
        assert min(blocks) < 2
        return
    for index, own in enumerate(offered):
        replica = offered[index - 1]
        assert own >= 1 and own + replica <= blocks[index]


@given(
    num_holders=st.integers(2, 8),
    failed=st.sets(st.integers(0, 7)),
    bare=st.sets(st.integers(0, 7)),
    acked=st.lists(st.integers(-1, 50), min_size=1, max_size=5),
)
def test_plans(num_holders: int, failed: set[int], bare: set[int], acked: list[int]) -> None:
    lost = {HolderId(x) for x in failed if x < num_holders}
    plan = plan_recovery(num_holders, lost, acked, {HolderId(x) for x in bare})
    assert {*plan.adopted, *plan.recomputed} == lost
    assert not {*plan.adopted}.intersection(plan.recomputed)
    for holder, keeper in plan.adopted.items():
        assert keeper == neighbour(holder, num_holders) not in lost
        assert holder not in bare
    for each in plan.copies:
        assert each.source not in lost and each.target in lost
        assert each.owner in (each.source, each.target)
    if plan.resume is not None:
        before = plan.resume.step, plan.resume.lane
        for lane, last in enumerate(acked):
            assert all(step <= last for step in range(60) if (step, lane) < before)
        assert plan.resume.step == acked[plan.resume.lane] + 1


def test_those_that_share_heads_offer_alike() -> None:
    """Each keeps its own heads of as many blocks, and those of the one before it."""
    assert num_shared([10, 10], [4, 4]) == 5
    assert num_shared([30, 20, 20], [2, 3, 3]) == 10  # 60 bytes for 3 + 2 each, then 60 for 5, 6
    with pytest.raises(ConfigError, match="no memory for a KV block and a replica"):
        num_shared([1, 10], [4, 4])
    with pytest.raises(ConfigError, match="a second R-worker"):
        num_shared([10], [4])


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 9)), min_size=2, max_size=6))
def test_what_is_offered_fits_beside_the_replica_and_no_more_does(
    members: list[tuple[int, int]],
) -> None:
    blocks, sizes = ([one[i] for one in members] for i in (0, 1))
    needed = [size + sizes[index - 1] for index, size in enumerate(sizes)]
    memory = [number * size for number, size in zip(blocks, sizes, strict=True)]
    try:
        offered = num_shared(blocks, sizes)
    except ConfigError:
        offered = 0
    assert all(offered * need <= have for need, have in zip(needed, memory, strict=True))
    assert any((offered + 1) * need > have for need, have in zip(needed, memory, strict=True))
