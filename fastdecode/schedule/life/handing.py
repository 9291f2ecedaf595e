"""Drawn tokens, and sequences that continue on another engine once their first token is drawn, or
come from one.

A token may be known only after the step behind it has begun: its sequence steps with a token that
is **coming**. If that is the last one, the step was in vain.

A sequence that is handed over is **parked**: none of its steps run, and its blocks stay, named so
that they can be fetched, until its request is cancelled. One of a request's sequences is enough.
A sequence that arrives starts with those blocks as with any that are fetched. If they cannot be
fetched, its prompt runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import COMING, Sequence
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Drawn, HandOver, HasFetched
from fastdecode.schedule.life.sequences import PendingAction, SequenceRecord, SequenceState

HANDED_OVER_LOST: Final = "handed_over_lost"
"""Error code of a request whose prompt can no longer be fetched."""


class Handing:
    """See the module."""

    def __init__(self, endings: Endings) -> None:
        self._endings, self._scheduler = endings, endings.scheduler
        self._table, self._grants, self._out = endings.table, endings.grants, endings.out
        self._failed: set[str] = set()
        """Requests with a part of the prompt that could not be fetched."""

    @property
    def has_exported(self) -> bool:
        """True if a prompt waits to be fetched by another engine."""
        return bool(self._scheduler.parked)

    def expect(self, sequence: Sequence) -> None:
        """Note that a sequence's token is coming. After its last one its cache is not needed."""
        life = self._table.by_sequence.get(sequence.sequence_id)
        if life is None or life.pending is not None:
            return
        sequence.token_ids.append(COMING)
        if len(sequence.token_ids) >= life.longest and sequence.request.hands_over:
            self.hold(life)
        elif len(sequence.token_ids) >= life.longest:
            self._scheduler.finish(sequence)
            self._endings.set_aside(life)
            self._table.move(life, SequenceState.DONE)

    def take_awaited(self, drawn: Iterable[Drawn]) -> None:
        """Take tokens that were coming. Their sequences may have been interrupted since."""
        for one in drawn:
            if one.sequence.is_coming:
                one.sequence.token_ids.pop()
                life = self._table.by_sequence.get(one.sequence.sequence_id)
                if life is not None and life.pending is not PendingAction.DROP:
                    self._take(life, one)

    def take_drawn(self, drawn: Iterable[Drawn]) -> None:
        """Take the tokens of an ended step. A sequence whose sibling failed in it takes none."""
        for one in drawn:
            life = self._table.by_sequence.get(one.sequence.sequence_id)
            if life is not None and life.pending is None:
                self._take(life, one)

    def _take(self, life: SequenceRecord, drawn: Drawn) -> None:
        request = life.sequence.request
        if drawn.error is not None:
            self._endings.drop(request.request_id, drawn.error)
            return
        life.sequence.token_ids.append(drawn.token_id)
        is_last = len(life.sequence.token_ids) >= life.longest
        if is_last and drawn.finish_reason is None and request.hands_over:
            self._park(life)
        elif is_last or drawn.finish_reason is not None:
            self._endings.finish(life, drawn.finish_reason or "length")
        if request.hands_over:
            self._look(request.request_id)

    def started(self, life: SequenceRecord, *, has_failed: bool = False) -> None:
        """Note that a sequence has its first tokens, or that they could not be fetched. What is
        offered is needed while any of its siblings may start with it."""
        sequence, request = life.sequence, life.sequence.request
        if not sequence.sources:
            return
        sequence.sources = ()
        siblings = self._table.by_request.get(request.request_id, ())
        if has_failed:
            self._failed.add(request.request_id)
            for sibling in siblings:
                if sibling.state is not SequenceState.FETCHING:  # else it reports its own end
                    sibling.sequence.sources = ()
        if not any(sibling.sequence.sources for sibling in siblings):
            self._out.append(HasFetched(sequence, request.request_id in self._failed))
            self._failed.discard(request.request_id)

    def hold(self, life: SequenceRecord) -> None:
        """Stop a sequence whose last token here is drawn, though perhaps not known."""
        if life.state is not SequenceState.EXPORTED:
            self._scheduler.park(life.sequence)
            self._table.move(life, SequenceState.EXPORTED)

    def _park(self, life: SequenceRecord) -> None:
        """Park a sequence whose last token here is known, and that is not over."""
        siblings = self._table.by_request[life.sequence.request.request_id]
        if any(_is_exported(other) for other in siblings if other is not life):
            siblings.remove(life)
            self._table.set_pending(life, PendingAction.DROP)
            self._endings.settle(life)
            return
        self.hold(life)

    def _look(self, request_id: str) -> None:
        """Hand a request over if all of its sequences have drawn their last token here, and some
        are not over: name its blocks, and close its parts."""
        siblings = self._table.by_request.get(request_id, [])
        if siblings and all(map(_is_exported, siblings)):
            life = siblings[0]
            num_tokens = self._scheduler.ledger.cache.offer(life.sequence)
            if not num_tokens:
                self.lose(life)  # its first block may not be read
                return
            self._endings.close(life)
            self._out.append(HandOver(life.sequence, num_tokens))

    def lose(self, life: SequenceRecord) -> None:
        """Fail the request of a parked sequence that has lost a part."""
        request_id = life.sequence.request.request_id
        if request_id in self._table.by_request:
            self._endings.drop(
                request_id,
                WorkerError("its prompt on offer cannot be read any more", code=HANDED_OVER_LOST),
            )

    def interrupt(self, holder: HolderId) -> None:
        """Fail parked requests on a lost holder that has a replica, which readers do not know."""
        for life in list(self._table.by_sequence.values()):
            residence = life.sequence.residence
            is_there = residence is not None and residence.is_on(holder)
            if is_there and life.state is SequenceState.EXPORTED:
                self._grants.lose(life, holder)
                self.lose(life)


def _is_exported(life: SequenceRecord) -> bool:
    return life.state is SequenceState.EXPORTED and not life.sequence.is_coming
