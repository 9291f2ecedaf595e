"""Holders that are lost, and gone on with from a replica.

Between the loss and the answer of whoever keeps the replica, no step begins:
those in flight end without the lost holder's rows, and then the neighbour is
asked what it has of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastdecode.core.holders import HolderId
from fastdecode.schedule.life.events import TakeOver
from fastdecode.schedule.life.lives import Life


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
    """Those under way."""

    def __init__(self) -> None:
        self._waiting: dict[HolderId, None] = {}
        self._asked: dict[HolderId, list[Life]] = {}
        self.counts = AdoptionCounts()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._asked)

    def begin(self, holder: HolderId) -> None:
        """A holder is lost, and its replica is to be taken over."""
        self._waiting[holder] = None

    def give_up(self, holder: HolderId) -> None:
        """Its replica is lost, too."""
        self._waiting.pop(holder, None)
        self._asked.pop(holder, None)

    def ask(self, lives: Iterable[Life]) -> list[TakeOver]:
        """What is asked for, now that no step is in flight. ``lives``: of all
        that isn't over."""
        every = list(lives)
        orders = []
        for holder in self._waiting:
            kept = self._asked[holder] = [life for life in every if _is_on(life, holder)]
            parts = tuple(part for life in kept for part in life.opened.values())
            counts = tuple(life.sequence.num_cached for life in kept)
            orders.append(TakeOver(holder, parts, counts))
        self._waiting.clear()
        return orders

    def end(self, holder: HolderId) -> list[Life]:
        """Whoever keeps the replica has answered. Of which sequences, in the
        order in which they were named."""
        self.counts.num_holders += 1
        return self._asked.pop(holder)

    def count(self, num_before: int, num_tokens: int) -> None:
        """A sequence goes on with so many of the tokens that it had."""
        self.counts.num_sequences += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_tokens_lost += num_before - num_tokens


def _is_on(life: Life, holder: HolderId) -> bool:
    residence = life.sequence.residence
    return residence is not None and residence.is_on(holder)
