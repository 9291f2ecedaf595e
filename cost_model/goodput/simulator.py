"""Requests through instances: FastDecode's dispatcher, batches, buffer and
reservations on a virtual clock.

A request waits until a prefill instance's queue has room for it, its prompt runs in a batch, its
first token is drawn. Its K and V wait in the prefill instance's buffer until a decode instance has
reserved room for all of it, cross both instances' ports, and are released; from the next step on
it decodes. Room is held from the beginning of the fetch to the end of the request. An instance
asks its R-workers for room, and for a fetch, between two steps: where they don't answer at once,
the next step goes on without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cost_model.goodput.instances import (
    ColocatedInstance,
    DecodeInstance,
    PrefillInstance,
    TransferPort,
    transfer,
)
from cost_model.goodput.slo import RequestTimes
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.instance_time import InstanceTime

_UNLIMITED = 1 << 60
WARM_UP = 0.1
"""The part of a run's first requests that isn't counted, where there are enough."""
MIN_WARMED_UP = 200


@dataclass(frozen=True)
class PrefillSpec:
    times: InstanceTime
    batch_tokens: int
    buffer_tokens: int = _UNLIMITED


@dataclass(frozen=True)
class DecodeSpec:
    """A decode instance, or one for both phases."""

    times: InstanceTime
    capacity_tokens: int = _UNLIMITED
    """Of its R-workers."""
    max_sequences: int = _UNLIMITED
    opens_at_once: bool = True
    """Its R-workers answer within no time that they have room."""


@dataclass
class GoodputRun:
    times: list[RequestTimes]
    """Of the requests, in order of arrival."""
    total_s: float = 0.0
    prefill_busy: list[float] = field(default_factory=list)
    """The part of the time that each instance's first stage was busy."""
    decode_busy: list[float] = field(default_factory=list)
    link_busy: list[float] = field(default_factory=list)
    """Of prefill instances' ports."""
    most_buffered: int = 0
    """Tokens in a prefill instance's buffer, at most."""

    def counted(self, since_s: float = 0.0) -> list[RequestTimes]:
        """Without the warm-up, where enough are left: the first tenth, and all
        that arrived before ``since_s``."""
        num = len(self.times)
        if num < MIN_WARMED_UP:
            return self.times
        rest = self.times[int(num * WARM_UP) :]
        later = [each for each in rest if each.arrived_s >= since_s]
        return later if len(later) >= MIN_WARMED_UP // 2 else rest

    @property
    def is_sustained(self) -> bool:
        """Requests don't wait longer and longer: those of the last third at most half as long
        again as those of the middle one. (Waits that grow steadily from nothing have 5/3.)"""
        third = len(self.times) // 3
        if third < 10:
            return True
        middle, last = self.times[third : 2 * third], self.times[2 * third :]
        return _mean(last) <= 1.5 * _mean(middle)


def _mean(times: Sequence[RequestTimes]) -> float:
    return sum(each.ttft_s + (each.tpot_s or 0.0) for each in times) / len(times)


@dataclass
class _Request:
    arrived_s: float
    output_tokens: int
    first_s: float = 0.0
    ended_s: float = 0.0
    instance: int = 0
    """That prefilled it."""


class _Cluster:
    def __init__(self, prefill: Sequence[PrefillSpec], decode: Sequence[DecodeSpec]) -> None:
        self.clock = VirtualClock()
        self.requests: dict[int, _Request] = {}
        self.prefill = [
            PrefillInstance(
                self.clock, spec.times, spec.batch_tokens, spec.buffer_tokens, self._prefilled
            )
            for spec in prefill
        ]
        self.decode = [DecodeInstance(self.clock, spec.times, self._decoded) for spec in decode]
        self._decoding: dict[int, int] = {}
        self._opens_at_once = [spec.opens_at_once for spec in decode]
        self._out = [TransferPort(spec.times.times) for spec in prefill]
        self._in = [TransferPort(spec.times.times) for spec in decode]
        rooms = [DecodeReservations(spec.capacity_tokens, spec.max_sequences) for spec in decode]
        queues = [PrefillQueue(spec.batch_tokens, _tokens) for spec in prefill]
        self._dispatcher = Dispatcher(queues, rooms or [DecodeReservations(_UNLIMITED, _UNLIMITED)])

    def arrive(self, job: DispatchJob) -> None:
        self._do(self._dispatcher.arrived(job))

    def offer(self, job: DispatchJob) -> None:
        """Its prompt is done, wherever."""
        self.requests[job.job_id].first_s = self.clock.now
        self._dispatcher.prefill.append(PrefillQueue(1, _tokens, job.prompt_tokens))
        self._do(self._dispatcher.prefilled(job, len(self._dispatcher.prefill) - 1))
        self._dispatcher.prefill.pop()

    def _do(self, decisions: Iterable[AssignPrefill | AssignDecode]) -> None:
        for decision in decisions:
            match decision:
                case AssignPrefill(job, instance):
                    self.requests[job.job_id].instance = instance
                    self.prefill[instance].put(job)
                case AssignDecode(job, instance):
                    self._fetch(job, instance)

    def _prefilled(self, job: DispatchJob) -> None:
        request = self.requests[job.job_id]
        request.first_s = request.ended_s = self.clock.now
        if request.output_tokens > 1 and self.decode:
            self._do(self._dispatcher.prefilled(job, request.instance))
            return
        self.prefill[request.instance].release(job)
        self._do(self._dispatcher.left(job, request.instance))

    def _fetch(self, job: DispatchJob, instance: int) -> None:
        self._decoding[job.job_id] = instance
        if self._opens_at_once[instance]:
            self._begin_fetch(job, instance)
        else:
            # Behind the step's end, by whichever way that is rounded.
            begins_s = math.nextafter(self.decode[instance].step_ends_s, math.inf)
            self.clock.at(begins_s, lambda: self._begin_fetch(job, instance))

    def _begin_fetch(self, job: DispatchJob, instance: int) -> None:
        ports = [self._in[instance]]
        if self.prefill:
            ports.append(self._out[self.requests[job.job_id].instance])
        there_s = transfer(self.clock.now, job.prompt_tokens, ports)
        self.clock.at(there_s, lambda: self._fetched(job, instance))

    def _fetched(self, job: DispatchJob, instance: int) -> None:
        request = self.requests[job.job_id]
        if self.prefill:
            self.prefill[request.instance].release(job)
        self.decode[instance].join(job, request.output_tokens - 1)

    def _decoded(self, job: DispatchJob) -> None:
        self.requests[job.job_id].ended_s = self.clock.now
        self._do(self._dispatcher.decoded(job, self._decoding.pop(job.job_id)))

    def outcome(self) -> GoodputRun:
        total_s = max(self.clock.now, 1e-12)
        return GoodputRun(
            _times(self.requests.values()),
            total_s,
            [each.busy_s / total_s for each in self.prefill],
            [each.busy_s / total_s for each in self.decode],
            [port.busy_s / total_s for port in self._out],
            max((each.most_held for each in self.prefill), default=0),
        )


