"""Instances that given hardware can make: their times, batches, memory and ports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cost_model.goodput.placements import Degrees, GpuCluster
from cost_model.goodput.simulator import DecodeSpec, PrefillSpec
from cost_model.hardware import Gpu
from cost_model.plans.question import Setup
from cost_model.predict import MAX_LANES, System
from cost_model.step_time import SystemTime
from cost_model.workload import Workload
from fastdecode.schedule.simulation.instance_time import InstanceTime

ENOUGH_THROUGHPUT = 0.95
"""A batch is large enough when it gives this part of the best tokens a second."""
_BATCHES = tuple(64 << i for i in range(9))
SOCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_NO_PROMPTS = Workload(0, 1)
"""Simulated ones come on top."""


@dataclass(frozen=True)
class InstanceHardware:
    """A model on nodes of alike GPUs, and CPU sockets beside.

    Args:
        setup: one GPU's; its workload holds the longest request.
        max_sockets: that a decode instance may have.
        mean_prompt: tokens.
    """

    setup: Setup
    num_nodes: int
    gpus_per_node: int
    max_sockets: int
    mean_prompt: float
    crosses_nodes: bool = True
    """K and V go from prefill to decode instances through ports."""
    can_run: Callable[[int, int, int], bool] = lambda *_: True
    """Whether an instance with this tp and pp and so many sockets can be started."""
    _systems: dict[int, System] = field(default_factory=dict)

    @property
    def cluster(self) -> GpuCluster:
        spec = self.setup.spec
        return GpuCluster(self.num_nodes, self.gpus_per_node, spec.num_q_heads, spec.num_layers)

    @property
    def token_bytes(self) -> float:
        return self.setup.costs.kv_bytes

    def system(self, tp: int) -> System:
        """Raises ConfigError where a profile is of other GPUs than asked for."""
        if tp not in self._systems:
            self._systems[tp] = replace(self.setup, num_gpus=tp).system()
        return self._systems[tp]

    def fits(self, degrees: Degrees) -> bool:
        """Weights and the activations of a batch fit on its GPUs; what was
        measured, was measured on one instance as it is."""
        if not self.can_run(degrees.tp, degrees.pp, degrees.pp):
            return False
        if not isinstance(self.setup.gpu, Gpu):
            return degrees == Degrees(1, 1)
        return self._room_bytes(degrees) > 0

    def _room_bytes(self, degrees: Degrees) -> float:
        """Of a stage's GPUs, beside its weights and its smallest batch of prompts."""
        costs = self.setup.costs
        layers = math.ceil(costs.num_layers / degrees.pp)
        weights = layers * costs.layer_weight_bytes
        weights += costs.weight_bytes - costs.num_layers * costs.layer_weight_bytes
        usable = self.system(degrees.tp).s.usable_memory_bytes
        return usable - weights - self.mean_prompt * costs.peak_activation_bytes

    def prefill(self, degrees: Degrees) -> PrefillSpec:
        """One instance. Its K and V wait in the memory of a socket of its host,
        and leave through its host's ports."""
        system = self.system(degrees.tp)
        times = self._times(degrees, 1, self.setup.num_nics)
        return PrefillSpec(
            times,
            batch_tokens(times, self.mean_prompt),
            max(1, int(system.r.capacity_bytes / self.token_bytes)),
        )

    def _times(self, degrees: Degrees, sockets: int, num_ports: float) -> InstanceTime:
        """Each stage has its part of the sockets; K and V cross so many ports."""
        system, a_stage, lanes = self.system(degrees.tp), sockets / degrees.pp, MAX_LANES
        ports = num_ports * system.link.bytes_per_s / system.link.pace
        if not sockets:
            system, a_stage, lanes = system.on_device(), 1.0, 1
        system = replace(system, workload=_NO_PROMPTS)
        times = SystemTime(system, a_stage, ports if self.crosses_nodes else math.inf)
        return InstanceTime(times, a_stage, degrees.pp, lanes)

    def decode(self, degrees: Degrees, sockets: int) -> DecodeSpec:
        """One instance, also for both phases. Without sockets, K and V are on its GPUs."""
        system = self.system(degrees.tp)
        hosts = max(1.0, sockets / system.r.sockets_per_host)
        most = int(self._room_bytes(degrees) / self.setup.costs.peak_activation_bytes)
        return DecodeSpec(
            self._times(degrees, sockets, hosts),
            max(1, int(self._kv_bytes(degrees, sockets) / self.token_bytes)),
            max(1, min(most * degrees.pp, system.s.max_batch or most * degrees.pp)),
            opens_at_once=False,
        )

    def _kv_bytes(self, degrees: Degrees, sockets: int) -> float:
        if sockets:
            return sockets * self.system(degrees.tp).r.capacity_bytes
        return degrees.pp * self._room_bytes(degrees)

    def fits_on_device(self, degrees: Degrees) -> bool:
        """K and V of the longest request fit beside the weights."""
        longest = self.setup.workload.peak_context_tokens * self.token_bytes
        can_run = self.can_run(degrees.tp, degrees.pp, 0)
        return can_run and self._kv_bytes(degrees, 0) >= longest

    def sockets(
        self, degrees: Degrees, most: int | None = None, *, limited: bool = True
    ) -> list[int]:
        """Numbers of sockets to look at: a pipeline's stages have as many each.
        ``limited``: no more than there may be."""
        limit = self.max_sockets if most is None else min(most, self.max_sockets)
        limit = limit if limited else SOCKETS[-1] * degrees.pp
        found = [count * degrees.pp for count in SOCKETS if count * degrees.pp <= limit]
        if not found and limit >= 1 and degrees.pp == 1:
            found = [limit]
        return found


def batch_tokens(times: InstanceTime, mean_prompt: float) -> int:
    """L_m: the smallest batch of prompts of this mean length that gives nearly
    the most tokens a second; longer ones only make others wait."""
    speeds = [tokens / times.prefill_s(prompts_of(tokens, mean_prompt)) for tokens in _BATCHES]
    enough = ENOUGH_THROUGHPUT * max(speeds)
    return next(tokens for tokens, speed in zip(_BATCHES, speeds, strict=True) if speed >= enough)


def prompts_of(tokens: int, mean_prompt: float) -> Sequence[int]:
    """A batch of so many tokens, as prompts of about this mean length."""
    count = max(1, round(tokens / mean_prompt))
    return [max(1, round(tokens / count))] * count
