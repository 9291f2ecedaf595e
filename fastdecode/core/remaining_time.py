"""How long a job still takes, by the tokens that are left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

SAMPLE_EVERY_S: Final = 2.0
FORGET: Final = 0.97
"""What a sample counts when the next one comes: half of it after 46 s."""
PROMPT_COST: Final = 0.25
"""A prompt token's cost in generated tokens, while nothing tells them apart."""
PRIOR: Final = 0.01
"""How much that counts against what was measured."""
FIXED_SHARE: Final = 0.5
"""The part of a full batch's step that a step with fewer sequences takes too."""
LEAST_SLOPE: Final = -0.5
"""A smaller slope is taken as this, since it rests on few lines."""


@dataclass(frozen=True)
class Lengths:
    """Of answers that are complete."""

    num: int = 0
    tokens: int = 0
    squares: int = 0
    """The sum of the squared lengths."""

    def plus(self, length: int) -> Lengths:
        """With one more, of ``length`` tokens."""
        return Lengths(self.num + 1, self.tokens + length, self.squares + length * length)

    @property
    def squared_variation(self) -> float | None:
        """The variance by the squared mean; None: no tokens."""
        if not self.tokens:
            return None
        return max(0.0, self.num * self.squares / self.tokens**2 - 1.0)


NO_LENGTHS: Final = Lengths()


@dataclass(frozen=True)
class JobCounts:
    """How far a job is since it began, or was resumed."""

    elapsed_s: float
    lines_left: int
    """To be done from the beginning on."""
    lines_done: int
    lines_running: int = 0
    prompt_tokens: int = 0
    """Run so far."""
    output_tokens: int = 0
    done: Lengths = NO_LENGTHS
    """The answers of lines that are done; empty: not known."""
    most_output_tokens: float = 0.0
    """That all lines together can have; 0: not known."""


@dataclass
class TokenTimes:
    """Seconds that a prompt token and a generated one take, from how counts grow:
    least squares, the last minute first."""

    _last: tuple[float, int, int] = (0.0, 0, 0)
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Of p·p, p·o, o·o, p·s and o·s: prompt tokens, output tokens, seconds."""
    _totals: list[float] = field(default_factory=lambda: [0.0] * 3)
    """Of p, o and s."""

    def add(self, elapsed_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """The counts, in all; call it as often as you like."""
        before_s, before_p, before_o = self._last
        s, p, o = elapsed_s - before_s, prompt_tokens - before_p, output_tokens - before_o
        if s < SAMPLE_EVERY_S:
            return
        self._last = elapsed_s, prompt_tokens, output_tokens
        fresh = (p * p, p * o, o * o, p * s, o * s)
        self._sums = [FORGET * old + new for old, new in zip(self._sums, fresh, strict=True)]
        self._totals = [
            FORGET * old + new for old, new in zip(self._totals, (p, o, s), strict=True)
        ]

    def of(self) -> tuple[float, float]:
        """Of a prompt token, and of a generated one; 0 and 0: nothing was run."""
        p, o, s = self._totals
        if not (p or o):
            return 0.0, 0.0
        ratio = self._ratio()
        each = s / (ratio * p + o) if ratio * p + o else 0.0
        return ratio * each, each

    def _ratio(self) -> float:
        """A prompt token's cost in generated tokens."""
        pp, po, oo, ps, os = self._sums
        weight = PRIOR * pp  # of (of_prompt - PROMPT_COST · of_output)²
        pp, po, oo = pp + weight, po - weight * PROMPT_COST, oo + weight * PROMPT_COST**2
        determinant = pp * oo - po * po
        if determinant <= 0:
            return PROMPT_COST
        of_prompt = (ps * oo - os * po) / determinant
        of_output = (os * pp - ps * po) / determinant
        if of_output <= 0:
            return PROMPT_COST if of_prompt <= 0 else 1.0
        return max(of_prompt, 0.0) / of_output


@dataclass(frozen=True)
class _Spread:
    """Lengths of answers: one that has ``x`` tokens still gets ``mean - slope * x``
    on average. The slope is 1 if all are equal, 0.5 for any length up to twice
    the mean, 0 if they end at any token alike, and below 0 with a longer tail
    (generalised Pareto distributions)."""

    mean: float
    slope: float
    most: float = math.inf

    def longest_left(self, num: int, tokens_left: float, *, is_full: bool) -> float:
        """Tokens that the longest of ``num`` answers still gets, expected.

        Args:
            tokens_left: on average.
            is_full: others replaced the answers that ended, so these began at any
                time. Else they are the rest of the answers that began.
        """
        scale = self.mean if is_full else tokens_left
        exponent = self.slope if is_full else self.slope / max(1.0 - self.slope, 1e-3)
        if abs(self.slope) < 1e-3:
            times = math.log(num + 1)
        else:
            times = (1.0 - (num + 1) ** -exponent) / self.slope
        return max(tokens_left, min(scale * times, self.most))


def remaining_s(counts: JobCounts, times: TokenTimes) -> float | None:
    """Seconds until all lines are done; None: too little is known.

    The tokens that are left are counted at what they cost while the batch is full.
    At the end the batch empties and its steps are less full, until the longest
    answer is done: that takes longer than the number of its tokens suggests.
    """
    if counts.lines_left <= counts.lines_done:
        return 0.0
    spread = _spread(counts)
    of_prompt, of_output = times.of()
    if spread is None or not of_output:
        return None
    started = min(counts.lines_done + counts.lines_running, counts.lines_left)
    prompts_left = 0.0
    if started:
        prompts_left = counts.prompt_tokens / started * (counts.lines_left - started)
    outputs_left = max(0.0, spread.mean * counts.lines_left - counts.output_tokens)
    emptying = _emptying_tokens(counts, spread, outputs_left)
    return prompts_left * of_prompt + (outputs_left + FIXED_SHARE * emptying) * of_output


def _emptying_tokens(counts: JobCounts, spread: _Spread, outputs_left: float) -> float:
    """Tokens that a full batch would get in the time in which it empties, less
    the tokens that it does get."""
    num = counts.lines_running
    if not num or not counts.done.tokens:
        return 0.0
    tokens_left, is_full = outputs_left / num, counts.lines_done + num < counts.lines_left
    if is_full:
        tokens_left = min(tokens_left, spread.mean / (1.0 + spread.slope))
    return num * (spread.longest_left(num, tokens_left, is_full=is_full) - tokens_left)


def _spread(counts: JobCounts) -> _Spread | None:
    """From lines that are done, and from what the running ones have.

    The mean of the lines that are done is too low at first, since short ones end
    first: the running ones have tokens that belong to lines that will be done. The
    slope tells how many of these tokens count (all if lines end at any token alike,
    none if all are equal). It follows from the squared variation v of lengths:
    sequences that began at any time have (1 + v) / 2 of the mean.
    """
    most = counts.most_output_tokens / counts.lines_left if counts.most_output_tokens else math.inf
    if not counts.lines_done:
        return None if most == math.inf else _Spread(most, 1.0, most)
    variation = counts.done.squared_variation
    slope = 0.0 if variation is None else (1.0 - variation) / (1.0 + variation)
    slope = max(slope, LEAST_SLOPE)
    of_running = max(0, counts.output_tokens - counts.done.tokens)
    mean = (counts.done.tokens + (1.0 - slope) * of_running) / counts.lines_done
    return _Spread(min(mean, most), slope, most)
