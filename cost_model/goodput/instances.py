"""Instances on a virtual clock: prompts in batches through stages, tokens in
steps, K and V over links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.goodput.decoding import DecodingBatch
from cost_model.goodput.times import InstanceTimes
from fastdecode.schedule.dispatch import DispatchJob
from fastdecode.schedule.simulation.clock import VirtualClock


class PrefillInstance:
    """Whole prompts, in order, up to ``batch_tokens`` a batch; a longer one by
    itself. Done prompts wait in its buffer until they are fetched; while that
    is full, no batch begins."""

    def __init__(
        self,
        clock: VirtualClock,
        times: InstanceTimes,
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
        """Its K and V have been fetched, or nobody wants them."""
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
    """A port: transfers one after the other."""

    bytes_per_s: float
    free_s: float = 0.0
    busy_s: float = 0.0


def transfer(now_s: float, num_bytes: float, links: list[TransferPort]) -> float:
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
    """Steps of all that decode."""

    def __init__(
        self, clock: VirtualClock, times: InstanceTimes, done: Callable[[DispatchJob], None]
    ) -> None:
        self._times = times
        self._done = done
        self._batch = DecodingBatch(clock, self._stepped)
        self._joining: list[tuple[DispatchJob, int]] = []

    @property
    def busy_s(self) -> float:
        return self._batch.busy_s

    @property
    def step_ends_s(self) -> float:
        """See ``DecodingBatch``."""
        return self._batch.step_ends_s

    def join(self, job: DispatchJob, num_tokens: int) -> None:
        """Its K and V are there; it decodes so many tokens, from the next step
        on. Not to be called from ``done``."""
        self._joining.append((job, num_tokens))
        if self._batch.is_stepping:
            self._batch.cut()  # the step under way is the last one without it
        else:
            self._go_on()

    def _stepped(self, over: list[DispatchJob]) -> None:
        for job in over:
            self._done(job)
        self._go_on()

    def _go_on(self) -> None:
        batch = self._batch
        for job, num_tokens in self._joining:
            batch.add(job, num_tokens)
        self._joining.clear()
        if len(batch):
            batch.begin(self._times.decode_s(len(batch), batch.context, batch.num_steps_ahead))
