"""The loop of ``fastdecode/engine/step/pipeline.py`` on a GPU, by events: one
host thread, one stream that computes, one that copies out, one that copies
back, and R-workers that answer at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_CYCLES = 4


@dataclass(frozen=True)
class LaneCosts:
    """Seconds of a lane and layer."""

    unit_s: float
    """Of the GPU: a unit."""
    out_s: float
    """q, k, v to the host."""
    back_s: float
    """o to the GPU."""
    launch_s: float
    """Of the host: to queue a unit and its copy."""
    send_s: float
    receive_s: float


class _Loop:
    """Never waits for a copy while an answer is here, nor the other way round."""

    def __init__(self, costs: LaneCosts, lanes: int) -> None:
        self._costs = costs
        self.now_s = 0.0
        self._gpu_s = self._out_s = self._back_s = 0.0  # until when each is busy
        self._arrived_s = [0.0] * lanes  # the lane's o, on the GPU
        self._unsent: deque[tuple[float, int]] = deque()
        self._answers: deque[int] = deque()

    def launch(self, lane: int) -> None:
        """Queue a unit, and its copy out."""
        queued_s = self.now_s + 0.5 * self._costs.launch_s
        self.now_s += self._costs.launch_s
        started_s = max(self._gpu_s, queued_s, self._arrived_s[lane])
        self._gpu_s = started_s + self._costs.unit_s
        self._out_s = max(self._out_s, self._gpu_s) + self._costs.out_s
        self._unsent.append((self._out_s, lane))

    def next_ready(self) -> int:
        """The lane that goes on next, once it has its answer."""
        while not self._answers:
            self._send()
        if self._unsent and self._unsent[0][0] <= self.now_s:
            self._send()
        self.now_s += self._costs.receive_s
        lane = self._answers.popleft()
        self._back_s = max(self._back_s, self.now_s) + self._costs.back_s
        self._arrived_s[lane] = self._back_s
        return lane

    def _send(self) -> None:
        copied_s, lane = self._unsent.popleft()
        self.now_s = max(self.now_s, copied_s) + self._costs.send_s
        self._answers.append(lane)


def cycle_s(costs: LaneCosts, lanes: int, num_units: int) -> float:
    """Seconds in which every lane runs so many units, once the loop has settled."""
    loop = _Loop(costs, lanes)
    for lane in range(lanes):
        loop.launch(lane)
    starts: list[float] = []
    for number in range(_CYCLES * lanes * num_units):
        if number % (lanes * num_units) == 0:
            starts.append(loop.now_s)
        loop.launch(loop.next_ready())
    return (starts[-1] - starts[0]) / (len(starts) - 1)
