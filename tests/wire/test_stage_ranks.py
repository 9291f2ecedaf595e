"""Which ranks of a job are stages, and whose R-workers the others are."""

from __future__ import annotations

import pytest

from fastdecode.core.errors import ConfigError
from fastdecode.wire.ranks import StageRanks


def r_workers(num_stages: int, num_ranks: int, tp: int = 1) -> list[list[int]]:
    """Of each stage, in a job of so many ranks."""
    ranks = StageRanks(num_stages, tp)
    return [list(ranks.r_workers(num_ranks, stage)) for stage in range(num_stages)]


def test_each_stage_has_as_many() -> None:
    assert r_workers(2, 6) == [[2, 3], [4, 5]]
    assert r_workers(3, 6) == [[3], [4], [5]]
    assert r_workers(2, 6, tp=2) == [[4], [5]]


@pytest.mark.parametrize(("num_ranks", "left"), [(5, 3), (2, 0), (1, 0)])
def test_r_workers_that_cant_be_shared_out(num_ranks: int, left: int) -> None:
    with pytest.raises(ConfigError, match=f"{left} are left, which isn't a multiple of 2"):
        r_workers(2, num_ranks)


def test_several_s_workers_of_a_stage_stand_side_by_side() -> None:
    ranks = StageRanks(2, tp=2)
    assert [(ranks.stage(rank), ranks.place(rank)) for rank in range(4)] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    assert [ranks.role(rank).name for rank in range(5)] == [
        "LEADER", "MIRROR", "STAGE", "MIRROR", "R_WORKER",
    ]  # fmt: skip
    assert [ranks.leader(stage) for stage in range(2)] == [0, 2]


def test_with_r_workers_at_addresses_all_ranks_are_stages() -> None:
    StageRanks(2, tp=2).check_none_left(4)
    for size in (3, 6):
        with pytest.raises(ConfigError, match=f"takes 4 MPI ranks .* and {size} were started"):
            StageRanks(2, tp=2).check_none_left(size)


def test_a_stage_is_connected_to_the_first_and_its_neighbours() -> None:
    assert [StageRanks(3).others(stage) for stage in range(3)] == [[1, 2], [0, 2], [0, 1]]
