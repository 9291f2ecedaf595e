"""Choice of holders for the sequences of each lane."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from fastdecode.core.holders import HolderId, Residence
from fastdecode.core.sequence import Sequence


class HolderChoice(Protocol):
    """Chooses where a sequence that starts may go."""

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> Seq[list[HolderId]]:
        """Return those of the holders with room where a sequence may start in this lane."""

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """Return the holders on which a lane's sequences could be in place of this one."""

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """Note where a sequence starts."""


class OwnHolders:
    """Each lane has its own holder, with the lane's number."""

    def of_lane(self, lane: int, capacity: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that each holder has room for, of this lane's sequences."""
        return tuple(tokens if holder == lane else 0 for holder, tokens in enumerate(capacity))

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> list[list[HolderId]]:
        return [[holder for holder in tier if holder == lane] for tier in tiers]

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        return [holder]

    def started(self, sequence: Sequence, residence: Residence) -> None:
        pass
