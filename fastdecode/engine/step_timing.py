"""How long steps take: measured for the scheduler, which may change the number of
lanes by it."""

from __future__ import annotations

from fastdecode.engine.extensions import Extension
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.times import MeasuredTimes


class StepTiming(Extension):
    """Measures the parts of every step.

    Args:
        times: where they are kept.
        lanes: decides on the number of lanes; None: it stays what it is.
    """

    def __init__(self, times: MeasuredTimes, lanes: LaneChoice | None = None) -> None:
        self._times = times
        self._lanes = lanes

    def num_lanes(self, current: int) -> int:
        """See ``Extension``."""
        return current if self._lanes is None else self._lanes.decide()

    def regrouped(self, num_lanes: int) -> None:
        """See ``Extension``."""
        if self._lanes is not None:
            self._lanes.regrouped(num_lanes)

    def completed(self, step: LaneStep, seconds: float) -> None:
        """See ``Extension``."""
        step.tell(self._times, self._lanes, seconds)
