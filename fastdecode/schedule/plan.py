"""What a scheduler plans for the next step of a lane: who is suspended,
enlarged and started before it, who runs in it.

A sequence is **waiting**, then **running** in one lane, then over. A plan is
made for each step of a lane; requests therefore join and leave the running
batch at every step (continuous batching).
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.holders import HolderId, Part, Residence
from fastdecode.core.sequence import Sequence


@dataclass(frozen=True)
class Start:
    """A sequence starts: empty, or as a fork that shares a prefix of a running sibling's tokens."""

    sequence: Sequence
    residence: Residence
    """Room that is to be opened for it. Of a fork, the first parts are where the parent's are."""
    parent: Sequence | None = None
    num_shared_tokens: int = 0
    """That it needn't run."""
    kept: tuple[tuple[bytes, ...], ...] = ()
    """It isn't a fork, and starts with kept blocks: of its first parts, the
    keys of each."""


@dataclass(frozen=True)
class Keep:
    """Full blocks of a part that is open are kept when it is closed."""

    part: Part
    first_block: int
    """Of the part."""
    keys: tuple[bytes, ...]

    @property
    def holder(self) -> HolderId:
        return self.part.holder


@dataclass(frozen=True)
class Forget:
    """A holder keeps these blocks no more."""

    holder: HolderId
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Suspend:
    """A running sequence gives its blocks back and waits again, its tokens
    kept, to be recomputed when it starts anew, which may be in the same
    plan."""

    sequence: Sequence


@dataclass(frozen=True)
class Grow:
    """A running sequence outgrows the room that it has: enlarge it."""

    sequence: Sequence
    residence: Residence
    """With its last part enlarged."""


@dataclass(frozen=True)
class Chunk:
    """The next ``num_tokens`` uncached tokens of a running sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True)
class Plan:
    """What comes before a lane's next step, in this order."""

    suspends: tuple[Suspend, ...] = ()
    grows: tuple[Grow, ...] = ()
    starts: tuple[Start, ...] = ()