def _tokens(num_tokens: int) -> float:
    """Instances of a phase are alike: the shortest queue has the fewest tokens."""
    return float(num_tokens)


def simulate(
    requests: Sequence[tuple[float, int, int]],
    prefill: Sequence[PrefillSpec],
    decode: Sequence[DecodeSpec],
) -> GoodputRun:
    """Both phases; or one by itself, where there are no instances of the other:
    without those for prefill a prompt is done as it arrives, without those for
    decode a request is over with its first token.

    Args:
        requests: seconds of arrival, prompt and output tokens, by arrival.

    Raises:
        CapacityError: If a request fits on no decode instance.
    """
    cluster = _Cluster(prefill, decode)
    for number, (arrived_s, prompt, output) in enumerate(requests):
        cluster.requests[number] = _Request(arrived_s, output)
        job = DispatchJob(number, prompt, prompt + output)
        if prefill:
            cluster.clock.at(arrived_s, lambda job=job: cluster.arrive(job))  # type: ignore[misc]
        elif output > 1:
            cluster.clock.at(arrived_s, lambda job=job: cluster.offer(job))  # type: ignore[misc]
        else:
            cluster.requests[number].first_s = arrived_s
    cluster.clock.run()
    return cluster.outcome()


def simulate_colocated(
    requests: Sequence[tuple[float, int, int]], instances: Sequence[DecodeSpec], step_tokens: int
) -> GoodputRun:
    """Instances for both phases; a request goes to the one with the least KV
    that is reserved, or wanted by the requests that wait there. ``Dispatcher`` does so
    while there is room; without, it keeps requests, or has prompts run alone.

    Args:
        step_tokens: of prompts in a step, at most.
    """
    clock = VirtualClock()
    known: dict[int, _Request] = {}

    def first(job: DispatchJob) -> int:
        request = known[job.job_id]
        request.first_s = request.ended_s = clock.now
        return request.output_tokens - 1

    def done(job: DispatchJob) -> None:
        known[job.job_id].ended_s = clock.now

    engines = [
        ColocatedInstance(
            clock, spec.times, step_tokens,
            DecodeReservations(spec.capacity_tokens, spec.max_sequences), first, done,
            opens_at_once=spec.opens_at_once,
        )
        for spec in instances
    ]  # fmt: skip

    def arrive(job: DispatchJob) -> None:
        min(engines, key=lambda engine: engine.fullness).put(job)

    for number, (arrived_s, prompt, output) in enumerate(requests):
        known[number] = _Request(arrived_s, output)
        job = DispatchJob(number, prompt, prompt + output)
        clock.at(arrived_s, lambda job=job: arrive(job))  # type: ignore[misc]
    clock.run()
    total_s = max(clock.now, 1e-12)
    return GoodputRun(
        _times(known.values()), total_s, [], [each.busy_s / total_s for each in engines]
    )


def _times(requests: Iterable[_Request]) -> list[RequestTimes]:
    return [
        RequestTimes(
            each.arrived_s,
            each.first_s - each.arrived_s,
            (each.ended_s - each.first_s) / (each.output_tokens - 1)
            if each.output_tokens > 1 and each.ended_s > each.first_s
            else None,
        )
        for each in requests
    ]
