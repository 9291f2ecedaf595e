"""Algorithms 1 and 2: worked cases, and every placement tried."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.placement_algorithms import algorithm_1, algorithm_2

from cost_model.goodput.placements import (
    Degrees,
    GpuCluster,
    Pair,
    RatedInstance,
    replicate,
)

TP1, TP2, TP4, PP2 = Degrees(1, 1), Degrees(2, 1), Degrees(4, 1), Degrees(1, 2)


def test_worked_case() -> None:
    prefill, decode = algorithm_1({TP1: 3, TP2: 7}, {TP1: 10, TP2: 18}, 20)
    assert prefill is not None and decode is not None
    assert (prefill.judged.what, prefill.count) == (TP2, 3)
    assert (decode.judged.what, decode.count) == (TP1, 2)
    assert prefill.num_gpus + decode.num_gpus == 8


def test_ties_go_to_fewer_gpus() -> None:
    prefill, decode = algorithm_1(
        {TP1: 4, TP2: 9, PP2: 7.9, TP4: 16}, {TP1: 9, TP2: 20, PP2: 17, TP4: 40}, 30
    )
    assert prefill is not None and decode is not None
    assert (prefill.judged.what, prefill.count, decode.judged.what, decode.count) == (
        TP2, 4, TP2, 2
    )  # fmt: skip
    assert prefill.num_gpus + decode.num_gpus == 12
    # 0.3 of 3 GPUs is 0.1 of one, whatever is left of it in binary.
    (best, _) = algorithm_1({Degrees(3, 1): 0.1 + 0.2, TP1: 0.1}, {}, 1.0)
    assert best is not None and best.judged.what == TP1


def test_three_tenths_are_three_times_a_tenth() -> None:
    assert replicate(RatedInstance(TP1, 0.1), 0.1 + 0.2).count == 3
    assert replicate(RatedInstance(TP1, 0.1), 0.31).count == 4
    assert replicate(RatedInstance(TP1, 5.0), 0.1).count == 1


def test_what_meets_no_slo_is_not_placed() -> None:
    prefill, decode = algorithm_1({TP1: 0.0}, {TP1: 2.0}, 1.0)
    assert prefill is None and decode is not None
    assert algorithm_2({Pair(1, 1, 1, 1, 1): 0.0}, 1.0) is None


@given(st.data(), st.integers(1, 2), st.integers(1, 4), st.floats(0.01, 100))
def test_equal_to_all_placements_of_up_to_4_gpus(
    data: st.DataObject, nodes: int, per_node: int, rate: float
) -> None:
    if nodes * per_node > 4:
        nodes = 1
    cluster = GpuCluster(nodes, per_node, heads=12, layers=8)
    total = nodes * per_node
    rates = st.integers(0, 40).map(lambda n: n / 4)
    phases = [
        {
            Degrees(tp, pp): data.draw(rates)
            for tp, pp in product(range(1, total + 1), repeat=2)
            if 12 % tp == 0 and 8 % pp == 0 and tp <= per_node and tp * pp <= total
            and -(-pp // (per_node // tp)) <= nodes
        }
        for _ in range(2)
    ]  # fmt: skip
    assert set(phases[0]) == set(cluster.instances())
    for found, phase in zip(algorithm_1(*phases, rate), phases, strict=True):
        best = max((goodput / each.num_gpus for each, goodput in phase.items()), default=0.0)
        assert (found is None) == (best == 0.0)
        if found is not None:
            assert found.judged.per_gpu == best
            assert (
                found.goodput
                >= rate * (1 - 1e-9)
                > (found.goodput - found.judged.goodput) * (1 - 2e-9)
            )
            equal = [each for each, goodput in phase.items() if goodput / each.num_gpus == best]
            assert found.judged.what.num_gpus == min(each.num_gpus for each in equal)
    brute = {
        Pair(*key): data.draw(rates)
        for key in product(*[range(1, 5)] * 5)
        if key[0] <= nodes and key[1] * key[2] + key[3] * key[4] <= per_node
        and all(12 % key[i] == 0 for i in (1, 3))
        and all(8 % (key[0] * key[i]) == 0 for i in (2, 4))
    }  # fmt: skip
    assert set(brute) == set(cluster.pairs())
    together = algorithm_2(brute, rate)
    best = max((goodput / pair.num_gpus for pair, goodput in brute.items()), default=0.0)
    assert (together is None) == (best == 0.0)
    if together is not None:
        assert together.judged.per_gpu == best and together.num_gpus >= 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_segments_stay_on_a_node(nodes: int) -> None:
    for pair in GpuCluster(nodes, 4, heads=40, layers=40).pairs():
        assert pair.segment_gpus <= 4 and pair.pp_cross <= nodes
        assert 40 % pair.prefill.pp == 40 % pair.decode.pp == 0
