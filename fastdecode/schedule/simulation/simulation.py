"""A trace, run by the real scheduler and lifecycle on a virtual clock, with R-workers that only
count. A lane starts its next step when its last one is over. ``Resources`` give the times of steps
that run side by side.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import Part, PartId
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import (
    Ask,
    Drawn,
    Event,
    Finish,
    LaneIdle,
    LaneReady,
    Opened,
    Regrouped,
    Run,
    StepDone,
    Submitted,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.resources import Flight, Resources, SimulatedStep
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.wire.blocks import Close, Extend, Open

# No policy looks further into its queue than a full batch. The rest of a long trace is not queued.
_QUEUE_AHEAD = 1 << 14


@dataclass
class SimulatedRWorker:
    """An R-worker whose sequences have no tokens, only lengths. Asserts what a real one checks."""

    num_blocks: int
    block_size: int
    reserved: dict[PartId, int] = field(default_factory=dict)
    """Tokens of each part."""
    cached: dict[PartId, int] = field(default_factory=dict)
    """Tokens of each part."""

    def open(self, part: Part, num_cached: int = 0) -> None:
        assert part.part_id not in self.reserved
        self.cached[part.part_id] = num_cached
        self.reserve(part)

    def reserve(self, part: Part) -> None:
        assert part.num_tokens >= self.reserved.get(part.part_id, 0)
        self.reserved[part.part_id] = part.num_tokens
        assert self.num_reserved_blocks <= self.num_blocks, (
            "an R-worker's blocks are oversubscribed"
        )

    def append(self, part: Part, num_past: int, num_tokens: int) -> None:
        assert num_tokens >= 1 and self.cached[part.part_id] == num_past
        self.cached[part.part_id] += num_tokens
        assert self.cached[part.part_id] <= self.reserved[part.part_id], (
            "a sequence outgrows what it reserved"
        )

    def close(self, part: Part) -> None:
        del self.reserved[part.part_id], self.cached[part.part_id]

    @property
    def num_reserved_blocks(self) -> int:
        return sum(max(1, -(-tokens // self.block_size)) for tokens in self.reserved.values())


@dataclass(eq=False)
class ServedRequest:
    """Times of one request, since the start of the trace."""

    traced: TracedRequest
    arrived_s: float
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token. None for outputs of one token."""
        n = self.traced.num_output_tokens
        return (self.finished_s - self.first_token_s) / (n - 1) if n > 1 else None


@dataclass
class SimulationOutcome:
    num_r_workers: int
    steps: list[SimulatedStep]
    served: list[ServedRequest] = field(default_factory=list)
    """Requests in order of their ends."""
    num_refused: int = 0
    """Requests that the scheduler refused."""
    num_suspended: int = 0
    total_s: float = 0.0


