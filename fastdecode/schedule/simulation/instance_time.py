"""Times of an instance's steps, with as many lanes as make them shortest."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from fastdecode.schedule.times import Prompts, StepTime, cycle_s

_KNOT_EVERY = 32
"""Steps between two at which R-parts are asked for. Between these they grow evenly."""


@dataclass(frozen=True)
class InstanceTime:
    """Times of an instance whose sequences are alike.

    With a pipeline, each stage has its part of the layers and of the R-workers, and as many
    microbatches are under way as there are stages.

    Args:
        times: times of a lane, all layers. R-workers are alike.
        num_r_workers: R-workers of a stage. A fraction where stages share them.
        num_stages: stages of the pipeline.
        most_lanes: most lanes of a stage.
    """

    times: StepTime
    num_r_workers: float = 1.0
    num_stages: int = 1
    most_lanes: int = 1
    _found: dict[int, list[_Lanes]] = field(default_factory=dict)

    def prefill_s(self, lengths: Seq[int]) -> float:
        """Return the seconds of whole prompts of these lengths, through all stages."""
        return self.times.s_part_s(0, [(0, length) for length in lengths])

    def decode_s(self, num_sequences: int, context: int, num_steps: int) -> np.ndarray:
        """Return the seconds of each of the next steps.

        Args:
            num_sequences: sequences that decode, all through.
            context: cached tokens of all of them at the first step. Each step adds one to each.
        """
        mean = context / num_sequences
        # Which number of lanes is best hardly changes within a few steps.
        best = min(self._lanes(num_sequences), key=lambda lanes: lanes.cycle_s(mean))
        knots = range(0, num_steps + _KNOT_EVERY - 1, _KNOT_EVERY)
        r_parts_s = [best.r_part_s(mean + step) for step in knots]
        return best.cycles_s(np.interp(np.arange(num_steps), knots, r_parts_s))

    def mixed_s(self, num_sequences: int, context: int, prompts: Prompts) -> float:
        """Return the seconds of a step in which parts of prompts run, too. These lengthen the
        S-part of the lanes, in equal shares."""
        if not num_sequences:
            return self.times.s_part_s(0, prompts)
        more_s = self.times.s_part_s(1, prompts) - self.times.s_part_s(1)
        mean, ways = context / num_sequences, self._lanes(num_sequences)
        return min(lanes.cycle_s(mean, more_s / lanes.num) for lanes in ways)

    def _lanes(self, num_sequences: int) -> list[_Lanes]:
        """Return each way to share them among lanes."""
        if num_sequences not in self._found:
            a_stage = -(-num_sequences // self.num_stages)
            self._found[num_sequences] = [
                _Lanes.of(self.times, num, -(-a_stage // num), self.num_r_workers)
                for num in range(1, min(self.most_lanes, a_stage) + 1)
            ]
        return self._found[num_sequences]


@dataclass(frozen=True)
class _Lanes:
    """Equal lanes, and the times of one by its sequences' context."""

    times: StepTime
    num: int
    s_part_s: float
    trip_s: float
    link_s: float
    a_worker: float
    """Sequences of a lane on the busiest R-worker."""

    @classmethod
    def of(cls, times: StepTime, num: int, batch: int, num_r_workers: float) -> _Lanes:
        a_worker = max(1.0, batch / num_r_workers)
        return cls(
            times, num, times.s_part_s(batch), times.trip_s(batch), times.link_s(batch), a_worker
        )

    def r_part_s(self, context: float) -> float:
        return self.times.r_part_s(0, self.a_worker * context, self.a_worker)

    def cycle_s(self, context: float, more_s: float = 0.0) -> float:
        r_part_s = self.r_part_s(context)
        return cycle_s(self.num, self.s_part_s + more_s, r_part_s, self.trip_s, self.link_s)

    def cycles_s(self, r_parts_s: np.ndarray) -> np.ndarray:
        """Return ``cycle_s`` of each R-part."""
        most_s = self.num * max(self.s_part_s, self.link_s)
        way_s = self.s_part_s + self.trip_s + r_parts_s
        cycles_s: np.ndarray = np.maximum(np.maximum(self.num * r_parts_s, most_s), way_s)
        return cycles_s
