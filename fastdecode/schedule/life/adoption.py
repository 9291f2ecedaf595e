"""Holders that are lost, and gone on with from a replica; and those that go on
elsewhere, from a copy.

Between the loss and the answer of whoever keeps the replica, no step begins:
those in flight end without the lost holder's rows, and then the neighbour is
asked what it has of each sequence. It is the same with a holder that leaves, but
that what is in flight counts.

A sequence with parts on several holders goes on with the tokens that all parts
have together. Holders that have more, of steps that didn't count as well, forget
it before the sequence goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.holders import HolderId, Part, PartId, SequenceId
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Ask, TakenOver, TakeOver
from fastdecode.schedule.life.sequences import (
    PendingAction,
    SequenceRecord,
    SequenceState,
)
from fastdecode.wire.blocks import Extend, Truncate

_UNDER_WAY: Final = HolderState.LEAVING, HolderState.INTERRUPTED, HolderState.ASKED
"""Meanwhile no step begins."""


@dataclass
class AdoptionCounts:
    """What has come of all of them."""

    num_holders: int = 0
    num_sequences: int = 0
    """That went on from a replica."""
    num_tokens: int = 0
    """Of those that were cached, and still are."""
    num_tokens_lost: int = 0
    """Of those that were cached, and have to be run again."""


@dataclass
class _Resuming:
    """A sequence that is to go on."""

    life: SequenceRecord
    found: dict[PartId, int] = field(default_factory=dict)
    """Tokens of its parts that were asked for, as far as that was answered."""
    num_tokens: int | None = None
    """With which it goes on, once all has been; all holders are told."""


class Adoptions:
    """Those under way."""

    def __init__(self, endings: Endings) -> None:
        self._endings, self._scheduler = endings, endings.scheduler
        self._table, self._grants, self._out = endings.table, endings.grants, endings.out
        self._holders = self._scheduler.ledger.holders
        self._cache = self._scheduler.ledger.cache
        self._asked: dict[HolderId, list[tuple[SequenceRecord, Part]]] = {}
        self._resuming: dict[SequenceId, _Resuming] = {}
        self.counts = AdoptionCounts()

    def __bool__(self) -> bool:
        return any(map(self._holders.having, _UNDER_WAY)) or any(
            resuming.life.pending is PendingAction.RECOVER for resuming in self._resuming.values()
        )

    def begin(self, holder: HolderId) -> None:
        """A holder is lost, and its replica is to be taken over: nothing new is
        placed there, and its sequences wait for what the replica has."""
        self._holders.move(holder, HolderState.INTERRUPTED)
        self._cache.stock.interrupt(holder)
        self.give_up(holder)
        table = self._table.by_sequence  # some may have ended meanwhile
        self._resuming = {i: one for i, one in self._resuming.items() if i in table}
        for life in self._on(holder):
            if not self._grants.forget_asked(life, holder) or self._cache.has_gap(life.sequence):
                self._start_again(life, holder)
            elif life.pending in (None, PendingAction.RECOVER):
                self._wait(life, holder)
            else:
                self._endings.settle(life)

    def _wait(self, life: SequenceRecord, holder: HolderId) -> None:
        self._table.tell(life, f"holder {holder} is lost, or leaves, and has a replica")
        sequence_id = life.sequence.sequence_id
        if life.pending is None:
            self._resuming[sequence_id] = _Resuming(life)
        self._table.set_pending(life, PendingAction.RECOVER)
        self._table.move(life, SequenceState.RECOVERING)
        self._resuming[sequence_id].num_tokens = None

    @property
    def about_to_leave(self) -> list[HolderId]:
        """Holders that leave, and have answered all that they were asked."""
        leaving = self._holders.having(HolderState.LEAVING)
        return [holder for holder in leaving if not self._grants.is_awaited(holder)]

    def give_up(self, holder: HolderId) -> None:
        """Its replica is lost, too."""
        self._asked.pop(holder, None)

    def ask(self) -> None:
        """No step is in flight: whoever keeps the replicas is asked. For a holder
        that leaves, once it has answered what it was asked."""
        for holder in self.about_to_leave:
            self.begin(holder)
        for holder in self._holders.having(HolderState.INTERRUPTED):
            self._holders.move(holder, HolderState.ASKED)
            kept = self._asked[holder] = list(self._open_on(holder))
            for life, part in kept:
                self._grants.ask(life, part)
            counts = tuple(_share(part, life.sequence.num_cached) for life, part in kept)
            keys = self._cache.stock.named(holder)
            self._out.append(TakeOver(holder, tuple(part for _, part in kept), counts, keys))

    def end(self, event: TakenOver) -> None:
        """The holder has answered what it has of each part, in the order in which
        they were named; and which of the blocks that it kept are lost."""
        holder, num_tokens = event.holder, event.num_tokens
        is_open = event.is_home or self._cache.is_awaited(holder)
        self._holders.move(holder, HolderState.OPEN if is_open else HolderState.ADOPTED)
        self.counts.num_holders += 1
        self._cache.lose_blocks(holder, event.lost)
        asked = self._asked.pop(holder)
        lacking: set[SequenceId] = set()
        for (life, part), found in zip(asked, num_tokens, strict=True):
            if part.part_id in life.unanswered:
                self._grants.opened(part.part_id)
            resuming = self._resuming.get(life.sequence.sequence_id)
            if found is None:
                lacking.add(life.sequence.sequence_id)
            elif resuming is not None:
                resuming.found[part.part_id] = found
        for sequence_id, life in {life.sequence.sequence_id: life for life, _ in asked}.items():
            if sequence_id in lacking:  # once, however many of its parts aren't there
                self._start_again(life, holder)
            self.proceed(life)

    def _start_again(self, life: SequenceRecord, holder: HolderId) -> None:
        """A sequence's parts on a holder are lost."""
        self._cache.lose_parts(life.sequence, holder)
        self._grants.lose(life, holder)
        self._endings.recompute(life)

    def proceed(self, life: SequenceRecord) -> None:
        """Something that was asked for a sequence has been answered, or can't
        be any more: it goes on once all has been."""
        sequence = life.sequence
        if life.pending is not PendingAction.RECOVER:
            self._resuming.pop(sequence.sequence_id, None)
            if life.pending is not None:
                self._endings.settle(life)
            return
        if life.unanswered or self._is_awaited(life):
            return
        resuming = self._resuming[sequence.sequence_id]
        if resuming.num_tokens is None:
            resuming.num_tokens = self._cut(resuming)
        if not life.unanswered:
            del self._resuming[sequence.sequence_id]
            self._resume(life, resuming)

    def _is_awaited(self, life: SequenceRecord) -> bool:
        """Whether anybody is still to say what is there of a sequence."""
        assert life.sequence.residence is not None
        awaited = HolderState.INTERRUPTED, HolderState.ASKED
        return any(self._holders[holder] in awaited for holder in life.sequence.residence.holders)

    def _cut(self, resuming: _Resuming) -> int:
        """Have all holders forget what isn't there everywhere. Returns how many
        tokens are."""
        life, found = resuming.life, resuming.found
        sequence, residence = life.sequence, life.sequence.residence
        assert residence is not None
        num_tokens = sequence.num_cached
        for part in residence.parts:
            if found.get(part.part_id, part.num_tokens) < _share(part, num_tokens):
                num_tokens = part.first_token + found[part.part_id]
        for part in residence.parts:
            wanted = _share(part, num_tokens)
            most = found.get(part.part_id, part.num_tokens)
            if wanted < most:
                self._grants.ask(life, part)
                self._out.append(Ask(part, Truncate(part.part_id, wanted)))
        return num_tokens

    def _resume(self, life: SequenceRecord, resuming: _Resuming) -> None:
        """A sequence goes on. Its room is asked for anew where a replica is gone
        on with: it needn't know of all that the lost holder had granted."""
        sequence, num_tokens = life.sequence, resuming.num_tokens
        assert num_tokens is not None and sequence.residence is not None
        self._table.clear_pending(life)
        self._count(sequence.num_cached, num_tokens)
        self._table.tell(life, f"goes on with {num_tokens} of {sequence.num_cached} tokens")
        self._table.move(life, SequenceState.RUNNING)
        self._table.cache(life, num_tokens)
        self._cache.rewind(sequence)
        self._scheduler.rewind(sequence)
        for part in sequence.residence.parts:
            if part.part_id in resuming.found:
                self._grants.ask(life, part)
                self._out.append(Ask(part, Extend(part.part_id, part.num_tokens)))

    def _count(self, num_before: int, num_tokens: int) -> None:
        self.counts.num_sequences += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_tokens_lost += num_before - num_tokens

    def _on(self, holder: HolderId) -> list[SequenceRecord]:
        """The sequences of which the holder has a part, or had one."""
        return [life for life in self._table.by_sequence.values() if _is_on(life, holder)]

    def _open_on(self, holder: HolderId) -> Iterator[tuple[SequenceRecord, Part]]:
        """Parts that the holder has."""
        for life in self._on(holder):
            for part in life.opened.values():
                if part.holder == holder:
                    yield life, part


def _is_on(life: SequenceRecord, holder: HolderId) -> bool:
    residence = life.sequence.residence
    return residence is not None and residence.is_on(holder)


def _share(part: Part, num_tokens: int) -> int:
    """Of a sequence's first tokens, those that are in a part."""
    return min(max(0, num_tokens - part.first_token), part.num_tokens)
