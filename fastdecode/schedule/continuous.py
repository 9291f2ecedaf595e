"""Continuous batching under a policy: the scheduler that all of ``fastdecode.schedule.admission`` shares.

What holds under every policy:

* First come, first served: nobody starts before the head of the queue, so nobody starves.
* Every running sequence gets on by at least one token in every step of its lane; prompts run in chunks beside the
  decoding sequences and never hold them up.
* A step can't run out of KV blocks. A sequence reserves blocks for the length that is forecast for it. If it gets
  longer, it reserves more, and if there is no more, the sequences of its lane that arrived last are suspended to make
  room: their blocks are freed, their tokens kept, and they go back to their place in the queue, to be recomputed. When
  they start again, they reserve all that they may ever need. Where forecasts are upper bounds, nobody is suspended.
* Where sequences are split, each part is placed, reserved and counted as load on its own R-worker. A sequence that may
  need several parts starts when all of them have room for all that it may ever need, whatever is forecast.
* The 2nd to n-th sequences of a request wait until a sibling holds the prompt and then fork it: all but the prompt's
  last token is shared, the last is run again to get its logits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from fastdecode.core.sequence import Parts, Sequence
from fastdecode.schedule.admission import Admission
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.load_control import MicroBatch
from fastdecode.schedule.placement import BlockLedger
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.schedule.running import Lane, Planned, Run, arrival, cached_at_end
from fastdecode.schedule.scheduler import Chunk, Extend, Start, StepPlan, Suspend


class ContinuousScheduler:
    """See the module. Sequences arrive in ascending order of their ids.

    Args:
        make_admission: makes one lane's policy, for so many lanes.
        lengths: forecasts how a sequence's load is projected, and what it reserves.
        max_num_sequences: most sequences that run at once, shared out evenly among the lanes.
        prefill_chunk: most prompt tokens of one sequence in a step.
        max_step_tokens: most tokens of a lane's step. What it exceeds the lane's share of ``max_num_sequences`` by is
            for prompts, however many sequences decode.
        max_guest_rows: most that the prompts of a step send to the closed parts on one R-worker, counted once for each
            query and part. As many sequences' closed parts the ledger allows there: each sends one as it decodes.
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
        max_guest_rows: int = 1 << 19,
    ) -> None:
        assert max_step_tokens > max_num_sequences >= 1 <= num_lanes
        self._ledger = ledger
        self._lengths = lengths
        self._max_num_sequences = max_num_sequences
        self._make_admission = make_admission
        self._prefill_chunk = prefill_chunk
        self._max_step_tokens = max_step_tokens
        self._max_guest_rows = max_guest_rows
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
            self._lanes[0].admission.check_possible(self._ledger.part_sizes(sequence.max_cached_tokens))
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
        runs.sort(key=lambda run: (-len(run.prefill), run.workers, -run.sequence.num_cached))
        for i, run in enumerate(runs):
            self._move(self._lanes[i % num_lanes], run)

    def _make_lanes(self, num_lanes: int) -> None:
        self._lane_size = -(-self._max_num_sequences // num_lanes)
        budget = self._max_step_tokens - self._lane_size
        limits = budget, self._prefill_chunk, self._max_guest_rows, self._ledger.part_tokens
        self._lanes = [Lane(self._make_admission(num_lanes), PrefillBudget(*limits)) for _ in range(num_lanes)]

    def _move(self, lane: Lane, run: Run) -> None:
        """A running sequence goes on in a new lane, whose first step is still to come."""
        length = len(run.sequence.token_ids) - max(0, len(run.prefill) - 1)
        run.projected = MicroBatch(1, max(run.projected.target_length, length), 0, length)
        parts = None if run.sequence.parts is None else run.workers
        lane.budget.book_ahead(tuple(run.prefill), run.sequence.num_cached, parts=parts)
        self._enter(lane, run)

    def _enter(self, lane: Lane, run: Run) -> None:
        """A sequence runs in the lane from now on."""
        first, *others = self._loads(run)
        lane.admission.add(*first)
        for worker, load in others:
            lane.admission.prolong(worker, load)
        for worker, num_tokens in zip(run.workers, self._sizes(run), strict=True):
            lane.reserved_tokens[worker] += num_tokens
        lane.running[run.sequence.sequence_id] = run

    def _sizes(self, run: Run) -> tuple[int, ...]:
        """Tokens reserved for each part."""
        return self._ledger.part_sizes(run.num_reserved_tokens)

    def _loads(self, run: Run) -> list[tuple[int, MicroBatch]]:
        """(R-worker, load projected there) of each part."""
        return list(zip(run.workers, self._shares(run.projected, len(run.workers)), strict=True))

    def _shares(self, projected: MicroBatch, num_parts: int) -> tuple[MicroBatch, ...]:
        """What each part is of a sequence's load."""
        part_tokens = self._ledger.part_tokens
        return (projected,) if num_parts == 1 or part_tokens is None else projected.split(num_parts, part_tokens)

    def _plan(self, lane: Lane) -> StepPlan:
        lane.step += 1
        lane.budget.next_step()
        if not lane.running:
            lane.budget.clear()
        extends, suspends = self._make_room(lane)
        starts = self._start_waiting(lane)
        chunks = tuple(run.next_chunk() for run in lane.running.values())
        return StepPlan(tuple(starts), chunks, tuple(suspends), tuple(extends))

    # Sequences that outlive their forecast.

    def _make_room(self, lane: Lane) -> tuple[list[Extend], list[Suspend]]:
        """See to it that every sequence can cache one more token, those that arrived first first."""
        extends: dict[int, Extend] = {}
        suspends: list[Suspend] = []
        outgrown = [
            run
            for run in lane.running.values()
            if run.sequence.num_cached >= min(run.projected.target_length, run.num_reserved_tokens) and not run.prefill
        ]
        for run in sorted(outgrown, key=arrival):
            if run.sequence.sequence_id not in lane.running:
                continue  # suspended just now
            length = run.sequence.num_cached + 1
            if length > run.projected.target_length:
                expected = cached_at_end(run.sequence, self._lengths.expected(run.sequence))
                run.projected = MicroBatch(1, expected, lane.step, length)
                for worker, load in self._loads(run):
                    lane.admission.prolong(worker, load)
            if length > run.num_reserved_tokens:
                suspends += self._extend(lane, run)
                extends[run.sequence.sequence_id] = Extend(run.sequence, run.num_reserved_tokens)
        for suspended in suspends:
            extends.pop(suspended.sequence.sequence_id, None)
        return list(extends.values()), suspends

    def _extend(self, lane: Lane, run: Run) -> list[Suspend]:
        """Reserve more for a sequence: what is forecast, or just the next block. Returns those suspended for it; the
        sequence itself may be the last of them. Not for split ones, which have reserved all."""
        suspends: list[Suspend] = []
        (worker,) = run.workers
        next_block = self._ledger.block_size * self._ledger.blocks_for(run.sequence.num_cached + 1)
        safe = cached_at_end(run.sequence, self._lengths.safe(run.sequence))
        wishes = (safe, min(next_block, run.sequence.max_cached_tokens))
        while run.sequence.sequence_id in lane.running:
            for num_tokens in wishes:
                if self._ledger.grow(worker, run.num_reserved_tokens, num_tokens):
                    lane.reserved_tokens[worker] += num_tokens - run.num_reserved_tokens
                    run.num_reserved_tokens = num_tokens
                    return suspends
            # Only this lane is at rest; the others' sequences may be in the middle of a step.
            last = max((r for r in lane.running.values() if worker in r.workers), key=arrival)
            suspends.append(Suspend(last.sequence, last.workers[0]))
            self._release(lane, last, at=lane.step)
            self._interrupt(last.sequence)
        return suspends

    # Sequences that start.

    def _start_waiting(self, lane: Lane) -> list[Start]:
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

    def _start(self, lane: Lane, sequence: Sequence, *, recompute: bool) -> Start | None:
        """Start the sequence, by a fork if a sibling runs; None if it has to wait."""
        num_shared = sequence.num_prompt_tokens - 1
        sibling = self._running_sibling(sequence) if num_shared else None
        if sibling is not None:
            if sibling.sequence.num_cached < num_shared:
                return None
            fork = Start(sequence, sibling.workers[0], sibling.sequence, num_shared)
            started = self._start_on(lane, fork, sibling.workers, recompute=recompute)
            if started is not None:
                return started
        return self._start_on(lane, Start(sequence, worker=-1), (), recompute=recompute)

    def _start_on(self, lane: Lane, start: Start, beside: tuple[int, ...], *, recompute: bool) -> Start | None:
        """Start as asked, what is shared ``beside`` the parent's parts and the rest anywhere, if blocks, prefill budget
        and policy allow it."""
        sequence, num_shared = start.sequence, start.num_shared_tokens
        most = sequence.max_cached_tokens
        sizes = self._ledger.part_sizes(most)
        part_tokens = self._ledger.part_tokens if len(sizes) > 1 else None
        is_split = part_tokens is not None
        reserve = most
        if not is_split and not recompute:
            reserve = cached_at_end(sequence, self._lengths.safe(sequence))
        num_fixed = -(-num_shared // sizes[0])
        plan = partial(self._plan_start, lane, sequence, num_shared, reserve)
        planned = plan(() if is_split else None, beside[:num_fixed])
        if planned is not None and is_split:
            # Where the parts are says how long chunks may be, and the number of chunks how much load is when.
            planned = plan(planned[1], planned[1])
        if planned is None:
            return None
        prefill, workers, projected = planned
        lane.budget.book(prefill, num_shared, parts=workers if is_split else None)
        run = Run(sequence, workers, reserve, projected, deque(prefill), Chunk(sequence, 1))
        self._ledger.reserve(workers, self._sizes(run))
        self._enter(lane, run)
        sequence.worker, sequence.num_cached = workers[0], num_shared
        sequence.parts = None if part_tokens is None else Parts(workers, part_tokens)
        return replace(start, worker=workers[0], num_reserved_tokens=reserve)

    def _plan_start(
        self,
        lane: Lane,
        sequence: Sequence,
        num_shared: int,
        reserve: int,
        parts: tuple[int, ...] | None,
        fixed: tuple[int, ...],
    ) -> Planned | None:
        """Chunks, R-workers and load of a sequence that would start now; None if it has to wait.

        Args:
            num_shared: tokens that it needn't run.
            reserve: tokens to reserve.
            parts: the R-workers of a split sequence's parts, as far as they are known.
            fixed: where its first parts have to be.
        """
        length = len(sequence.token_ids)
        prefill: tuple[int, ...] = ()
        if length - num_shared > 1:
            prefill = lane.budget.chunks(length - num_shared, num_shared, parts=parts)
            if not prefill:
                return None
        # R-workers hold `length` tokens after the last prefill step, and one more after each that follows.
        expected = cached_at_end(sequence, self._lengths.expected(sequence))
        projected = MicroBatch(1, expected, lane.step, length - max(0, len(prefill) - 1))
        may_grow_to = self._ledger.part_sizes(sequence.max_cached_tokens)
        workers = self._choose_workers(lane, self._ledger.part_sizes(reserve), may_grow_to, projected, fixed)
        return None if workers is None else (prefill, workers, projected)

    def _choose_workers(
        self,
        lane: Lane,
        sizes: tuple[int, ...],
        may_grow_to: tuple[int, ...],
        projected: MicroBatch,
        fixed: tuple[int, ...],
    ) -> tuple[int, ...] | None:
        """An R-worker for each part of so many tokens, the first ones where they have to be; None: not in this step."""
        loads = self._shares(projected, len(sizes))

        def choose(placed: list[int], fitting: list[int], alone: bool) -> int | None:
            if len(placed) < len(fixed) and not fitting:
                return None
            fitting.sort(key=lambda worker: lane.reserved_tokens[worker] / self._ledger.capacity_tokens(worker))
            earlier = tuple(zip(placed, loads, strict=False))
            return lane.admission.choose(loads[len(placed)], fitting, earlier, alone=alone)

        # Before parts go where they exceed a limit alone, all R-workers are looked at for room within their limits.
        for alone in (False, True) if len(sizes) > 1 else (True,):
            workers = self._ledger.place_parts(sizes, may_grow_to, partial(choose, alone=alone), fixed)
            if workers is not None:
                return workers
        return None

    def _running_sibling(self, sequence: Sequence) -> Run | None:
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

    def _release(self, lane: Lane, run: Run, *, at: int) -> None:
        """A running sequence runs no more, from its lane's step ``at`` on."""
        del lane.running[run.sequence.sequence_id]
        (worker, load), *others = self._loads(run)
        lane.admission.end(worker, load, at)
        for worker, load in others:
            lane.admission.unload(worker, load, at)
        self._ledger.release(run.workers, self._sizes(run))
        for worker, num_tokens in zip(run.workers, self._sizes(run), strict=True):
            lane.reserved_tokens[worker] -= num_tokens
        run.sequence.worker = run.sequence.parts = None

    def _interrupt(self, sequence: Sequence) -> None:
        """Back to its place in the queue."""
        sequence.num_cached = 0
        insort(self._interrupted, sequence, key=lambda s: s.sequence_id)
