"""How long a job still takes, by the tokens that are left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

SAMPLE_EVERY_S: Final = 2.0
FORGET: Final = 0.97
"""What a sample counts when the next one comes: half of it after 46 s."""
PROMPT_COST: Final = 0.25
"""A prompt token's cost in generated tokens, while nothing tells them apart."""
PRIOR: Final = 0.01
"""How much that counts against what was measured."""


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
    done_tokens: int = 0
    """Of the output tokens, those of lines that are done; 0: not known."""
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


def remaining_s(counts: JobCounts, times: TokenTimes) -> float | None:
    """Seconds until all lines are done; None: too little is known.

    How long lines are is estimated from both sides. The mean of the lines that
    are done is too low at first, since short ones end first. All tokens divided by
    lines that are done is right if lines end at any length alike, and too high
    if they all have about the same; no line has more than it may. The mean of
    the two is taken.
    """
    if counts.lines_left <= counts.lines_done:
        return 0.0
    tokens_each = _tokens_each(counts)
    of_prompt, of_output = times.of()
    if tokens_each is None or not of_output:
        return None
    started = min(counts.lines_done + counts.lines_running, counts.lines_left)
    prompts_left = 0.0
    if started:
        prompts_left = counts.prompt_tokens / started * (counts.lines_left - started)
    outputs_left = max(0.0, tokens_each * counts.lines_left - counts.output_tokens)
    return prompts_left * of_prompt + outputs_left * of_output


def _tokens_each(counts: JobCounts) -> float | None:
    most = counts.most_output_tokens / counts.lines_left if counts.most_output_tokens else None
    if not counts.lines_done:
        return most
    high = counts.output_tokens / counts.lines_done
    high = high if most is None else min(high, most)
    low = counts.done_tokens / counts.lines_done if counts.done_tokens else high
    return (low + high) / 2
