"""How long an instance takes: ``System``'s stages (from datasheets, or as
measured), at the batch and the contexts of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from cost_model.predict import MAX_LANES, LaneTimes, System
from cost_model.stages import Provenance
from cost_model.workload import Workload


class InstanceTimes(Protocol):
    """Seconds."""

    @property
    def num_stages(self) -> int:
        """Of the pipeline that a batch of prompts passes."""

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Of whole prompts of these lengths, through all stages."""

    def decode_s(self, num_sequences: int, context: int, num_steps: int) -> np.ndarray:
        """Of the next steps, each.

        Args:
            num_sequences: that decode, all through.
            context: cached tokens of all of them at the first step; each step
                adds one to each.
        """

    def mixed_s(self, num_sequences: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Of one step in which chunks of prompts run beside those that decode.

        Args:
            chunks: of each, tokens that ran before, and tokens of this chunk.
        """


@dataclass(frozen=True)
class FixedTimes:
    """The same whatever the batch: what closed forms are about."""

    prompt_s: float
    step_s: float = 0.0
    num_stages: int = 1

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """As ``InstanceTimes``."""
        return self.prompt_s * len(lengths)

    def decode_s(self, num_sequences: int, context: int, num_steps: int) -> np.ndarray:
        """As ``InstanceTimes``."""
        return np.full(num_steps, self.step_s)

    def mixed_s(self, num_sequences: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """As ``InstanceTimes``."""
        return self.step_s * (num_sequences > 0) + self.prompt_s * len(chunks)


@dataclass(frozen=True)
class SystemTimes:
    """An instance of FastDecode.

    Lanes are as many as make the step shortest. With a pipeline, each stage has
    its part of the layers and of the sockets, and as many microbatches are under
    way as there are stages.
    """

    system: System
    sockets: int
    num_stages: int = 1
    _found: dict[int, list[_Way]] = field(default_factory=dict)

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """A step of prompts only reads the weights and sends K and V to the
        R-workers, as one with tokens does."""
        s, costs = self.system.s, self.system.costs
        total = sum(lengths)
        prompts_s = sum(map(s.prefill_s, lengths))
        if s.provenance is Provenance.MEASURED:
            # Each was measured by itself, weights and all.
            prompts_s = min(prompts_s, s.prefill_s(total))
        else:
            prompts_s = max(prompts_s, s.pace * costs.num_layers * s.layer_s(total))
            prompts_s += s.pace * s.head_s(len(lengths))
        kv_bytes = costs.num_layers * costs.prompt_out_bytes * total
        if s.host_link_bytes_per_s is None:
            return prompts_s
        return max(prompts_s, kv_bytes / s.host_link_bytes_per_s)

    def decode_s(self, num_sequences: int, context: int, num_steps: int) -> np.ndarray:
        """As ``InstanceTimes``."""
        mean = context / num_sequences
        attended = self._attended(mean)
        # Which number of lanes is best hardly changes within a few steps.
        best = min(self._ways(num_sequences), key=lambda way: way.cycle_s(attended))
        contexts = [mean + step for step in range(num_steps)]
        if self._windows:
            contexts = [self._attended(each) for each in contexts]
        return self.system.costs.num_layers * best.cycles_s(np.array(contexts))

    def mixed_s(self, num_sequences: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """As ``InstanceTimes``. Prompts lengthen the S-part of the lanes, in equal shares."""
        s, layers = self.system.s, self.system.costs.num_layers
        prompts_s = sum(s.prefill_s(past + new) - s.prefill_s(past) for past, new in chunks)
        num_tokens = sum(new for _, new in chunks)
        if not num_sequences:
            floor_s = s.pace * layers * s.layer_s(num_tokens)
            return max(prompts_s, floor_s) + s.pace * s.head_s(len(chunks))
        attended = self._attended(context / num_sequences)
        ways = self._ways(num_sequences)
        return layers * min(way.cycle_s(attended, prompts_s / layers / way.lanes) for way in ways)

    def _ways(self, num_sequences: int) -> list[_Way]:
        """For each number of lanes that they can be in."""
        if num_sequences not in self._found:
            system = replace(self.system, workload=Workload(0, 1))
            a_stage = -(-num_sequences // self.num_stages)
            sockets = self.sockets / self.num_stages
            self._found[num_sequences] = [
                _way(system, lanes, -(-a_stage // lanes), sockets)
                for lanes in range(1, min(MAX_LANES, a_stage) + 1)
            ]
        return self._found[num_sequences]

    @cached_property
    def _windows(self) -> tuple[int | None, ...]:
        """Of the layers; none if no layer has one."""
        windows = tuple(each.sliding_window for each in self.system.costs.spec.attention)
        return windows if any(windows) else ()

    def _attended(self, mean_context: float) -> float:
        """Keys that a query sees a layer, averaged over layers."""
        if not self._windows:
            return mean_context
        seen = [mean_context if w is None else min(mean_context, w) for w in self._windows]
        return sum(seen) / len(seen)


@dataclass(frozen=True)
class _Way:
    """A number of lanes: what a layer's cycle takes, by the keys that a query sees."""

    lanes: int
    s_s: float
    quick_s: float
    """The longest of what lanes do one after the other, but S- and R-part."""
    chain_s: float
    """One lane's way, but for the R-part."""
    r_fixed_s: float
    r_key_s: float

    def cycle_s(self, attended: float, more_s: float = 0.0) -> float:
        """``more_s``: of a lane's S-part."""
        r_s = self.r_fixed_s + self.r_key_s * attended
        s_s = self.lanes * (self.s_s + more_s)
        return max(s_s, self.quick_s, self.lanes * r_s, self.chain_s + more_s + r_s)

    def cycles_s(self, attended: np.ndarray) -> np.ndarray:
        """Of each."""
        r_s = self.r_fixed_s + self.r_key_s * attended
        quick_s = max(self.lanes * self.s_s, self.quick_s)
        cycles_s: np.ndarray = np.maximum(np.maximum(self.lanes * r_s, quick_s), self.chain_s + r_s)
        return cycles_s


def _way(system: System, lanes: int, batch: int, sockets: float) -> _Way:
    lane, r = _without_prompts(system, batch, sockets), system.r
    sequences = max(1.0, batch / sockets)
    return _Way(
        lanes,
        lane.s_s,
        lanes * max(lane.out_s, lane.back_s, lane.messages_s, lane.io_s),
        lane.chain_s,
        r.r_s(sequences, 0.0),
        r.pace * r.token_s * sequences,
    )


def _without_prompts(system: System, batch: int, sockets: float) -> LaneTimes:
    """A lane's times but for the R-part, which follows contexts."""
    out, back = batch * system.costs.out_bytes, batch * system.costs.back_bytes
    return LaneTimes(
        s_s=system.s.t_of_b(batch),
        out_s=system.way_s(out, sockets),
        r_s=0.0,
        back_s=system.way_s(back, sockets),
        round_trip_s=system.link.trip_s,
        messages_s=system.messages_s(batch, sockets),
        io_s=system.transport.io_s(out + back, sockets),
    )
