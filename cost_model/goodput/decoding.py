"""Those that decode on one instance, step by step. Between two changes of the
batch, many steps are one event."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

from fastdecode.schedule.dispatch import DispatchJob
from fastdecode.schedule.simulation.clock import VirtualClock

MAX_STEPS_AHEAD = 512


class DecodingBatch:
    """Runs steps whose times its owner knows.

    Args:
        stepped: told of all that have come to their end, when the steps that
            were begun are over.
    """

    def __init__(self, clock: VirtualClock, stepped: Callable[[list[DispatchJob]], None]) -> None:
        self._clock = clock
        self._stepped = stepped
        self._running: list[tuple[int, int, DispatchJob]] = []
        """By the step after which they are over."""
        self._order = itertools.count()
        self._num_steps = 0
        self.context = 0
        """Cached tokens of all that run, at the next step."""
        self._began_s = 0.0
        self._ends_s: np.ndarray | None = None
        """Of the steps under way, since ``_began_s``."""
        self._version = 0
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def is_stepping(self) -> bool:
        """Whether steps are under way."""
        return self._ends_s is not None

    @property
    def step_ends_s(self) -> float:
        """When the step under way is over; now, if there is none."""
        if self._ends_s is None:
            return self._clock.now
        last = min(self._under_way(self._ends_s), len(self._ends_s) - 1)
        return max(self._clock.now, self._began_s + float(self._ends_s[last]))

    def _under_way(self, ends_s: np.ndarray) -> int:
        """Which of the steps that end so."""
        return int(np.searchsorted(ends_s, self._clock.now - self._began_s, side="right"))

    @property
    def num_steps_ahead(self) -> int:
        """Until the first of them is over, as far as one looks ahead."""
        return min(MAX_STEPS_AHEAD, self._running[0][0] - self._num_steps)

    def add(self, job: DispatchJob, num_tokens: int) -> None:
        """It decodes so many tokens, from the next step on. At its end, its
        context is all that was reserved."""
        over = self._num_steps + num_tokens
        heapq.heappush(self._running, (over, next(self._order), job))
        self.context += job.reserved_tokens - num_tokens

    def begin(self, steps_s: np.ndarray) -> None:
        """Steps that take so long each."""
        self._began_s = self._clock.now
        self._ends_s = np.cumsum(steps_s)
        self._await()

    def cut(self) -> None:
        """The step under way is the last of those that were begun."""
        assert self._ends_s is not None
        last = self._under_way(self._ends_s)
        if last + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: last + 1]
            self._await()

    def _await(self) -> None:
        assert self._ends_s is not None
        self._version += 1
        version = self._version
        end_s = max(self._clock.now, self._began_s + float(self._ends_s[-1]))
        self._clock.at(end_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # it was cut
        assert self._ends_s is not None
        count = len(self._ends_s)
        self.busy_s += float(self._ends_s[-1])
        self._num_steps += count
        self.context += count * len(self._running)
        self._ends_s = None
        over = []
        while self._running and self._running[0][0] == self._num_steps:
            over.append(heapq.heappop(self._running)[2])
            self.context -= over[-1].reserved_tokens
        self._stepped(over)
