"""What the threads of a mover have to do, in units: a block that is stored, or
some layers of a block that is fetched.

Reads precede writes. What is fetched comes a **group** of layers at a time, all
of a job's first groups before any later ones, since layers are attended in that
order; so somebody may attend a layer while later ones are still to come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastdecode.core.clock import Clock
from rworker.tiers.lower_tier import MoveJob


@dataclass(frozen=True)
class Unit:
    """What a thread does at a time."""

    job: MoveJob
    index: int
    """Of the job's blocks."""
    group: int


class Units:
    """Of one mover. Any thread may call.

    Args:
        num_groups: of layers.
        clock: seconds.
    """

    def __init__(self, num_groups: int, clock: Clock) -> None:
        self._num_groups = num_groups
        self._clock = clock
        self._changed = threading.Condition()
        self._fetches: deque[Unit] = deque()
        self._stores: deque[Unit] = deque()
        self._running: dict[Unit, float] = {}  # since when
        self._placing: set[Unit] = set()  # into the cache
        self._jobs: dict[int, MoveJob] = {}
        self._is_closed = False
        self._is_giving_up = False

    @property
    def oldest_s(self) -> float | None:
        """Since when that unit runs which has run for longest; None: none does."""
        with self._changed:
            return min(self._running.values(), default=None)

    def begin(self, job: MoveJob) -> None:
        """Its units are to be done."""
        with self._changed:
            job.asked_s = self._clock()
            self._jobs[job.number] = job
            count, num_groups = len(job.keys), self._num_groups if job.is_fetch else 1
            job.num_left = [count] * num_groups
            queue = self._fetches if job.is_fetch else self._stores
            queue += [Unit(job, i, group) for group in range(num_groups) for i in range(count)]
            self._changed.notify_all()

    def next(self) -> Unit | None:
        """What to do next, once there is something; None: nothing any more."""
        with self._changed:
            while not self._is_closed:
                is_fetching = any(unit.job.is_fetch for unit in self._running)
                queue = self._fetches or (None if is_fetching else self._stores)
                if queue:
                    unit = queue.popleft()
                    self._running[unit] = now_s = self._clock()
                    unit.job.began_s = unit.job.began_s or now_s
                    return unit
                self._changed.wait()
        return None

    @contextmanager
    def placing(self, unit: Unit) -> Iterator[bool]:
        """While a unit's layers are put into the cache; False: they were given
        up, and the block may be another's by now."""
        with self._changed:
            may_place = unit in self._running
            if may_place:
                self._placing.add(unit)
        try:
            yield may_place
        finally:
            with self._changed:
                self._placing.discard(unit)
                if self._is_giving_up:
                    self._changed.notify_all()

    def done(self, unit: Unit, *, has_failed: bool) -> None:
        """A unit is done, be it for nothing."""
        job = unit.job
        with self._changed:
            if self._running.pop(unit, None) is None:
                return  # it was given up
            num_before = job.num_there
            job.num_left[unit.group] -= 1
            if has_failed:
                job.failed.add(unit.index)
            if job.num_there > num_before:
                job.seconds = self._clock() - job.began_s
                self._end_if_over(job)
                self._changed.notify_all()
            elif not job.is_fetch or not self._fetches:
                self._changed.notify_all()  # a store may begin now

    def progress(self, job: MoveJob) -> int:
        """Groups of a job that are there, or have failed."""
        with self._changed:
            job.num_told = job.num_there
            if job.is_over:
                self._jobs.pop(job.number, None)
            return job.num_told

    def wait(self, timeout_s: float | None) -> None:
        """Until there is more of some job than was reported, or so long; or no job is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._jobs or any(job.has_more for job in self._jobs.values()),
                timeout_s,
            )

    def wait_for(self, numbers: Iterable[int], group: int, most_s: float) -> list[MoveJob]:
        """Until a group of layers of these jobs is there. Jobs that are waited
        for longer than ``most_s`` in all are given up: which they are."""
        late: list[MoveJob] = []
        with self._changed:
            for job in [self._jobs[number] for number in numbers if number in self._jobs]:
                if job.num_there > group:
                    continue
                started_s = self._clock()
                is_there = self._changed.wait_for(
                    lambda job=job: job.num_there > group,  # type: ignore[misc]
                    max(0.0, most_s - job.waited_s),
                )
                job.waited_s += self._clock() - started_s
                if not is_there:
                    late.append(job)
        if late:
            self.give_up(late)
        return late

    def give_up(self, jobs: Collection[MoveJob] | None = None) -> None:
        """Nobody waits for these any more, or for any: they have failed. A
        thread that comes back later finds that out, and places nothing."""
        with self._changed:
            doomed = set(self._jobs.values() if jobs is None else jobs)
            self._fetches = deque(unit for unit in self._fetches if unit.job not in doomed)
            self._stores = deque(unit for unit in self._stores if unit.job not in doomed)
            self._is_giving_up = True
            self._changed.wait_for(lambda: all(x.job not in doomed for x in self._placing))
            self._is_giving_up = False
            self._running = {x: s for x, s in self._running.items() if x.job not in doomed}
            for job in doomed:
                if not job.is_over:
                    job.failed.update(range(len(job.keys)))
                    job.num_left = [0] * len(job.num_left)
                    self._end_if_over(job)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._is_closed = True
            self._fetches.clear()
            self._stores.clear()
            self._changed.notify_all()

    def _end_if_over(self, job: MoveJob) -> None:
        if job.is_over:
            job.seconds = self._clock() - job.asked_s
