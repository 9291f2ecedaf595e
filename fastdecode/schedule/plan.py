"""What a scheduler plans for the next step of a lane: who is suspended,
enlarged and started before it, who runs in it.

A sequence is **waiting**, then **running** in one lane, then over. A plan is
made for each step of a lane; requests therefore join and leave the running
batch at every step (continuous batching).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastdecode.core.holders import HolderId, KVSource, Residence
from fastdecode.core.sequence import NOTHING, Sequence
from fastdecode.wire.blocks import Fetch, Forget, Name, Retain


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
    gap: range = NOTHING
    """Of the tokens that those blocks would hold if there were no gap among
    them, those that aren't there. Only of a whole sequence."""
    awaits: frozenset[int] = frozenset()
    """Jobs that fetch some of them: nothing is opened before these are due."""
    num_first_tokens: int = 1
    """That its first step runs."""
    sources: tuple[KVSource, ...] = ()
    """It isn't a fork, and starts with tokens that are fetched from there."""

    @property
    def behind_gap(self) -> range:
        """Tokens that those blocks hold, and that have the gap before them."""
        num_held = self.num_shared_tokens + len(self.gap)
        return range(self.gap.stop, num_held) if self.gap else NOTHING


@dataclass(frozen=True)
class Send:
    """Send a holder a message about cached blocks, which it does not answer."""

    holder: HolderId
    message: Name | Forget | Retain | Fetch


@dataclass(frozen=True)
class Grow:
    """A running sequence outgrows the room that it has: enlarge it."""

    sequence: Sequence
    residence: Residence
    """With its last part enlarged."""


@dataclass(frozen=True)
class Chunk:
    """Uncached tokens of a running sequence, the next ones. Where a step fills
    a sequence's gap and goes on behind what is kept, it has two chunks of it,
    in this order."""

    sequence: Sequence
    num_tokens: int
    is_behind_gap: bool = False
    """It is the second of two."""

    @property
    def first(self) -> int:
        """Its first token; before its step is over."""
        sequence = self.sequence
        return sequence.behind_gap.stop if self.is_behind_gap else sequence.num_cached

    @property
    def num_in_prompt(self) -> int:
        """Tokens of it that are of the prompt; before its step is over."""
        return min(self.num_tokens, max(0, self.sequence.num_prompt_tokens - self.first))


def num_in_prompts(chunks: Iterable[Chunk]) -> int:
    """Tokens of a step that are of prompts, before the step is over. A sequence that
    decodes has its whole prompt cached."""
    return sum(
        [
            chunk.num_in_prompt
            for chunk in chunks
            if chunk.sequence.num_cached < len(chunk.sequence.request.prompt_token_ids)
        ]
    )


@dataclass(frozen=True)
class LanePlan:
    """What comes before a lane's next step, in this order."""

    suspends: tuple[Sequence, ...] = ()
    """Running sequences that give their blocks back and wait again, to be recomputed."""
    grows: tuple[Grow, ...] = ()
    starts: tuple[Start, ...] = ()
