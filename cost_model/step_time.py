"""Step times of a ``System``: from datasheets, or as measured."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_model.predict import LaneTimes, System
from cost_model.stages import Provenance
from cost_model.workload import Workload
from fastdecode.schedule.times import Prompts, StepTime


def machine_times(system: System, sequences: int) -> tuple[float, float]:
    """Return seconds of a microbatch's prompts, and of one token, on the GPUs alone, with all
    layers and K and V in their memory."""
    workload = system.workload
    alone = SystemTime(replace(system.on_device(), workload=Workload(0, 1)), 1)
    load = sequences * workload.mean_context_tokens
    prompt_s = alone.s_part_s(0, [(0, workload.prompt_tokens)] * sequences)
    r_part_s = alone.r_part_s(0, load, sequences)
    return prompt_s, alone.s_part_s(sequences) + r_part_s + alone.trip_s(sequences)


@dataclass(frozen=True)
class SystemTime(StepTime):
    """Step times of an S-worker and equal R-workers, which share sequences evenly.
    The prompts of the system's workload are counted in, at their average.

    Args:
        sockets: R-workers, one per socket.
        transfer_bytes_per_s: Rate at which K and V leave or come. Infinite if they stay.
    """

    system: System
    sockets: float
    transfer_bytes_per_s: float = math.inf
    _lanes: dict[int, LaneTimes] = field(default_factory=dict)

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        if not num_decoding:
            return self._prompts_alone_s(prompts)
        return self._layers * self._lane(num_decoding).s_s + self._prompts_s(prompts)

    def _prompts_s(self, prompts: Prompts) -> float:
        """Return what prompts add to a step, which reads the weights anyway."""
        s = self.system.s
        own_s = sum(s.prefill_s(before + new) - s.prefill_s(before) for before, new in prompts)
        return own_s + self._way_s(sum(new for _, new in prompts))

    def _way_s(self, num_tokens: int) -> float:
        system, costs = self.system, self.system.costs
        if not system.s.prompts_on_r:
            return 0.0
        out_s = system.way_s(num_tokens * costs.out_bytes, self.sockets)
        return self._layers * (out_s + system.way_s(num_tokens * costs.back_bytes, self.sockets))

    def _prompts_alone_s(self, prompts: Prompts) -> float:
        """Return a step of prompts alone. It reads the weights, and sends K and V to the
        R-workers."""
        s, costs = self.system.s, self.system.costs
        total, prompts_s = sum(new for _, new in prompts), self._prompts_s(prompts)
        if s.provenance is Provenance.MEASURED:
            # Each was measured by itself, weights included.
            prompts_s = min(prompts_s, s.prefill_s(total) + self._way_s(total))
        else:
            prompts_s = max(prompts_s, s.pace * self._layers * s.layer_s(total))
            prompts_s += s.pace * s.head_s(len(prompts))
        if s.host_link_bytes_per_s is None:
            return prompts_s
        kv_bytes = self._layers * costs.prompt_out_bytes * total
        return max(prompts_s, kv_bytes / s.host_link_bytes_per_s)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        attended = load_tokens
        if self._windows and num_sequences:
            context = load_tokens / num_sequences
            seen = (
                count * (context if window is None else min(context, window))
                for window, count in self._windows.items()
            )
            attended = num_sequences * (sum(seen) / self._layers)
        return self._layers * self.system.r.r_s(num_sequences, attended)

    def link_s(self, num_tokens: int) -> float:
        return self._layers * self._lane(num_tokens).link_s

    def trip_s(self, num_tokens: int) -> float:
        return self._layers * self._lane(num_tokens).trip_s

    def transfer_s(self, num_tokens: float) -> float:
        return num_tokens * self.system.costs.kv_bytes / self.transfer_bytes_per_s

    @cached_property
    def _layers(self) -> int:
        return self.system.costs.num_layers

    def _lane(self, num_decoding: int) -> LaneTimes:
        if num_decoding not in self._lanes:
            self._lanes[num_decoding] = self.system.lane(num_decoding, self.sockets)
        return self._lanes[num_decoding]

    @cached_property
    def _windows(self) -> Counter[int | None]:
        """How many layers have each window; empty if no layer has one."""
        windows = Counter(each.sliding_window for each in self.system.costs.spec.attention)
        return windows if any(windows) else Counter()
