"""Instances on a virtual clock: prompts in batches through stages, tokens in
steps, both in one, and K and V through ports."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fastdecode.schedule.dispatch import DecodeReservations, DispatchJob
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.instance_time import InstanceTime
from fastdecode.schedule.times import StepTime


class PrefillInstance:
    """Whole prompts, in order, up to ``batch_tokens`` a batch; a longer one by itself. Done
    prompts wait in its buffer until they are fetched; while that is full, no batch begins."""

    def __init__(
        self,
        clock: VirtualClock,
        times: InstanceTime,
        batch_tokens: int,
        buffer_tokens: int,
        done: Callable[[DispatchJob], None],
    ) -> None:
        self._clock = clock
        self._times = times
        self._batch_tokens = batch_tokens
        self._buffer_tokens = buffer_tokens
        self._done = done
        self._queue: deque[DispatchJob] = deque()
        self._free_s = [0.0] * times.num_stages
        self._is_asked = False
        self._held = 0
        self.most_held = 0
        """Tokens, running and waiting to be fetched."""
        self.busy_s = 0.0
        """Of the first stage."""

    def put(self, job: DispatchJob) -> None:
        self._queue.append(job)
        self._ask()

    def release(self, job: DispatchJob) -> None:
        """Its K and V have been fetched, or no instance needs them."""
        self._held -= job.prompt_tokens
        self._ask()

    def _ask(self) -> None:
        """Begin a batch when the first stage is free."""
        if not self._is_asked and self._queue:
            self._is_asked = True
            self._clock.at(max(self._clock.now, self._free_s[0]), self._begin)

    def _begin(self) -> None:
        self._is_asked = False
        batch = self._take()
        if not batch:
            return
        self.most_held = max(self.most_held, self._held)
        stage_s = self._times.prefill_s([job.prompt_tokens for job in batch])
        stage_s /= self._times.num_stages
        self.busy_s += stage_s
        left_s = self._clock.now
        for stage, free_s in enumerate(self._free_s):
            left_s = self._free_s[stage] = max(left_s, free_s) + stage_s
        self._clock.at(left_s, lambda: self._end(batch))
        self._ask()

    def _take(self) -> list[DispatchJob]:
        batch: list[DispatchJob] = []
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

    def _end(self, batch: list[DispatchJob]) -> None:
        for job in batch:
            self._done(job)


@dataclass
class TransferPort:
    """A port of an instance: transfers one after the other."""

    times: StepTime
    free_s: float = 0.0
    busy_s: float = 0.0


def transfer(now_s: float, num_tokens: int, ports: Iterable[TransferPort]) -> float:
    """When K and V of so many tokens are there: they wait for all ports, and pass at
    the pace of the slowest. A port that takes no time is never waited for."""
    took = [(port, port.times.transfer_s(num_tokens)) for port in ports]
    slow = [port for port, took_s in took if took_s]
    if not slow:
        return now_s
    took_s = max(seconds for _, seconds in took)
    ended_s = max(now_s, *(port.free_s for port in slow)) + took_s
    for port in slow:
        port.free_s = ended_s
        port.busy_s += took_s
    return ended_s


MAX_STEPS_AHEAD = 512


class DecodeInstance:
    """Steps of all that decode. Between two changes of the batch, many steps are one event.

    Args:
        done: a request has drawn its last token.
    """

    def __init__(
        self, clock: VirtualClock, times: InstanceTime, done: Callable[[DispatchJob], None]
    ) -> None:
        self._clock = clock
        self._times = times
        self._done = done
        self._joining: list[tuple[DispatchJob, int]] = []
        self._running: list[tuple[int, int, DispatchJob]] = []
        """By the step after which they are over."""
        self._order = itertools.count()
        self._num_steps = 0
        self._context = 0
        """Cached tokens of all that run, at the next step."""
        self._began_s = 0.0
        self._ends_s: np.ndarray | None = None
        """Of the steps under way, since ``_began_s``."""
        self._version = 0
        self.busy_s = 0.0

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

    def join(self, job: DispatchJob, num_tokens: int) -> None:
        """Its K and V are there; it decodes so many tokens, from the next step
        on. Not to be called from ``done``."""
        self._joining.append((job, num_tokens))
        self._wake()

    def _wake(self) -> None:
        if self._ends_s is None:
            self._go_on()
            return
        # The step under way is the last one without it.
        last = self._under_way(self._ends_s)
        if last + 1 < len(self._ends_s):
            self._await(self._ends_s[: last + 1])

    def _add(self, job: DispatchJob, num_tokens: int) -> None:
        """It decodes so many tokens, from the next step on. At its end, its
        context is all that was reserved."""
        heapq.heappush(self._running, (self._num_steps + num_tokens, next(self._order), job))
        self._context += job.reserved_tokens - num_tokens

    def _go_on(self) -> None:
        for job, num_tokens in self._joining:
            self._add(job, num_tokens)
        self._joining.clear()
        if self._running:
            self._decode(min(MAX_STEPS_AHEAD, self._running[0][0] - self._num_steps))

    def _decode(self, num_steps: int) -> None:
        self._begin(self._times.decode_s(len(self._running), self._context, num_steps))

    def _begin(self, steps_s: np.ndarray) -> None:
        self._began_s = self._clock.now
        self._await(np.cumsum(steps_s))

    def _await(self, ends_s: np.ndarray) -> None:
        self._ends_s = ends_s
        self._version += 1
        version = self._version
        end_s = max(self._clock.now, self._began_s + float(ends_s[-1]))
        self._clock.at(end_s, lambda: self._end_steps(version))

    def _end_steps(self, version: int) -> None:
        if version != self._version:
            return  # they were cut
        assert self._ends_s is not None
        count = len(self._ends_s)
        self.busy_s += float(self._ends_s[-1])
        self._num_steps += count
        self._context += count * len(self._running)
        self._ends_s = None
        over = []
        while self._running and self._running[0][0] == self._num_steps:
            over.append(heapq.heappop(self._running)[2])
            self._context -= over[-1].reserved_tokens
        self._stepped(over)

    def _stepped(self, over: list[DispatchJob]) -> None:
        for job in over:
            self._done(job)
        self._go_on()


@dataclass
class _Prompt:
    job: DispatchJob
    num_done: int = 0


class ColocatedInstance(DecodeInstance):
    """An instance for both phases: parts of prompts run in decode steps, as the engine runs them.
    Requests start in order, where there is room for all that they will cache.

    Args:
        step_tokens: of prompts in a step, at most.
        first: a request's first token is drawn; returns how many are to come.
        opens_at_once: what starts joins the very step that is begun; else the
            next one, where something else runs meanwhile.
    """

    def __init__(
        self,
        clock: VirtualClock,
        times: InstanceTime,
        step_tokens: int,
        room: DecodeReservations,
        first: Callable[[DispatchJob], int],
        done: Callable[[DispatchJob], None],
        *,
        opens_at_once: bool = True,
    ) -> None:
        super().__init__(clock, times, done)
        self._step_tokens = step_tokens
        self.room = room
        self._first = first
        self._opens_at_once = opens_at_once
        self._waiting: deque[DispatchJob] = deque()
        self._opening: list[_Prompt] = []
        """Their room is reserved; they join the step after the one under way."""
        self._prompts: deque[_Prompt] = deque()
        self._parts: list[tuple[_Prompt, int]] = []
        """Of prompts, in the step under way."""
        self._wanted_tokens = 0
        """That waiting requests will reserve."""

    @property
    def fullness(self) -> float:
        """Which share of its room is reserved, or wanted by waiting requests."""
        return self.room.fullness + self._wanted_tokens / self.room.capacity_tokens

    def put(self, job: DispatchJob) -> None:
        """Not to be called from ``first`` or ``done``."""
        self._waiting.append(job)
        self._wanted_tokens += job.reserved_tokens
        self._wake()

    def _go_on(self) -> None:
        self._prompts += self._opening
        self._opening = self._start_waiting()
        if self._opens_at_once or not (self._running or self._prompts):
            self._prompts += self._opening
            self._opening = []
        self._parts = self._take()
        if self._parts:
            parts = [(prompt.num_done, tokens) for prompt, tokens in self._parts]
            step_s = self._times.mixed_s(len(self._running), self._context, parts)
            self._begin(np.array([step_s]))
        elif self._opening and self._running:
            self._decode(1)
        else:
            super()._go_on()

    def _start_waiting(self) -> list[_Prompt]:
        started = []
        while self._waiting and self.room.fits(self._waiting[0]):
            job = self._waiting.popleft()
            self._wanted_tokens -= job.reserved_tokens
            self.room.num_tokens += job.reserved_tokens
            self.room.num_sequences += 1
            started.append(_Prompt(job))
        return started

    def _take(self) -> list[tuple[_Prompt, int]]:
        left, parts = self._step_tokens, []
        for prompt in self._prompts:
            tokens = min(left, prompt.job.prompt_tokens - prompt.num_done)
            if tokens <= 0:
                break
            parts.append((prompt, tokens))
            left -= tokens
        return parts

    def _stepped(self, over: list[DispatchJob]) -> None:
        for job in over:
            self._end(job)
        for prompt, tokens in self._parts:
            prompt.num_done += tokens
        while self._prompts and self._prompts[0].num_done == self._prompts[0].job.prompt_tokens:
            self._drawn(self._prompts.popleft().job)
        self._go_on()

    def _drawn(self, job: DispatchJob) -> None:
        num_tokens = self._first(job)
        if num_tokens:
            self._add(job, num_tokens)
        else:
            self._end(job)

    def _end(self, job: DispatchJob) -> None:
        self.room.num_tokens -= job.reserved_tokens
        self.room.num_sequences -= 1
        self._done(job)
