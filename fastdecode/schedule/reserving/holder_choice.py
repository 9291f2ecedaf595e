"""Which holders are for which lane, where not all are for all."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from fastdecode.core.holders import HolderId, Residence
from fastdecode.core.sequence import Sequence


class HolderChoice(Protocol):
    """Says where a sequence that starts may go."""

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> Seq[list[HolderId]]:
        """Of the holders that have room for a sequence, those where it may
        start in this lane."""

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """The holders on which a lane's sequences could be in place of this one."""

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """A sequence starts there."""


class OwnHolders:
    """Each lane has a holder of its own, of the lane's number."""

    def of_lane(self, lane: int, capacity: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that each holder has room for, of this lane's sequences."""
        return tuple(tokens if holder == lane else 0 for holder, tokens in enumerate(capacity))

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> list[list[HolderId]]:
        """See ``HolderChoice``."""
        return [[holder for holder in tier if holder == lane] for tier in tiers]

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """See ``HolderChoice``."""
        return [holder]

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """See ``HolderChoice``."""
