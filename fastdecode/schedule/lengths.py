"""How long will a sequence get? A bound, or a forecast learnt from those that have finished."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Protocol

from fastdecode.core.sequence import Sequence


class LengthPredictor(Protocol):
    """Forecasts how many tokens a sequence will have generated at its end: more
    than now, at most its max_tokens."""

    def expected(self, sequence: Sequence) -> int:
        """On average: by this its load is projected. Over many sequences, errors cancel out."""

    def safe(self, sequence: Sequence) -> int:
        """Rarely exceeded: for this many it reserves KV blocks."""

    def observe(self, sequence: Sequence) -> None:
        """The sequence is over."""


class LearntLengths:
    """Mean and quantile of the lengths seen lately, among those that got longer
    than the sequence at hand is.

    Until enough are known to have got that far, ``first_guess``, or max_tokens
    without one; and always max_tokens for a sequence that nothing else can end.
    Sequences that were cancelled, or cut off by a low max_tokens, count with
    the length they had.

    Args:
        quantile: the part of sequences that are to end within ``safe``; None:
            that is max_tokens.
        window: how many of the last finished sequences count.
        min_observed: fewer give no forecast.
        first_guess: tokens that are expected of a sequence until then; twice,
            four times as many of one that has got longer.
    """

    def __init__(
        self,
        quantile: float | None = None,
        *,
        window: int = 1024,
        min_observed: int = 32,
        first_guess: int | None = None,
    ) -> None:
        assert (quantile is None or 0 < quantile <= 1) and 1 <= min_observed <= window
        self._first_guess = first_guess
        self._quantile = quantile
        self._window = window
        self._min_observed = min_observed
        self._recent: deque[int] = deque()
        self._ascending: list[int] = []

    def expected(self, sequence: Sequence) -> int:
        longer = self._longer(sequence)
        return min(sequence.request.max_tokens, round(sum(longer) / len(longer)))

    def safe(self, sequence: Sequence) -> int:
        if self._quantile is None:
            return sequence.request.max_tokens
        longer = self._longer(sequence)
        return min(sequence.request.max_tokens, longer[math.ceil(self._quantile * len(longer)) - 1])

    def observe(self, sequence: Sequence) -> None:
        self._recent.append(sequence.num_generated)
        insort(self._ascending, sequence.num_generated)
        if len(self._recent) > self._window:
            del self._ascending[bisect_left(self._ascending, self._recent.popleft())]

    def _longer(self, sequence: Sequence) -> list[int]:
        """Lengths above the sequence's own so far, ascending."""
        params = sequence.request.params
        ends_at_max = params.ignore_eos and not params.stop and not params.stop_token_ids
        longer = self._ascending[bisect_right(self._ascending, sequence.num_generated) :]
        if ends_at_max:
            return [sequence.request.max_tokens]
        return longer if len(longer) >= self._min_observed else [self._guess(sequence)]

    def _guess(self, sequence: Sequence) -> int:
        """What is expected of a sequence while nothing is known of any as long."""
        most, guess = sequence.request.max_tokens, self._first_guess
        while guess is not None and guess <= sequence.num_generated:
            guess *= 2
        return most if guess is None else min(guess, most)
