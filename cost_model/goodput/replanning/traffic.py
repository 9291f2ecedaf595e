"""What came in a window, how sure one can be of it, and whether it is another
traffic than before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.arrivals import MAX_CV
from cost_model.goodput.slo import RequestTimes, Slo

SURE = 3.0
"""Standard errors beyond which a difference isn't chance."""
_BATCHES = 10
_MEASURES = ("rate", "cv", "prompts", "outputs")


@dataclass(frozen=True)
class FinishedRequest:
    """A request that is over."""

    times: RequestTimes
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Estimate:
    """A mean, and its standard error."""

    value: float
    error: float

    def is_off(self, planned: Estimate, shift: float) -> bool:
        """By more than a part of what was planned, and more than chance does."""
        difference = abs(self.value - planned.value)
        return difference > shift * planned.value and difference > SURE * math.hypot(
            self.error, planned.error
        )


@dataclass(frozen=True)
class Traffic:
    """What came: arrivals as a gamma process, lengths, and what they saw."""

    num_requests: int
    rate: Estimate
    """Requests a second."""
    cv: Estimate
    """Of the gaps."""
    prompts: Estimate
    """Tokens."""
    outputs: Estimate
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens of those that are over."""
    kept: Estimate
    """The part of these that kept the SLO."""

    def shift_from(self, planned: Traffic, shift: float) -> str | None:
        """What is otherwise by more than this part; None: nothing is."""
        for name in _MEASURES:
            now, then = getattr(self, name), getattr(planned, name)
            if now.is_off(then, shift):
                return f"{name} {then.value:.4g} -> {now.value:.4g}"
        return None

    def shortfall(self, slo: Slo, points: float) -> str | None:
        """Fewer keep the SLO than are to, by more than this; None: enough do."""
        short = slo.attainment - self.kept.value
        if short > points and short - points > SURE * self.kept.error:
            return f"{self.kept.value:.1%} keep the SLO, not {slo.attainment:.0%}"
        return None


def traffic(
    arrived_s: Sequence[float], over: Sequence[FinishedRequest], slo: Slo, now_s: float
) -> Traffic:
    """Of a window up to now.

    Args:
        arrived_s: of all that came in it, rising; two at least.
        over: those that came to their end in it, by that; one at least.
    """
    num = len(arrived_s)
    rate = num / max(now_s - arrived_s[0], 1e-9)
    gaps = np.diff(np.asarray(arrived_s))
    mean_s = float(gaps.mean())
    cv = min(MAX_CV, float(gaps.std() / mean_s)) if mean_s > 0 else 1.0
    kept = np.array([slo.is_met_by(each.times) for each in over], float)
    return Traffic(
        num,
        # Of renewals; and of gamma gaps' coefficient by the delta method.
        Estimate(rate, rate * cv / math.sqrt(num)),
        Estimate(cv, cv * math.sqrt((1 + cv * cv) / 2 / num)),
        _mean([each.prompt_tokens for each in over]),
        _mean([each.output_tokens for each in over]),
        tuple((each.prompt_tokens, each.output_tokens) for each in over),
        Estimate(float(kept.mean()), _error_of_batches(kept)),
    )


def _mean(values: Sequence[int]) -> Estimate:
    tokens = np.array(values, float)
    return Estimate(float(tokens.mean()), float(tokens.std()) / math.sqrt(len(tokens)))


def _error_of_batches(values: np.ndarray) -> float:
    """Of the mean of values that follow upon each other, and are alike when they
    do: by the means of batches of them."""
    if len(values) < 2 * _BATCHES:
        return 0.5 / math.sqrt(len(values))
    means = [float(batch.mean()) for batch in np.array_split(values, _BATCHES)]
    return float(np.std(means, ddof=1)) / math.sqrt(_BATCHES)
