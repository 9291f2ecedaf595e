"""Counts of blocks that move between tiers, and what fetching and computing them take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.holders import HolderId

MOST_STORED: Final = 32
"""Most blocks of a job that copies down. A holder has one such job at a time."""
_SHARE_STORED: Final = 4
"""Most of a holder's blocks in such a job: one in as many."""
_WEIGHT: Final = 0.2
"""Weight of a new measurement."""
_TRY_AGAIN: Final = 64
"""Fetching that does not pay is tried again when it was refused as often."""


@dataclass
class TierCounts:
    """Blocks of all lower tiers since the start."""

    num_slots: int = 0
    """Blocks that lower tiers can have. 0 if there are no tiers."""
    num_stored: int = 0
    num_fetched: int = 0
    num_dropped: int = 0
    """Blocks that full tiers evicted."""
    num_joined: int = 0
    """Sequences that began to step before all of their blocks had come."""
    num_failed: int = 0
    """Blocks that could not be stored, or fetched."""
    num_unread: int = 0
    """Failed blocks that the disk did not give."""
    num_damaged: int = 0
    """Failed blocks that were not as they had been written."""
    num_unwritten: int = 0
    """Failed blocks that the disk did not take."""
    num_late: int = 0
    """Failed blocks that a step could not wait for any longer."""
    num_found: int = 0
    """Blocks that lower tiers had from before."""
    stored_bytes: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0


@dataclass
class Rates:
    """What fetching a block takes lately, and what computing its tokens takes."""

    block_size: int
    fetch_s: dict[HolderId, float] = field(default_factory=dict)
    """Seconds to fetch a block."""
    token_s: float | None = None
    """Seconds to compute a prompt's token in a step with many. None if unknown."""
    beside_s: float | None = None
    """Seconds of a step without prompts while blocks are fetched. None if unknown."""
    _decode_s: float = 0.0  # of a step without prompts
    _steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Prompts' tokens and seconds of steps that had some, by the tokens' power of two. A step with
    few tokens takes as long as reading weights and long contexts takes."""
    _num_refused: int = 0

    def fetched(self, holder: HolderId, num_blocks: int, seconds: float) -> None:
        """Note a fetch of a holder."""
        if num_blocks:
            each_s = seconds / num_blocks
            self.fetch_s[holder] = _mixed(self.fetch_s.get(holder), each_s)

    def stepped(self, num_prompt_tokens: int, seconds: float) -> None:
        """Note a step, in which tokens of prompts ran beside sequences that decode."""
        if not num_prompt_tokens:
            self._decode_s = _mixed(self._decode_s or None, seconds)
            return
        self._note(num_prompt_tokens, seconds)
        if num_prompt_tokens >= self.block_size:
            own_s = max(0.0, seconds - self._decode_s)
            self.token_s = _mixed(self.token_s, own_s / num_prompt_tokens)

    def stepped_beside(self, num_prompt_tokens: int, own_s: float) -> None:
        """Note a step that ran while blocks were fetched.

        Args:
            own_s: its time without waiting. If it waited for blocks, the next step would else be
                expected to take as long, and its sequences would join too early.
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
        """Return what a step takes in which tokens of prompts run: what steps with about as many
        took, or else what each of many takes. None if neither is known."""
        token_s = self.token_s or 0.0
        if (known := self._steps.get(num_prompt_tokens.bit_length())) is not None:
            tokens, seconds = known
            return max(0.0, seconds + token_s * (num_prompt_tokens - tokens))
        return None if self.token_s is None else self._decode_s + token_s * num_prompt_tokens

    def under_way_s(self, num_prompt_tokens: int) -> float:
        """Return what a step takes that runs while blocks are fetched. 0 if unknown."""
        if num_prompt_tokens:
            return self.step_s(num_prompt_tokens) or 0.0
        return self._decode_s if self.beside_s is None else self.beside_s

    def pays(self, holder: HolderId) -> bool:
        """Return True if fetching a block takes less time than computing it, or if that is
        unknown."""
        fetch_s = self.fetch_s.get(holder)
        if fetch_s is None or self.token_s is None or fetch_s <= self.token_s * self.block_size:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)


def most_stored(num_blocks: int) -> int:
    """Return how many blocks a holder of ``num_blocks`` copies down at a time."""
    return min(MOST_STORED, max(1, num_blocks // _SHARE_STORED))
