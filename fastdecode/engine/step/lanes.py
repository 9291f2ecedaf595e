"""The lanes' steps in flight: what is to be sent of them, and who can go on."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from fastdecode.core.holders import HolderId
from fastdecode.engine.step.lane_step import LaneStep


class Lanes:
    """Some lanes, each with a step in flight or idle."""

    def __init__(self, num_lanes: int) -> None:
        self._steps: list[LaneStep | None] = [None] * num_lanes
        self.in_flight: list[LaneStep] = []
        """The steps, by lane. A list that was taken stays as it is."""
        self.ready: Final[deque[LaneStep]] = deque()
        """Steps that can go on, in the order in which they became able to."""
        self.unsent: Final[deque[LaneStep]] = deque()
        """Steps that are scattered, and not on the host yet; once a layer."""

    def __len__(self) -> int:
        return len(self._steps)

    def resize(self, num_lanes: int) -> None:
        """From now on there are so many. No step is in flight."""
        assert not self.in_flight
        self._steps = [None] * num_lanes

    @property
    def idle(self) -> list[int]:
        return [lane for lane, step in enumerate(self._steps) if step is None]

    def step_of(self, lane: int) -> LaneStep | None:
        """None: there is no such lane, or it is idle."""
        return self._steps[lane] if 0 <= lane < len(self._steps) else None

    def enter(self, step: LaneStep) -> None:
        """An idle lane's step begins."""
        assert self._steps[step.lane] is None
        self._put(step.lane, step)

    def leave(self, step: LaneStep) -> None:
        """It is over. What isn't sent by now was for holders that are lost;
        others may be in their place soon."""
        self._put(step.lane, None)
        while step in self.unsent:
            self.unsent.remove(step)

    def _put(self, lane: int, step: LaneStep | None) -> None:
        self._steps[lane] = step
        self.in_flight = [step for step in self._steps if step is not None]

    def lose(self, holder: HolderId) -> None:
        """A holder answers nothing of the steps in flight any more."""
        for step in self.in_flight:
            step.remote.lose(holder)

    def scattered(self, step: LaneStep) -> None:
        """A layer of it is on its way to the host, to be sent then; never too few times."""
        self.unsent.append(step)

    def dispatch(self) -> bool:
        """Send what has come to the host, in the order in which it was
        computed. Whether anything went."""
        sent = False
        while self.unsent:
            step, started = self.unsent[0], time.perf_counter()
            if not step.remote.dispatch():
                break
            step.s_compute_s += time.perf_counter() - started
            self.unsent.popleft()
            sent = True
        return sent

    @property
    def any_can_go_on(self) -> bool:
        """Whether something can be done for one in flight, as it stands now."""
        return any(step.can_go_on or step.has_come for step in self.in_flight)

    def collect_ready(self) -> None:
        """Queue those that have become able to go on."""
        ready = self.ready
        for step in self.in_flight:
            if step.can_go_on and step not in ready:
                ready.append(step)

    def note_ready(self, step: LaneStep) -> None:
        """Queue a step in flight if it has become able to go on."""
        if step.can_go_on and step not in self.ready:
            self.ready.append(step)

    def take_ready(self) -> LaneStep:
        """The one that has been able to for longest."""
        return self.ready.popleft()
