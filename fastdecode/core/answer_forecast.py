"""The tokens that running and waiting answers will still get, by the lengths of others."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from fastdecode.core.answer_lengths import EDGES, AnswerCounts, LengthTable, bucket_of

MOST_IN_TURN: Final = 4
"""Up to so many waiting answers for each running one are given their starts one by one."""
GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less whole numbers, are spread evenly."""
NUM_STARTS: Final = 50
"""Answers that begin at about the same time are taken as one group."""


class FreshAnswers:
    """The lengths of answers that haven't begun: the table's, cut at limits.

    Args:
        table: how long answers get.
        limits: answers by the most tokens that they may get; 0: no limit is known.
    """

    def __init__(self, table: LengthTable, limits: Mapping[int, int]) -> None:
        every = sorted((most or math.inf, num) for most, num in limits.items())
        self._table = table
        self._limits = [most for most, _ in every]
        total = sum(num for _, num in every)
        parts = [num / total for _, num in every]
        self._cut = [0.0, *accumulate(parts)]
        """The part of answers with one of the first limits."""
        areas = [part * table.area(most) for part, most in zip(parts, self._limits, strict=True)]
        self._cut_areas = [0.0, *accumulate(areas)]
        self.mean = self._cut_areas[-1]

    def share(self, length: float) -> float:
        """Of answers that get more tokens than this."""
        num_cut = bisect_right(self._limits, length)
        return self._table.share(length) * (1.0 - self._cut[num_cut])

    def area(self, length: float) -> float:
        """Tokens that an answer gets on average, of its first ``length``."""
        num_cut = bisect_right(self._limits, length)
        return self._cut_areas[num_cut] + (1.0 - self._cut[num_cut]) * self._table.area(length)

    def limit(self, quantile: float) -> float:
        """Of the answer at this place, from 0 to 1, among all in order of their limits."""
        return self._limits[min(bisect_right(self._cut, quantile), len(self._limits)) - 1]

    @property
    def mean_left(self) -> float:
        """Tokens that an answer still gets on average, at a time when answers have
        long been replaced one by one."""
        left, before = 0.0, 1.0
        for start, end in pairwise(EDGES):
            after = max(0.0, 1.0 - self.area(end) / self.mean)
            left += (end - start) * (before + after) / 2
            before = after
            if after < 1e-4:
                break
        return left


@dataclass(frozen=True)
class _Group:
    """Answers that are alike. One that will begin has no tokens, and a start."""

    num: int
    length: int = 0
    most: float = math.inf
    start: float = 0.0
    """In rounds from now on."""


class Forecast:
    """What a job's answers will still get. A round is a token of every answer that runs.

    Args:
        table: how long answers get.
        running: answers by tokens and limits.
        num_waiting: answers that haven't begun.
        limits: of all answers, as ``FreshAnswers`` takes them.
    """

    def __init__(
        self,
        table: LengthTable,
        running: AnswerCounts,
        num_waiting: float,
        limits: Mapping[int, int],
    ) -> None:
        self._table = table
        self._fresh = FreshAnswers(table, limits)
        self._running = [
            _Group(num, length, most or math.inf) for (length, most), num in _merged(running)
        ]
        self._num = sum(group.num for group in self._running)
        self._num_waiting = num_waiting
        left = (each.num * table.left(each.length, each.most) for each in self._running)
        self.tokens = sum(left) + (num_waiting * self._fresh.mean if num_waiting else 0.0)
        """That are left; infinite: nothing bounds them."""

    def rounds(self) -> float:
        """Until the longest answer is done, where some run: as likely more as fewer."""
        if self._num_waiting > MOST_IN_TURN * self._num:
            fresh = self._fresh
            full = self.tokens / self._num - fresh.mean_left
            all_over = fresh.mean * 0.5 ** (1.0 / self._num)
            return max(0.0, full) + _first(lambda t: fresh.area(t) >= all_over)
        every = [*self._running, *self._starting()]
        return _first(lambda t: self._chance_of_end(every, t) >= 0.5)

    def _chance_of_end(self, every: list[_Group], rounds: float) -> float:
        """That all are over by then."""
        chance = 1.0
        for group in every:
            now = group.length + rounds - group.start
            if now < group.length:
                return 0.0
            if group.start:
                longer = self._fresh.share(now)
            elif now >= group.most:
                longer = 0.0
            else:
                longer = self._table.share(now) / max(self._table.share(group.length), 1e-12)
            chance *= max(0.0, 1.0 - longer) ** group.num
        return chance

    def _starting(self) -> list[_Group]:
        """The waiting answers, each of which begins when another one ends. The ends
        of running answers are spread evenly over their likely lengths."""
        each = (group for group in self._running for _ in range(group.num))
        ends = [self._end(group, (place * GOLDEN) % 1.0) for place, group in enumerate(each)]
        heapq.heapify(ends)
        starts: Counter[float] = Counter()
        num = round(self._num_waiting)
        every = max(1, num // NUM_STARTS)
        begun = 0.0
        for place in range(num):
            start = max(ends[0], 1.0)
            begun = start if place % every == 0 else begun
            starts[begun] += 1
            spread = (place * GOLDEN) % 1.0
            length = min(self._table.length(1.0 - spread), self._fresh.limit((spread * 31) % 1.0))
            heapq.heapreplace(ends, start + length)
        return [_Group(num, start=start) for start, num in starts.items()]

    def _end(self, group: _Group, spread: float) -> float:
        """In rounds from now on, of one of a group."""
        share = self._table.share(group.length) * (1.0 - spread)
        return min(self._table.length(share), group.most) - group.length


def _merged(running: AnswerCounts) -> list[tuple[tuple[int, int], int]]:
    """Answers that are about as long, with about the same limit, are taken as alike."""
    merged: dict[tuple[int, int], list[int]] = {}
    for (length, most), num in running.items():
        sums = merged.setdefault((bucket_of(length), bucket_of(most)), [0, 0, 0])
        sums[0] += num
        sums[1] += num * length
        sums[2] += num * most
    return [
        ((round(length / num), round(most / num)), num) for num, length, most in merged.values()
    ]


def _first(is_reached: Callable[[float], bool]) -> float:
    """The least number from which on something holds, about."""
    high = 1.0
    while not is_reached(high) and high < EDGES[-1]:
        high *= 2.0
    low = 0.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high
