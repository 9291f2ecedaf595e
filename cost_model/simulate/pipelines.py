"""Pipelines of machines on a virtual clock, in strict order of time: prompts and
tokens in one, or each in its own (DéjàVu, sections 3 and 5).

A microbatch runs its prompt through all stages once, then a token through all
stages for as many tokens as it generates. A stage serves one microbatch at a
time, in the order in which they come; it takes a machine's time over the number
of stages. As many microbatches are under way as there are stages; when one has
left the last stage for good, its slot admits the next at that moment.

Microbatches often come to a stage at the very same time, and who is first then
changes the end by parts of a percent. So time is counted in whole ticks, of
which every time that occurs is a multiple.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from cost_model.exact import as_typed


@dataclass(frozen=True)
class Microbatch:
    """What it asks of a pipeline."""

    num_tokens: int
    """That it generates: passes of tokens after its prompt."""
    arrived_s: float = 0.0


@dataclass(frozen=True)
class MachineTimes:
    """Seconds that one machine alone would take for a microbatch."""

    prompt_s: float
    token_s: float
    transfer_s: float = 0.0
    """That streaming K and V adds to each prompt stage, where prompts have
    machines of their own."""


@dataclass(frozen=True)
class Span:
    """A stage at work."""

    stage: int
    microbatch: int
    token: int
    """0: its prompt; n: its n-th token."""
    began_s: float
    ended_s: float


@dataclass
class PipelineRun:
    """What came of it. Times are since the start."""

    finished_s: list[float]
    """Of each microbatch."""
    busy_s: list[float]
    """Of each stage."""
    spans: list[Span] = field(default_factory=list)
    """If they were asked for, in order of their beginning."""

    @property
    def makespan_s(self) -> float:
        return max(self.finished_s)

    @property
    def busy_share(self) -> float:
        """Of all stages until the end."""
        return sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def run_colocated(
    microbatches: Sequence[Microbatch],
    num_stages: int,
    times: MachineTimes,
    *,
    keep_spans: bool = False,
) -> PipelineRun:
    """Prompts and tokens in one pipeline.

    Args:
        microbatches: at least one, in order of arrival.
    """
    stages = (as_typed(times.prompt_s) / num_stages, as_typed(times.token_s) / num_stages)
    clock = _Clock(microbatches, *stages)
    prompt, token = map(clock.ticks, stages)
    pipeline = _Pipeline(microbatches, num_stages, (prompt, token), keep_spans)
    pipeline.run(_Coming(zip(clock.arrived, itertools.count(), strict=False)), first_pass=0)
    return pipeline.told(clock)


def run_disaggregated(
    microbatches: Sequence[Microbatch],
    num_prompt_stages: int,
    num_token_stages: int,
    times: MachineTimes,
    *,
    keep_spans: bool = False,
) -> PipelineRun:
    """Prompts in one pipeline, tokens in another. Stages of prompts come first.

    A prompt enters when the one before has left the first stage, and is ready
    once its K and V have left the last.
    """
    of_prompts = as_typed(times.prompt_s) / num_prompt_stages
    of_tokens = as_typed(times.token_s) / num_token_stages
    clock = _Clock(microbatches, of_prompts, of_tokens, as_typed(times.transfer_s))
    stage, step = clock.ticks(of_prompts), clock.ticks(of_tokens)
    way = stage + clock.ticks(as_typed(times.transfer_s))
    entered = list(itertools.accumulate(clock.arrived, lambda last, came: max(came, last + stage)))
    ready = [(each + num_prompt_stages * way, index) for index, each in enumerate(entered)]
    pipeline = _Pipeline(microbatches, num_token_stages, (0, step), keep_spans, num_prompt_stages)
    if keep_spans:
        for index, each in enumerate(entered):
            for number in range(num_prompt_stages):
                began = each + number * way
                pipeline.spans.append((began, began + stage, number, index, 0))
    pipeline.run(_Coming(iter(ready)), first_pass=1)
    pipeline.busy[:0] = [stage * len(microbatches)] * num_prompt_stages
    return pipeline.told(clock)


def run_data_parallel(
    microbatches: Sequence[Microbatch],
    num_pipelines: int,
    stages_each: int,
    times: MachineTimes,
) -> list[PipelineRun]:
    """So many pipelines, each with prompts and tokens, over consecutive parts
    of the trace; those that get none aren't run. It is over when the last is."""
    least, more = divmod(len(microbatches), num_pipelines)
    runs, begin = [], 0
    for index in range(num_pipelines):
        end = begin + least + (index < more)
        if end > begin:
            runs.append(run_colocated(microbatches[begin:end], stages_each, times))
        begin = end
    return runs


