"""An instance for both phases on a virtual clock: chunks of prompts run in the
steps of those that decode, as the engine runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cost_model.goodput.decoding import DecodingBatch
from cost_model.goodput.times import InstanceTimes
from fastdecode.schedule.dispatch import DecodeReservations, DispatchJob
from fastdecode.schedule.simulation.clock import VirtualClock


@dataclass
class _Prompt:
    job: DispatchJob
    num_done: int = 0


class ColocatedInstance:
    """Requests start in order, where there is room for all that they will cache.
    A step has at most so many tokens of prompts.

    ``opens_at_once``: what starts joins the very step that is begun; else the
    next one, where somebody else runs meanwhile.
    """

    def __init__(
        self,
        clock: VirtualClock,
        times: InstanceTimes,
        step_tokens: int,
        room: DecodeReservations,
        first: Callable[[DispatchJob], int],
        done: Callable[[DispatchJob], None],
        *,
        opens_at_once: bool = True,
    ) -> None:
        self._times = times
        self._step_tokens = step_tokens
        self.room = room
        self._first = first
        """Its first token is drawn; returns how many are to come."""
        self._done = done
        self._opens_at_once = opens_at_once
        self._waiting: deque[DispatchJob] = deque()
        self._opening: list[_Prompt] = []
        """Their room is reserved; they join the step after the one under way."""
        self._prompts: deque[_Prompt] = deque()
        self._batch = DecodingBatch(clock, self._stepped)
        self._chunks: list[tuple[_Prompt, int]] = []
        self._wanted_tokens = 0
        """That those who wait will reserve."""

    @property
    def busy_s(self) -> float:
        return self._batch.busy_s

    @property
    def fullness(self) -> float:
        """Which share of its room is reserved, or wanted by those that wait."""
        return self.room.fullness + self._wanted_tokens / self.room.capacity_tokens

    def put(self, job: DispatchJob) -> None:
        """Not to be called from ``first`` or ``done``."""
        self._waiting.append(job)
        self._wanted_tokens += job.reserved_tokens
        if self._batch.is_stepping:
            self._batch.cut()
        else:
            self._go_on()

    def _go_on(self) -> None:
        batch, times = self._batch, self._times
        self._prompts += self._opening
        self._opening = self._start_waiting()
        if self._opens_at_once or not (len(batch) or self._prompts):
            self._prompts += self._opening
            self._opening = []
        self._chunks = self._take()
        if self._chunks:
            chunks = [(prompt.num_done, tokens) for prompt, tokens in self._chunks]
            batch.begin(np.array([times.mixed_s(len(batch), batch.context, chunks)]))
        elif len(batch):
            num_steps = 1 if self._opening else batch.num_steps_ahead
            batch.begin(times.decode_s(len(batch), batch.context, num_steps))

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
        left, chunks = self._step_tokens, []
        for prompt in self._prompts:
            tokens = min(left, prompt.job.prompt_tokens - prompt.num_done)
            if tokens <= 0:
                break
            chunks.append((prompt, tokens))
            left -= tokens
        return chunks

    def _stepped(self, over: list[DispatchJob]) -> None:
        for job in over:
            self._end(job)
        for prompt, tokens in self._chunks:
            prompt.num_done += tokens
        while self._prompts and self._prompts[0].num_done == self._prompts[0].job.prompt_tokens:
            self._drawn(self._prompts.popleft().job)
        self._go_on()

    def _drawn(self, job: DispatchJob) -> None:
        num_tokens = self._first(job)
        if num_tokens:
            self._batch.add(job, num_tokens)
        else:
            self._end(job)

    def _end(self, job: DispatchJob) -> None:
        self.room.num_tokens -= job.reserved_tokens
        self.room.num_sequences -= 1
        self._done(job)
