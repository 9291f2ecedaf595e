"""How many KV blocks R-workers offer where each keeps a replica, too: worked cases, and
what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.schedule.ring import neighbour, num_offered, num_shared


def test_one_holder_has_no_neighbour() -> None:
    for act in (lambda: neighbour(HolderId(0), 1), lambda: num_offered([10])):
        with pytest.raises(ConfigError, match=r"second R-worker.* r_workers=2 .*replicas=0"):
            act()


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
