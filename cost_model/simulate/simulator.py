"""The virtual clock: the lives of sequences as the engine leads them, with
R-workers that only count.

Time passes in rounds; in a round every lane makes one step. Lanes share the
S-worker and the R-workers, and a lane is at one of the two at a time, so a
round takes

    max(sum of the lanes' S-parts, the busiest R-worker's sum of R-parts, the
    slowest lane's S-part + R-part + link)

which is S + R with one lane, and max(S, R) a lane with two equal ones, as long
as the link is quick.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from cost_model.simulate.trace import RequestTrace, TracedRequest
from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import Part, PartId, Residence
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import (
    Close,
    Drawn,
    Event,
    Extend,
    Finish,
    Fork,
    LaneIdle,
    LaneReady,
    Open,
    Opened,
    Run,
    StepDone,
    Submitted,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import StepTimes

# No policy looks further into its queue than a full batch; the rest of a long
# trace isn't held in memory.
_QUEUE_AHEAD = 1 << 14


@dataclass
class SimulatedRWorker:
    """Refuses what a real one would refuse. Its sequences bring no tokens, only lengths."""

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


@dataclass(frozen=True)
class SimulatedStep:
    """One round: a step of every lane."""

    started_s: float
    step_s: float
    s_part_s: float
    """The S-worker was busy."""
    r_part_s: float
    """The busiest R-worker was busy."""
    r_parts_s: float
    """All R-workers were busy, summed."""
    load_tokens: int
    num_running: int
    num_tokens: int


@dataclass(eq=False)
class ServedRequest:
    """One request's way through. Times are since the start of the trace."""

    traced: TracedRequest
    arrived_s: float
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """None for outputs of one token."""
        n = self.traced.num_output_tokens
        return (self.finished_s - self.first_token_s) / (n - 1) if n > 1 else None


@dataclass
class SimulationOutcome:
    """A simulated run."""

    num_r_workers: int
    steps: list[SimulatedStep] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)
    """In order of their end."""
    num_refused: int = 0
    """Requests that the scheduler would not take."""
    num_suspended: int = 0
    total_s: float = 0.0


