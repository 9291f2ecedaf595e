"""How sequences end, or wait again, once they are **at rest** (``PendingAction``)."""

from __future__ import annotations

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import FinishReason
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import Ask, Fail, Finish, Instruction
from fastdecode.schedule.life.grants import Grants
from fastdecode.schedule.life.sequences import (
    PendingAction,
    SequenceRecord,
    SequenceState,
    SequenceTable,
)
from fastdecode.wire.blocks import Close


class Endings:
    """Carries out pending actions, and has the state that all of the lifecycle shares."""

    def __init__(self, scheduler: ContinuousScheduler) -> None:
        self.scheduler = scheduler
        self.table = SequenceTable()
        self.grants = Grants()
        self.out: list[Instruction] = []
        """Instructions that follow from the present event."""
        self._cache = scheduler.ledger.cache
        self.looks_for_room = False
        """True if some waiting sequences may no longer fit anywhere."""
        self.was_refused = False
        """True if a holder refused room, and nothing was freed since then."""

    def finish(self, life: SequenceRecord, reason: FinishReason) -> None:
        """Finish a sequence whose last token is known."""
        self._cache.answered(life.sequence)
        request_id = life.sequence.request.request_id
        siblings = self.table.by_request[request_id]
        siblings.remove(life)
        if not siblings:
            del self.table.by_request[request_id]
        self.out.append(Finish(life.sequence, reason, self._cache.kept(life.sequence)))
        self.table.set_pending(life, PendingAction.DROP)
        self.settle(life)

    def drop(self, request_id: str, error: FastDecodeError | None = None) -> None:
        """End a request, and all of its sequences. ``error``: sent to its client, if any."""
        if error is not None:
            self.out.append(Fail(request_id, error))
        for life in self.table.by_request.pop(request_id):
            self.table.set_pending(life, PendingAction.DROP)
            self.settle(life)

    def recompute(self, life: SequenceRecord) -> None:
        """Start a sequence again."""
        if life.pending in (None, PendingAction.RECOVER):
            self.table.set_pending(life, PendingAction.REQUEUE)
            self.table.counts.num_recomputed += 1
        self.settle(life)

    def settle(self, life: SequenceRecord) -> None:
        """Carry out what is pending for a sequence, once it is at rest."""
        if life.pending is PendingAction.RECOVER or not self.table.is_at_rest(life):
            return
        is_closed = life.state is SequenceState.DONE
        if life.pending is PendingAction.DROP:
            if not is_closed:
                self.scheduler.finish(life.sequence)
                self.set_aside(life)
            self.table.clear_pending(life)
            self.table.move(life, SequenceState.DONE)
            del self.table.by_sequence[life.sequence.sequence_id]
        else:
            self.scheduler.requeue(life.sequence, was_over=is_closed)
            self.table.move(life, SequenceState.REQUEUED)
            self.set_aside(life)
            self.table.clear_pending(life)
            self.looks_for_room = True

    def set_aside(self, life: SequenceRecord) -> None:
        """Close what is open of a sequence that waits again, or is over."""
        self.close(life)
        self.table.cache(life, 0)
        life.sequence.residence = None
        life.stop_awaiting()

    def close(self, life: SequenceRecord) -> None:
        """Close what is open of a sequence. Blocks that are named now stay."""
        self.out += self._cache.stock.take_orders()  # of blocks that are still open
        for part in self.grants.close(life):
            tail = (self._cache.stock.take_tail(part.part_id) or b"").hex()
            self.out.append(Ask(part, Close(part.part_id, tail=tail)))
            self.was_refused = False
