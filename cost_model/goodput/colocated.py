"""An instance for both phases on a virtual clock: chunks of prompts run in the
steps of those that decode, as the engine runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cost_model.goodput.clock import Clock
from cost_model.goodput.decoding import DecodingBatch
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
        self._times = times
        self._step_tokens = step_tokens
        self.room = room
        self._first = first
        """Its first token is drawn; returns how many are to come."""
        self._done = done
        self._waiting: deque[Job] = deque()
        self._prompts: deque[_Prompt] = deque()
        self._batch = DecodingBatch(clock, self._stepped)
        self._chunks: list[tuple[_Prompt, int]] = []
        self.num_queued_tokens = 0
        """Of prompts that haven't run."""

    @property
    def busy_s(self) -> float:
        return self._batch.busy_s

    def put(self, job: Job) -> None:
        """Not to be called from ``first`` or ``done``."""
        self._waiting.append(job)
        self.num_queued_tokens += job.prompt_tokens
        if self._batch.is_stepping:
            self._batch.cut()
        else:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self.room.fits(self._waiting[0]):
            job = self._waiting.popleft()
            self.room.num_tokens += job.reserved_tokens
            self.room.num_sequences += 1
            self._prompts.append(_Prompt(job))
        self._chunks = self._take()
        batch, times = self._batch, self._times
        if self._chunks:
            chunks = [(prompt.num_done, tokens) for prompt, tokens in self._chunks]
            batch.begin(np.array([times.mixed_s(len(batch), batch.context, chunks)]))
        elif len(batch):
            batch.begin(times.decode_s(len(batch), batch.context, batch.num_steps_ahead))

    def _take(self) -> list[tuple[_Prompt, int]]:
        left, chunks = self._step_tokens, []
        for prompt in self._prompts:
            tokens = min(left, prompt.job.prompt_tokens - prompt.num_done)
            if tokens <= 0:
                break
            chunks.append((prompt, tokens))
            left -= tokens
        return chunks

    def _stepped(self, over: list[Job]) -> None:
        for job in over:
            self._end(job)
        for prompt, tokens in self._chunks:
            prompt.num_done += tokens
            self.num_queued_tokens -= tokens
        while self._prompts and self._prompts[0].num_done == self._prompts[0].job.prompt_tokens:
            self._drawn(self._prompts.popleft().job)
        self._go_on()

    def _drawn(self, job: Job) -> None:
        num_tokens = self._first(job)
        if num_tokens:
            self._batch.add(job, num_tokens)
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        self.room.num_tokens -= job.reserved_tokens
        self.room.num_sequences -= 1
        self._done(job)
