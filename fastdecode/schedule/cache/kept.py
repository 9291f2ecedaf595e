"""A kept block, and since when it is idle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Use:
    """A sequence that has ended, and what is idle since then."""

    number: int
    """Uses of a holder's blocks are numbered as they end."""
    ended_s: float
    num_idle: int = 0
    """Blocks that nobody has used since."""


@dataclass(eq=False, slots=True)
class KeptBlock:
    """One of a holder's.

    Behind a block are those that begin with all of its tokens. A block without
    an idle one behind it is an **end**: those alone are given up.
    """

    key: bytes
    parent: KeptBlock | None
    """The block before it; it may have been given up meanwhile."""
    num_tokens: int
    """Up to its end, of whatever sequence has it."""
    num_users: int = 0
    """Running sequences that use it."""
    was_hit: bool = False
    is_condemned: bool = False
    """Nobody may start with it any more; it is given up when it gets idle."""
    num_turns: int = 0
    """Conversations whose last turn ended here."""
    num_leases: int = 0
    """The same of this block and all behind it: conversations that share it."""
    idle_since: Use | None = None
    """None: it isn't idle."""
    num_idle_behind: int = 0
    """Idle blocks whose parent it is."""
    row: int = -1
    """Among ends; -1: it is none."""
