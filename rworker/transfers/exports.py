"""Sequences of a cache that others may read, by ticket."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from fastdecode.core.errors import ProtocolError

MAX_OFFERS = 1 << 16
"""Of one cache."""


@dataclass(frozen=True)
class ExportedSequence:
    """What a ticket stands for."""

    sequence: int
    num_tokens: int


class Exports:
    """Of one cache.

    Tickets are looked up by their hashes: how long that takes says nothing of a
    ticket that somebody guesses at.
    """

    def __init__(self) -> None:
        self._offered: dict[bytes, ExportedSequence] = {}
        self._tickets: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._offered)

    def give(self, ticket: str, sequence: int, num_tokens: int) -> None:
        """From now on whoever has the ticket may read so many tokens.

        Raises:
            ProtocolError: the ticket, or the sequence, has been given already;
                or there are too many.
        """
        key = _key(ticket)
        if key in self._offered or sequence in self._tickets:
            raise ProtocolError(f"sequence {sequence}, or its ticket, is on offer already")
        if len(self._offered) >= MAX_OFFERS:
            raise ProtocolError(f"more than {MAX_OFFERS} sequences can't be on offer")
        self._offered[key] = ExportedSequence(sequence, num_tokens)
        self._tickets[sequence] = key

    def find(self, ticket: str) -> ExportedSequence | None:
        """What a ticket stands for; None: nothing, or nothing any more."""
        return self._offered.get(_key(ticket))

    def forget(self, sequence: int) -> None:
        """A sequence isn't on offer any more, if it was."""
        key = self._tickets.pop(sequence, None)
        if key is not None:
            del self._offered[key]

    @property
    def sequences(self) -> frozenset[int]:
        """Those on offer."""
        return frozenset(self._tickets)


def _key(ticket: str) -> bytes:
    return blake2b(ticket.encode(), digest_size=16).digest()
