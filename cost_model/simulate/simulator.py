"""The virtual clock: plans of the real scheduler, carried out by workers that only count.

Time passes in rounds; in a round every lane makes one step. Lanes share the S-worker and the R-workers, and a lane is
at one of the two at a time, so a round takes

    max(sum of the lanes' S-parts, the busiest R-worker's sum of R-parts, the slowest lane's S-part + R-part + link)

which is S + R with one lane, and max(S, R) a lane with two equal ones, as long as the link is quick.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache

from cost_model.simulate.trace import Trace, TracedRequest
from fastdecode.core.errors import CapacityError
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.scheduler import Chunk, Scheduler, StepPlan
from fastdecode.schedule.times import StepTimes

# No policy looks further into its queue than a full batch; the rest of a long trace isn't held in memory.
_QUEUE_AHEAD = 1 << 14


@dataclass
class SimulatedRWorker:
    """Refuses what a real one would refuse. Its sequences bring no tokens, only lengths."""

    num_blocks: int
    block_size: int
    reserved: dict[int, int] = field(default_factory=dict)
    """Sequence → tokens."""
    cached: dict[int, int] = field(default_factory=dict)
    """Sequence → tokens."""

    def open(self, sequence_id: int, num_reserved_tokens: int) -> None:
        assert sequence_id not in self.reserved
        self.cached[sequence_id] = 0
        self.reserve(sequence_id, num_reserved_tokens)

    def reserve(self, sequence_id: int, num_reserved_tokens: int) -> None:
        assert num_reserved_tokens >= self.reserved.get(sequence_id, 0)
        self.reserved[sequence_id] = num_reserved_tokens
        assert self.num_reserved_blocks <= self.num_blocks, "an R-worker's blocks are oversubscribed"

    def append(self, sequence_id: int, num_past: int, num_tokens: int) -> None:
        assert num_tokens >= 1 and self.cached[sequence_id] == num_past
        self.cached[sequence_id] += num_tokens
        assert self.cached[sequence_id] <= self.reserved[sequence_id], "a sequence outgrows what it reserved"

    def close(self, sequence_id: int) -> None:
        del self.reserved[sequence_id], self.cached[sequence_id]

    @property
    def num_reserved_blocks(self) -> int:
        return sum(max(1, -(-tokens // self.block_size)) for tokens in self.reserved.values())


@dataclass(frozen=True)
class Step:
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
class Outcome:
    """A simulated run."""

    num_r_workers: int
    steps: list[Step] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)
    """In order of their end."""
    num_refused: int = 0
    """Requests that the scheduler would not take."""
    num_suspended: int = 0
    total_s: float = 0.0


class Simulator:
    """Runs one trace to its end.

    Args:
        scheduler: what the engine would use, for ``num_lanes`` lanes and these R-workers.
        link_s: what a lane's step spends on the way between S-worker and R-workers, over all of its layers.
    """

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        times: StepTimes,
        *,
        worker_blocks: tuple[int, ...],
        block_size: int,
        num_lanes: int = 1,
        link_s: float = 0.0,
    ) -> None:
        self._trace = trace
        self._link_s = link_s
        self._scheduler = scheduler
        self._times = times
        self.workers = [SimulatedRWorker(blocks, block_size) for blocks in worker_blocks]
        self._num_lanes = num_lanes
        self._coming = deque(trace.requests)
        self._live: dict[int, ServedRequest] = {}
        self._num_arrived = 0
        self._now_s = 0.0
        self._step = 0.0
        """Rounds so far, and those slept through until an arrival."""
        self.outcome = Outcome(len(worker_blocks))

    def run(self) -> Outcome:
        """Run the trace to its end."""
        while self._live or self._coming:
            self._arrive()
            plans = [self._scheduler.plan(lane) for lane in range(self._num_lanes)]
            if any(plan.chunks for plan in plans):
                self._run_round(plans)
                continue
            assert not self._live, "a scheduler with unfinished sequences plans at least one chunk"
            if self._coming:
                self._sleep_until(self._coming[0].arrival)
        self.outcome.total_s = self._now_s
        return self.outcome

    def _arrive(self) -> None:
        """Queue the requests whose time has come."""
        now = self._now_s if self._trace.unit == "s" else self._step
        while self._coming and self._coming[0].arrival <= now and self._scheduler.num_waiting < _QUEUE_AHEAD:
            traced = self._coming.popleft()
            sequence_id, self._num_arrived = self._num_arrived, self._num_arrived + 1
            request = _request(traced)
            try:
                self._scheduler.add([Sequence.of(sequence_id, request, 0)])
            except CapacityError:
                self.outcome.num_refused += 1
                continue
            arrived_s = traced.arrival if self._trace.unit == "s" else self._now_s
            self._live[sequence_id] = ServedRequest(traced, arrived_s)

    def _sleep_until(self, arrival: float) -> None:
        if self._trace.unit == "s":
            self._now_s = max(self._now_s, arrival)
        else:
            self._step = max(self._step, arrival)

    def _run_round(self, plans: list[StepPlan]) -> None:
        for plan in plans:
            self.begin(plan)
        step = self._timed([plan.chunks for plan in plans])
        self.outcome.steps.append(step)
        self._now_s += step.step_s
        self._step += 1
        for plan in plans:
            self.complete(plan)

    def begin(self, plan: StepPlan) -> None:
        """Tell the R-workers what a step brings, as the engine does: close, enlarge, open, append."""
        for suspend in plan.suspends:
            self.workers[suspend.worker].close(suspend.sequence.sequence_id)
        for extend in plan.extends:
            self._worker_of(extend.sequence).reserve(extend.sequence.sequence_id, extend.num_reserved_tokens)
        for start in plan.starts:
            reserved = start.num_reserved_tokens
            self.workers[start.worker].open(
                start.sequence.sequence_id, start.sequence.max_cached_tokens if reserved is None else reserved
            )
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._worker_of(sequence).append(sequence.sequence_id, sequence.num_cached, chunk.num_tokens)
        self.outcome.num_suspended += len(plan.suspends)

    def complete(self, plan: StepPlan) -> None:
        """A step is over: draw tokens, finish what they end."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_cached += chunk.num_tokens
            if sequence.num_uncached:
                continue
            sequence.token_ids.append(0)
            served = self._live[sequence.sequence_id]
            if sequence.num_generated == 1:
                served.first_token_s = self._now_s
            if sequence.num_generated == served.traced.num_output_tokens:
                self._finish(sequence, served)

    def _finish(self, sequence: Sequence, served: ServedRequest) -> None:
        self._worker_of(sequence).close(sequence.sequence_id)
        self._scheduler.finish(sequence)
        served.finished_s = self._now_s
        self.outcome.served.append(self._live.pop(sequence.sequence_id))

    def _worker_of(self, sequence: Sequence) -> SimulatedRWorker:
        assert sequence.worker is not None
        return self.workers[sequence.worker]

    def _timed(self, lanes: list[tuple[Chunk, ...]]) -> Step:
        """How long a round takes, and who is busy for how long."""
        s_parts: list[float] = []
        slowest_lane_s = 0.0
        busy_s = [0.0] * len(self.workers)
        num_tokens = load_tokens = 0
        for chunks in lanes:
            if not chunks:
                continue
            loads = [0] * len(self.workers)
            for chunk in chunks:
                assert chunk.sequence.worker is not None
                loads[chunk.sequence.worker] += chunk.sequence.num_cached + chunk.num_tokens
            lane_tokens = sum(chunk.num_tokens for chunk in chunks)
            r_parts = [self._times.r_part_s(w, load) if load else 0.0 for w, load in enumerate(loads)]
            s_parts.append(self._times.s_part_s(lane_tokens))
            slowest_lane_s = max(slowest_lane_s, s_parts[-1] + max(r_parts) + self._link_s)
            busy_s = [busy + r_part for busy, r_part in zip(busy_s, r_parts, strict=True)]
            num_tokens += lane_tokens
            load_tokens += sum(loads)
        return Step(
            started_s=self._now_s,
            step_s=max(sum(s_parts), max(busy_s), slowest_lane_s),
            s_part_s=sum(s_parts),
            r_part_s=max(busy_s),
            r_parts_s=sum(busy_s),
            load_tokens=load_tokens,
            num_running=sum(len(chunks) for chunks in lanes),
            num_tokens=num_tokens,
        )


@cache
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


_KNOWN, _UNKNOWN = SamplingParams(ignore_eos=True), SamplingParams()


def _request(traced: TracedRequest) -> Request:
    """Its length is known to the scheduler if it runs to its max_tokens."""
    params = _KNOWN if traced.num_output_tokens == traced.max_tokens else _UNKNOWN
    return Request("", _prompt(traced.num_prompt_tokens), params, traced.max_tokens, seed=0)
