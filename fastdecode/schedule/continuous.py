"""Continuous batching under a policy of ``fastdecode.schedule.admission.policies``.

Under every policy:

* First come, first served: no sequence starts before the head of the queue, so none starves.
* Every running sequence advances by at least one token in every step of its lane. Prompts run in
  chunks beside the decoding sequences and never hold them up.
* A step can't run out of KV blocks: what starts has reserved its room (``starts``), and what
  outgrows it reserves more before it steps (``outgrown``).
* Each part of a split sequence is placed, reserved and counted as load on its own holder.
* The 2nd to n-th sequences of a request wait until a sibling holds the prompt, and then fork it.
  All but the prompt's last token is shared. The last one runs again for its logits.

Holders grant room, which takes a round trip. A sequence joins as soon as it has its room. Where
holders answer at once, that is the step that was planned, else the lane's next one, for which its
chunks are booked. So a lane never waits while a sequence in it can step. If an answer takes longer
than a step, what was booked and projected is put off.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.hybrid.control import HybridControl
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.plan import (
    NOT_BOOKED,
    Chunk,
    Lane,
    LanePlan,
    RunningSequence,
    Start,
    WaitingQueue,
)
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.reserving.outgrown import Outgrown
from fastdecode.schedule.reserving.starts import OwnHolders, Starts


class ContinuousScheduler:
    """See the module. Sequences arrive in ascending order of their ids, and are only read.

    Args:
        ledger: counts what is reserved.
        make_lanes: makes a number of empty lanes.
        lengths: forecasts what a sequence reserves, and its load.
        num_lanes: lanes at the start.
        max_num_sequences: most sequences that run at once, shared evenly among the lanes.
        opening_steps: steps of a lane from a plan until what starts in it has its room. 0 where
            holders answer at once, else 1.
        hybrid: where one holder is the device: which sequence goes where, and which lane is whose.
        places: which lane is for which holder. None if ``hybrid`` decides.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        make_lanes: Callable[[int], list[Lane]],
        lengths: LengthPredictor,
        *,
        num_lanes: int,
        max_num_sequences: int,
        opening_steps: int = 0,
        hybrid: HybridControl | None = None,
        first_part_id: int = 0,
        places: OwnHolders | None = None,
    ) -> None:
        self.ledger = ledger
        self.hybrid = hybrid
        self._make_lanes = make_lanes
        self._lengths = lengths
        self._max_num_sequences = max_num_sequences
        self._opening_steps = opening_steps
        self._starts = Starts(ledger, lengths, places or hybrid, first_part_id)
        self._outgrown = Outgrown(ledger, lengths)
        self.lanes = make_lanes(num_lanes)
        self.parked: dict[int, RunningSequence] = {}
        """Sequences by id that run no more, and keep what they have reserved."""
        self.waiting = WaitingQueue(self.lanes[0].admission.order)
        if hybrid is not None:
            hybrid.view = lambda: (self.lanes, list(self.waiting))

    @property
    def num_running(self) -> int:
        """Sequences that have started, also those without room yet."""
        return sum(len(lane.running) for lane in self.lanes)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of one request. While all holders are gone, it is unknown what their
        replacements will have room for.

        Raises:
            CapacityError: If holders could never have room for one of them. None is added then.
        """
        arrived = list(sequences)
        for sequence in arrived:
            if not self.ledger.holders.are_lost:
                self.ledger.capacity.check_possible(sequence.max_cached_tokens)
            self.lanes[0].admission.check_possible(
                self.ledger.shape.sizes(sequence.max_cached_tokens)
            )
        self.waiting.arrive(arrived)

    def plan(self, lane_index: int, *, may_start: bool = True) -> LanePlan:
        """Return what precedes the lane's next step. Its starts count as running.

        While sequences are unfinished, a plan for each lane in turn starts one, or one is running.

        Args:
            may_start: sequences may start.
        """
        lane = self.lanes[lane_index]
        if lane.is_planned and (due := lane.due):
            if not self.waiting or not all(run.is_fetching for run in due):
                return LanePlan()
            for run in due:  # others do not wait for their blocks
                _put_off(lane, run)
        lane.is_planned = True
        lane.step += 1
        if lane.budget.booked:
            lane.budget.next_step()
            if not lane.running:
                lane.budget.clear()
        grows, suspended = self._outgrown.make_room(lane) if lane.outgrown else ([], [])
        for run in suspended:
            self.waiting.come_back(run.sequence)
        for run in lane.running.values():
            if run.first_step == NOT_BOOKED and not _book(lane, run, ahead=0):
                lane.postpone(run, 1)
        starts: Seq[Start] = ()
        if may_start and self.waiting:
            starts = self._start_waiting(lane)
        elif may_start and lane.admission.follows_steps:
            lane.admission.begin_step(lane.step, len(lane.running), 0, 0)
        return LanePlan(tuple(run.sequence for run in suspended), tuple(grows), tuple(starts))

    def chunks(self, lane_index: int) -> tuple[Chunk, ...]:
        """Return the lane's planned step, of all that have their room. Empty if none has it yet."""
        lane = self.lanes[lane_index]
        due = lane.due
        able = [run for run in due if run.is_open]
        lane.is_planned = bool(due) and not able
        if len(able) < len(due) and able:
            for run in due:
                if not run.is_open:
                    _put_off(lane, run)
        of_runs = [run.next_prompt_chunks() if run.prefill else (run.decode,) for run in able]
        return tuple(itertools.chain.from_iterable(of_runs))

    def granted(self, sequence: Sequence) -> None:
        """Note that a running sequence has all of its room."""
        for lane in self.lanes:
            run = lane.running.get(sequence.sequence_id)
            if run is not None:
                run.is_open, run.is_fetching = True, False

    def rewind(self, sequence: Sequence) -> None:
        """Run tokens of a running sequence again that are no longer cached, once its room is
        granted again. It is at rest."""
        lane = next(x for x in self.lanes if sequence.sequence_id in x.running)
        run = lane.running[sequence.sequence_id]
        run.is_open = False
        num_uncached = len(sequence.token_ids) - sequence.num_cached
        if num_uncached == (sum(run.prefill) or 1):
            return
        if run.prefill and run.first_step != NOT_BOOKED:
            ahead = max(run.first_step - lane.step, 0 if lane.is_planned else 1)
            lane.budget.unbook(run.prefill, sequence.num_cached, ahead=ahead)
        run.prefill = deque([num_uncached] if num_uncached > 1 else [])
        run.first_step = NOT_BOOKED  # it is booked with the lane's next plan
        lane.postpone(run, 1)

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence, and free what it has reserved."""
        if self._stop(sequence):
            self._lengths.observe(sequence)
        else:
            self.waiting.remove(sequence)
        self.ledger.cache.chains.end(sequence)

    def requeue(self, sequence: Sequence, *, was_over: bool = False) -> None:
        """Queue a running sequence that has lost its cache at its old place. ``was_over``: it was
        thought to be over."""
        stopped = self._stop(sequence)
        assert stopped is not was_over, "only a running sequence can be requeued"
        self.waiting.come_back(sequence)

    def regroup(self, num_lanes: int) -> None:
        """Share the running sequences among another number of lanes, while no step is in flight.
        Prompts keep the room that was booked for them, so a lane may run more tokens than it should
        for a few steps."""
        runs = [run for lane in self.lanes for run in lane.running.values()]
        whole_prompts = self.lanes[0].budget.whole_prompts
        self.lanes = self._make_lanes(num_lanes)
        self.set_whole_prompts(whole_prompts)
        # Like cards, so that every lane gets as many of each holder, long and short.
        runs.sort(key=lambda run: (-len(run.prefill), run.holders, -run.sequence.num_cached))
        for i, run in enumerate(runs):
            lane = (
                i % num_lanes
                if self.hybrid is None
                else self.hybrid.lane_of(run.holders[0], num_lanes)
            )
            _move(self.lanes[lane], run)

    def set_whole_prompts(self, whole_prompts: bool) -> None:
        """Set how prompts begin (``PrefillBudget``)."""
        for lane in self.lanes:
            lane.budget.whole_prompts = whole_prompts

    def _start_waiting(self, lane: Lane) -> list[Start]:
        """Start as many sequences as blocks, prefill budget and policy allow."""
        is_busy = any(run.is_open for run in lane.due)
        ahead = self._opening_steps if is_busy else 0
        if self.hybrid is not None and lane.index == 0:
            ahead = 0  # the device answers at once
        num_ending = 0
        if ahead:
            num_ending = sum(_ends(run, lane.step) for run in lane.running.values())
        most = self._num_free(lane, num_ending)
        lane.admission.begin_step(lane.step, len(lane.running), most, len(self.waiting))
        if most and self.hybrid is not None:
            self.hybrid.begin_plan(self.waiting.head)
        starts: list[Start] = []
        while len(starts) < most:
            head = self.waiting.head
            if head.is_coming:
                break  # what is run of it must be known
            sibling = self._running_sibling(head)
            candidate = self._starts.candidate(
                lane, head, sibling, ahead=ahead, recompute=self.waiting.has_head_run
            )
            if candidate is None:
                break
            self.waiting.pop()
            starts.append(self._starts.start(lane, candidate))
        return starts

    def _num_free(self, lane: Lane, num_ending: int) -> int:
        """Count the sequences for which there will be a place in a lane, which ``num_ending``
        leave."""
        num_running, num_waiting = self.num_running, len(self.waiting)
        most = min(num_waiting, self._max_num_sequences - num_running + num_ending)
        if self.hybrid is None:  # some lane always has less than its share: none waits for ever
            lane_size = -(-self._max_num_sequences // len(self.lanes))
            share = min(lane_size, -(-(num_running + num_waiting) // len(self.lanes)))
            most = min(most, share - len(lane.running) + num_ending)
        return max(0, most)

    def _running_sibling(self, sequence: Sequence) -> RunningSequence | None:
        """Return the running or parked sequence of the same request with its room and most
        tokens."""
        if sequence.request.params.n == 1:
            return None
        running = (run for lane in self.lanes for run in lane.running.values())
        runs = itertools.chain(running, self.parked.values())
        siblings = (run for run in runs if run.sequence.request is sequence.request)
        return max(siblings, key=lambda run: (run.is_open, run.sequence.num_cached), default=None)

    def park(self, sequence: Sequence) -> None:
        """Stop a running sequence, which keeps what it has reserved until it is finished."""
        lane = next(lane for lane in self.lanes if sequence.sequence_id in lane.running)
        run = self.parked[sequence.sequence_id] = lane.running[sequence.sequence_id]
        lane.leave(run, at=lane.step + 1)

    def _stop(self, sequence: Sequence) -> bool:
        """Stop a sequence, and free what it has reserved. Return False if it does not run."""
        run = self.parked.pop(sequence.sequence_id, None)
        if run is None:
            lane = next((x for x in self.lanes if sequence.sequence_id in x.running), None)
            if lane is None:
                return False
            run = lane.running[sequence.sequence_id]
            lane.leave(run, at=lane.step + 1)
        self.ledger.release(run.residence, sequence)
        return True

    def check_invariants(self) -> None:
        runs = [run for lane in self.lanes for run in lane.running.values()]
        held = [*runs, *self.parked.values()]
        self.ledger.check_invariants(run.residence for run in held)
        self.ledger.cache.check_invariants(run.sequence.sequence_id for run in held)
        for lane in self.lanes:
            reserved = {holder: tokens for holder, tokens in lane.reserved_tokens.items() if tokens}
            parts = [part for run in lane.running.values() for part in run.residence.parts]
            for part in parts:
                reserved[part.holder] -= part.num_tokens
            assert not any(reserved.values()), "a lane counts other reservations than it has"
        self.waiting.check_invariants()


def _move(lane: Lane, run: RunningSequence) -> None:
    """Continue a running sequence in a new lane, which has not stepped yet."""
    length = len(run.sequence.token_ids) - max(0, len(run.prefill) - 1)
    run.projected = MicroBatch(1, max(run.projected.target_length, length), 0, length)
    lane.budget.book(run.prefill, run.sequence.num_cached, parts=_parts(run), ahead=1)
    run.first_step = 0
    lane.enter(run, run.residence)


def _ends(run: RunningSequence, step: int) -> bool:
    """Return True if this step of its lane is surely its last."""
    sequence = run.sequence
    is_last = not run.prefill and sequence.num_generated + 1 >= sequence.request.max_tokens
    return is_last and run.is_open and run.first_step <= step


def _put_off(lane: Lane, run: RunningSequence) -> None:
    """Put off a sequence that was to step and does not have its room yet."""
    lane.budget.unbook(run.prefill, run.sequence.num_cached, parts=_parts(run))
    lane.postpone(run, 1)
    _book(lane, run, ahead=1)


def _book(lane: Lane, run: RunningSequence, ahead: int) -> bool:
    """Book its prompt again, ``ahead`` steps from here. Return False if there is no room."""
    run.first_step = lane.step + ahead
    if run.prefill:
        first, parts = run.sequence.num_cached, _parts(run)
        chunks = lane.budget.chunks(sum(run.prefill), first, parts=parts, ahead=ahead)
        if not chunks:
            run.first_step = NOT_BOOKED
            return False
        lane.budget.book(chunks, first, parts=parts, ahead=ahead)
        run.prefill = deque(chunks)
    return True


def _parts(run: RunningSequence) -> tuple[HolderId, ...] | None:
    """Return its parts as ``PrefillBudget`` wants them."""
    return run.holders if len(run.residence.parts) > 1 else None
