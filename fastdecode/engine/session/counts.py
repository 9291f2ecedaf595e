"""What came of going on with a session, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttachedCounts:
    """What R-workers had kept of a run that was cut off."""

    num_sequences: int = 0
    """Unfinished ones that are known."""
    num_tokens: int = 0
    """Of them, prompts and what was drawn."""
    num_held_sequences: int = 0
    """Of which something was kept."""
    num_held_tokens: int = 0
