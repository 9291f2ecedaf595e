"""Instances on a virtual clock: prompts in batches through stages, tokens in steps, both in one,
and K and V through ports."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fastdecode.schedule.dispatch import DecodeReservations, DispatchJob
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.instance_time import InstanceTime
from fastdecode.schedule.times import StepTime

UNLIMITED = 1 << 60
MAX_STEPS_AHEAD = 512


@dataclass(frozen=True)
class PrefillSpec:
    times: InstanceTime
    batch_tokens: int
    buffer_tokens: int = UNLIMITED


@dataclass(frozen=True)
class DecodeSpec:
    times: InstanceTime
    capacity_tokens: int = UNLIMITED
    max_sequences: int = UNLIMITED
    opens_at_once: bool = True
    """True if its R-workers answer within no time that they have capacity."""


class PrefillInstance:
    """Runs whole prompts in order, in batches. A prompt longer than a batch runs by itself.

    Finished prompts stay in its buffer until they are fetched. No batch starts while that is full.
    """

    def __init__(
        self, clock: VirtualClock, spec: PrefillSpec, done: Callable[[DispatchJob], None]
    ) -> None:
        self._clock = clock
        self._spec = spec
        self._done = done
        self._queue: deque[DispatchJob] = deque()
        self._free_at = [0.0] * spec.times.num_stages
        self._is_asked = False
        self._held = 0
        self.most_held = 0
        """Most tokens that ran or waited to be fetched."""
        self.busy_s = 0.0
        """Busy time of the first stage."""

    def put(self, job: DispatchJob) -> None:
        self._queue.append(job)
        self._ask()

    def release(self, job: DispatchJob) -> None:
        """Free its K and V: they have been fetched, or no instance needs them."""
        self._held -= job.prompt_tokens
        self._ask()

    def _ask(self) -> None:
        if not self._is_asked and self._queue:
            self._is_asked = True
            self._clock.at(max(self._clock.now, self._free_at[0]), self._start)

    def _start(self) -> None:
        self._is_asked = False
        batch = self._take()
        if not batch:
            return
        self.most_held = max(self.most_held, self._held)
        times = self._spec.times
        stage_s = times.prefill_s([job.prompt_tokens for job in batch]) / times.num_stages
        self.busy_s += stage_s
        left_at = self._clock.now
        for stage, free_at in enumerate(self._free_at):
            left_at = self._free_at[stage] = max(left_at, free_at) + stage_s
        self._clock.at(left_at, partial(self._end, batch))
        self._ask()

    def _take(self) -> list[DispatchJob]:
        batch: list[DispatchJob] = []
        tokens = 0
        while self._queue:
            prompt = self._queue[0].prompt_tokens
            if batch and tokens + prompt > self._spec.batch_tokens:
                break
            if self._held and self._held + prompt > self._spec.buffer_tokens:
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
    free_at: float = 0.0
    busy_s: float = 0.0


def transfer(now_s: float, num_tokens: int, ports: Iterable[TransferPort]) -> float:
    """Return when K and V of this many tokens have arrived. They wait for all ports, and pass at
    the pace of the slowest. A port that takes no time is never waited for."""
    took = [(port, port.times.transfer_s(num_tokens)) for port in ports]
    slow = [port for port, took_s in took if took_s]
    if not slow:
        return now_s
    took_s = max(seconds for _, seconds in took)
    ended_at = max(now_s, *(port.free_at for port in slow)) + took_s
    for port in slow:
        port.free_at = ended_at
        port.busy_s += took_s
    return ended_at


@dataclass
class _Prompt:
    job: DispatchJob
    num_done: int = 0


class DecodeInstance:
    """Runs steps of all that decode, and parts of prompts in them, as the engine does. Between two
    changes of the batch, many steps are one event.

    Prompts start in order, once there is capacity for all that their requests will cache, at most
    ``step_tokens`` per step. If R-workers do not open at once, a request that starts joins the step
    after the next, unless nothing runs. ``first`` gets a request whose first token is sampled here,
    and returns how many follow; ``done`` gets one that has sampled its last.
    """

    def __init__(
        self,
        clock: VirtualClock,
        spec: DecodeSpec,
        done: Callable[[DispatchJob], None],
        first: Callable[[DispatchJob], int] = lambda _: 0,
        step_tokens: int = 0,
    ) -> None:
        self._clock = clock
        self._times = spec.times
        self._done = done
        self._first = first
        self._step_tokens = step_tokens
        self.opens_at_once = spec.opens_at_once
        self.room = DecodeReservations(spec.capacity_tokens, spec.max_sequences)
        self._waiting: deque[DispatchJob] = deque()
        self._wanted_tokens = 0
        self._opening: list[_Prompt] = []
        """Prompts with a reservation that join the step after the running one."""
        self._prompts: deque[_Prompt] = deque()
        self._parts: list[tuple[_Prompt, int]] = []
        self._joining: list[tuple[DispatchJob, int]] = []
        self._running: list[tuple[int, int, DispatchJob]] = []
        """Ordered by the step after which they are finished."""
        self._order = itertools.count()
        self._num_steps = 0
        self._context = 0
        """Cached tokens of all that run, at the next step."""
        self._started_at = 0.0
        self._ends_s: np.ndarray | None = None
        """Ends of the running steps, since ``_started_at``."""
        self._version = 0
        self.busy_s = 0.0

    @property
    def fullness(self) -> float:
        """The share of its capacity that is reserved, or wanted by waiting requests."""
        return self.room.fullness + self._wanted_tokens / self.room.capacity_tokens

    @property
    def step_ends_s(self) -> float:
        if self._ends_s is None:
            return self._clock.now
        last = min(self._running_step(self._ends_s), len(self._ends_s) - 1)
        return max(self._clock.now, self._started_at + float(self._ends_s[last]))

    def _running_step(self, ends_s: np.ndarray) -> int:
        return int(np.searchsorted(ends_s, self._clock.now - self._started_at, side="right"))

    def put(self, job: DispatchJob) -> None:
        """Queue a prompt. Not to be called from ``first`` or ``done``, as ``join``."""
        self._waiting.append(job)
        self._wanted_tokens += job.reserved_tokens
        self._wake()

    def join(self, job: DispatchJob, num_tokens: int) -> None:
        """Decode this many tokens from the next step on."""
        self._reserve(job)
        self._joining.append((job, num_tokens))
        self._wake()

    def _reserve(self, job: DispatchJob, sign: int = 1) -> None:
        self.room.num_tokens += sign * job.reserved_tokens
        self.room.num_sequences += sign

    def _wake(self) -> None:
        if self._ends_s is None:
            self._continue()
            return
        # The running step is the last one without the new request.
        last = self._running_step(self._ends_s)
        if last + 1 < len(self._ends_s):
            self._await(self._ends_s[: last + 1])

    def _add(self, job: DispatchJob, num_tokens: int) -> None:
        # At its end, its context is all that was reserved.
        heapq.heappush(self._running, (self._num_steps + num_tokens, next(self._order), job))
        self._context += job.reserved_tokens - num_tokens

    def _continue(self) -> None:
        for job, num_tokens in self._joining:
            self._add(job, num_tokens)
        self._joining.clear()
        self._prompts += self._opening
        self._opening = []
        while self._waiting and self.room.fits(self._waiting[0]):
            job = self._waiting.popleft()
            self._wanted_tokens -= job.reserved_tokens
            self._reserve(job)
            self._opening.append(_Prompt(job))
        if self.opens_at_once or not (self._running or self._prompts):
            self._prompts += self._opening
            self._opening = []
        self._parts = self._take()
        if self._parts:
            parts = [(prompt.num_done, tokens) for prompt, tokens in self._parts]
            step_s = self._times.mixed_s(len(self._running), self._context, parts)
            self._start(np.array([step_s]))
        elif self._running:
            few = min(MAX_STEPS_AHEAD, self._running[0][0] - self._num_steps)
            num_steps = 1 if self._opening else few
            self._start(self._times.decode_s(len(self._running), self._context, num_steps))

    def _take(self) -> list[tuple[_Prompt, int]]:
        left, parts = self._step_tokens, []
        for prompt in self._prompts:
            tokens = min(left, prompt.job.prompt_tokens - prompt.num_done)
            if tokens <= 0:
                break
            parts.append((prompt, tokens))
            left -= tokens
        return parts

    def _start(self, steps_s: np.ndarray) -> None:
        self._started_at = self._clock.now
        self._await(np.cumsum(steps_s))

    def _await(self, ends_s: np.ndarray) -> None:
        self._ends_s = ends_s
        self._version += 1
        end_at = max(self._clock.now, self._started_at + float(ends_s[-1]))
        self._clock.at(end_at, partial(self._end_steps, self._version))

    def _end_steps(self, version: int) -> None:
        if version != self._version:
            return  # they were cut short
        assert self._ends_s is not None
        count = len(self._ends_s)
        self.busy_s += float(self._ends_s[-1])
        self._num_steps += count
        self._context += count * len(self._running)
        self._ends_s = None
        while self._running and self._running[0][0] == self._num_steps:
            job = heapq.heappop(self._running)[2]
            self._context -= job.reserved_tokens
            self._end(job)
        for prompt, tokens in self._parts:
            prompt.num_done += tokens
        while self._prompts and self._prompts[0].num_done == self._prompts[0].job.prompt_tokens:
            job = self._prompts.popleft().job
            num_tokens = self._first(job)
            if num_tokens:
                self._add(job, num_tokens)
            else:
                self._end(job)
        self._continue()

    def _end(self, job: DispatchJob) -> None:
        self._reserve(job, -1)
        self._done(job)
