"""Requests through instances, and the greatest rate that they carry: FastDecode's dispatcher,
batches, buffer and reservations on a virtual clock.

A request waits until a prefill instance's queue has capacity for it, its prompt runs in a batch,
its first token is sampled. Its K and V wait in the prefill instance's buffer until a decode
instance has reserved capacity for all of it, cross both instances' ports, and are released; from
the next step on it decodes. The reservation lasts from the start of the fetch to the end of the
request. An instance asks its R-workers for capacity, and for a fetch, between two steps: where they
don't answer at once, the next step runs without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cost_model.goodput.instances import (
    UNLIMITED,
    DecodeInstance,
    DecodeSpec,
    PrefillInstance,
    PrefillSpec,
    TransferPort,
    transfer,
)
from cost_model.goodput.slo import Attainment, RequestTimes, Slo
from cost_model.goodput.workload import MIN_REQUESTS, Draw, TimedRequests
from cost_model.numbers import smallest
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)
from fastdecode.schedule.simulation.clock import VirtualClock

PRECISION = 0.02  # relative precision of a rate
MAX_REQUESTS = 6000
RESIDENCES = 2.5
"""Shortest run, in times that a request decodes at the SLO's pace. Before that, batches grow."""
_SPAN = 1 << 12
"""Rates this many times below the greatest are not tried."""
WARM_UP = 0.1
"""Part of a run's first requests that does not count, where enough are left."""
MIN_WARMED_UP = 200


@dataclass
class GoodputRun:
    times: list[RequestTimes]
    total_s: float = 0.0
    prefill_busy: list[float] = field(default_factory=list)
    """Share of the time that each instance's first stage was busy."""
    decode_busy: list[float] = field(default_factory=list)
    link_busy: list[float] = field(default_factory=list)
    """The same of prefill instances' ports."""
    most_buffered: int = 0

    def counted(self, since_s: float = 0.0) -> list[RequestTimes]:
        """Return the requests without the warm-up, where enough are left: the first tenth, and all
        that arrived before ``since_s``."""
        num = len(self.times)
        if num < MIN_WARMED_UP:
            return self.times
        rest = self.times[int(num * WARM_UP) :]
        later = [each for each in rest if each.arrived_s >= since_s]
        return later if len(later) >= MIN_WARMED_UP // 2 else rest

    @property
    def is_sustained(self) -> bool:
        """True if waits do not grow: those of the last third are at most half as long again as
        those of the middle one. (Waits that grow steadily from nothing have 5/3.)"""
        third = len(self.times) // 3
        if third < 10:
            return True
        middle, last = self.times[third : 2 * third], self.times[2 * third :]
        return _mean_s(last) <= 1.5 * _mean_s(middle)


def _mean_s(times: Sequence[RequestTimes]) -> float:
    return sum(each.ttft_s + (each.tpot_s or 0.0) for each in times) / len(times)


@dataclass
class _Request:
    arrived_s: float
    output_tokens: int
    first_s: float = 0.0
    ended_s: float = 0.0
    instance: int = 0

    def times(self) -> RequestTimes:
        tpot_s, decoding_s = None, self.ended_s - self.first_s
        if self.output_tokens > 1 and decoding_s > 0:
            tpot_s = decoding_s / (self.output_tokens - 1)
        return RequestTimes(self.arrived_s, self.first_s - self.arrived_s, tpot_s)


