"""Placements: worked cases of the paper's algorithms, and every placement tried."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.placement_algorithms import best_per_gpu

from cost_model.goodput.placements import Degrees, InstanceHardware, Pair
from cost_model.goodput.search import Chosen, Objective, Question, Search, What
from cost_model.numbers import whole

TP1, TP2, TP4, PP2 = Degrees(1, 1), Degrees(2, 1), Degrees(4, 1), Degrees(1, 2)


def asked(rate: float, objective: Objective) -> Question:
    return Question("", None, None, rate, "high", 2, objective, (1.0, 0.25))  # type: ignore[arg-type]


class Known(Search):
    """Instances whose goodputs are known, by what they are and how many sockets each has."""

    known: Mapping[tuple[What, int], float]

    def fewest(self, kind: object, what: What, sockets: int, most: int) -> int:
        goodput = self.known[what, sockets]
        count = whole(self.asked.rate / goodput) if goodput else 0
        return count if count <= most else 0


def cheapest(
    goodputs: Mapping[tuple[What, int], float], rate: float, objective: Objective = "gpu"
) -> Chosen | None:
    search = Known(asked(rate, objective))
    search.known = goodputs
    return search.cheapest("both", goodputs)


def alone(goodputs: Mapping[Degrees, float]) -> dict[tuple[What, int], float]:
    return {(degrees, 0): goodput for degrees, goodput in goodputs.items()}


def test_the_best_a_gpu_may_take_more_gpus() -> None:
    """4.95 a GPU is more than 4, but two pairs of GPUs carry 10, and so do three single ones."""
    goodputs = {TP1: 4.0, TP2: 9.9}
    assert best_per_gpu(goodputs, 10.0) == (TP2, 2)
    assert cheapest(alone(goodputs), 10.0) == Chosen(TP1, 0, 3)


@given(st.data(), st.sampled_from(("gpu", "cost")), st.floats(0.01, 100))
def test_none_is_cheaper(data: st.DataObject, objective: Objective, rate: float) -> None:
    rates = st.integers(0, 40).map(lambda n: n / 4)
    goodputs: dict[tuple[What, int], float] = {
        (degrees, sockets): data.draw(rates)
        for degrees in (TP1, PP2, TP2, TP4)
        for sockets in (0, 1, 2, 4, 8)
    }

    def cost(what: What, sockets: int, count: int) -> tuple[float, ...]:
        gpus, price = count * what.num_gpus, count * (what.num_gpus + 0.25 * sockets)
        return (gpus, price) if objective == "gpu" else (price, gpus)

    costs = [cost(*key, whole(rate / goodput)) for key, goodput in goodputs.items() if goodput > 0]
    found = cheapest(goodputs, rate, objective)
    assert (found is None) == (not costs)
    if found is not None:
        assert cost(found.what, found.sockets, found.count) == min(costs)
    # The paper's way never takes fewer GPUs.
    without = {what: goodput for (what, sockets), goodput in goodputs.items() if not sockets}
    paper = best_per_gpu(without, rate)  # type: ignore[type-var]
    ours = cheapest({(what, 0): goodput for what, goodput in without.items()}, rate)
    assert (paper is None) == (ours is None)
    if paper is not None and ours is not None:
        assert ours.count * ours.what.num_gpus <= paper[1] * paper[0].num_gpus


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 3), (1, 4), (2, 1), (2, 2)])
def test_all_instances_and_pairs_that_there_are(nodes: int, per_node: int) -> None:
    model = SimpleNamespace(spec=SimpleNamespace(num_q_heads=12, num_layers=8))
    hardware = InstanceHardware(model, nodes, per_node, 8, 512.0)  # type: ignore[arg-type]
    total = nodes * per_node
    assert set(hardware.instances()) == {
        Degrees(tp, pp)
        for tp, pp in product(range(1, total + 1), repeat=2)
        if 12 % tp == 0 and 8 % pp == 0 and tp <= per_node and tp * pp <= total
        and -(-pp // (per_node // tp)) <= nodes
    }  # fmt: skip
    assert set(hardware.pairs()) == {
        Pair(cross, Degrees(tp, cross * pp), Degrees(other_tp, cross * other_pp))
        for cross, tp, pp, other_tp, other_pp in product(*[range(1, 5)] * 5)
        if cross <= nodes and tp * pp + other_tp * other_pp <= per_node
        and 12 % tp == 12 % other_tp == 8 % (cross * pp) == 8 % (cross * other_pp) == 0
    }  # fmt: skip
