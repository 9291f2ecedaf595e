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

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from cost_model.numbers import as_typed
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.times import StepTime


@dataclass(frozen=True)
class Microbatch:
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

    @classmethod
    def of(
        cls, times: StepTime, sequences: int, prompt_tokens: int, context_tokens: float
    ) -> MachineTimes:
        """From step times of a machine with all layers.

        Args:
            context_tokens: cached tokens of a sequence while it generates.
        """
        load = sequences * context_tokens
        return cls(
            times.s_part_s(0, [(0, prompt_tokens)] * sequences),
            times.s_part_s(sequences)
            + times.r_part_s(0, load, sequences)
            + times.trip_s(sequences),
            times.transfer_s(sequences * prompt_tokens),
        )


@dataclass(frozen=True)
class Failures:
    """When a stage fails, and what that costs."""

    at_s: tuple[float, ...]
    """In order. All stages stop."""
    restart_s: float = 0.0
    """Until they run again."""
    has_replicas: bool = False
    """Microbatches under way go on with the pass that failed. Else they begin anew."""


NO_FAILURES = Failures(())


@dataclass
class PipelineRun:
    finished_s: list[float]
    busy_s: list[float]

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
    failures: Failures = NO_FAILURES,
) -> PipelineRun:
    """Prompts and tokens in one pipeline.

    Args:
        microbatches: at least one, in order of arrival.
    """
    stages = (as_typed(s) / num_stages for s in (times.prompt_s, times.token_s))
    ticks = _Ticks(microbatches, *stages, *map(as_typed, (failures.restart_s, *failures.at_s)))
    prompt, token, restart, *fails_at = ticks.times
    pipeline = _Pipeline(microbatches, num_stages, (prompt, token))
    starts: Iterator[tuple[int, int]] = zip(ticks.arrived, itertools.count(), strict=False)
    for at in fails_at:
        starts = itertools.chain(pipeline.run(starts, 0, at), starts)
        pipeline.restart(at + restart, has_replicas=failures.has_replicas)
    pipeline.run(starts, first_pass=0)
    return pipeline.outcome(ticks)


def run_disaggregated(
    microbatches: Sequence[Microbatch],
    num_prompt_stages: int,
    num_token_stages: int,
    times: MachineTimes,
) -> PipelineRun:
    """Prompts in one pipeline, tokens in another. Stages of prompts come first.

    A prompt enters when the one before has left the first stage, and is ready
    once its K and V have left the last.
    """
    ticks = _Ticks(
        microbatches,
        as_typed(times.prompt_s) / num_prompt_stages,
        as_typed(times.token_s) / num_token_stages,
        as_typed(times.transfer_s),
    )
    stage, step, transfer = ticks.times
    way = stage + transfer
    entered = list(itertools.accumulate(ticks.arrived, lambda last, came: max(came, last + stage)))
    ready = ((each + num_prompt_stages * way, index) for index, each in enumerate(entered))
    pipeline = _Pipeline(microbatches, num_token_stages, (0, step))
    pipeline.run(ready, first_pass=1)
    pipeline.busy = [stage * len(microbatches)] * num_prompt_stages
    return pipeline.outcome(ticks)


def run_data_parallel(
    microbatches: Sequence[Microbatch],
    num_pipelines: int,
    stages_each: int,
    times: MachineTimes,
) -> list[PipelineRun]:
    """So many pipelines, each with prompts and tokens, over consecutive parts
    of the trace; pipelines without any aren't run. It is over when the last is."""
    least, more = divmod(len(microbatches), num_pipelines)
    runs, begin = [], 0
    for index in range(num_pipelines):
        end = begin + least + (index < more)
        if end > begin:
            runs.append(run_colocated(microbatches[begin:end], stages_each, times))
        begin = end
    return runs


class _Ticks:
    """Times in ticks so short that arrivals and stages' times are whole numbers of them."""

    def __init__(self, microbatches: Sequence[Microbatch], *times: Fraction) -> None:
        arrived = [as_typed(each.arrived_s) for each in microbatches]
        self.per_s = math.lcm(*(time.denominator for time in (*times, *arrived)))
        self.times = [int(time * self.per_s) for time in times]
        self.arrived = [int(time * self.per_s) for time in arrived]

    def seconds(self, ticks: float) -> float:
        return ticks / self.per_s


class _Pipeline:
    """Stages, each of which serves first come, first served, on a clock of ticks.
    Nothing overtakes on the way, so a pass through all stages is one event."""

    def __init__(
        self, microbatches: Sequence[Microbatch], num_stages: int, passes: Sequence[int]
    ) -> None:
        self._clock = VirtualClock()
        self._tokens = [each.num_tokens for each in microbatches]
        self._num_stages = num_stages
        self._took = passes
        self._num_passes = [0, 0]
        """Of prompts and of tokens."""
        self._free: list[float] = [0] * num_stages
        self._under_way: dict[int, tuple[int, float]] = {}
        """Of each microbatch, the pass and when it is over."""
        self._finished: list[float] = [0] * len(microbatches)
        self.busy: list[int] = []
        """Of stages before these."""

    def run(
        self, starts: Iterator[tuple[int, int]], first_pass: int, until: float = math.inf
    ) -> list[tuple[int, int]]:
        """Until the last has left, or a stage fails. Returns the microbatches
        that start later.

        Args:
            starts: when each microbatch may start, in order, and which it is.
            first_pass: 0 a prompt, 1 the first token.
        """
        admitted: dict[int, int] = {}

        def admit(now: float) -> None:
            """The next one takes a slot that is free then."""
            start, index = next(starts, (None, 0))
            if start is not None:
                admitted[index] = start
                self._clock.at(max(now, start), partial(serve, index, first_pass))

        def serve(index: int, token: int) -> None:
            admitted.pop(index, None)
            left = self._pass(token)
            self._under_way[index] = token, left
            if token < self._tokens[index]:
                self._clock.at(left, partial(serve, index, token + 1))
            else:
                self._finished[index] = left
                admit(left)

        for index, (token, _) in self._under_way.items():
            self._clock.at(self._clock.now, partial(serve, index, token))
        for _ in range(self._num_stages - len(self._under_way)):
            admit(self._clock.now)
        self._clock.run(until)
        return [(start, index) for index, start in sorted(admitted.items())]

    def restart(self, at: float, *, has_replicas: bool) -> None:
        now = self._clock.now
        lost = {i: (token, left) for i, (token, left) in self._under_way.items() if left > now}
        for token, left in lost.values():
            self._num_passes[token > 0] -= left < math.inf
        self._under_way = {i: (token * has_replicas, math.inf) for i, (token, _) in lost.items()}
        self._clock, self._free = VirtualClock(), [at] * self._num_stages
        self._clock.run(at)

    def _pass(self, token: int) -> float:
        """One pass, through all stages. Returns when it leaves."""
        at, free, took = self._clock.now, self._free, self._took[token > 0]
        self._num_passes[token > 0] += 1
        for stage, free_at in enumerate(free):
            at = free[stage] = (at if at > free_at else free_at) + took
        return at

    def outcome(self, ticks: _Ticks) -> PipelineRun:
        """In seconds."""
        busy = sum(num * took for num, took in zip(self._num_passes, self._took, strict=True))
        stages = [*self.busy, *[busy] * self._num_stages]
        return PipelineRun(
            list(map(ticks.seconds, self._finished)), list(map(ticks.seconds, stages))
        )
