"""How a cache's lower tier does: what has gone wrong, and what it is still asked."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

MOST_FAILURES: Final = 8
"""Writes that fail in a row: then nothing more is stored."""


@dataclass
class Faults:
    """What has gone wrong."""

    num_unread: int = 0
    """Blocks that couldn't be read."""
    num_damaged: int = 0
    """Blocks whose checksum was wrong."""
    num_unwritten: int = 0
    """Blocks that couldn't be written."""
    num_late: int = 0
    """Blocks that a step couldn't wait for any longer."""

    def since(self, before: Faults) -> Faults:
        """What has come to those that there were before."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Faults(*(now - then for now, then in pairs))


class Health:
    """Of the disk that has a file. Each kind of fault is told of once.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.faults: Final = Faults()
        self.is_broken = False
        """Nothing is asked of it any more."""
        self.is_full = False
        """Nothing is stored any more."""
        self._path = path
        self._num_failures = 0
        self._told_faults = Faults()
        self._told: set[str] = set()

    def take_faults(self) -> Faults:
        """What has gone wrong since that was asked last."""
        now = replace(self.faults)
        new, self._told_faults = now.since(self._told_faults), now
        return new

    def note_stuck(self, seconds: float) -> None:
        """It hasn't answered for so long."""
        self.is_broken = True
        self._warn("stuck", f"doesn't answer for {seconds:g} s, and isn't asked any more")

    def note_late(self, num_blocks: int) -> None:
        """Steps wait for so many blocks no longer."""
        self.faults.num_late += num_blocks
        self._warn("late", "is too slow for steps that wait for it: KV blocks are run again")

    def note_unread(self, error: OSError) -> None:
        """A block."""
        self.faults.num_unread += 1
        self._warn("unread", f"can't be read ({error.strerror}): KV blocks are run again")

    def note_damaged(self) -> None:
        """A block isn't what was written."""
        self.faults.num_damaged += 1
        self._warn("damaged", "holds damaged KV blocks (checksum): they are run again")

    def note_unwritten(self, error: OSError) -> None:
        """A block."""
        self.faults.num_unwritten += 1
        self._num_failures += 1
        self.is_full = self._num_failures >= MOST_FAILURES
        self._warn("unwritten", f"can't be written ({error.strerror})")
        if self.is_full:
            self._warn("full", "isn't written any more: what it has is read")

    def note_written(self) -> None:
        """A block."""
        self._num_failures = 0

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s %s", self._path, what)
