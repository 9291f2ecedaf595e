"""What a scheduler plans for the next step of a lane: which sequences are suspended, enlarged and
started before it, and which run in it.

A sequence is **waiting**, then **running** in one lane, then over. There is a plan for each step of
a lane, so requests join and leave the running batch at every step (continuous batching).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastdecode.core.holders import HolderId, Residence
from fastdecode.core.sequence import NOTHING, Sequence
from fastdecode.wire.blocks import Fetch, Forget, Name, Retain


@dataclass(frozen=True)
class Start:
    """A sequence starts: empty, or as a fork that shares a prefix of a running sibling's tokens."""

    sequence: Sequence
    residence: Residence
    """Its room. A fork's first parts are where the parent's are."""
    parent: Sequence | None = None
    num_shared_tokens: int = 0
    """Tokens of it that are not run again."""
    kept: tuple[tuple[bytes, ...], ...] = ()
    """Keys of the cached blocks that its first parts start with. Empty for a fork."""
    gap: range = NOTHING
    """Missing tokens among those of the cached blocks. Only a whole sequence has a gap."""
    awaits: frozenset[int] = frozenset()
    """Jobs that fetch some of the blocks. No part is opened before they are due."""
    num_first_tokens: int = 1
    """Tokens that its first step runs."""
    is_handed: bool = False
    """It starts with blocks that other engines keep, and not as a fork."""

    @property
    def behind_gap(self) -> range:
        """Tokens of cached blocks behind the gap."""
        num_held = self.num_shared_tokens + len(self.gap)
        return range(self.gap.stop, num_held) if self.gap else NOTHING


@dataclass(frozen=True)
class Send:
    """Send a holder a message about cached blocks, which it does not answer."""

    holder: HolderId
    message: Name | Forget | Retain | Fetch


@dataclass(frozen=True)
class Chunk:
    """The next uncached tokens of a running sequence. A step that fills a gap and continues behind
    it has two chunks of the sequence, in this order."""

    sequence: Sequence
    num_tokens: int
    is_behind_gap: bool = False
    """True for the second of two."""

    @property
    def first(self) -> int:
        """Its first token, before its step is over."""
        sequence = self.sequence
        return sequence.behind_gap.stop if self.is_behind_gap else sequence.num_cached

    @property
    def num_in_prompt(self) -> int:
        """Tokens of it in the prompt, before its step is over."""
        return min(self.num_tokens, max(0, self.sequence.num_prompt_tokens - self.first))


def num_in_prompts(chunks: Iterable[Chunk]) -> int:
    """Count a step's tokens of prompts, before it is over. A sequence that decodes has its whole
    prompt cached."""
    return sum(
        [
            chunk.num_in_prompt
            for chunk in chunks
            if chunk.sequence.num_cached < len(chunk.sequence.request.prompt_token_ids)
        ]
    )


@dataclass(frozen=True)
class LanePlan:
    """What precedes a lane's next step, in this order."""

    suspends: tuple[Sequence, ...] = ()
    """Running sequences that give their blocks back and wait again, to be recomputed."""
    grows: tuple[tuple[Sequence, Residence], ...] = ()
    """Running sequences that outgrow their room, and where they are with a larger last part."""
    starts: tuple[Start, ...] = ()
