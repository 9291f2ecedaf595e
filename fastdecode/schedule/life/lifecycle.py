"""What happens to sequences, and what follows: for the engine, the simulator and tests.

Nothing here waits, sends, or computes: ``handle`` takes an event and returns the instructions that
follow, in order. A ``Lifecycle`` owns the scheduler, and it alone writes a sequence's tokens, how
many of them are cached, and where. States are in ``fastdecode.schedule.life.sequences``.
"""

from __future__ import annotations

import logging
from typing import Final

from fastdecode.core.errors import CapacityError, WorkerError, assert_never
from fastdecode.core.holders import HolderId, PartId
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.adoption import Adoptions
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import (
    Ask,
    BetweenSteps,
    Came,
    Cancelled,
    Ended,
    Event,
    Instruction,
    Interrupted,
    Joined,
    LaneIdle,
    LaneReady,
    Leaving,
    Lost,
    Opened,
    Refused,
    Regrouped,
    Reopened,
    Run,
    StepDone,
    Submitted,
    TakenOver,
)
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.sequences import PendingAction, SequenceState
from fastdecode.schedule.life.starting import Starting
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.blocks import Done, Extend, Inventory, Progress, keys_of

logger = logging.getLogger(__name__)

_NO_ROOM: Final = "its R-worker was lost, and no R-worker that is left has room for it"


