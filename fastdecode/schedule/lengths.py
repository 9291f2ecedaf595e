"""Forecasts of sequences' lengths: a bound, or learnt from those that have finished."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Protocol

from fastdecode.core.sequence import Sequence


class LengthPredictor(Protocol):
    """Forecasts how many tokens a sequence will have generated at its end: more than now, at most
    its max_tokens."""

    def expected(self, sequence: Sequence) -> int:
        """Return its mean, by which load is projected. Over many sequences, errors cancel out."""

    def safe(self, sequence: Sequence) -> int:
        """Return a rarely exceeded number, for which KV blocks are reserved."""

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that is over."""


class LearntLengths:
    """Mean and quantile of the latest lengths, among those that are longer than the sequence.

    Until enough of these are known, ``first_guess`` counts, or max_tokens without one. A sequence
    that nothing else can end gets max_tokens. Sequences that were cancelled, or cut off by a low
    max_tokens, count with the length they had.

    Args:
        quantile: share of sequences that are to end within ``safe``. None for max_tokens.
        window: number of the last finished sequences that count.
        min_observed: fewer lengths give no forecast.
        first_guess: tokens of a sequence until then. Doubled for one that is longer already.
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
        """Return the lengths above the sequence's own so far, ascending."""
        params = sequence.request.params
        ends_at_max = params.ignore_eos and not params.stop and not params.stop_token_ids
        longer = self._ascending[bisect_right(self._ascending, sequence.num_generated) :]
        if ends_at_max:
            return [sequence.request.max_tokens]
        if len(longer) >= self._min_observed:
            return longer
        most, guess = sequence.request.max_tokens, self._first_guess
        while guess is not None and guess <= sequence.num_generated:
            guess *= 2
        return [most if guess is None else min(guess, most)]
