"""What becomes of sequences: they wait again, are over, or are given up.

A sequence's fate is carried out when it is **at rest** (see
``fastdecode.schedule.life.lifecycle``).
"""

from __future__ import annotations

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import FinishReason
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import Close, Fail, Finish, Instruction
from fastdecode.schedule.life.grants import Grants
from fastdecode.schedule.life.lives import Fate, Life, Lives, Status


class Endings:
    """Carries fates out.

    Args:
        scheduler: is told who waits again, and who is over.
        lives: all sequences that aren't over.
        grants: what is open of them.
        out: what is to be done about it.
    """

    def __init__(
        self,
        scheduler: ContinuousScheduler,
        lives: Lives,
        grants: Grants,
        out: list[Instruction],
    ) -> None:
        self._scheduler = scheduler
        self._lives = lives
        self._grants = grants
        self._out = out
        self._cache = scheduler.ledger.cache
        self.num_recomputed = 0
        """Sequences that had to start again: a holder was lost, or is doubted."""
        self.looks_for_room = False
        """Some that wait may fit nowhere any more."""
        self.was_refused = False
        """Somebody was, and since then nothing was freed."""

    def finish(self, life: Life, reason: FinishReason) -> None:
        """Its last token is known."""
        self._cache.answered(life.sequence)
        request_id = life.sequence.request.request_id
        siblings = self._lives.by_request[request_id]
        siblings.remove(life)
        if not siblings:
            del self._lives.by_request[request_id]
        self._lives.tell(life, f"finished: {reason}")
        self._out.append(Finish(life.sequence, reason))
        self._lives.doom(life, Fate.DROP)
        self.settle(life)

    def drop(self, request_id: str, error: FastDecodeError | None = None) -> None:
        """A request ends before its time, all of its sequences with it. None:
        nobody wants to know."""
        if error is not None:
            self._out.append(Fail(request_id, error))
        for life in self._lives.by_request.pop(request_id):
            self._lives.tell(life, "cancelled" if error is None else f"failed: {error}")
            self._lives.doom(life, Fate.DROP)
            self.settle(life)

    def recompute(self, life: Life) -> None:
        """It has to start again."""
        if life.fate in (None, Fate.RESUME):
            self._lives.doom(life, Fate.REQUEUE)
            self.num_recomputed += 1
        self.settle(life)

    def settle(self, life: Life) -> None:
        """Carry out what becomes of a sequence, once it is at rest."""
        if life.fate is Fate.RESUME or not self._lives.is_at_rest(life):
            return
        if life.sources or life.pulling:  # what was to be fetched isn't there, and isn't kept
            self._lives.place(life, life.status, 0)
        is_closed = life.status is Status.FINISHED
        if life.fate is Fate.DROP:
            if not is_closed:
                self._scheduler.finish(life.sequence)
                self.set_aside(life)
            self._lives.absolve(life)
            life.status = Status.FINISHED
            del self._lives.by_sequence[life.sequence.sequence_id]
        else:
            self._scheduler.requeue(life.sequence, was_over=is_closed)
            self.set_aside(life)
            self._lives.absolve(life)
            self.looks_for_room = True

    def set_aside(self, life: Life) -> None:
        """Close what is open of a sequence, which waits again, or is over."""
        self._out += self._cache.stock.orders.take()  # of blocks that are still open
        for part in self._grants.close(life):
            self._out.append(Close(part, self._cache.stock.take_tail(part.part_id)))
            self.was_refused = False
        self._lives.place(life, Status.INTERRUPTED, 0)
        life.sequence.residence = None
        life.stop_awaiting()
        life.sources = ()
        life.pulling.clear()
