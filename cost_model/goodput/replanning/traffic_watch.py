"""What came in a window, how sure one can be of it, and whether it is another traffic than
before: when the roles of instances are judged again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.arrivals import MAX_CV
from cost_model.goodput.replanning.roles import JudgedRoles, Roles
from cost_model.goodput.slo import RequestTimes, Slo

MOST_REQUESTS = 10_000
"""Of a window: more don't say more."""
_LOOKS = 10
"""In a window."""
SURE = 3.0
"""Standard errors beyond which a difference isn't chance."""
_BATCHES = 10
_MEASURES = ("rate", "cv", "prompts", "outputs")


@dataclass(frozen=True)
class FinishedRequest:
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
    """Prompt and output tokens of requests that have ended."""
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
        over: requests that ended in it, in that order; one at least.
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


@dataclass(frozen=True)
class WatchRules:
    period_s: float = 3600.0
    """At the latest after so long, roles are looked at."""
    window_s: float = 300.0
    min_requests: int = 100
    """Of a window, which is as long as it takes then."""
    shift: float = 0.25
    """Part by which rate, cv or lengths are otherwise than planned."""
    short: float = 0.05
    """Part of the requests by which attainment falls short."""
    gain: float = 0.10
    """Part by which other roles must carry more."""
    cool_down_s: float = 600.0
    """Nothing is looked at after that was done."""


@dataclass(frozen=True)
class Due:
    reason: str
    traffic: Traffic


class TrafficWatch:
    """Is told what comes and what is over, and says when that is another traffic
    than the roles were chosen for.

    Args:
        slo: what requests are to keep.
        now_s: its clock's time; all others are of the same clock.
    """

    def __init__(self, slo: Slo, rules: WatchRules, now_s: float) -> None:
        self.slo = slo
        self.rules = rules
        self._arrived: deque[float] = deque(maxlen=MOST_REQUESTS)
        self._over: deque[tuple[float, FinishedRequest]] = deque(maxlen=MOST_REQUESTS)
        self._planned: Traffic | None = None
        """What the present roles were judged for."""
        self._since_s = now_s
        """Of what came before nothing is counted."""
        self._looks_s = now_s
        self._judged_s = now_s
        self._is_asked = False
        self.better: Roles | None = None
        """That the last window wants, and the next one is to want, too."""

    def arrived(self, now_s: float) -> None:
        self._arrived.append(now_s)

    def over(self, now_s: float, seen: FinishedRequest) -> None:
        self._over.append((now_s, seen))

    def due(self, now_s: float) -> Due | None:
        """Whether the roles are to be looked at, which ``decided`` or ``put_off`` ends."""
        if self._is_asked or now_s < self._looks_s:
            return None
        self._looks_s = now_s + self.rules.window_s / _LOOKS
        self._forget(now_s)
        enough = min(len(self._arrived), len(self._over)) >= self.rules.min_requests
        if not enough or now_s - self._since_s < self.rules.window_s:
            return None
        found = traffic(self._arrived, [seen for _, seen in self._over], self.slo, now_s)
        reason = self._reason(now_s, found)
        self._is_asked = reason is not None
        return None if reason is None else Due(reason, found)

    def decided(self, now_s: float, due: Due, judged: JudgedRoles | None) -> bool:
        """What came of looking at them; None: nothing could be said. Returns whether the roles
        should change now: two windows, one after the other, want the same."""
        self._is_asked = False
        self._judged_s = now_s
        self._looks_s = now_s + self.rules.cool_down_s
        if judged is None:
            return False
        self._planned = due.traffic
        better, self.better = self.better, None
        if judged.best == judged.present or judged.gain < self.rules.gain:
            return False
        # A window may be odd: the next one, which has nothing of it, is to say the same.
        is_sure = better == judged.best
        self._begin_anew(now_s)
        if not is_sure:
            self.better = judged.best
            self._looks_s = now_s
        return is_sure

    def put_off(self) -> None:
        """Nothing was looked at: it is due again soon, if it still is then."""
        self._is_asked = False

    def _begin_anew(self, now_s: float) -> None:
        """Nothing that was seen before counts any more."""
        self._since_s = now_s
        self._arrived.clear()
        self._over.clear()

    def _reason(self, now_s: float, found: Traffic) -> str | None:
        if self._planned is None:
            return "the first window is full"
        if self.better is not None:
            return f"a second window, after one that wants {self.better}"
        rules = self.rules
        shifted = found.shift_from(self._planned, rules.shift)
        shifted = shifted or found.shortfall(self.slo, rules.short)
        if shifted is None and now_s - self._judged_s >= rules.period_s:
            return f"{rules.period_s:g} s are over"
        return shifted

    def _forget(self, now_s: float) -> None:
        begins_s, least = now_s - self.rules.window_s, self.rules.min_requests
        while len(self._arrived) > least and self._arrived[0] < begins_s:
            self._arrived.popleft()
        while len(self._over) > least and self._over[0][0] < begins_s:
            self._over.popleft()
