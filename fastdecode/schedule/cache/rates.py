"""Kept blocks on their way between tiers: what is copied down ahead of time, and
whether fetching pays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.holders import HolderId

MOST_STORED: Final = 32
"""Blocks of one job; it is the only one of a holder that copies down."""
_SHARE_STORED: Final = 4
"""Of a holder's blocks, at most one in so many is being copied down."""
_WEIGHT: Final = 0.2
"""Of a new measurement."""
_TRY_AGAIN: Final = 64
"""After so many times that fetching didn't pay it is measured anew."""


@dataclass
class TierCounts:
    """Blocks, since the start."""

    num_slots: int = 0
    """Blocks that lower tiers can have; 0: there are none."""
    num_stored: int = 0
    num_fetched: int = 0
    num_dropped: int = 0
    """Given up by lower tiers that were full."""
    num_joined: int = 0
    """Sequences that began to step before all of their blocks had come."""
    num_failed: int = 0
    """That couldn't be stored, or fetched."""
    num_unread: int = 0
    """Of those, what the disk didn't give."""
    num_damaged: int = 0
    """What wasn't as it had been written."""
    num_unwritten: int = 0
    """What the disk didn't take."""
    num_late: int = 0
    """What a step couldn't wait for any longer."""
    num_found: int = 0
    """That lower tiers had from before."""
    stored_bytes: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0

    def count_faults(
        self, num_unread: int, num_damaged: int, num_unwritten: int, num_late: int
    ) -> None:
        """Of some holder's lower tier."""
        self.num_unread += num_unread
        self.num_damaged += num_damaged
        self.num_unwritten += num_unwritten
        self.num_late += num_late


@dataclass
class Rates:
    """What fetching a block takes, and what computing its tokens does, lately."""

    block_size: int
    fetch_s: dict[HolderId, float] = field(default_factory=dict)
    """Of a block."""
    token_s: float | None = None
    """Of a prompt's token, where many run."""
    beside_s: float | None = None
    """Of a step without prompts, while something is fetched."""
    _decode_s: float = 0.0  # of a step without prompts
    _steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Prompts' tokens and seconds of steps that had some, by these tokens' power of
    two: few of them take as long as weights and long contexts take to be read."""
    _num_refused: int = 0

    def fetched(self, holder: HolderId, num_blocks: int, seconds: float) -> None:
        """So many have come, in that time."""
        if num_blocks:
            each_s = seconds / num_blocks
            self.fetch_s[holder] = _mixed(self.fetch_s.get(holder), each_s)

    def stepped(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step has taken so long, in which so many tokens of prompts ran
        beside whoever decoded."""
        if not num_prompt_tokens:
            self._decode_s = _mixed(self._decode_s or None, seconds)
            return
        self._note(num_prompt_tokens, seconds)
        if num_prompt_tokens >= self.block_size:
            own_s = max(0.0, seconds - self._decode_s)
            self.token_s = _mixed(self.token_s, own_s / num_prompt_tokens)

    def stepped_beside(self, num_prompt_tokens: int, own_s: float) -> None:
        """The same of a step that ran while blocks were fetched.

        Args:
            own_s: without the time in which nobody computed: it may have waited
                for those blocks, and the next one would be thought to take as
                long, and its sequences would join too early.
        """
        if num_prompt_tokens:
            self._note(num_prompt_tokens, own_s)
        else:
            self.beside_s = _mixed(self.beside_s, own_s)

    def _note(self, num_prompt_tokens: int, seconds: float) -> None:
        size = num_prompt_tokens.bit_length()
        tokens, took_s = self._steps.get(size, (None, None))
        self._steps[size] = _mixed(tokens, num_prompt_tokens), _mixed(took_s, seconds)

    def step_s(self, num_prompt_tokens: int) -> float | None:
        """What a step takes in which so many tokens run beside whoever
        decodes, by such as had about as many, or else by what each of many
        takes; None: that isn't known."""
        token_s = self.token_s or 0.0
        if (known := self._steps.get(num_prompt_tokens.bit_length())) is not None:
            tokens, seconds = known
            return max(0.0, seconds + token_s * (num_prompt_tokens - tokens))
        return None if self.token_s is None else self._decode_s + token_s * num_prompt_tokens

    def under_way_s(self, num_prompt_tokens: int) -> float:
        """What a step takes that runs while blocks are fetched; 0 if nothing is known."""
        if num_prompt_tokens:
            return self.step_s(num_prompt_tokens) or 0.0
        return self._decode_s if self.beside_s is None else self.beside_s

    def pays(self, holder: HolderId) -> bool:
        """Whether a block is sooner fetched than computed; while that isn't
        known, it is."""
        fetch_s = self.fetch_s.get(holder)
        if fetch_s is None or self.token_s is None or fetch_s <= self.token_s * self.block_size:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)


def most_stored(num_blocks: int) -> int:
    """Blocks that a holder of so many copies down at a time."""
    return min(MOST_STORED, max(1, num_blocks // _SHARE_STORED))
