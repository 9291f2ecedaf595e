"""Continuous batching under a policy: the scheduler that all of ``fastdecode.schedule.admission`` shares.

What holds under every policy:

* First come, first served: nobody starts before the head of the queue, so nobody starves.
* Every running sequence gets on by at least one token in every step of its lane; prompts run in chunks beside the
  decoding sequences and never hold them up.
* A step can't run out of KV blocks. A sequence reserves blocks for the length that is forecast for it. If it gets
  longer, it reserves more, and if there is no more, the sequences of its lane that arrived last are suspended to make
  room: their blocks are freed, their tokens kept, and they go back to their place in the queue, to be recomputed. When
  they start again, they reserve all that they may ever need. Where forecasts are upper bounds, nobody is suspended.
* The 2nd to n-th sequences of a request wait until a sibling holds the prompt and then fork it: all but the prompt's
  last token is shared, the last is run again to get its logits.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission import Admission
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.load_control import MicroBatch
from fastdecode.schedule.placement import BlockLedger
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.schedule.scheduler import Chunk, Extend, Start, StepPlan, Suspend


@dataclass(eq=False)
class _Run:
    """A running sequence, and what was promised to it."""

    sequence: Sequence
    worker: int
    num_reserved_tokens: int
    projected: MicroBatch
    """Its load from its start, or from when it outlived what was projected first."""
    prefill: deque[int]
    """Chunks that are still booked."""
    decode: Chunk

    def next_chunk(self) -> Chunk:
        return Chunk(self.sequence, self.prefill.popleft()) if self.prefill else self.decode


@dataclass(eq=False)
class _Lane:
    admission: Admission
    budget: PrefillBudget
    step: int = -1
    """The lane's own count of steps."""
    running: dict[int, _Run] = field(default_factory=dict)
    """By sequence_id, in order of their start."""
    reserved_tokens: Counter[int] = field(default_factory=Counter)
    """By R-worker."""