class Simulator:
    """Runs one trace to its end.

    Args:
        scheduler: what the engine would use, for ``num_lanes`` lanes and these
            R-workers, which answer at once.
        link_s: what a lane's step spends on the way between S-worker and
            R-workers, over all of its layers.
    """

    def __init__(
        self,
        trace: RequestTrace,
        scheduler: ContinuousScheduler,
        times: StepTimes,
        *,
        worker_blocks: tuple[int, ...],
        block_size: int,
        num_lanes: int = 1,
        link_s: float = 0.0,
    ) -> None:
        self._trace = trace
        self._link_s = link_s
        self._lifecycle = Lifecycle(scheduler)
        self._times = times
        self.workers = [SimulatedRWorker(blocks, block_size) for blocks in worker_blocks]
        self._num_lanes = num_lanes
        self._coming = deque(trace.requests)
        self._unserved: dict[str, ServedRequest] = {}
        self._request_ids = map(str, itertools.count())
        self._now_s = 0.0
        self._step = 0.0
        """Rounds so far, and those slept through until an arrival."""
        self.outcome = SimulationOutcome(len(worker_blocks))

    def run(self) -> SimulationOutcome:
        """Run the trace to its end."""
        while self._unserved or self._coming:
            self._arrive()
            runs = [run for lane in range(self._num_lanes) for run in self._launch(lane)]
            if runs:
                self._run_round(runs)
                continue
            assert not self._unserved, (
                "a scheduler with unfinished sequences plans at least one chunk"
            )
            if self._coming:
                self._sleep_until(self._coming[0].arrival)
        self.outcome.num_suspended = self._lifecycle.num_suspended
        self.outcome.total_s = self._now_s
        return self.outcome

    def _arrive(self) -> None:
        """Queue the requests whose time has come."""
        now = self._now_s if self._trace.unit == "s" else self._step
        waiting = self._lifecycle.scheduler.waiting
        while self._coming and self._coming[0].arrival <= now and len(waiting) < _QUEUE_AHEAD:
            traced = self._coming.popleft()
            request = _request(next(self._request_ids), traced)
            try:
                self._tell(Submitted(request))
            except CapacityError:
                self.outcome.num_refused += 1
                continue
            arrived_s = traced.arrival if self._trace.unit == "s" else self._now_s
            self._unserved[request.request_id] = ServedRequest(traced, arrived_s)

    def _sleep_until(self, arrival: float) -> None:
        if self._trace.unit == "s":
            self._now_s = max(self._now_s, arrival)
        else:
            self._step = max(self._step, arrival)

    def _launch(self, lane: int) -> list[Run]:
        """A lane's next step, if anybody can step."""
        for part in self._tell(LaneIdle(lane)):
            self._tell(Opened(part.part_id))
        runs = [run for run in self._lifecycle.handle(LaneReady(lane)) if isinstance(run, Run)]
        for chunk in [chunk for run in runs for chunk in run.chunks]:
            part, num_past = _growing_part(chunk)
            self.workers[part.holder].append(part, num_past, chunk.num_tokens)
        return runs

    def _tell(self, event: Event) -> list[Part]:
        """Tell the lifecycle what has happened, and do what it wants. Returns
        the parts that were opened, or grew."""
        granted: list[Part] = []
        for instruction in self._lifecycle.handle(event):
            match instruction:
                case Close(part):
                    self.workers[part.holder].close(part)
                case Open(part):
                    self.workers[part.holder].open(part)
                    granted.append(part)
                case Fork(part, _, num_shared):
                    self.workers[part.holder].open(part, num_shared)
                    granted.append(part)
                case Extend(part):
                    self.workers[part.holder].reserve(part)
                    granted.append(part)
                case Finish(sequence, _):
                    served = self._unserved.pop(sequence.request.request_id)
                    served.finished_s = self._now_s
                    self.outcome.served.append(served)
                case _:
                    raise AssertionError("nobody fails, and lanes run when they are launched")
        return granted

    def _run_round(self, runs: list[Run]) -> None:
        step = self._timed([run.chunks for run in runs])
        self.outcome.steps.append(step)
        self._now_s += step.step_s
        self._step += 1
        for run in runs:
            self._done(run)

    def _done(self, run: Run) -> None:
        """A lane's step is over."""
        drawing = [
            chunk.sequence
            for chunk in run.chunks
            if chunk.num_tokens == chunk.sequence.num_uncached
        ]
        self._tell(StepDone(run.lane, tuple(map(self._draw, drawing))))

    def _draw(self, sequence: Sequence) -> Drawn:
        """The sequence's next token, at the end of its step."""
        served = self._unserved[sequence.request.request_id]
        if not sequence.num_generated:
            served.first_token_s = self._now_s
        is_over = sequence.num_generated + 1 == served.traced.num_output_tokens
        return Drawn(sequence, 0, "stop" if is_over else None)

    def _timed(self, lanes: list[tuple[Chunk, ...]]) -> SimulatedStep:
        """How long a round takes, and who is busy for how long."""
        s_parts: list[float] = []
        slowest_lane_s = 0.0
        busy_s = [0.0] * len(self.workers)
        num_tokens = load_tokens = 0
        for chunks in lanes:
            loads = [0] * len(self.workers)
            for chunk in chunks:
                _add_load(loads, chunk)
            lane_tokens = sum(chunk.num_tokens for chunk in chunks)
            r_parts = [
                self._times.r_part_s(w, load) if load else 0.0 for w, load in enumerate(loads)
            ]
            s_parts.append(self._times.s_part_s(lane_tokens))
            slowest_lane_s = max(slowest_lane_s, s_parts[-1] + max(r_parts) + self._link_s)
            busy_s = [busy + r_part for busy, r_part in zip(busy_s, r_parts, strict=True)]
            num_tokens += lane_tokens
            load_tokens += sum(loads)
        return SimulatedStep(
            started_s=self._now_s,
            step_s=max(sum(s_parts), max(busy_s), slowest_lane_s),
            s_part_s=sum(s_parts),
            r_part_s=max(busy_s),
            r_parts_s=sum(busy_s),
            load_tokens=load_tokens,
            num_running=sum(len(chunks) for chunks in lanes),
            num_tokens=num_tokens,
        )


def _residence(chunk: Chunk) -> Residence:
    assert chunk.sequence.residence is not None
    return chunk.sequence.residence


def _growing_part(chunk: Chunk) -> tuple[Part, int]:
    """Where a chunk goes, and how many tokens are there."""
    residence, num_cached = _residence(chunk), chunk.sequence.num_cached
    part = residence.parts[residence.index_of(num_cached)]
    return part, num_cached - part.first_token


def _add_load(loads: list[int], chunk: Chunk) -> None:
    """Count what is cached once the chunk has run, by R-worker."""
    num_cached = chunk.sequence.num_cached + chunk.num_tokens
    for part in _residence(chunk).parts:
        loads[part.holder] += max(0, min(num_cached - part.first_token, part.num_tokens))


@cache
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


_KNOWN, _UNKNOWN = SamplingParams(ignore_eos=True), SamplingParams()


def _request(request_id: str, traced: TracedRequest) -> Request:
    """Its length is known to the scheduler if it runs to its max_tokens."""
    params = _KNOWN if traced.num_output_tokens == traced.max_tokens else _UNKNOWN
    return Request(request_id, _prompt(traced.num_prompt_tokens), params, traced.max_tokens, seed=0)
