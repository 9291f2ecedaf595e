"""An instance for both phases on a virtual clock: chunks of prompts run in the
steps of those that decode, as the engine runs them."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cost_model.goodput.instances import MAX_STEPS_AHEAD, Clock
from cost_model.goodput.times import InstanceTimes
from fastdecode.schedule.dispatch import DecodeRoom, Job


@dataclass
class _Prompt:
    job: Job
    num_done: int = 0


class ColocatedInstance:
    """Requests start in order, where there is room for all that they will cache.
    A step has at most so many tokens of prompts."""

    def __init__(
        self,
        clock: Clock,
        times: InstanceTimes,
        step_tokens: int,
        room: DecodeRoom,
        first: Callable[[Job], int],
        done: Callable[[Job], None],
    ) -> None:
        self._clock = clock
        self._times = times
        self._step_tokens = step_tokens
        self.room = room
        self._first = first
        """Its first token is drawn; returns how many are to come."""
        self._done = done
        self._waiting: deque[Job] = deque()
        self._prompts: deque[_Prompt] = deque()
        self._running: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._num_steps = 0
        self._context = 0
        self._ends_s: np.ndarray | None = None
        self._began_s = 0.0
        self._version = 0
        self._chunks: list[tuple[_Prompt, int]] = []
        self.busy_s = 0.0

    @property
    def num_queued_tokens(self) -> int:
        """Of prompts that haven't run."""
        running = sum(each.job.prompt_tokens - each.num_done for each in self._prompts)
        return running + sum(job.prompt_tokens for job in self._waiting)

    def put(self, job: Job) -> None:
        """Not to be called from ``first`` or ``done``."""
        self._waiting.append(job)
        if self._ends_s is None:
            self._go_on()
            return
        last = int(np.searchsorted(self._ends_s, self._clock.now_s - self._began_s))
        if last + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: last + 1]
            self._await()

    def _await(self) -> None:
        assert self._ends_s is not None
        self._version += 1
        version = self._version
        end_s = max(self._clock.now_s, self._began_s + float(self._ends_s[-1]))
        self._clock.at(end_s, lambda: self._stepped(version))

    def _go_on(self) -> None:
        while self._waiting and self.room.fits(self._waiting[0]):
            job = self._waiting.popleft()
            self.room.num_tokens += job.reserved_tokens
            self.room.num_sequences += 1
            self._prompts.append(_Prompt(job))
        self._chunks = self._take()
        if self._chunks:
            chunks = [(prompt.num_done, tokens) for prompt, tokens in self._chunks]
            steps_s = np.array([self._times.mixed_s(len(self._running), self._context, chunks)])
        elif self._running:
            count = min(MAX_STEPS_AHEAD, self._running[0][0] - self._num_steps)
            steps_s = self._times.decode_s(len(self._running), self._context, count)
        else:
            return
        self._began_s = self._clock.now_s
        self._ends_s = np.cumsum(steps_s)
        self._await()

    def _take(self) -> list[tuple[_Prompt, int]]:
        left, chunks = self._step_tokens, []
        for prompt in self._prompts:
            tokens = min(left, prompt.job.prompt_tokens - prompt.num_done)
            if tokens <= 0:
                break
            chunks.append((prompt, tokens))
            left -= tokens
        return chunks

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
            self._end(job)
        for prompt, tokens in self._chunks:
            prompt.num_done += tokens
        while self._prompts and self._prompts[0].num_done == self._prompts[0].job.prompt_tokens:
            self._drawn(self._prompts.popleft().job)
        self._go_on()

    def _drawn(self, job: Job) -> None:
        num_tokens = self._first(job)
        if not num_tokens:
            self._end(job)
            return
        heapq.heappush(self._running, (self._num_steps + num_tokens, next(self._order), job))
        self._context += job.reserved_tokens - num_tokens

    def _end(self, job: Job) -> None:
        self.room.num_tokens -= job.reserved_tokens
        self.room.num_sequences -= 1
        self._done(job)
