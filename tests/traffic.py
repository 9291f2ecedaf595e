"""A scheduler that is put to work: its plans are carried out on the R-workers' real KV stores, step by step, in lanes
that finish in any order, and each is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fastdecode.core.errors import CapacityError
from fastdecode.core.sequence import Request, SamplingParams, Sequence, part_id
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.scheduler import Start, StepPlan
from rworker.kv_store import KVStore

BLOCK_SIZE = 4
MAX_SEQUENCES = 7
PREFILL_CHUNK = 5
MAX_STEP_TOKENS = MAX_SEQUENCES + 7

Requests: TypeAlias = "list[tuple[int, tuple[int, ...], int]]"
"""Prompt tokens, generated tokens of each sequence, max_tokens."""


class Store:
    """An R-worker's real KV store, one sequence at a time."""

    def __init__(self, num_blocks: int) -> None:
        self._store = KVStore(num_blocks, BLOCK_SIZE)
        self.open, self.fork, self.extend = self._store.open, self._store.fork, self._store.extend
        self.close = self._store.close

    def append(self, sequence_id: int, num_new: int) -> None:
        self._store.append(np.array([sequence_id]), np.array([num_new], np.int32))

    def num_cached(self, sequence_id: int) -> int:
        return int(self._store.num_tokens(np.array([sequence_id]))[0])