class _Clock:
    """Ticks so short that arrivals and stages' times are whole numbers of them."""

    def __init__(self, microbatches: Sequence[Microbatch], *times: Fraction) -> None:
        arrived = [as_typed(each.arrived_s) for each in microbatches]
        self.per_s = math.lcm(*(time.denominator for time in (*times, *arrived)))
        self.arrived = [self.ticks(time) for time in arrived]

    def ticks(self, seconds: Fraction) -> int:
        whole = seconds * self.per_s
        assert whole.denominator == 1
        return whole.numerator

    def seconds(self, ticks: int) -> float:
        return ticks / self.per_s


class _Coming:
    """Microbatches that wait for a slot: when they may start, in order."""

    def __init__(self, starts: Iterator[tuple[int, int]]) -> None:
        self._starts = starts

    def admit(self, now: int) -> tuple[int, int] | None:
        """The next one, and when it starts in a slot that is free now."""
        start = next(self._starts, None)
        return None if start is None else (max(now, start[0]), start[1])


class _Pipeline:
    """Stages, each with a queue by the time of coming."""

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        num_stages: int,
        passes: tuple[int, int],
        keep_spans: bool,
        first_stage: int = 0,
    ) -> None:
        self._tokens = [each.num_tokens for each in microbatches]
        self._num_stages = num_stages
        self._prompt, self._token = passes
        self._first_stage = first_stage
        self._keep_spans = keep_spans
        self._free = [0] * num_stages
        self._finished = [0] * len(microbatches)
        self.busy = [0] * num_stages
        self.spans: list[tuple[int, int, int, int, int]] = []
        """Began, ended, stage, microbatch, token."""

    def run(self, coming: _Coming, first_pass: int) -> None:
        """Until the last has left. ``first_pass``: 0 a prompt, 1 the first token."""
        order = itertools.count()
        waiting: list[tuple[int, int, int, int, int]] = []

        def admit(now: int) -> None:
            if (start := coming.admit(now)) is not None:
                heapq.heappush(waiting, (start[0], next(order), 0, start[1], first_pass))

        for _ in range(self._num_stages):
            admit(0)
        while waiting:
            came, _, stage, index, token = heapq.heappop(waiting)
            left = self._serve(came, stage, index, token)
            stage += 1
            if stage == self._num_stages:
                stage, token = 0, token + 1
            if token <= self._tokens[index]:
                heapq.heappush(waiting, (left, next(order), stage, index, token))
            else:
                self._finished[index] = left
                admit(left)

    def _serve(self, came: int, stage: int, index: int, token: int) -> int:
        """Whoever comes first is served first. Returns when it leaves."""
        began = max(came, self._free[stage])
        took = self._token if token else self._prompt
        left = self._free[stage] = began + took
        self.busy[stage] += took
        if self._keep_spans:
            self.spans.append((began, left, self._first_stage + stage, index, token))
        return left

    def told(self, clock: _Clock) -> PipelineRun:
        """In seconds."""
        seconds = clock.seconds
        spans = [
            Span(stage, index, token, seconds(began), seconds(ended))
            for began, ended, stage, index, token in sorted(self.spans)
        ]
        return PipelineRun(
            [seconds(each) for each in self._finished], [seconds(each) for each in self.busy], spans
        )
