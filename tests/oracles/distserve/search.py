"""simdistserve's search: every placement of a prefill and a decode instance on
so many GPUs, the greatest rate a GPU of each by bisection, and the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from cost_model.goodput.placements import Degrees, GpuCluster, Pair
from cost_model.goodput.slo import RequestTimes, Slo
from fastdecode.core.errors import ConfigError
from oracles.distserve.profile import PublishedModel
from oracles.distserve.simulator import simulate_colocated, simulate_disaggregated


@dataclass(frozen=True)
class SearchQuestion:
    """The question: what comes, and what it must keep."""

    unit_gaps: Sequence[float]
    """Before each request, divided by the rate: seconds."""
    lengths: Sequence[tuple[int, int]]
    """Prompt and output tokens."""
    slo: Slo
    max_gpu_rate: float
    """Requests a second and GPU, beyond which nobody looks."""
    step: float
    """The rate is found to this."""


def placements(
    model: PublishedModel, num_nodes: int, gpus_per_node: int, *, is_high_affinity: bool
) -> list[Pair]:
    """All that there are, whether or not the profile can run them."""
    cluster = GpuCluster(num_nodes, gpus_per_node, model.heads, model.layers)
    return list(_pairs_anywhere(cluster) if is_high_affinity else cluster.pairs())


def _pairs_anywhere(cluster: GpuCluster) -> Iterator[Pair]:
    """Pairs that know no nodes: the search with high affinity."""
    most = cluster.num_gpus
    tps, pps = (
        [each for each in range(1, min(number, most) + 1) if number % each == 0]
        for number in (cluster.heads, cluster.layers)
    )
    pairs = (Pair(1, *each) for each in product(tps, pps, tps, pps))
    return (pair for pair in pairs if pair.num_gpus <= most)


def is_runnable(model: PublishedModel, placement: Pair) -> bool:
    return all(
        model.is_runnable(degrees.tp, degrees.pp)
        for degrees in (placement.prefill, placement.decode)
    )


def gpu_goodput(model: PublishedModel, placement: Pair, asked: SearchQuestion) -> float:
    """Requests a second and GPU; 0 where the lowest rate tried is too high."""

    def run(requests: Sequence[tuple[float, int, int]]) -> list[RequestTimes]:
        return simulate_disaggregated(requests, model, placement.prefill, placement.decode)

    return _bisect(run, placement.num_gpus, asked)


def colocated_goodput(model: PublishedModel, degrees: Degrees, asked: SearchQuestion) -> float:
    """As ``gpu_goodput``, of one instance for both."""

    def run(requests: Sequence[tuple[float, int, int]]) -> list[RequestTimes]:
        return simulate_colocated(requests, model, degrees)

    return _bisect(run, degrees.tp * degrees.pp, asked)


def _bisect(
    run: Callable[[Sequence[tuple[float, int, int]]], list[RequestTimes]],
    num_gpus: int,
    asked: SearchQuestion,
) -> float:
    low, high = 0.0, asked.max_gpu_rate
    while high - low > asked.step:
        middle = (low + high) / 2
        rate = middle * num_gpus
        arrivals = accumulate(gap / rate for gap in asked.unit_gaps)
        requests = [(at_s, *pair) for at_s, pair in zip(arrivals, asked.lengths, strict=True)]
        if asked.slo.is_attained(run(requests), "each"):
            low = middle
        else:
            high = middle
    return low


def best_placement(
    model: PublishedModel,
    candidates: Iterable[Pair],
    asked: SearchQuestion,
    progress: Callable[[], object] = lambda: None,
) -> tuple[Pair, dict[Pair, float]]:
    """The placement with the greatest goodput a GPU, and that of all; of equal
    ones, the one with the fewest GPUs.

    Raises:
        ConfigError: the profile can't run any.
    """
    found = {}
    for placement in candidates:
        if is_runnable(model, placement):
            found[placement] = gpu_goodput(model, placement, asked)
            progress()
    if not found:
        raise ConfigError(
            f"the published profile can't run {model.name} on so few GPUs: give more of them"
        )
    best = min(found, key=lambda each: (-found[each], each.num_gpus, each))
    return best, found
