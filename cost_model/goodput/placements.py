"""Placements: degrees of parallelism of a prefill and a decode instance, which of
them there are, and how many of each carry a rate (DistServe, section 4).

With high node affinity K and V cross nodes as quickly as they stay on one: each
phase has its own best instance (algorithm 1). With low affinity a pair is cut
in segments of layers, and a segment's stages of both phases are on one node, so
that K and V never leave it: pairs are judged together (algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from cost_model.goodput.rates import Load
from cost_model.goodput.simulator import GoodputRun
from cost_model.goodput.slo import RequestTimes


@dataclass(frozen=True, order=True)
class Degrees:
    """Tensor and pipeline parallelism of an instance."""

    tp: int
    pp: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def prefill(self) -> Degrees:
        """As of a ``Pair``."""
        return self

    decode = prefill

    def __str__(self) -> str:
        return f"tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, order=True)
class Pair:
    """A prefill and a decode instance, each cut in ``pp_cross`` segments, one a node."""

    pp_cross: int
    tp_prefill: int
    pp_prefill: int
    tp_decode: int
    pp_decode: int

    @property
    def num_gpus(self) -> int:
        return self.pp_cross * self.segment_gpus

    @property
    def segment_gpus(self) -> int:
        return self.tp_prefill * self.pp_prefill + self.tp_decode * self.pp_decode

    @property
    def prefill(self) -> Degrees:
        return Degrees(self.tp_prefill, self.pp_cross * self.pp_prefill)

    @property
    def decode(self) -> Degrees:
        return Degrees(self.tp_decode, self.pp_cross * self.pp_decode)

    def __str__(self) -> str:
        return (
            f"{self.pp_cross},{self.tp_prefill},{self.pp_prefill},{self.tp_decode},{self.pp_decode}"
        )


@dataclass(frozen=True)
class GpuCluster:
    """GPUs, and a model that is to be cut in parts."""

    num_nodes: int
    gpus_per_node: int
    heads: int
    layers: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def instances(self) -> Iterator[Degrees]:
        """Of one phase, anywhere: stages of a node's GPUs, on as many nodes as it
        takes. Degrees divide heads and layers."""
        for tp, pp in product(_divisors(self.heads), _divisors(self.layers)):
            if tp <= self.gpus_per_node and tp * pp <= self.num_gpus:
                stages_a_node = self.gpus_per_node // tp
                if math.ceil(pp / stages_a_node) <= self.num_nodes:
                    yield Degrees(tp, pp)

    def pairs(self) -> Iterator[Pair]:
        """All whose segments fit on a node, in as many segments as nodes at most."""
        layers, few = _divisors(self.layers), self.gpus_per_node
        crosses = [pp for pp in layers if pp <= self.num_nodes]
        tps = [tp for tp in _divisors(self.heads) if tp <= few]
        pps = [pp for pp in layers if pp <= few]
        for pair in map(Pair, *zip(*product(crosses, tps, pps, tps, pps), strict=True)):
            divides = all(degrees.pp in layers for degrees in (pair.prefill, pair.decode))
            if pair.segment_gpus <= few and divides:
                yield pair


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class PlacementPrices:
    """In any one unit; a socket costs a twentieth of a GPU, unless more is given."""

    gpu: float = 1.0
    socket: float = 0.05

    def of(self, gpus: int, sockets: int) -> float:
        return gpus * self.gpu + sockets * self.socket


@dataclass(frozen=True)
class InstanceGroup:
    role: Literal["prefill", "decode", "both"]
    degrees: Degrees
    count: int
    sockets: int
    """Of each, beside those of its own host."""
    goodput: float
    """Requests a second of each, by itself."""

    @property
    def is_on_device(self) -> bool:
        """K and V are in the GPUs' memory while it decodes."""
        return self.role != "prefill" and not self.sockets

    @property
    def num_gpus(self) -> int:
        return self.count * self.degrees.num_gpus

    @property
    def num_sockets(self) -> int:
        return self.count * self.sockets


@dataclass(frozen=True)
class PlacementPlan:
    kind: Literal["disaggregated", "colocated"]
    instances: tuple[InstanceGroup, ...]
    goodput: float
    """Requests a second that they carry."""
    load: Load
    run: GoodputRun
    """At the rate that they were made for."""
    segments: int = 1
    """Nodes that a pair is spread over."""

    @property
    def num_gpus(self) -> int:
        return sum(each.num_gpus for each in self.instances)

    @property
    def num_sockets(self) -> int:
        return sum(each.num_sockets for each in self.instances)

    @cached_property
    def counted(self) -> list[RequestTimes]:
        """The requests of the run that say whether the SLO is kept."""
        return self.run.counted(self.load.residence_s)

    @property
    def share(self) -> float:
        """The part of the requests that keep the SLO."""
        return self.load.slo.share(self.counted)

    @cached_property
    def is_carried(self) -> bool:
        """Enough requests keep the SLO, and they don't wait longer and longer."""
        return self.load.is_carried(self.run)

    @cached_property
    def quantiles(self) -> tuple[float, float]:
        """TTFT and TPOT at the attainment."""
        return self.load.slo.quantiles(self.counted)

    @property
    def binds(self) -> str:
        """Which limit the requests come nearer to."""
        (ttft_s, tpot_s), slo = self.quantiles, self.load.slo
        return "ttft" if ttft_s / slo.ttft_s >= tpot_s / slo.tpot_s else "tpot"

    @property
    def gpu_goodput(self) -> float:
        return self.goodput / self.num_gpus

    def carried_by(self, gpus: int) -> float:
        """Requests a second, of such instances on so many GPUs; 0: they don't
        hold one of each role."""
        first, *others = self.instances
        most = 0.0
        for count in range(1, gpus // first.degrees.num_gpus + 1):
            left, carried = gpus - count * first.degrees.num_gpus, count * first.goodput
            for other in others:
                num = count if self.segments > 1 else left // other.degrees.num_gpus
                fits = num * other.degrees.num_gpus <= left
                carried = min(carried, num * other.goodput) if fits else 0.0
            most = max(most, carried)
        return most

    def price(self, prices: PlacementPrices) -> float:
        return prices.of(self.num_gpus, self.num_sockets)
