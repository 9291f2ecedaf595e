"""Load stabilising where it pays (``--schedule auto``), and greedy starts elsewhere.

Equal sequences that start together bring a load that ramps from their first lengths to their last,
again and again. Steps then take max(S, R(load)), on average over the ramp. Stabilized starts take
max(S, R(mean load)), and one more generation of sequences to fill and to drain. So with n
generations to come they are quicker by

    mean of max(S, R) over the ramp / max(S, R(mean load)) · n / (n + 1)

Lengths that differ spread the starts by themselves: then nothing is gained, and a lane that is not
full loses (docs/design/scheduling.md has the figures).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.admission.policies import NOTHING_EARLIER, Earlier
from fastdecode.schedule.admission.stabilized import RECALIBRATE_EVERY, Stabilized
from fastdecode.schedule.times import StepTime

LEAST_GAIN = 1.03
"""Forecasts know no prompts and no link."""
_POINTS = 16
"""Points of the ramp."""
_MOST_SPREAD = 0.02
"""Share of the mean number of steps: sequences that differ by more are not equal."""


def stabilizing_gain(
    times: StepTime, batch_size: int, capacity: Seq[int], lengths: tuple[float, float]
) -> float:
    """Return the time of greedy steps over that of stabilized ones, without an end. NaN while step
    times are unknown.

    Args:
        batch_size: sequences of a full lane, all equal.
        capacity: tokens that each R-worker holds, by which loads are shared out.
        lengths: cached tokens of a sequence at its first step and at its last.
    """
    s_part_s = times.s_part_s(batch_size)
    if math.isnan(s_part_s):
        return math.nan
    total = max(1, sum(capacity))

    def step_s(length: float) -> float:
        loads = (round(batch_size * length * tokens / total) for tokens in capacity)
        return max(s_part_s, *(times.r_part_s(w, load) for w, load in enumerate(loads)))

    first, last = lengths
    ramp = [step_s(first + (last - first) * (i + 0.5) / _POINTS) for i in range(_POINTS)]
    return sum(ramp) / _POINTS / step_s((first + last) / 2)


class ByForecast(Stabilized):
    """As ``Stabilized`` while that is forecast to pay, else greedily.

    Args:
        capacity, batch_size, balance, headroom: see ``Stabilized``.
        gain: ``stabilizing_gain`` for first and last lengths.
        num_lanes: lanes that share the waiting sequences.
    """

    def __init__(
        self,
        capacity: Seq[int],
        batch_size: int,
        *,
        balance: Callable[[], Seq[int] | None],
        gain: Callable[[tuple[float, float]], float],
        num_lanes: int,
        headroom: bool = True,
    ) -> None:
        super().__init__(capacity, batch_size, balance=balance, headroom=headroom)
        self._gain = gain
        self._num_full = batch_size * num_lanes
        self._started: deque[MicroBatch] = deque(maxlen=batch_size)
        self._as_projected: deque[bool] = deque(maxlen=batch_size)
        """True for each of the last sequences that ended as projected."""
        self.is_stabilizing = False

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        super().begin_step(step, num_running, num_startable, num_waiting)
        if step % RECALIBRATE_EVERY == 0:
            self.is_stabilizing = self._forecast(num_waiting / self._num_full) >= LEAST_GAIN

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        if self.is_stabilizing:
            return super().choose(batch, workers, earlier, alone=alone)
        return workers[0] if workers else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        super().add(worker, batch)
        self._started.append(batch)

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        super().prolong(worker, batch)
        if batch.most is None:  # no further part of a split sequence
            self._as_projected.append(False)

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        super().end(worker, batch, at)
        self._as_projected.append(at > batch.end)

    def _forecast(self, num_generations: float) -> float:
        """Return how much quicker stabilized starts are. 0 if nothing says so."""
        are_equal = self._started and all(self._as_projected) and self._spread() <= _MOST_SPREAD
        if num_generations < 1 or not are_equal:
            return 0.0
        found = self._gain(self._mean_lengths())
        return 0.0 if math.isnan(found) else found * num_generations / (num_generations + 1)

    def _spread(self) -> float:
        """Return by how much the started sequences' steps differ, over their mean."""
        steps = [batch.num_steps for batch in self._started]
        return (max(steps) - min(steps)) * len(steps) / sum(steps)

    def _mean_lengths(self) -> tuple[float, float]:
        """Return the mean cached tokens at the first step and at the last."""
        num = len(self._started)
        return (
            sum(batch.first_length for batch in self._started) / num,
            sum(batch.target_length for batch in self._started) / num,
        )
