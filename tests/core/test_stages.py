"""Which stage has which layers."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fastdecode.core.errors import ConfigError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.stages import layers_of_stages, split_layers


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 60))
def test_no_other_cut_is_cheaper_or_as_cheap_and_more_even(
    costs: list[int], num_stages: int, head: int
) -> None:
    num_stages = min(num_stages, len(costs))

    def told(stages: tuple[range, ...]) -> tuple[int, int]:
        each = [sum(costs[i] for i in layers) for layers in stages]
        each[0] += head
        return max(each), sum(cost * cost for cost in each)

    stages = split_layers(costs, num_stages, head)
    assert [i for layers in stages for i in layers] == list(range(len(costs)))
    assert len(stages) == num_stages and all(stages)
    others = [
        tuple(range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    ]
    assert told(stages) == min(map(told, others))


def test_the_first_stage_has_fewer_layers_where_the_head_is_large() -> None:
    assert split_layers([1.0] * 12, 3) == (range(4), range(4, 8), range(8, 12))
    assert split_layers([1.0] * 12, 3, 3.0) == (range(2), range(2, 7), range(7, 12))


def test_counts_by_hand(tiny_checkpoint) -> None:  # type: ignore[no-untyped-def]
    path: Path = tiny_checkpoint("llama")
    spec = open_checkpoint(path).spec()
    assert layers_of_stages(spec, 2, (1, 2)) == (range(1), range(1, 3))
    assert len(layers_of_stages(spec, 3)) == 3
    for num_stages, counts in ((2, (1, 1)), (2, (3,)), (2, (0, 3))):
        with pytest.raises(ConfigError, match="add up to the 3 layers"):
            layers_of_stages(spec, num_stages, counts)
    with pytest.raises(ConfigError, match="every stage needs one"):
        layers_of_stages(spec, 4)