@dataclass(eq=False)
class Harness:
    """Carries out plans as the engine does, and checks each of them."""

    scheduler: ContinuousScheduler
    stores: list[Store]
    num_lanes: int
    lane_limits: list[int] | None = None
    """W_lim of each R-worker and lane, where lengths are known."""
    in_flight: dict[int, StepPlan] = field(default_factory=dict)
    lane_of: dict[int, int] = field(default_factory=dict)
    held: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """The parts of a sequence: R-worker, and id there."""
    live: dict[int, Sequence] = field(default_factory=dict)
    length_of: dict[int, int] = field(default_factory=dict)
    """How many tokens a sequence will generate."""
    lost: set[int] = field(default_factory=set)
    num_arrived: int = 0
    num_suspended: int = 0
    finished: dict[int, list[int]] = field(default_factory=dict)
    together: set[tuple[int, ...]] = field(default_factory=set)
    """Sequences that stepped together."""

    def arrive(self, num_prompt_tokens: int, lengths: tuple[int, ...], max_tokens: int) -> bool:
        """A request of one sequence a length. Returns whether it was taken."""
        request = Request("r", tuple(range(num_prompt_tokens)), SamplingParams(n=len(lengths)), max_tokens, seed=0)
        ids = range(self.num_arrived, self.num_arrived + len(lengths))
        self.num_arrived += len(lengths)
        sequences = [Sequence.of(sequence_id, request, index) for index, sequence_id in enumerate(ids)]
        try:
            self.scheduler.add(sequences)
        except CapacityError:
            return False
        self.live.update(zip(ids, sequences, strict=True))
        self.length_of.update(zip(ids, lengths, strict=True))
        return True

    def turn(self, lane: int) -> bool:
        """Finish the lane's step, or begin one. Returns whether there was anything to do."""
        if lane in self.in_flight:
            self._complete(self.in_flight.pop(lane))
            return True
        self._recover()
        plan = self.scheduler.plan(lane)
        self._begin(lane, plan)
        if plan.chunks:
            self.in_flight[lane] = plan
        return bool(plan.chunks)

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self.live[sequence.sequence_id]
        self.lane_of.pop(sequence.sequence_id, None)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        for worker, part in self.held.pop(sequence.sequence_id, ()):
            if worker not in self.lost:
                self.stores[worker].close(part)

    @property
    def at_rest(self) -> list[Sequence]:
        """Live sequences whose step isn't in flight."""
        flying = {chunk.sequence.sequence_id for plan in self.in_flight.values() for chunk in plan.chunks}
        return [sequence for sequence_id, sequence in self.live.items() if sequence_id not in flying]

    def lose(self, worker: int) -> None:
        self.lost.add(worker)
        for sequence in self.scheduler.lose_worker(worker):
            self.cancel(sequence)

    def _recover(self) -> None:
        for sequence in self.at_rest:
            if not self.lost.isdisjoint(sequence.workers):
                del self.lane_of[sequence.sequence_id]
                self._close(sequence)
                try:
                    self.scheduler.requeue(sequence)
                except CapacityError:
                    self.cancel(sequence)

    def _begin(self, lane: int, plan: StepPlan) -> None:
        for suspend in plan.suspends:
            sequence_id = suspend.sequence.sequence_id
            assert self.lane_of.pop(sequence_id) == lane, "only the lane that is at rest may be changed"
            again = any(start.sequence is suspend.sequence for start in plan.starts)
            assert again or (suspend.sequence.num_cached == 0 and suspend.sequence.workers == ())
            assert suspend.worker == self.held[sequence_id][0][0]
            self._close(suspend.sequence)
            self.num_suspended += 1
        for extend in plan.extends:
            assert extend.sequence.worker is not None
            self.stores[extend.sequence.worker].extend(extend.sequence.sequence_id, extend.num_reserved_tokens)
        for start in plan.starts:
            self._open(start)
            self.lane_of[start.sequence.sequence_id] = lane
        waiting = [sequence_id for sequence_id, sequence in self.live.items() if sequence.worker is None]
        started = [start.sequence.sequence_id for start in plan.starts]
        assert started == sorted(started) and max(started, default=-1) < min(waiting, default=1 << 60), (
            "first come first"
        )
        self._check_chunks(lane, plan)
        for chunk in plan.chunks:
            worker, part, num_cached = self._last_part(chunk.sequence)
            if worker not in self.lost:
                assert self.stores[worker].num_cached(part) == num_cached
                self.stores[worker].append(part, chunk.num_tokens)

    def _open(self, start: Start) -> None:
        sequence, reserve = start.sequence, start.num_reserved_tokens
        assert start.worker == sequence.worker and reserve is not None and self.lost.isdisjoint(sequence.workers)
        sizes = self.scheduler._ledger.part_sizes(reserve)
        assert (sequence.parts is None) == (len(sizes) == 1)
        held = self.held[sequence.sequence_id] = []
        num_shared = start.num_shared_tokens
        for part, (worker, num_tokens) in enumerate(zip(sequence.workers, sizes, strict=True)):
            held.append((worker, part_id(sequence.sequence_id, part)))
            if num_shared > 0:
                assert start.parent is not None and self.held[start.parent.sequence_id][part][0] == worker
                parent = part_id(start.parent.sequence_id, part)
                self.stores[worker].fork(parent, held[-1][1], min(num_shared, num_tokens), num_tokens)
            else:
                self.stores[worker].open(held[-1][1], num_tokens)
            num_shared -= num_tokens

    def _last_part(self, sequence: Sequence) -> tuple[int, int, int]:
        """R-worker and id of the part that grows, and its cached tokens."""
        part, num_cached = 0, sequence.num_cached
        if sequence.parts is not None:
            part, num_cached = sequence.parts.fill(num_cached)
        return *self.held[sequence.sequence_id][part], num_cached

    def _check_chunks(self, lane: int, plan: StepPlan) -> None:
        chunks = {chunk.sequence.sequence_id: chunk for chunk in plan.chunks}
        assert len(chunks) == len(plan.chunks)
        self.together.add(tuple(sorted(chunks)))
        assert set(chunks) == {i for i, at in self.lane_of.items() if at == lane}, "everyone gets on in every step"
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= MAX_STEP_TOKENS
        assert len(self.lane_of) == self.scheduler.num_running <= MAX_SEQUENCES
        assert self.scheduler.num_waiting == len(self.live) - len(self.lane_of)
        loads = [0] * len(self.stores)
        members = [0] * len(self.stores)  # of each R-worker: sequences that have a part there
        for chunk in plan.chunks:
            assert 1 <= chunk.num_tokens <= max(1, min(PREFILL_CHUNK, chunk.sequence.num_uncached))
            sizes = self.scheduler._ledger.part_sizes(chunk.sequence.num_cached + chunk.num_tokens)
            for worker, num_tokens in zip(chunk.sequence.workers, sizes, strict=False):
                loads[worker] += num_tokens
            for worker in set(chunk.sequence.workers):
                members[worker] += 1
        if self.lane_limits is not None:
            for load, here, limit in zip(loads, members, self.lane_limits, strict=True):
                assert load <= limit or here == 1, "no start above the limit"

    def _complete(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.sequence_id not in self.live or not self.lost.isdisjoint(sequence.workers):
                continue
            sequence.num_cached += chunk.num_tokens
            held = self.held[sequence.sequence_id]
            assert sequence.num_cached == sum(self.stores[worker].num_cached(part) for worker, part in held)
            if sequence.num_uncached == 0:
                # A token depends on the sequence alone, however often it was computed.
                sequence.token_ids.append(1000 * sequence.sequence_id + sequence.num_generated)
                if sequence.num_generated == self.length_of[sequence.sequence_id]:
                    self.finished[sequence.sequence_id] = sequence.token_ids[sequence.num_prompt_tokens :]
                    self.cancel(sequence)

    def run_out(self) -> None:
        """Until nothing is left, within as many turns as running one sequence after the other would take."""
        turns = sum(2 * (len(s.token_ids) + s.request.max_tokens) for s in self.live.values()) + 1
        for _ in range(turns * 2):
            if not self.live:
                return
            moved = [self.turn(lane) for lane in range(self.num_lanes)]
            assert any(moved), "somebody can always get on"
        raise AssertionError("somebody starves")


def options(mode: str, num_lanes: int, **more: object) -> ScheduleOptions:
    given_ = {
        "mode": mode,
        "num_lanes": num_lanes,
        "max_num_sequences": MAX_SEQUENCES,
        "prefill_chunk": PREFILL_CHUNK,
        "max_step_tokens": MAX_STEP_TOKENS,
        "target_length": 24,
    }
    return ScheduleOptions(**(given_ | more))  # type: ignore[arg-type]


@st.composite
def traffic(draw: st.DrawFn, *, forks: bool) -> Requests:
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        max_tokens = draw(st.integers(1, 24))
        n = draw(st.sampled_from((1, 1, 2, 3))) if forks else 1
        lengths = tuple(draw(st.integers(1, max_tokens)) for _ in range(n))
        requests.append((draw(st.integers(1, 24)), lengths, max_tokens))
    return requests


def play(data: st.DataObject, harness: Harness, requests: Requests, *, lose: bool) -> None:
    """Requests come in between turns of random lanes; sequences are cancelled and R-workers lost at random."""
    expected: dict[int, int] = {}
    cancelled: set[int] = set()
    for prompt, lengths, max_tokens in requests:
        first = harness.num_arrived
        if harness.arrive(prompt, lengths, max_tokens):
            expected.update(enumerate(lengths, first))
        for lane in data.draw(st.lists(st.integers(0, harness.num_lanes - 1), max_size=12)):
            harness.turn(lane)
        if harness.at_rest and data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(harness.at_rest))
            if harness.lost.isdisjoint(victim.workers):
                cancelled.add(victim.sequence_id)
                harness.cancel(victim)
        if lose and not harness.lost and data.draw(st.integers(0, 7)) == 0:
            before = set(harness.live)
            harness.lose(0)
            cancelled |= before - set(harness.live)
    harness.run_out()
    assert harness.scheduler.num_running == harness.scheduler.num_waiting == 0
    for sequence_id, length in expected.items():
        if sequence_id in harness.finished:
            assert harness.finished[sequence_id] == [1000 * sequence_id + i for i in range(length)]
        else:
            assert sequence_id in cancelled or harness.lost


relaxed = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
