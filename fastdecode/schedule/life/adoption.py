"""Holders that are lost, and gone on with from a replica.

Between the loss and the answer of whoever keeps the replica, no step begins:
those in flight end without the lost holder's rows, and then the neighbour is
asked what it has of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.holders import HolderId
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Extend, Instruction, TakeOver
from fastdecode.schedule.life.grants import Grants
from fastdecode.schedule.life.lives import Fate, Life, Lives, Status


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


class Adoptions:
    """Those under way.

    Args:
        scheduler: books the tokens that have to be run again.
        lives: all sequences that aren't over.
        grants: what is open of them.
        endings: what becomes of those that no replica has.
        out: what is to be done.
    """

    def __init__(
        self,
        scheduler: ContinuousScheduler,
        lives: Lives,
        grants: Grants,
        endings: Endings,
        out: list[Instruction],
    ) -> None:
        self._scheduler = scheduler
        self._lives = lives
        self._grants = grants
        self._endings = endings
        self._out = out
        self._waiting: dict[HolderId, None] = {}
        self._asked: dict[HolderId, list[Life]] = {}
        self.counts = AdoptionCounts()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._asked)

    def begin(self, holder: HolderId) -> None:
        """A holder is lost, and its replica is to be taken over: nothing new is
        placed there, and its sequences wait for what the replica has."""
        self._scheduler.ledger.close(holder)
        self._waiting[holder] = None
        for life in self._on(holder):
            if not self._grants.forget_asked(life):
                self._grants.lose(life, holder)
                self._endings.recompute(life)
            elif life.fate is None:
                self._lives.tell(life, f"holder {holder} is lost, and has a replica")
                self._lives.doom(life, Fate.RESUME)
            else:
                self._endings.settle(life)

    def give_up(self, holder: HolderId) -> None:
        """Its replica is lost, too."""
        self._waiting.pop(holder, None)
        self._asked.pop(holder, None)

    def ask(self) -> None:
        """No step is in flight: whoever keeps the replicas is asked."""
        for holder in self._waiting:
            kept = self._asked[holder] = self._on(holder)
            parts = tuple(part for life in kept for part in life.opened.values())
            for life in kept:
                for part in life.opened.values():
                    self._grants.ask(life, part)
            counts = tuple(life.sequence.num_cached for life in kept)
            self._out.append(TakeOver(holder, parts, counts))
        self._waiting.clear()

    def end(self, holder: HolderId, num_tokens: Sequence[int | None]) -> None:
        """Whoever keeps the replica has answered: what it has of each sequence,
        in the order in which they were named."""
        self.counts.num_holders += 1
        for life, found in zip(self._asked.pop(holder), num_tokens, strict=True):
            for part_id in list(life.unanswered):
                self._grants.opened(part_id)
            if found is None:
                self._grants.lose(life, holder)
                self._endings.recompute(life)
            elif life.fate is Fate.RESUME:
                self._resume(life, found)
            else:
                self._endings.settle(life)

    def _resume(self, life: Life, num_tokens: int) -> None:
        """A sequence goes on with so many tokens. Its room is asked for anew: the
        replica needn't know of all that the lost holder had granted."""
        sequence = life.sequence
        self._lives.absolve(life)
        self._count(sequence.num_cached, num_tokens)
        self._lives.tell(life, f"goes on with {num_tokens} of {sequence.num_cached} tokens")
        self._lives.place(life, Status.RUNNING, num_tokens)
        self._scheduler.rewind(sequence)
        assert sequence.residence is not None
        for part in sequence.residence.parts:
            self._grants.ask(life, part)
            self._out.append(Extend(part))

    def _count(self, num_before: int, num_tokens: int) -> None:
        self.counts.num_sequences += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_tokens_lost += num_before - num_tokens

    def _on(self, holder: HolderId) -> list[Life]:
        """The sequences of which the holder has a part, or had one."""
        return [life for life in self._lives.by_sequence.values() if _is_on(life, holder)]


def _is_on(life: Life, holder: HolderId) -> bool:
    residence = life.sequence.residence
    return residence is not None and residence.is_on(holder)