class Simulation:
    """Runs one trace to its end.

    Args:
        scheduler: the engine's, for these R-workers, which answer at once. Its ``HybridControl``
            decides on the number of lanes, if there is one.
        resources: resources that the lanes share.
        worker_blocks: KV blocks of each holder.
        block_size: tokens in a block.
        num_lanes: lanes at the start.
        clock: its time. The scheduler's control may read the same.
    """

    def __init__(
        self,
        trace: RequestTrace,
        scheduler: ContinuousScheduler,
        resources: Resources,
        *,
        worker_blocks: tuple[int, ...],
        block_size: int,
        num_lanes: int = 1,
        clock: VirtualClock | None = None,
    ) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self.workers = [SimulatedRWorker(blocks, block_size) for blocks in worker_blocks]
        self.outcome = SimulationOutcome(len(worker_blocks), resources.steps)
        self._trace = trace
        self._lifecycle = Lifecycle(scheduler)
        self._control = scheduler.hybrid
        self._resources = resources
        self._num_lanes = self._wanted_lanes = num_lanes
        self._flights: dict[int, Flight] = {}
        self._coming = deque(trace.requests)
        self._unserved: dict[str, ServedRequest] = {}
        self._request_ids = map(str, itertools.count())
        self._step = 0.0
        """Steps so far, and those slept through until an arrival."""

    def run(self) -> SimulationOutcome:
        """Run the trace to its end."""
        while self._unserved or self._coming:
            self._arrive()
            self._start_lanes()
            if self._flights:
                self._pass_time()
                continue
            assert not self._unserved, (
                "a scheduler with unfinished sequences plans at least one chunk"
            )
            if self._coming:
                self._sleep_until(self._coming[0].arrival)
        self.outcome.num_suspended = self._lifecycle.sequences.counts.num_suspended
        self.outcome.total_s = self.clock.now
        return self.outcome

    def _arrive(self) -> None:
        """Queue the requests whose time has come."""
        now = self.clock.now if self._trace.unit == "s" else self._step
        waiting = self._lifecycle.scheduler.waiting
        while self._coming and self._coming[0].arrival <= now and len(waiting) < _QUEUE_AHEAD:
            traced = self._coming.popleft()
            request = _request(next(self._request_ids), traced)
            try:
                self._tell(Submitted(request))
            except CapacityError:
                self.outcome.num_refused += 1
                continue
            arrived_s = traced.arrival if self._trace.unit == "s" else self.clock.now
            self._unserved[request.request_id] = ServedRequest(traced, arrived_s)

    def _sleep_until(self, arrival: float) -> None:
        if self._trace.unit == "s":
            self.clock.run(arrival)
        else:
            self._step = max(self._step, arrival)

    def _start_lanes(self) -> None:
        """Begin the next step of each lane that does not step."""
        if self._wanted_lanes != self._num_lanes:
            if self._flights:
                return  # they come to rest first
            self._num_lanes = self._wanted_lanes
            self._tell(Regrouped(self._num_lanes))
            assert self._control is not None
            self._control.regrouped(self._num_lanes)
        for lane in range(self._num_lanes):
            if lane not in self._flights:
                for run in self._launch(lane):
                    self._flights[lane] = self._resources.flight(run)
        if not self._flights and self._control is not None:
            self._wanted_lanes = self._control.decide()
            if self._wanted_lanes != self._num_lanes:
                self._start_lanes()

    def _pass_time(self) -> None:
        """Let time pass until the next end of a step."""
        steps_s = self._resources.steps_s(self._flights, self.clock.now)
        span_s = min(flight.left * steps_s[lane] for lane, flight in self._flights.items())
        self.clock.pass_by(span_s)
        for lane, flight in self._flights.items():
            is_over = flight.left * steps_s[lane] <= span_s
            flight.left = 0.0 if is_over else flight.left - span_s / steps_s[lane]
        self._step += 1
        for lane in [lane for lane, flight in self._flights.items() if not flight.left]:
            self._end(lane, self._flights.pop(lane))

    def _end(self, lane: int, flight: Flight) -> None:
        self._done(flight.run)
        if self._control is not None:
            self._control.observe(lane, flight.num_decoding, flight.loads)
            self._wanted_lanes = self._control.decide()

    def _launch(self, lane: int) -> list[Run]:
        """Return a lane's next step, if any sequence can step."""
        for part in self._tell(LaneIdle(lane)):
            self._tell(Opened(part.part_id))
        runs = [run for run in self._lifecycle.handle(LaneReady(lane)) if isinstance(run, Run)]
        for chunk in [chunk for run in runs for chunk in run.chunks]:
            part, num_past = _growing_part(chunk)
            self.workers[part.holder].append(part, num_past, chunk.num_tokens)
        return runs

    def _tell(self, event: Event) -> list[Part]:
        """Give the lifecycle an event, and carry out its instructions. Return the parts that were
        opened, or grew."""
        granted: list[Part] = []
        for instruction in self._lifecycle.handle(event):
            match instruction:
                case Ask(part, Close()):
                    self.workers[part.holder].close(part)
                case Ask(part, Open(num_tokens=num_shared)):
                    self.workers[part.holder].open(part, num_shared)
                    granted.append(part)
                case Ask(part, Extend()):
                    self.workers[part.holder].reserve(part)
                    granted.append(part)
                case Finish(sequence, _):
                    served = self._unserved.pop(sequence.request.request_id)
                    served.finished_s = self.clock.now
                    self.outcome.served.append(served)
                case _:
                    raise AssertionError("no request fails, and lanes run when they are launched")
        return granted

    def _done(self, run: Run) -> None:
        """End a lane's step."""
        drawing = [
            chunk.sequence
            for chunk in run.chunks
            if chunk.num_tokens == chunk.sequence.num_uncached
        ]
        self._tell(StepDone(run.lane, tuple(map(self._draw, drawing))))

    def _draw(self, sequence: Sequence) -> Drawn:
        """Draw the sequence's next token, at the end of its step."""
        served = self._unserved[sequence.request.request_id]
        if not sequence.num_generated:
            served.first_token_s = self.clock.now
        is_over = sequence.num_generated + 1 == served.traced.num_output_tokens
        return Drawn(sequence, 0, "stop" if is_over else None)


def _growing_part(chunk: Chunk) -> tuple[Part, int]:
    """Return the part to which a chunk goes, and how many tokens it has."""
    residence, num_cached = chunk.sequence.residence, chunk.sequence.num_cached
    assert residence is not None
    part = residence.parts[residence.index_of(num_cached)]
    return part, num_cached - part.first_token


@cache
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


_KNOWN, _UNKNOWN = SamplingParams(ignore_eos=True), SamplingParams()


def _request(request_id: str, traced: TracedRequest) -> Request:
    """Make a request. The scheduler knows its length if it runs to its max_tokens."""
    params = _KNOWN if traced.num_output_tokens == traced.max_tokens else _UNKNOWN
    return Request(request_id, _prompt(traced.num_prompt_tokens), params, traced.max_tokens, seed=0)
