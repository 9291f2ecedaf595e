"""How long a job still takes, by the tokens and the steps that are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.answer_forecast import Forecast
from fastdecode.core.answer_lengths import AnswerCounts, EndedAnswers, LengthTable

SAMPLE_EVERY_S: Final = 2.0
FORGET: Final = 0.97
"""What a sample counts when the next one comes: half of it after 46 s."""
PROMPT_COST: Final = 0.25
"""A prompt token's cost in generated tokens, until samples tell them apart."""
PRIOR: Final = 0.01
"""How much that counts against what was measured."""
FIXED_SHARE: Final = 0.5
"""The part of a full batch's step that a step with fewer sequences takes too,
until a sample shows it."""
FIXED_DEVIATION: Final = 0.2
"""The standard deviation of that part among jobs."""
LEAST_NOISE: Final = 0.01
"""Of a sample's seconds, at least."""


@dataclass(frozen=True)
class JobCounts:
    """How far a job is since it began, or was resumed."""

    lines_left: int
    """To be done from the beginning on."""
    lines_done: int
    running: AnswerCounts = field(default_factory=dict)
    prompt_tokens: int = 0
    """Run so far."""
    done: EndedAnswers = field(default_factory=EndedAnswers)
    limits: Mapping[int, int] = field(default_factory=dict)
    """Answers of all lines by the most tokens that they may get; 0: no limit is known."""
    num_lines: int = 0
    """All, with the ones that were done before."""

    @property
    def num_running(self) -> int:
        return sum(self.running.values())

    @property
    def answers_of_line(self) -> float:
        return sum(self.limits.values()) / self.num_lines

    @property
    def num_waiting(self) -> float:
        num_left = (self.lines_left - self.lines_done) * self.answers_of_line
        return max(0.0, num_left - self.num_running)


@dataclass(frozen=True)
class TokenCosts:
    """Seconds."""

    prompt_token: float = 0.0
    output_token: float = 0.0
    round: float = 0.0
    """Of a token for each running answer, without the cost of these tokens."""
    width: float = 1.0
    """Answers that ran, on average."""


@dataclass
class TokenTimes:
    """What tokens take, from how counts grow: least squares, the last minute first.

    A round is a token of every running answer. Full batches don't tell the cost of
    a round from that of its tokens; batches that empty do.
    """

    _last: tuple[float, int, int] = (0.0, 0, 0)
    _rounds: float = 0.0
    _counted: int = 0
    """Output tokens whose rounds are counted."""
    _sums: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    """Of products of two of: prompt tokens, output tokens, rounds, seconds."""
    _totals: list[float] = field(default_factory=lambda: [0.0] * 4)
    _num: float = 0.0
    """Samples."""

    def add(
        self, elapsed_s: float, prompt_tokens: int, output_tokens: int, num_running: int
    ) -> None:
        """The counts, in all; call it as often as you like."""
        before_s, before_p, before_o = self._last
        if not (before_p or before_o):  # until the first tokens there are kernels to compile
            self._last = elapsed_s, prompt_tokens, output_tokens
            self._counted = output_tokens
            return
        self._rounds += (output_tokens - self._counted) / max(1, num_running)
        self._counted = output_tokens
        s, p, o = elapsed_s - before_s, prompt_tokens - before_p, output_tokens - before_o
        if s < SAMPLE_EVERY_S:
            return
        self._last = elapsed_s, prompt_tokens, output_tokens
        fresh = p, o, self._rounds, s
        self._rounds = 0.0
        self._num = FORGET * self._num + 1.0
        for i, a in enumerate(fresh):
            self._totals[i] = FORGET * self._totals[i] + a
            for j, b in enumerate(fresh):
                self._sums[i][j] = FORGET * self._sums[i][j] + a * b

    def of(self) -> TokenCosts:
        """Return what tokens cost, or zeros as long as no output tokens were measured."""
        p, o, r, s = self._totals
        if not o:
            return TokenCosts()
        ratio = self._ratio()
        each = s / (ratio * p + o) if ratio * p + o else 0.0
        width = o / r if r else 1.0
        fixed = self._fixed_share(ratio * each, each, width)
        return TokenCosts(ratio * each, (1.0 - fixed) * each, fixed * each * width, width)

    def _ratio(self) -> float:
        """A prompt token's cost in generated tokens."""
        (pp, po, _, ps), (_, oo, _, os), _, _ = self._sums
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

    def _fixed_share(self, of_prompt: float, of_output: float, width: float) -> float:
        """The part of a full batch's round that doesn't depend on how many run: the
        slope of y = seconds in output tokens - output tokens by x = width · rounds -
        output tokens. What is known before counts as one sample would that is as
        noisy as the others."""
        if not of_output:
            return FIXED_SHARE
        a, b = 1.0 / of_output, of_prompt / of_output
        y, x = (-b, -1.0, 0.0, a), (0.0, -1.0, width, 0.0)
        xx, xy, yy = self._product(x, x), self._product(x, y), self._product(y, y)
        noise = yy - 2 * FIXED_SHARE * xy + FIXED_SHARE**2 * xx
        noise = max(noise, LEAST_NOISE**2 * self._sums[1][1], 1e-9)  # only prompts: above 0
        prior = noise / (self._num * FIXED_DEVIATION**2)
        return min(max((xy + prior * FIXED_SHARE) / (xx + prior), 0.0), 1.0)

    def _product(self, first: Sequence[float], second: Sequence[float]) -> float:
        """The sum of the products of two weighted sums."""
        return sum(
            a * b * self._sums[i][j] for i, a in enumerate(first) for j, b in enumerate(second)
        )


def remaining_s(counts: JobCounts, times: TokenTimes) -> float | None:
    """Seconds until all lines are done; None: too little is known.

    The tokens that are left cost their time, and the rounds until the longest
    answer is done: when the batch empties, rounds hold few tokens.
    """
    if counts.lines_left <= counts.lines_done:
        return 0.0
    costs = times.of()
    table = LengthTable.of(counts.done, counts.running)
    forecast = Forecast(table, counts.running, counts.num_waiting, counts.limits)
    if not math.isfinite(forecast.tokens) or not (costs.output_token or costs.round):
        return None
    started = max(1.0, counts.lines_done + counts.num_running / counts.answers_of_line)
    of_line = counts.prompt_tokens / started
    prompts_left = of_line * max(0.0, counts.lines_left - started)
    rounds = forecast.rounds() if counts.num_running else forecast.tokens / costs.width
    return (
        prompts_left * costs.prompt_token
        + forecast.tokens * costs.output_token
        + rounds * costs.round
    )