class Lifecycle:
    """See the module.

    Args:
        scheduler: decides which sequence starts where, and what runs.
        joins_early: sequences step while blocks with which they start are still fetched.
    """

    def __init__(self, scheduler: ContinuousScheduler, *, joins_early: bool = True) -> None:
        self.scheduler = scheduler
        self.holders: Final = scheduler.ledger.holders
        self.endings = Endings(scheduler)
        self.sequences, self.grants = self.endings.table, self.endings.grants
        self._out = self.endings.out
        self.adoptions = Adoptions(self.endings)
        """While any is under way no step begins."""
        self.handing = Handing(self.endings)
        self.starting = Starting(self.endings, self.handing, joins_early=joins_early)
        self._flying: dict[int, tuple[Chunk, ...]] = {}  # by lane
        self._cache = scheduler.ledger.cache
        self.keeps_blocks: Final = self._cache.chains.are_on
        """Blocks outlive their sequences, and may move between tiers."""
        self._fails_over = False  # some holder was lost that has a replica

    def handle(self, event: Event) -> list[Instruction]:
        """Return the instructions that follow from an event.

        Raises:
            CapacityError: If a submitted request could never fit. It is not queued then.
        """
        match event:
            case StepDone():
                self._step_done(event)
            case Came():
                self.handing.take_awaited(event.drawn)
            case LaneIdle() | LaneReady() if self._fails_over and self.adoptions:
                pass  # no step begins
            case LaneIdle():
                self._plan(event.lane)
            case LaneReady():
                self._run(event.lane)
            case _:
                self._take(event)
        if self._fails_over and self.adoptions and not self._flying:
            self._ask_adopters()
        if self.keeps_blocks:
            self._out += self._cache.stock.take_orders()
            self._out += self._cache.stock.take_fetches()
        instructions = self._out.copy()
        self._out.clear()
        return instructions

    def _take(self, event: BetweenSteps) -> None:
        """Take an event that is not part of a lane's step."""
        match event:
            case Opened():
                self._opened(event.part_id)
            case Refused():
                self._refused(event)
            case Submitted():
                sequences = self.sequences.make(event.request)
                self.scheduler.add(sequences)
                self.sequences.add(event.request, sequences)
            case Lost() | Interrupted() | Leaving() | TakenOver() | Reopened() | Joined():
                self._about_holder(event)
            case Cancelled():
                self.endings.drop(event.request_id)
            case Ended():
                self._cache.end_conversation(event.token_ids, event.salt)
            case Progress() | Done():
                self.starting.hear(event)
            case Inventory():
                blocks = dict(zip(keys_of(event.keys), event.num_tokens.tolist(), strict=True))
                self._cache.stock.stocked(HolderId(event.holder), event.num_slots, blocks)
            case Regrouped():
                assert not self._flying
                self.scheduler.regroup(event.num_lanes)
            case _:
                assert_never(event)

    def _ask_adopters(self) -> None:
        """Ask the R-workers that take holders over what they have, while no step is in flight."""
        for holder in self.adoptions.about_to_leave:
            self.handing.interrupt(holder)
        self.adoptions.ask()
        self.starting.forget_lost()

    def _about_holder(
        self, event: Lost | Interrupted | Leaving | TakenOver | Reopened | Joined
    ) -> None:
        match event:
            case Lost():
                self._lost(event)
            case Interrupted():
                self._fails_over = True
                self.endings.looks_for_room = True
                self.handing.interrupt(event.holder)
                self.adoptions.begin(event.holder)
            case Leaving():
                self._fails_over = True
                self.holders.move(event.holder, HolderState.LEAVING)
            case TakenOver():
                self.adoptions.end(event)
            case Reopened():
                self.holders.move(event.holder, HolderState.OPEN)
            case Joined():
                self.scheduler.ledger.regain(event.holder, event.num_blocks)
                self.endings.looks_for_room = True  # it may have less than before

    def _plan(self, lane: int) -> None:
        if self.endings.looks_for_room:
            self.endings.looks_for_room = False
            for request_id in _unplaceable(self.scheduler):
                self.endings.drop(request_id, WorkerError(_NO_ROOM))
        plan = self.scheduler.plan(lane, may_start=not (self.endings.was_refused and self._flying))
        # Before a part is closed, which may be cached, or opened, which may need the room.
        if self.keeps_blocks:
            self._out += self._cache.stock.take_orders()
        for sequence in plan.suspends:
            life = self.sequences.by_sequence[sequence.sequence_id]
            self.sequences.counts.num_suspended += 1
            self.sequences.move(life, SequenceState.REQUEUED)
            self.endings.set_aside(life)
        for sequence, residence in plan.grows:
            sequence.residence = residence
            part = residence.parts[-1]
            self.grants.ask(self.sequences.by_sequence[sequence.sequence_id], part)
            self._out.append(Ask(part, Extend(part.part_id, part.num_tokens)))
        if self.keeps_blocks:
            self._out += self._cache.stock.take_fetches()
        for start in plan.starts:
            life = self.sequences.by_sequence[start.sequence.sequence_id]
            life.lane = lane
            self.starting.start(life, start)
        if self.keeps_blocks:
            self._tend_blocks(lane)

    def _tend_blocks(self, lane: int) -> None:
        """Evict blocks whose memory a planned step may need, and move others."""
        flying = sum([chunk.num_tokens for chunks in self._flying.values() for chunk in chunks])
        coming = self.scheduler.lanes[lane].num_next_tokens
        num_tokens = self.sequences.num_cached_tokens + flying + coming
        self._cache.stock.trim(num_tokens, self.scheduler.num_running)
        self.scheduler.ledger.move_ahead(self.scheduler.waiting)

    def _run(self, lane: int) -> None:
        chunks = self.scheduler.chunks(lane)
        if chunks:
            self._flying[lane] = chunks
            self.sequences.flying[lane] = frozenset(
                [chunk.sequence.sequence_id for chunk in chunks]
            )
            self._out.append(Run(lane, chunks))
            if self.keeps_blocks:
                self.starting.begin_step(lane, chunks)

    def _opened(self, part_id: PartId) -> None:
        life = self.grants.opened(part_id)
        if life.pending is PendingAction.RECOVER:
            self.adoptions.proceed(life)
        elif life.pending is not None:
            self.endings.settle(life)
        elif not life.unanswered:
            self.sequences.move(life, SequenceState.RUNNING)
            self.scheduler.granted(life.sequence)

    def _refused(self, event: Refused) -> None:
        """Let a sequence wait for room that a holder lacks, or fail. It fails if no other sequence
        took room there when it was asked: none that ends makes any."""
        asked = self.grants.refused(event.part_id)
        life, part = asked.life, asked.part
        if life.pending is PendingAction.RECOVER:  # a part can no longer be cut, or enlarged
            self.endings.recompute(life)
            self.adoptions.proceed(life)
            return
        if life.pending is None:
            residence, request_id = life.sequence.residence, life.sequence.request.request_id
            assert residence is not None
            number = [one.part_id for one in residence.parts].index(part.part_id) + 1
            of_part = f"part {number} of " if len(residence.parts) > 1 else ""
            message = f"{event.peer} refused {of_part}request {request_id}: {event.message}"
            if event.code == CapacityError.default_code and not asked.is_alone:
                logger.warning("%s: it waits", message)
                self.sequences.set_pending(life, PendingAction.REQUEUE)
                self.endings.was_refused = True
            else:
                self.endings.drop(request_id, CapacityError(message, code=event.code))
                return
        self.endings.settle(life)

    def _step_done(self, event: StepDone) -> None:
        self.endings.was_refused = False
        lives = self.sequences
        del lives.flying[event.lane]
        if self.keeps_blocks:
            self.starting.end_step(event.lane)
        chunks = self._flying.pop(event.lane)
        cache = self._cache
        for chunk in lives.wanted(chunks):
            sequence = chunk.sequence
            sequence.num_cached += chunk.num_tokens
            if sequence.behind_gap:
                sequence.pass_gap()
            lives.num_cached_tokens += chunk.num_tokens
            if sequence.sequence_id in cache.computing:
                cache.keep(sequence)
        if lives.num_pending:
            for life in [lives.by_sequence[chunk.sequence.sequence_id] for chunk in chunks]:
                if life.pending is not None:
                    self.endings.settle(life)
        self.handing.take_drawn(event.drawn)
        for sequence in event.coming:
            self.handing.expect(sequence)

    def _lost(self, lost: Lost) -> None:
        holder = lost.holder
        self.adoptions.give_up(holder)
        self.scheduler.ledger.lose(holder, returns=lost.returns)
        self.starting.forget_lost()
        self.endings.looks_for_room = True
        for life in list(self.sequences.by_sequence.values()):
            if self.grants.lose(life, holder):
                if life.state is SequenceState.EXPORTED:
                    self.handing.lose(life)
                else:
                    self.endings.recompute(life)

    def stepped(self, num_prompt_tokens: int, seconds: float, idle_s: float = 0.0) -> None:
        """Note the time of a step, where ``keeps_blocks``.

        Args:
            num_prompt_tokens: tokens of prompts that ran in it.
            idle_s: time of it without computation.
        """
        stock = self._cache.stock
        if not stock.has_lower:
            return
        if self.starting.was_beside:
            stock.rates.stepped_beside(num_prompt_tokens, max(0.0, seconds - idle_s))
        else:
            stock.rates.stepped(num_prompt_tokens, seconds)

    @property
    def is_owed(self) -> bool:
        """True if an answer about a room is owed, a holder is being taken over, or a sequence may
        have to wait for a block that is moved between tiers."""
        if self.grants.asked or (self._fails_over and self.adoptions):
            return True
        return self.keeps_blocks and bool(self._cache.stock.jobs and self.sequences.by_sequence)

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.grants.check_invariants(self.sequences.by_sequence.values())
        self.sequences.check_invariants(
            {sequence.sequence_id for sequence in self.scheduler.waiting}
        )


def _unplaceable(scheduler: ContinuousScheduler) -> list[str]:
    """Return the waiting requests for which no holder that is left has room."""
    capacity = scheduler.ledger.capacity
    unplaceable = [s for s in scheduler.waiting if not capacity.is_possible(s.max_cached_tokens)]
    return list(dict.fromkeys(sequence.request.request_id for sequence in unplaceable))
