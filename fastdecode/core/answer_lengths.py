"""How long answers get: learnt from complete answers, and from how far the running
ones are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from operator import neg
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from fastdecode.core.sequence import RequestOutput

WIDTH: Final = 1.05
"""Of a bucket of lengths: its end by its start. The first ones hold one length each."""
LONGEST: Final = 4 << 20
MOST_LIMITS: Final = 256
"""More different limits than these are counted by bucket."""
NUM_IN_TAIL: Final = 10
"""Answers that ended last: beyond the start of these the rate of ends is taken as constant."""

AnswerCounts: TypeAlias = Mapping[tuple[int, int], int]
"""Answers by their tokens so far and the most that they may get; 0: no limit is known."""


def _edges() -> tuple[int, ...]:
    edges = [0]
    while edges[-1] < LONGEST:
        edges.append(max(edges[-1] + 1, round(edges[-1] * WIDTH)))
    return tuple(edges)


EDGES: Final = _edges()
"""Bucket ``i`` holds lengths above ``EDGES[i - 1]``, up to ``EDGES[i]``."""


def bucket_of(length: int) -> int:
    return min(bisect_left(EDGES, length), len(EDGES) - 1)


class EndedAnswers:
    """Counts of answers that are complete, by length. Memory stays flat."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ended = [0] * len(EDGES)
        """That ended by themselves."""
        self.cut = [0] * len(EDGES)
        """That had the most tokens that they may have."""

    def add(self, length: int, *, is_cut: bool) -> None:
        self.num_tokens += length
        (self.cut if is_cut else self.ended)[bucket_of(length)] += 1

    def add_output(self, output: RequestOutput) -> None:
        for one in output.completions:
            self.add(len(one.token_ids), is_cut=one.finish_reason == "length")


def few_limits(limits: Mapping[int, int]) -> Mapping[int, int]:
    """Answers by their limit, of ``MOST_LIMITS`` limits at most."""
    if len(limits) <= MOST_LIMITS:
        return limits
    few: Counter[int] = Counter()
    for most, num in limits.items():
        few[EDGES[bucket_of(most)]] += num
    return few


def spread_evenly(num: int, num_tokens: int, limits: Collection[int]) -> AnswerCounts:
    """Running answers of which only the sum of tokens is known, and all limits: their
    lengths from none to twice the mean, with the highest limit."""
    most = 0 if 0 in limits else max(limits, default=0)
    mean = max(0, num_tokens) / num if num else 0.0
    return Counter((round(2 * mean * (place + 0.5) / num), most) for place in range(num))


class LengthTable:
    """The share of answers that get longer than a length, if nothing cuts them: a
    life table. An answer that runs, or was cut, counts up to the length it has.

    Beyond the last ``NUM_IN_TAIL`` ends the table goes on exponentially.
    """

    def __init__(self, ended: Sequence[int], cut: Sequence[int]) -> None:
        both = [a + b for a, b in zip(ended, cut, strict=True)]
        at_risk = [*accumulate(reversed(both))][::-1]
        self._start, self._rate = _tail(ended, cut, at_risk)
        share, shares = 1.0, [1.0]
        for place in range(1, self._start + 1):
            exposed = at_risk[place] - cut[place] / 2
            share *= 1.0 - (ended[place] / exposed if exposed > 0 else 0.0)
            shares.append(share)
        self._shares = shares
        self._areas = [0.0]
        for place in range(1, self._start + 1):
            step = EDGES[place] - EDGES[place - 1]
            self._areas.append(self._areas[-1] + step * (shares[place - 1] + shares[place]) / 2)

    @classmethod
    def of(cls, done: EndedAnswers, running: AnswerCounts) -> LengthTable:
        """From answers that are complete, and from running ones."""
        cut = [*done.cut]
        for (length, _), num in running.items():
            cut[bucket_of(length)] += num
        return cls([*done.ended], cut)  # a copy: other threads count on

    def share(self, length: float) -> float:
        """Of answers that get more tokens than this."""
        if length >= EDGES[self._start]:
            beyond = length - EDGES[self._start]
            return self._shares[-1] * math.exp(-self._rate * beyond)
        place, part = _place(length)
        before, after = self._shares[place - 1], self._shares[place]
        return before + part * (after - before)

    def area(self, length: float) -> float:
        """Tokens that an answer gets on average, if it is cut at ``length``."""
        if length >= EDGES[self._start]:
            beyond, rate = length - EDGES[self._start], self._rate
            more = beyond if not rate else -math.expm1(-rate * beyond) / rate
            return self._areas[-1] + self._shares[-1] * more
        place, part = _place(length)
        step = EDGES[place] - EDGES[place - 1]
        before, after = self._shares[place - 1], self._shares[place]
        return self._areas[place - 1] + part * step * (before + part * (after - before) / 2)

    def length(self, share: float) -> float:
        """What this share of answers gets beyond."""
        if share <= self._shares[-1]:
            if share <= 0.0 or not self._rate:
                return math.inf
            return EDGES[self._start] + math.log(self._shares[-1] / share) / self._rate
        place = bisect_left(self._shares, -share, key=neg)
        before, after = self._shares[place - 1], self._shares[place]
        part = (before - share) / (before - after)
        return EDGES[place - 1] + part * (EDGES[place] - EDGES[place - 1])

    def left(self, length: int, most: float) -> float:
        """Tokens that an answer of ``length`` still gets on average, if it is cut at ``most``."""
        share = self.share(length)
        if most <= length:
            return 0.0
        return (self.area(most) - self.area(length)) / share if share > 1e-12 else 1.0


def _place(length: float) -> tuple[int, float]:
    """The bucket of a length below the last edge, and how far in it the length is."""
    place = max(1, bisect_left(EDGES, length))
    return place, (length - EDGES[place - 1]) / (EDGES[place] - EDGES[place - 1])


def _tail(ended: Sequence[int], cut: Sequence[int], at_risk: Sequence[int]) -> tuple[int, float]:
    """The edge from which on answers end at a constant rate, and that rate a token."""
    start, num = len(EDGES) - 1, 0
    while start > 0 and num < NUM_IN_TAIL:
        num += ended[start]
        start -= 1
    exposed = 0.0
    for place in range(start + 1, len(EDGES)):
        if not at_risk[place]:
            break
        step = EDGES[place] - EDGES[place - 1]
        middle = (step + 1) / 2
        through = at_risk[place] - ended[place] - cut[place]
        exposed += through * step + (ended[place] + cut[place]) * middle
    guess = 0.5 if num < NUM_IN_TAIL else 0.0  # before any has ended
    return start, (num + guess) / exposed if exposed else 0.0
