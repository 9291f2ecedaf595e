"""Instances that given hardware can make: degrees of parallelism, times, batches, memory, ports.

With high node affinity K and V cross nodes as quickly as they stay on one: each phase has its own
best instance (DistServe, algorithm 1). With low affinity a pair is cut in segments of layers, and a
segment's stages of both phases are on one node, so that K and V never leave it: pairs are judged
together (algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from cost_model.goodput.instances import DecodeSpec, PrefillSpec
from cost_model.hardware import Gpu
from cost_model.plans.question import Setup
from cost_model.predict import MAX_LANES, System
from cost_model.step_time import SystemTime
from cost_model.workload import Workload
from fastdecode.schedule.simulation.instance_time import InstanceTime

ENOUGH_THROUGHPUT = 0.95
"""A batch is large enough when it gives this part of the best tokens per second."""
_BATCHES = tuple(64 << i for i in range(9))
SOCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_NO_PROMPTS = Workload(0, 1)
"""Simulated prompts come on top."""


@dataclass(frozen=True, order=True)
class Degrees:
    tp: int
    pp: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def prefill(self) -> Degrees:
        """The instance itself, as ``Pair`` has it."""
        return self

    decode = prefill

    def __str__(self) -> str:
        return f"tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, order=True)
class Pair:
    """A prefill and a decode instance, each cut in ``pp_cross`` segments, one per node."""

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


@dataclass(frozen=True)
class GpuCluster:
    """GPUs, and the model that is to be cut in parts."""

    num_nodes: int
    gpus_per_node: int
    heads: int
    layers: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def instances(self) -> Iterator[Degrees]:
        """Yield instances of one phase: stages of a node's GPUs, on as many nodes as they need.
        Degrees divide heads and layers."""
        for tp, pp in product(_divisors(self.heads), _divisors(self.layers)):
            if tp <= self.gpus_per_node and tp * pp <= self.num_gpus:
                stages_per_node = self.gpus_per_node // tp
                if math.ceil(pp / stages_per_node) <= self.num_nodes:
                    yield Degrees(tp, pp)

    def pairs(self) -> Iterator[Pair]:
        """Yield pairs whose segments fit on a node, in at most as many segments as nodes."""
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
class InstanceHardware:
    """A model on nodes of equal GPUs, with CPU sockets beside them.

    Args:
        setup: Setup of one GPU. Its workload holds the longest request.
        max_sockets: Most sockets of a decode instance.
        mean_prompt: Tokens.
    """

    setup: Setup
    num_nodes: int
    gpus_per_node: int
    max_sockets: int
    mean_prompt: float
    crosses_nodes: bool = True
    """True if K and V pass ports on their way from prefill to decode instances."""
    can_run: Callable[[int, int, int], bool] = lambda *_: True
    """True if an instance with this tp, pp and number of sockets can be started."""
    _systems: dict[int, System] = field(default_factory=dict)

    @property
    def cluster(self) -> GpuCluster:
        spec = self.setup.spec
        return GpuCluster(self.num_nodes, self.gpus_per_node, spec.num_q_heads, spec.num_layers)

    @property
    def token_bytes(self) -> float:
        return self.setup.costs.kv_bytes

    def system(self, tp: int) -> System:
        if tp not in self._systems:
            self._systems[tp] = replace(self.setup, num_gpus=tp).system()
        return self._systems[tp]

    def fits(self, degrees: Degrees) -> bool:
        """True if weights and the activations of a batch fit on its GPUs. A measured instance is
        taken as it is."""
        if not self.can_run(degrees.tp, degrees.pp, degrees.pp):
            return False
        if not isinstance(self.setup.gpu, Gpu):
            return degrees == Degrees(1, 1)
        return self._free_bytes(degrees) > 0

    def _free_bytes(self, degrees: Degrees) -> float:
        """Return memory of a stage's GPUs beside its weights and its smallest batch of prompts."""
        costs = self.setup.costs
        layers = math.ceil(costs.num_layers / degrees.pp)
        weights = layers * costs.layer_weight_bytes
        weights += costs.weight_bytes - costs.num_layers * costs.layer_weight_bytes
        usable = self.system(degrees.tp).s.usable_memory_bytes
        return usable - weights - self.mean_prompt * costs.peak_activation_bytes

    def prefill(self, degrees: Degrees) -> PrefillSpec:
        """Return an instance. Its K and V wait in a socket's memory, and leave through its host's
        ports."""
        times = self._times(degrees, 1, self.setup.num_nics)
        capacity_bytes = self.system(degrees.tp).r.capacity_bytes
        buffer_tokens = max(1, int(capacity_bytes / self.token_bytes))
        return PrefillSpec(times, batch_tokens(times, self.mean_prompt), buffer_tokens)

    def _times(self, degrees: Degrees, sockets: int, num_ports: float) -> InstanceTime:
        """Return times of an instance whose stages share the sockets evenly."""
        system, stage_sockets, lanes = self.system(degrees.tp), sockets / degrees.pp, MAX_LANES
        ports = num_ports * system.link.bytes_per_s / system.link.pace
        if not sockets:
            system, stage_sockets, lanes = system.on_device(), 1.0, 1
        system = replace(system, workload=_NO_PROMPTS)
        times = SystemTime(system, stage_sockets, ports if self.crosses_nodes else math.inf)
        return InstanceTime(times, stage_sockets, degrees.pp, lanes)

    def decode(self, degrees: Degrees, sockets: int) -> DecodeSpec:
        """Return an instance, also for both phases. Without sockets, K and V are on its GPUs."""
        system = self.system(degrees.tp)
        hosts = max(1.0, sockets / system.r.sockets_per_host)
        most = int(self._free_bytes(degrees) / self.setup.costs.peak_activation_bytes) * degrees.pp
        return DecodeSpec(
            self._times(degrees, sockets, hosts),
            max(1, int(self._kv_bytes(degrees, sockets) / self.token_bytes)),
            max(1, min(most, system.s.max_batch or most)),
            opens_at_once=False,
        )

    def _kv_bytes(self, degrees: Degrees, sockets: int) -> float:
        if sockets:
            return sockets * self.system(degrees.tp).r.capacity_bytes
        return degrees.pp * self._free_bytes(degrees)

    def fits_on_device(self, degrees: Degrees) -> bool:
        """True if K and V of the longest request fit beside the weights."""
        longest = self.setup.workload.peak_context_tokens * self.token_bytes
        can_run = self.can_run(degrees.tp, degrees.pp, 0)
        return can_run and self._kv_bytes(degrees, 0) >= longest

    def sockets(
        self, degrees: Degrees, most: int | None = None, *, limited: bool = True
    ) -> list[int]:
        """Return numbers of sockets to try, the same for each stage. ``limited``: at most as many
        as there may be."""
        limit = self.max_sockets if most is None else min(most, self.max_sockets)
        limit = limit if limited else SOCKETS[-1] * degrees.pp
        found = [count * degrees.pp for count in SOCKETS if count * degrees.pp <= limit]
        if not found and limit >= 1 and degrees.pp == 1:
            found = [limit]
        return found


def batch_tokens(times: InstanceTime, mean_prompt: float) -> int:
    """Return L_m: the smallest batch of prompts of this mean length that gives nearly the most
    tokens per second. Larger ones only delay others."""
    speeds = [tokens / times.prefill_s(prompts_of(tokens, mean_prompt)) for tokens in _BATCHES]
    enough = ENOUGH_THROUGHPUT * max(speeds)
    return next(tokens for tokens, speed in zip(_BATCHES, speeds, strict=True) if speed >= enough)


def prompts_of(tokens: int, mean_prompt: float) -> Sequence[int]:
    count = max(1, round(tokens / mean_prompt))
    return [max(1, round(tokens / count))] * count
