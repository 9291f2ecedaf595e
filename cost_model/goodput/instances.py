"""Instances on a virtual clock: prompts in batches through stages, tokens in
steps, K and V over links."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cost_model.goodput.times import InstanceTimes
from fastdecode.schedule.dispatch import Job

MAX_STEPS_AHEAD = 512


class Clock:
    """Calls at times; those of the same time in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self.now_s
        heapq.heappush(self._heap, (time_s, next(self._order), call))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()


class PrefillInstance:
    """Whole prompts, in order, up to ``batch_tokens`` a batch; a longer one by
    itself. Done prompts wait in its buffer until they are fetched; while that
    is full, no batch begins."""

    def __init__(
        self,
        clock: Clock,
        times: InstanceTimes,
        batch_tokens: int,
        buffer_tokens: int,
        done: Callable[[Job], None],
    ) -> None:
        self._clock = clock
        self._times = times
        self._batch_tokens = batch_tokens
        self._buffer_tokens = buffer_tokens
        self._done = done
        self._queue: deque[Job] = deque()
        self._free_s = [0.0] * times.num_stages
        self._is_asked = False
        self._held = 0
        self.most_held = 0
        """Tokens, running and waiting to be fetched."""
        self.busy_s = 0.0
        """Of the first stage."""

    def put(self, job: Job) -> None:
        self._queue.append(job)
        self._ask()

    def release(self, job: Job) -> None:
        """Its K and V have been fetched, or nobody wants them."""
        self._held -= job.prompt_tokens
        self._ask()

    def _ask(self) -> None:
        """Begin a batch when the first stage is free."""
        if not self._is_asked and self._queue:
            self._is_asked = True
            self._clock.at(max(self._clock.now_s, self._free_s[0]), self._begin)

    def _begin(self) -> None:
        self._is_asked = False
        batch = self._take()
        if not batch:
            return
        self.most_held = max(self.most_held, self._held)
        stage_s = self._times.prefill_s([job.prompt_tokens for job in batch])
        stage_s /= self._times.num_stages
        self.busy_s += stage_s
        left_s = self._clock.now_s
        for stage, free_s in enumerate(self._free_s):
            left_s = self._free_s[stage] = max(left_s, free_s) + stage_s
        self._clock.at(left_s, lambda: self._end(batch))
        self._ask()

    def _take(self) -> list[Job]:
        batch: list[Job] = []
        tokens = 0
        while self._queue:
            prompt = self._queue[0].prompt_tokens
            if batch and tokens + prompt > self._batch_tokens:
                break
            if self._held and self._held + prompt > self._buffer_tokens:
                break
            batch.append(self._queue.popleft())
            tokens += prompt
            self._held += prompt
        return batch

    def _end(self, batch: list[Job]) -> None:
        for job in batch:
            self._done(job)


@dataclass
class Link:
    """A port: transfers one after the other."""

    bytes_per_s: float
    free_s: float = 0.0
    busy_s: float = 0.0


def transfer(now_s: float, num_bytes: float, links: list[Link]) -> float:
    """When so many bytes are there: they wait for all links, and pass at the
    pace of the slowest."""
    if not links:
        return now_s
    took_s = num_bytes / min(link.bytes_per_s for link in links)
    ended_s = max(now_s, *(link.free_s for link in links)) + took_s
    for link in links:
        link.free_s = ended_s
        link.busy_s += took_s
    return ended_s


class DecodeInstance:
    """Steps of all that decode. Between two changes of the batch, many steps at once."""

    def __init__(self, clock: Clock, times: InstanceTimes, done: Callable[[Job], None]) -> None:
        self._clock = clock
        self._times = times
        self._done = done
        self._running: list[tuple[int, int, Job]] = []
        """By the step after which they are over."""
        self._order = itertools.count()
        self._joining: list[tuple[Job, int]] = []
        self._num_steps = 0
        self._context = 0
        """Cached tokens of all that run, at the next step."""
        self._began_s = 0.0
        self._ends_s: np.ndarray | None = None
        """Of the steps under way, since ``_began_s``."""
        self._version = 0
        self.busy_s = 0.0

    def join(self, job: Job, num_tokens: int) -> None:
        """Its K and V are there; it decodes so many tokens, from the next step
        on. Not to be called from ``done``."""
        self._joining.append((job, num_tokens))
        if self._ends_s is None:
            self._go_on()
            return
        # The step under way is the last one without it.
        passed_s = self._clock.now_s - self._began_s
        last = int(np.searchsorted(self._ends_s, passed_s))
        if last + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: last + 1]
            self._await()

    def _await(self) -> None:
        assert self._ends_s is not None
        self._version += 1
        version = self._version
        end_s = max(self._clock.now_s, self._began_s + float(self._ends_s[-1]))
        self._clock.at(end_s, lambda: self._stepped(version))

    def _stepped(self, version: int) -> None:
        if version != self._version:
            return
        assert self._ends_s is not None
        count = len(self._ends_s)
        self.busy_s += float(self._ends_s[-1])
        self._num_steps += count
        self._context += count * len(self._running)
        self._ends_s = None
        while self._running and self._running[0][0] == self._num_steps:
            job = heapq.heappop(self._running)[2]
            self._context -= job.reserved_tokens
            self._done(job)
        self._go_on()

    def _go_on(self) -> None:
        for job, num_tokens in self._joining:
            over = self._num_steps + num_tokens
            heapq.heappush(self._running, (over, next(self._order), job))
            # At its end, its context is all that was reserved.
            self._context += job.reserved_tokens - num_tokens
        self._joining.clear()
        if not self._running:
            return
        count = min(MAX_STEPS_AHEAD, self._running[0][0] - self._num_steps)
        steps_s = self._times.decode_s(len(self._running), self._context, count)
        self._began_s = self._clock.now_s
        self._ends_s = np.cumsum(steps_s)
        self._await()
