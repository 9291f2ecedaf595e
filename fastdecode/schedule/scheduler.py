"""Which sequences step, which start: the interface every policy has, and the plainest policy, first come first served.

A sequence is **waiting**, then **running** in one lane, then **finished**. For each step of a lane the engine asks for
a plan, carries it out whole, and tells the scheduler which sequences finished; requests therefore join and leave the
running batch at every step (continuous batching).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.placement import BlockLedger


@dataclass(frozen=True)
class Start:
    """A sequence starts on an R-worker: empty, or as a fork that shares a prefix of a running sibling's tokens."""

    sequence: Sequence
    worker: int
    parent: Sequence | None = None
    num_shared_tokens: int = 0
    num_reserved_tokens: int | None = None
    """Room that the R-worker sets aside; None: for all that the sequence may ever cache."""


@dataclass(frozen=True)
class Suspend:
    """A running sequence gives its blocks back and waits again, its tokens kept, to be recomputed when it starts anew.
    By the time the plan is read it has no worker and nothing cached; here is where its blocks still are."""

    sequence: Sequence
    worker: int


@dataclass(frozen=True)
class Extend:
    """A running sequence outgrows what its R-worker has set aside for it: enlarge that to ``num_reserved_tokens``."""

    sequence: Sequence
    num_reserved_tokens: int


@dataclass(frozen=True)
class Chunk:
    """The next ``num_tokens`` uncached tokens of a running sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """One step: what is freed, enlarged and started before it, in this order, and what runs in it."""

    starts: tuple[Start, ...]
    chunks: tuple[Chunk, ...]
    suspends: tuple[Suspend, ...] = ()
    extends: tuple[Extend, ...] = ()


class Scheduler(Protocol):
    """What the engine asks of a policy."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """The sequences of one request join the queue, in order.

        Raises:
            CapacityError: no R-worker could ever hold one of them; none was added.
        """

    def plan(self, lane: int) -> StepPlan:
        """The lane's next step. Its starts count as running from now on; the engine carries out the plan whole.

        The plan of a lane that has nothing to do has no chunks. While sequences are unfinished, a plan for each lane in
        turn gives at least one chunk, or some lane's step is in flight.
        """

    def finish(self, sequence: Sequence) -> None:
        """The sequence, waiting or running, is over; what it held is free."""

    def requeue(self, sequence: Sequence) -> None:
        """A running sequence has lost its cache: it waits again, at its old place in the queue, to be recomputed.

        Raises:
            CapacityError: no R-worker that is left could ever hold it; it waits all the same, until it is finished.
        """

    def lose_worker(self, worker: int) -> list[Sequence]:
        """Start nothing on this R-worker any more; its running sequences are requeued by the engine, one by one.

        Returns:
            The waiting sequences that no R-worker that is left could ever hold.
        """

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class FirstComeFirstServed:
    """Start in order of arrival whenever there is room; decode every running sequence in every step.

    Decoding comes first, so that no prompt can stall it; prompts in order of their start share what is left of the
    step's token budget, each at most ``prefill_chunk`` tokens. The head of the queue waits for room, and nobody
    overtakes it, so nobody starves. Lanes take an equal share of the unfinished sequences each. The 2nd to n-th
    sequences of a request wait until a sibling holds the prompt and then fork it; all but the prompt's last token is
    shared, the last is run again to get its logits.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        *,
        max_num_sequences: int,
        prefill_chunk: int,
        max_step_tokens: int,
        num_lanes: int = 1,
    ) -> None:
        assert max_step_tokens > max_num_sequences >= 1 <= prefill_chunk
        assert num_lanes >= 1
        self._ledger = ledger
        self._max_num_sequences = max_num_sequences
        self._prefill_chunk = prefill_chunk
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Sequence] = deque()
        self._lanes: list[dict[int, Sequence]] = [{} for _ in range(num_lanes)]  # by sequence_id, in order of start

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(lane) for lane in self._lanes)

    def add(self, sequences: Iterable[Sequence]) -> None:
        arrived = list(sequences)
        for sequence in arrived:
            self._ledger.check_possible(sequence.max_cached_tokens)
        self._waiting.extend(arrived)

    def plan(self, lane: int) -> StepPlan:
        running = self._lanes[lane]
        starts = self._start_waiting(running)
        decoding = [s for s in running.values() if s.num_uncached == 1]
        chunks = [Chunk(sequence, 1) for sequence in decoding]
        budget = self._max_step_tokens - len(decoding)
        for sequence in running.values():
            if budget and sequence.num_uncached > 1:
                num_tokens = min(sequence.num_uncached, self._prefill_chunk, budget)
                chunks.append(Chunk(sequence, num_tokens))
                budget -= num_tokens
        return StepPlan(tuple(starts), tuple(chunks))

    def finish(self, sequence: Sequence) -> None:
        if not self._stop(sequence):
            self._waiting.remove(sequence)

    def requeue(self, sequence: Sequence) -> None:
        stopped = self._stop(sequence)
        assert stopped, "only a running sequence can be requeued"
        sequence.num_cached = 0
        self._waiting = deque(sorted([sequence, *self._waiting], key=lambda s: s.sequence_id))
        self._ledger.check_possible(sequence.max_cached_tokens)

    def lose_worker(self, worker: int) -> list[Sequence]:
        self._ledger.lose(worker)
        return [s for s in self._waiting if not self._ledger.is_possible(s.max_cached_tokens)]

    def _stop(self, sequence: Sequence) -> bool:
        for lane in self._lanes:
            if lane.pop(sequence.sequence_id, None) is not None:
                assert sequence.worker is not None
                self._ledger.release(sequence.worker, sequence.max_cached_tokens)
                sequence.worker = None
                return True
        return False

    def _start_waiting(self, running: dict[int, Sequence]) -> list[Start]:
        starts: list[Start] = []
        share = -(-(self.num_running + self.num_waiting) // len(self._lanes))
        while self._waiting and len(running) < share and self.num_running < self._max_num_sequences:
            start = self._place(self._waiting[0])
            if start is None:
                break
            sequence = self._waiting.popleft()
            self._ledger.reserve(start.worker, sequence.max_cached_tokens)
            sequence.worker = start.worker
            sequence.num_cached = start.num_shared_tokens
            running[sequence.sequence_id] = sequence
            starts.append(start)
        return starts

    def _place(self, sequence: Sequence) -> Start | None:
        """Where the sequence can start now; None if it has to wait."""
        num_shared = sequence.num_prompt_tokens - 1
        sibling = self._running_sibling(sequence) if num_shared else None
        if sibling is not None:
            if sibling.num_cached < num_shared:
                return None
            assert sibling.worker is not None
            if self._ledger.has_room(sibling.worker, sequence.max_cached_tokens):
                return Start(sequence, sibling.worker, sibling, num_shared)
        worker = self._ledger.choose(sequence.max_cached_tokens)
        return None if worker is None else Start(sequence, worker)

    def _running_sibling(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the same request, the one with most tokens cached."""
        if sequence.request.params.n == 1:
            return None
        siblings = (s for lane in self._lanes for s in lane.values() if s.request is sequence.request)
        return max(siblings, key=lambda s: s.num_cached, default=None)
