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
from cost_model.predict import MAX_LANES, System, SystemTime
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
    prefill: Degrees
    decode: Degrees

    @property
    def num_gpus(self) -> int:
        return self.prefill.num_gpus + self.decode.num_gpus


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class InstanceHardware:
    """A model on nodes of equal GPUs, with up to ``max_sockets`` CPU sockets for a decode instance.
    ``setup`` is one GPU's. Its workload holds the longest request."""

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
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def _degrees(self) -> Iterator[Degrees]:
        spec = self.setup.spec
        for tp, pp in product(_divisors(spec.num_q_heads), _divisors(spec.num_layers)):
            yield Degrees(tp, pp)

    def instances(self) -> Iterator[Degrees]:
        """Yield instances of one phase: stages of a node's GPUs, on as many nodes as they need."""
        for each in self._degrees():
            if each.pp <= self.num_nodes * (self.gpus_per_node // each.tp):
                yield each

    def pairs(self) -> Iterator[Pair]:
        """Yield pairs whose segments fit on a node, in at most as many segments as nodes."""
        for cross in _divisors(self.setup.spec.num_layers):
            most = cross * self.gpus_per_node if cross <= self.num_nodes else 0
            cut = [x for x in self._degrees() if x.pp % cross == 0 and x.num_gpus < most]
            pairs = (Pair(cross, *two) for two in product(cut, cut))
            yield from (pair for pair in pairs if pair.num_gpus <= most)

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
        buffer_tokens = max(1, int(capacity_bytes / self.setup.costs.kv_bytes))
        return PrefillSpec(times, batch_tokens(times, self.mean_prompt), buffer_tokens)

    def _times(self, degrees: Degrees, sockets: int, num_ports: float) -> InstanceTime:
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
            max(1, int(self._kv_bytes(degrees, sockets) / self.setup.costs.kv_bytes)),
            max(1, min(most, system.s.max_batch or most)),
            opens_at_once=False,
        )

    def _kv_bytes(self, degrees: Degrees, sockets: int) -> float:
        if sockets:
            return sockets * self.system(degrees.tp).r.capacity_bytes
        return degrees.pp * self._free_bytes(degrees)

    def fits_on_device(self, degrees: Degrees) -> bool:
        """True if K and V of the longest request fit beside the weights."""
        longest = self.setup.workload.peak_context_tokens * self.setup.costs.kv_bytes
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
