"""The number of lanes: as many as keep S-worker and R-workers busy, and no more, since each lane
reads the weights again.

When B sequences with W cached tokens step in k lanes, all have stepped once after at least

=======================  ==========================================================================
k · T_S(B/k)             the S-worker does one lane after the other
k · T_R(W/k)             so does the busiest R-worker
T_S(B/k) + T_R(W/k) + L  a lane's own way: S-part, out, R-part, back; L is the way out and back
=======================  ==========================================================================

and after the greatest of these if the lanes fill each other's gaps. With N pipeline stages the
first two are the slowest stage's, and a lane's own way is N · (T_S(B/k) + T_R(W/k)) + L. The third
falls as k grows until it is below the others: with lanes of a given size, at k = 1 +
(L + T_R)/T_S. The first grows with k by what a step costs whatever its batch. All times are
measured, of a step through all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from fastdecode.schedule.times import MeasuredTimes, cycle_s

MAX_AUTO_LANES = 8
# Lane steps between two decisions: twice as many as times have to be measured for.
_EVERY = 64
# Changing the lanes must save this part of a step: it interrupts the pipeline, and predictions are
# not exact. Of numbers that differ by less than half of it, the lowest is taken.
_LEAST_GAIN = 0.06


class LaneChoice(Protocol):
    """Decides on the number of lanes."""

    def observe(self, lane: int, num_decoding: int, loads: Mapping[int, int]) -> None:
        """Note that a lane's step was run.

        Args:
            num_decoding: sequences that decoded.
            loads: cached tokens to which each R-worker attended.
        """

    def decide(self) -> int:
        """Return the number of lanes that there should be. If it changes, ``regrouped`` is due."""

    def regrouped(self, num_lanes: int) -> None:
        """Note the new number of lanes, all of them between two steps."""


class LaneControl:
    """Decides on the number of lanes from the steps that were run.

    Args:
        times: times of the parts of a lane's step, of the slowest stage. The caller observes them.
        num_lanes: lanes at the start.
        most: most lanes.
        every: lane steps between two decisions.
        num_stages: pipeline stages that a step goes through.
    """

    def __init__(
        self,
        times: MeasuredTimes,
        num_lanes: int,
        *,
        most: int = MAX_AUTO_LANES,
        every: int = _EVERY,
        num_stages: int = 1,
    ) -> None:
        assert 1 <= num_lanes <= most and every >= 1
        self._times = times
        self._most = most
        self._every = every
        self._num_stages = num_stages
        self._batches: dict[int, int] = {}  # by lane: sequences that decoded in its last step
        self._loads: dict[int, dict[int, int]] = {}  # by lane and R-worker: cached tokens
        self._num_steps = 0
        self._num_lanes = num_lanes

    def observe(self, lane: int, num_decoding: int, loads: Mapping[int, int]) -> None:
        if not num_decoding:
            return  # that says nothing of the steps to come
        self._batches[lane] = num_decoding
        self._loads[lane] = dict(loads)
        self._num_steps += 1

    def decide(self) -> int:
        # A lane that was not observed has nothing that decodes: wait for it twice as long as for
        # the others.
        all_heard = len(self._batches) >= self._num_lanes
        if self._num_steps < (self._every if all_heard else 2 * self._every):
            return self._num_lanes
        most = max(1, min(self._most, sum(self._batches.values())))  # none of them idle
        cycles_s = {k: self.cycle_s(k) for k in range(1, most + 1)}
        fastest_s = min(cycles_s.values())
        if fastest_s < (1 - _LEAST_GAIN) * self.cycle_s(self._num_lanes):
            return next(
                k for k, cycle_s in cycles_s.items() if cycle_s <= (1 + _LEAST_GAIN / 2) * fastest_s
            )
        self._num_steps = 0
        return self._num_lanes

    def regrouped(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._num_steps = 0
        self._batches.clear()
        self._loads.clear()

    def cycle_s(self, num_lanes: int) -> float:
        """Return the time of one step of the whole batch in this many lanes. NaN while unknown."""
        num_sequences = sum(self._batches.values())
        num_lane = -(-num_sequences // num_lanes)
        s_part_s = self._times.s_part_s(num_lane, hopeful=True)
        if math.isnan(s_part_s):
            return math.nan
        loads: dict[int, int] = {}
        for lane in self._loads.values():
            for worker, load in lane.items():
                loads[worker] = loads.get(worker, 0) + load
        r_part_s = max(
            (self._times.r_part_s(w, -(-load // num_lanes)) for w, load in loads.items()),
            default=0.0,
        )
        # Its way through the other stages is part of its trip.
        others_s = (self._num_stages - 1) * (s_part_s + r_part_s)
        return cycle_s(num_lanes, s_part_s, r_part_s, others_s + self._times.trip_s(num_lane))
