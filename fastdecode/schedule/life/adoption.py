"""Lost holders that a replica takes over, and holders that return to a replacement.

Between the loss and the replica's answer no step begins: those in flight end without the lost
holder's rows, and then the neighbour is asked what it has of each sequence. The same holds for a
holder that leaves, except that what is in flight counts.

A sequence with parts on several holders continues with the tokens that all parts have together.
Holders that have more of it forget the rest before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.holders import HolderId, Part, PartId, SequenceId
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Ask, TakenOver, TakeOver
from fastdecode.schedule.life.sequences import PendingAction, SequenceRecord, SequenceState
from fastdecode.wire.blocks import Extend, Truncate

_UNDER_WAY: Final = HolderState.LEAVING, HolderState.INTERRUPTED, HolderState.ASKED


@dataclass
class AdoptionCounts:
    num_holders: int = 0
    num_sequences: int = 0
    """Sequences that continued from a replica."""
    num_tokens: int = 0
    """Cached tokens that were kept."""
    num_tokens_lost: int = 0
    """Cached tokens that have to be run again."""


@dataclass
class _Resuming:
    life: SequenceRecord
    found: dict[PartId, int] = field(default_factory=dict)
    """Tokens of its parts on the holder, as far as that was answered."""
    num_tokens: int | None = None
    """Tokens with which it continues, once all was answered."""


class Adoptions:
    """Adoptions under way."""

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
        """Let the sequences of a lost holder wait for what its replica has."""
        self._holders.move(holder, HolderState.INTERRUPTED)
        self._cache.stock.interrupt(holder)
        self.give_up(holder)
        table = self._table.by_sequence  # some may have ended meanwhile
        self._resuming = {i: one for i, one in self._resuming.items() if i in table}
        for life in self._on(holder):
            if not self._grants.forget_asked(life, holder) or self._cache.has_gap(life.sequence):
                self._start_again(life, holder)
            elif life.pending in (None, PendingAction.RECOVER):
                self._wait(life)
            else:
                self._endings.settle(life)

    def _wait(self, life: SequenceRecord) -> None:
        sequence_id = life.sequence.sequence_id
        if life.pending is None:
            self._resuming[sequence_id] = _Resuming(life)
        self._table.set_pending(life, PendingAction.RECOVER)
        self._table.move(life, SequenceState.RECOVERING)
        self._resuming[sequence_id].num_tokens = None

    @property
    def about_to_leave(self) -> list[HolderId]:
        """Holders that leave, and owe no answer."""
        leaving = self._holders.having(HolderState.LEAVING)
        return [holder for holder in leaving if not self._grants.is_awaited(holder)]

    def give_up(self, holder: HolderId) -> None:
        """Forget the request to a replica that is lost, too."""
        self._asked.pop(holder, None)

    def ask(self) -> None:
        """Ask the replicas what they have, while no step is in flight."""
        for holder in self.about_to_leave:
            self.begin(holder)
        for holder in self._holders.having(HolderState.INTERRUPTED):
            self._holders.move(holder, HolderState.ASKED)
            kept = self._asked[holder] = [
                (life, part)
                for life in self._on(holder)
                for part in life.opened.values()
                if part.holder == holder
            ]
            for life, part in kept:
                self._grants.ask(life, part)
            counts = tuple(_share(part, life.sequence.num_cached) for life, part in kept)
            keys = self._cache.stock.named(holder)
            self._out.append(TakeOver(holder, tuple(part for _, part in kept), counts, keys))

    def end(self, event: TakenOver) -> None:
        """Take in what a replica has of each part, in the order in which they were named."""
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
        self._cache.lose_parts(life.sequence, holder)
        self._grants.lose(life, holder)
        self._endings.recompute(life)

    def proceed(self, life: SequenceRecord) -> None:
        """Continue a sequence once all that was asked for it has been answered."""
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
        assert life.sequence.residence is not None
        awaited = HolderState.INTERRUPTED, HolderState.ASKED
        return any(self._holders[holder] in awaited for holder in life.sequence.residence.holders)

    def _cut(self, resuming: _Resuming) -> int:
        """Let all holders forget what not all parts have. Return how many tokens these have."""
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
        """Continue a sequence. A replica may not know of all room that the lost holder had granted,
        so it is asked again."""
        sequence, num_tokens = life.sequence, resuming.num_tokens
        assert num_tokens is not None and sequence.residence is not None
        self._table.clear_pending(life)
        self.counts.num_sequences += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_tokens_lost += sequence.num_cached - num_tokens
        self._table.move(life, SequenceState.RUNNING)
        self._table.cache(life, num_tokens)
        self._cache.rewind(sequence)
        self._scheduler.rewind(sequence)
        for part in sequence.residence.parts:
            if part.part_id in resuming.found:
                self._grants.ask(life, part)
                self._out.append(Ask(part, Extend(part.part_id, part.num_tokens)))

    def _on(self, holder: HolderId) -> list[SequenceRecord]:
        """Return the sequences of which the holder has a part, or had one."""
        lives = self._table.by_sequence.values()
        return [x for x in lives if x.sequence.residence and x.sequence.residence.is_on(holder)]


def _share(part: Part, num_tokens: int) -> int:
    """Count those of a sequence's first tokens that are in a part."""
    return min(max(0, num_tokens - part.first_token), part.num_tokens)