class ContinuousScheduler:
    """See the module. Sequences arrive in ascending order of their ids.

    Args:
        make_admission: makes one lane's policy, for so many lanes.
        lengths: forecasts how a sequence's load is projected, and what it reserves.
        max_num_sequences: most sequences that run at once, shared out evenly among the lanes.
        prefill_chunk: most prompt tokens of one sequence in a step.
        max_step_tokens: most tokens of a lane's step. What it exceeds the lane's share of ``max_num_sequences`` by is
            for prompts, however many sequences decode.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        make_admission: Callable[[int], Admission],
        lengths: LengthPredictor,
        *,
        num_lanes: int,
        max_num_sequences: int,
        prefill_chunk: int,
        max_step_tokens: int,
    ) -> None:
        assert max_step_tokens > max_num_sequences >= 1 <= num_lanes
        self._ledger = ledger
        self._lengths = lengths
        self._max_num_sequences = max_num_sequences
        self._make_admission = make_admission
        self._prefill_chunk = prefill_chunk
        self._max_step_tokens = max_step_tokens
        self._make_lanes(num_lanes)
        self._waiting: deque[Sequence] = deque()
        # Those that have run before, in order of arrival. All of them came before all that wait for their first start.
        self._interrupted: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._interrupted)

    @property
    def num_running(self) -> int:
        return sum(len(lane.running) for lane in self._lanes)

    def add(self, sequences: Iterable[Sequence]) -> None:
        arrived = list(sequences)
        for sequence in arrived:
            self._ledger.check_possible(sequence.max_cached_tokens)
            self._lanes[0].admission.check_possible(sequence.max_cached_tokens)
        self._waiting.extend(arrived)

    def plan(self, lane: int) -> StepPlan:
        return self._plan(self._lanes[lane])

    def finish(self, sequence: Sequence) -> None:
        if self._stop(sequence):
            self._lengths.observe(sequence)
        elif sequence in self._interrupted:
            self._interrupted.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def requeue(self, sequence: Sequence) -> None:
        stopped = self._stop(sequence)
        assert stopped, "only a running sequence can be requeued"
        self._interrupt(sequence)
        self._ledger.check_possible(sequence.max_cached_tokens)

    def lose_worker(self, worker: int) -> list[Sequence]:
        self._ledger.lose(worker)
        waiting = [*self._interrupted, *self._waiting]
        return [sequence for sequence in waiting if not self._ledger.is_possible(sequence.max_cached_tokens)]

    def regain_worker(self, worker: int, num_blocks: int) -> None:
        self._ledger.regain(worker, num_blocks)

    def is_possible(self, sequence: Sequence) -> bool:
        return self._ledger.is_possible(sequence.max_cached_tokens)

    def regroup(self, num_lanes: int) -> None:
        runs = [run for lane in self._lanes for run in lane.running.values()]
        self._make_lanes(num_lanes)
        # Like cards, so that every lane gets as many of each R-worker, long and short.
        runs.sort(key=lambda run: (-len(run.prefill), run.worker, -run.sequence.num_cached))
        for i, run in enumerate(runs):
            self._move(self._lanes[i % num_lanes], run)

    def _make_lanes(self, num_lanes: int) -> None:
        self._lane_size = -(-self._max_num_sequences // num_lanes)
        budget = self._max_step_tokens - self._lane_size
        self._lanes = [
            _Lane(self._make_admission(num_lanes), PrefillBudget(budget, self._prefill_chunk)) for _ in range(num_lanes)
        ]

    @staticmethod
    def _move(lane: _Lane, run: _Run) -> None:
        """A running sequence goes on in a new lane, whose first step is still to come."""
        length = len(run.sequence.token_ids) - max(0, len(run.prefill) - 1)
        run.projected = MicroBatch(1, max(run.projected.target_length, length), 0, length)
        lane.budget.book_ahead(tuple(run.prefill))
        lane.admission.add(run.worker, run.projected)
        lane.reserved_tokens[run.worker] += run.num_reserved_tokens
        lane.running[run.sequence.sequence_id] = run

    def _plan(self, lane: _Lane) -> StepPlan:
        lane.step += 1
        lane.budget.next_step()
        if not lane.running:
            lane.budget.clear()
        extends, suspends = self._make_room(lane)
        starts = self._start_waiting(lane)
        chunks = tuple(run.next_chunk() for run in lane.running.values())
        return StepPlan(tuple(starts), chunks, tuple(suspends), tuple(extends))

    # Sequences that outlive their forecast.

    def _make_room(self, lane: _Lane) -> tuple[list[Extend], list[Suspend]]:
        """See to it that every sequence can cache one more token, those that arrived first first."""
        extends: dict[int, Extend] = {}
        suspends: list[Suspend] = []
        outgrown = [
            run
            for run in lane.running.values()
            if run.sequence.num_cached >= min(run.projected.target_length, run.num_reserved_tokens) and not run.prefill
        ]
        for run in sorted(outgrown, key=_arrival):
            if run.sequence.sequence_id not in lane.running:
                continue  # suspended just now
            length = run.sequence.num_cached + 1
            if length > run.projected.target_length:
                expected = _cached_at_end(run.sequence, self._lengths.expected(run.sequence))
                run.projected = MicroBatch(1, expected, lane.step, length)
                lane.admission.prolong(run.worker, run.projected)
            if length > run.num_reserved_tokens:
                suspends += self._extend(lane, run)
                extends[run.sequence.sequence_id] = Extend(run.sequence, run.num_reserved_tokens)
        for suspended in suspends:
            extends.pop(suspended.sequence.sequence_id, None)
        return list(extends.values()), suspends

    def _extend(self, lane: _Lane, run: _Run) -> list[Suspend]:
        """Reserve more for a sequence: what is forecast, or just the next block. Returns those suspended for it; the
        sequence itself may be the last of them."""
        suspends: list[Suspend] = []
        next_block = self._ledger.block_size * self._ledger.blocks_for(run.sequence.num_cached + 1)
        safe = _cached_at_end(run.sequence, self._lengths.safe(run.sequence))
        wishes = (safe, min(next_block, run.sequence.max_cached_tokens))
        while run.sequence.sequence_id in lane.running:
            for num_tokens in wishes:
                if self._ledger.grow(run.worker, run.num_reserved_tokens, num_tokens):
                    lane.reserved_tokens[run.worker] += num_tokens - run.num_reserved_tokens
                    run.num_reserved_tokens = num_tokens
                    return suspends
            # Only this lane is at rest; the others' sequences may be in the middle of a step.
            last = max((r for r in lane.running.values() if r.worker == run.worker), key=_arrival)
            suspends.append(Suspend(last.sequence, last.worker))
            self._release(lane, last, at=lane.step)
            self._interrupt(last.sequence)
        return suspends

    # Sequences that start.

    def _start_waiting(self, lane: _Lane) -> list[Start]:
        share = -(-(self.num_running + self.num_waiting) // len(self._lanes))
        most = min(self._lane_size, share) - len(lane.running)
        most = max(0, min(most, self.num_waiting, self._max_num_sequences - self.num_running))
        lane.admission.begin_step(lane.step, len(lane.running), most)
        starts: list[Start] = []
        while len(starts) < most:
            queue = self._interrupted or self._waiting
            start = self._start(lane, queue[0], recompute=queue is self._interrupted)
            if start is None:
                break
            del queue[0]
            starts.append(start)
        return starts

    def _start(self, lane: _Lane, sequence: Sequence, *, recompute: bool) -> Start | None:
        """Start the sequence, by a fork if a sibling runs; None if it has to wait."""
        num_shared = sequence.num_prompt_tokens - 1
        sibling = self._running_sibling(sequence) if num_shared else None
        if sibling is not None:
            if sibling.sequence.num_cached < num_shared:
                return None
            fork = Start(sequence, sibling.worker, sibling.sequence, num_shared)
            started = self._start_on(lane, fork, recompute=recompute)
            if started is not None:
                return started
        return self._start_on(lane, Start(sequence, worker=-1), recompute=recompute)

    def _start_on(self, lane: _Lane, start: Start, *, recompute: bool) -> Start | None:
        """Start as asked, on the R-worker asked for (-1: on any), if blocks, prefill budget and policy allow it."""
        sequence = start.sequence
        length, most = len(sequence.token_ids), sequence.max_cached_tokens
        num_uncached = length - start.num_shared_tokens
        prefill = lane.budget.chunks(num_uncached) if num_uncached > 1 else ()
        if num_uncached > 1 and not prefill:
            return None
        reserve = most if recompute else _cached_at_end(sequence, self._lengths.safe(sequence))
        workers = self._ledger.workers_with_room(reserve, most)
        workers.sort(key=lambda worker: lane.reserved_tokens[worker] / self._ledger.capacity_tokens(worker))
        if start.worker >= 0:
            workers = [worker for worker in workers if worker == start.worker]
            if not workers:
                return None
        # The R-worker holds `length` tokens after the last prefill step, and one more after each that follows.
        expected = _cached_at_end(sequence, self._lengths.expected(sequence))
        projected = MicroBatch(1, expected, lane.step, length - max(0, len(prefill) - 1))
        worker = lane.admission.choose(projected, workers)
        if worker is None:
            return None
        lane.budget.book(prefill)
        lane.admission.add(worker, projected)
        self._ledger.reserve(worker, reserve)
        lane.reserved_tokens[worker] += reserve
        sequence.worker, sequence.num_cached = worker, start.num_shared_tokens
        lane.running[sequence.sequence_id] = _Run(
            sequence, worker, reserve, projected, deque(prefill), Chunk(sequence, 1)
        )
        return replace(start, worker=worker, num_reserved_tokens=reserve)

    def _running_sibling(self, sequence: Sequence) -> _Run | None:
        """A running sequence of the same request, the one with most tokens cached."""
        if sequence.request.params.n == 1:
            return None
        runs = (run for lane in self._lanes for run in lane.running.values())
        siblings = (run for run in runs if run.sequence.request is sequence.request)
        return max(siblings, key=lambda run: run.sequence.num_cached, default=None)

    # Sequences that stop.

    def _stop(self, sequence: Sequence) -> bool:
        for lane in self._lanes:
            run = lane.running.get(sequence.sequence_id)
            if run is not None:
                self._release(lane, run, at=lane.step + 1)
                return True
        return False

    def _release(self, lane: _Lane, run: _Run, *, at: int) -> None:
        """A running sequence runs no more, from its lane's step ``at`` on."""
        del lane.running[run.sequence.sequence_id]
        lane.admission.end(run.worker, run.projected, at)
        self._ledger.release(run.worker, run.num_reserved_tokens)
        lane.reserved_tokens[run.worker] -= run.num_reserved_tokens
        run.sequence.worker = None

    def _interrupt(self, sequence: Sequence) -> None:
        """Back to its place in the queue."""
        sequence.num_cached = 0
        insort(self._interrupted, sequence, key=lambda s: s.sequence_id)


def _arrival(run: _Run) -> int:
    return run.sequence.sequence_id


def _cached_at_end(sequence: Sequence, num_generated: int) -> int:
    """Tokens that a sequence has cached when it ends with so many generated: the last one never is."""
    return sequence.num_prompt_tokens + num_generated - 1