class _Cluster:
    """Instances for each phase, or for both: these run ``step_tokens`` of prompts in a step."""

    def __init__(
        self, prefill: Sequence[PrefillSpec], decode: Sequence[DecodeSpec], step_tokens: int = 0
    ) -> None:
        self.clock = VirtualClock()
        self.requests: dict[int, _Request] = {}
        self.prefill = [PrefillInstance(self.clock, spec, self._prefilled) for spec in prefill]
        callbacks = self._decoded, self._sampled_first
        self.decode = [DecodeInstance(self.clock, x, *callbacks, step_tokens) for x in decode]
        self._decoding: dict[int, int] = {}
        self._out = [TransferPort(spec.times.times) for spec in prefill]
        self._in = [TransferPort(spec.times.times) for spec in decode]
        rooms = [DecodeReservations(spec.capacity_tokens, spec.max_sequences) for spec in decode]
        # Instances of a phase are alike: the shortest queue has the fewest tokens.
        queues = [PrefillQueue(spec.batch_tokens, float) for spec in prefill]
        self._dispatcher = Dispatcher(queues, rooms or [DecodeReservations(UNLIMITED, UNLIMITED)])

    def put(self, job: DispatchJob) -> None:
        """Give a request to the least full of the instances for both phases."""
        min(self.decode, key=lambda instance: instance.fullness).put(job)

    def dispatch(self, job: DispatchJob) -> None:
        """Take a request whose prompt an instance runs, or whose prompt is finished."""
        if self.prefill:
            self._assign(self._dispatcher.arrived(job))
            return
        request = self.requests[job.job_id]
        request.first_s = self.clock.now
        if request.output_tokens > 1:
            self._dispatcher.prefill.append(PrefillQueue(1, float, job.prompt_tokens))
            self._assign(self._dispatcher.prefilled(job, len(self._dispatcher.prefill) - 1))
            self._dispatcher.prefill.pop()

    def _assign(self, decisions: Iterable[AssignPrefill | AssignDecode]) -> None:
        for decision in decisions:
            match decision:
                case AssignPrefill(job, instance):
                    self.requests[job.job_id].instance = instance
                    self.prefill[instance].put(job)
                case AssignDecode(job, instance):
                    self._decoding[job.job_id] = instance
                    if self.decode[instance].opens_at_once:
                        self._fetch(job, instance)
                    else:
                        # After the step's end, whichever way that is rounded.
                        start_s = math.nextafter(self.decode[instance].step_ends_s, math.inf)
                        self.clock.at(start_s, partial(self._fetch, job, instance))

    def _prefilled(self, job: DispatchJob) -> None:
        request = self.requests[job.job_id]
        request.first_s = request.ended_s = self.clock.now
        if request.output_tokens > 1 and self.decode:
            self._assign(self._dispatcher.prefilled(job, request.instance))
            return
        self.prefill[request.instance].release(job)
        self._assign(self._dispatcher.left(job, request.instance))

    def _fetch(self, job: DispatchJob, instance: int) -> None:
        ports = [self._in[instance]]
        if self.prefill:
            ports.append(self._out[self.requests[job.job_id].instance])
        arrived_s = transfer(self.clock.now, job.prompt_tokens, ports)
        self.clock.at(arrived_s, partial(self._fetched, job, instance))

    def _fetched(self, job: DispatchJob, instance: int) -> None:
        request = self.requests[job.job_id]
        if self.prefill:
            self.prefill[request.instance].release(job)
        self.decode[instance].join(job, request.output_tokens - 1)

    def _sampled_first(self, job: DispatchJob) -> int:
        request = self.requests[job.job_id]
        request.first_s = request.ended_s = self.clock.now
        return request.output_tokens - 1

    def _decoded(self, job: DispatchJob) -> None:
        self.requests[job.job_id].ended_s = self.clock.now
        if (instance := self._decoding.pop(job.job_id, None)) is not None:
            self._assign(self._dispatcher.decoded(job, instance))

    def run(self, requests: TimedRequests, arrive: Callable[[DispatchJob], None]) -> GoodputRun:
        for number, (arrived_s, prompt, output) in enumerate(requests):
            self.requests[number] = _Request(arrived_s, output)
            job = DispatchJob(number, prompt, prompt + output)
            self.clock.at(arrived_s, partial(arrive, job))
        self.clock.run()
        total_s = max(self.clock.now, 1e-12)
        return GoodputRun(
            [each.times() for each in self.requests.values()],
            total_s,
            [each.busy_s / total_s for each in self.prefill],
            [each.busy_s / total_s for each in self.decode],
            [port.busy_s / total_s for port in self._out],
            max((each.most_held for each in self.prefill), default=0),
        )


def simulate(
    requests: TimedRequests, prefill: Sequence[PrefillSpec], decode: Sequence[DecodeSpec]
) -> GoodputRun:
    """Run both phases, or one by itself. Without prefill instances a prompt is finished when it
    arrives. Without decode instances a request ends with its first token."""
    cluster = _Cluster(prefill, decode)
    return cluster.run(requests, cluster.dispatch)


def simulate_colocated(
    requests: TimedRequests, instances: Sequence[DecodeSpec], step_tokens: int
) -> GoodputRun:
    """Run instances for both phases. A request goes to the one with the least KV that is reserved,
    or wanted by the requests that wait there. ``Dispatcher`` does so while there is capacity;
    without, it keeps requests, or has prompts run alone."""
    cluster = _Cluster([], instances, step_tokens)
    return cluster.run(requests, cluster.put)


@dataclass(frozen=True)
class Load:
    draw: Draw
    slo: Slo
    how: Attainment = "both"
    min_requests: int = MIN_REQUESTS

    @property
    def residence_s(self) -> float:
        """How long a mean request decodes at the SLO's pace."""
        return self.draw.mean_output * self.slo.tpot_s

    def requests(self, rate: float) -> list[tuple[float, int, int]]:
        wanted = math.ceil(RESIDENCES * rate * self.residence_s)
        return self.draw.at(rate, max(self.min_requests, min(MAX_REQUESTS, wanted)))

    def is_carried(self, run: GoodputRun) -> bool:
        counted = run.counted(self.residence_s)
        return self.slo.is_attained(counted, self.how) and run.is_sustained


def greatest_rate(
    load: Load,
    run_at: Callable[[list[tuple[float, int, int]]], GoodputRun],
    most: float,
    top: float | None = None,
) -> float:
    """Return requests per second to 2 %, at most ``most``. 0 if no rate keeps the SLO. ``top`` and
    rates 2 % apart below it are tried, so that those of several instances can be compared."""
    top = most if top is None else top
    step = 1 + PRECISION

    def is_carried(index: int) -> bool:
        return load.is_carried(run_at(load.requests(top / step**index)))

    high = max(0, math.ceil(math.log(top / most) / math.log(step) - 1e-9))
    if is_carried(high):
        return top / step**high
    least = high + math.ceil(math.log(_SPAN) / math.log(step))
    if not is_carried(least):
        return 0.0
    halving = round(math.log(2) / math.log(step))
    low = high + halving
    while low < least and not is_carried(low):
        low, high = low + halving, low
    return top / step ** smallest(is_carried, min(low, least), above=high)
