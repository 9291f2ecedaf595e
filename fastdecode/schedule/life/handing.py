"""Sequences that go on elsewhere once their first token is drawn, and those that
come from elsewhere.

Whoever goes is **parked**: nothing of it runs, and what is cached stays, to be
fetched, until its request is cancelled. Of the sequences of one request one is
enough for that. Whoever comes has its room opened first, then its first tokens
fetched, and runs when they are there; if they can't be had, it is recomputed.
"""

from __future__ import annotations

from typing import Final

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId, PartId
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import HandOver, HasFetched, Pull
from fastdecode.schedule.life.sequences import (
    PendingAction,
    SequenceRecord,
    SequenceState,
)
from fastdecode.wire.blocks import Pulled

HANDED_OVER_LOST: Final = "handed_over_lost"
"""Code of what a request ends with whose prompt can't be fetched any more."""


class Handing:
    """Both kinds."""

    def __init__(self, endings: Endings) -> None:
        self._endings, self._scheduler = endings, endings.scheduler
        self._table, self._grants, self._out = endings.table, endings.grants, endings.out
        self._pulling: dict[PartId, SequenceRecord] = {}
        self._failed: set[str] = set()
        """Requests of whose prompts a part couldn't be fetched."""

    @property
    def is_importing(self) -> bool:
        """Whether anything is being fetched."""
        return bool(self._pulling)

    @property
    def has_exported(self) -> bool:
        """Whether anything waits to be fetched by others."""
        return bool(self._scheduler.parked.runs)

    def fetch(self, life: SequenceRecord) -> bool:
        """All parts of a sequence are open: whether something has to come before
        it runs."""
        sources, life.sources = life.sources, ()
        residence = life.sequence.residence
        assert residence is not None
        for part in residence.parts if sources else ():
            num_tokens = min(life.sequence.num_cached - part.first_token, part.num_tokens)
            if num_tokens > 0:
                life.importing.add(part.part_id)
                self._pulling[part.part_id] = life
                self._out.append(Pull(part, num_tokens, sources))
        if life.importing:
            self._table.move(life, SequenceState.IMPORTING)
            self._table.tell(life, "fetches its prompt")
        return bool(life.importing)

    def pulled(self, event: Pulled) -> None:
        """What was to be fetched of a part is there, or can't be had. The part
        may be closed by now."""
        life = self._pulling.pop(PartId(event.sequence_id), None)
        if life is None or event.sequence_id not in life.importing:
            return
        life.importing.discard(PartId(event.sequence_id))
        if event.reason:
            self._table.tell(life, f"can't fetch its prompt: {event.reason}")
            self._failed.add(life.sequence.request.request_id)
            for sibling in self._table.by_request.get(life.sequence.request.request_id, ()):
                if not (sibling.importing or sibling.sources):  # else it reports its own end
                    sibling.sequence.sources = ()
            self._table.cache(life, 0)  # none of it is kept
            self._endings.recompute(life)
        elif not life.importing:
            self._table.move(life, SequenceState.RUNNING)
            self._scheduler.granted(life.sequence)
            self._table.tell(life, "running")
        if not life.importing:
            self.started(life)

    def started(self, life: SequenceRecord) -> None:
        """A sequence has its first tokens, or won't have them from elsewhere.
        What is offered is needed as long as any of its siblings may want it."""
        sequence = life.sequence
        sequence.sources = ()
        siblings = self._table.of_request(sequence.request.request_id)
        if sequence.request.sources and not any(sibling.sources for sibling in siblings):
            failed = sequence.request.request_id in self._failed
            self._failed.discard(sequence.request.request_id)
            self._out.append(HasFetched(sequence, failed))

    def hold(self, life: SequenceRecord) -> None:
        """Its last token here is drawn, though perhaps not known: nothing of it
        runs any more."""
        if life.state is not SequenceState.EXPORTED:
            self._scheduler.parked.park(self._scheduler.lanes, life.sequence)
            self._table.move(life, SequenceState.EXPORTED)

    def park(self, life: SequenceRecord) -> None:
        """Its last token here is known, and it isn't over."""
        siblings = self._table.by_request[life.sequence.request.request_id]
        if any(_is_exported(other) for other in siblings if other is not life):
            siblings.remove(life)
            self._table.tell(life, "handed over with a sibling")
            self._table.set_pending(life, PendingAction.DROP)
            self._endings.settle(life)
            return
        self._table.tell(life, "parked")
        self.hold(life)

    def look(self, request_id: str) -> None:
        """One of a request's sequences has drawn its last token here: hand the
        request over if all have, and some aren't over."""
        siblings = self._table.by_request.get(request_id, [])
        if siblings and all(map(_is_exported, siblings)):
            self._out.append(HandOver(siblings[0].sequence))

    def lose(self, life: SequenceRecord) -> None:
        """A parked sequence has lost what was to be fetched."""
        request_id = life.sequence.request.request_id
        if request_id in self._table.by_request:
            self._endings.drop(
                request_id,
                WorkerError(
                    "the R-worker is lost that had its prompt on offer", code=HANDED_OVER_LOST
                ),
            )

    def forget(self) -> None:
        """Nothing is heard any more of what was to come to a lost holder."""
        self._pulling = {i: life for i, life in self._pulling.items() if i in life.importing}

    def interrupt(self, holder: HolderId) -> None:
        """A holder is lost that has a replica, which knows of no offer, and
        nothing of what was coming."""
        for life in list(self._table.by_sequence.values()):
            residence = life.sequence.residence
            if residence is None or not residence.is_on(holder):
                continue
            if life.state is SequenceState.EXPORTED:
                self._grants.lose(life, holder)
                self.lose(life)
            elif life.importing:
                self._grants.lose(life, holder)
                self._endings.recompute(life)
        self.forget()


def _is_exported(life: SequenceRecord) -> bool:
    return life.state is SequenceState.EXPORTED and not life.sequence.is_coming
