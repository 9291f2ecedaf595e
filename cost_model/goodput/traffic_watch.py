"""Traffic of a window with its uncertainty, and when roles of instances must be judged again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.goodput.replanning import JudgedRoles, Roles
from cost_model.goodput.slo import RequestTimes, Slo
from cost_model.goodput.workload import MAX_CV

MAX_REQUESTS = 10_000
_CHECKS = 10
"""Checks in the time of a window."""
SURE = 3.0
"""Standard errors beyond which a difference is not chance."""
_BATCHES = 10


@dataclass(frozen=True)
class FinishedRequest:
    times: RequestTimes
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float

    def is_off(self, planned: Estimate, shift: float) -> bool:
        """True if it differs by more than this part of ``planned``, and by more than chance."""
        difference = abs(self.value - planned.value)
        chance = SURE * math.hypot(self.error, planned.error)
        return difference > shift * planned.value and difference > chance

    @classmethod
    def of(cls, values: Sequence[int]) -> Estimate:
        tokens = np.array(values, float)
        return cls(float(tokens.mean()), float(tokens.std()) / math.sqrt(len(tokens)))


@dataclass(frozen=True)
class Traffic:
    rate: Estimate
    cv: Estimate
    prompts: Estimate
    outputs: Estimate
    lengths: tuple[tuple[int, int], ...]
    kept: Estimate


def traffic(
    arrived_s: Sequence[float], finished: Sequence[FinishedRequest], slo: Slo, now_s: float
) -> Traffic:
    """Return the traffic of a window up to now. It needs two arrivals, rising, and a finished
    request."""
    num = len(arrived_s)
    rate = num / max(now_s - arrived_s[0], 1e-9)
    gaps = np.diff(np.asarray(arrived_s))
    mean_s = float(gaps.mean())
    cv = min(MAX_CV, float(gaps.std() / mean_s)) if mean_s > 0 else 1.0
    kept = np.array([slo.is_met_by(each.times) for each in finished], float)
    # Requests that follow each other are alike: the error is that of means of batches.
    error = 0.5 / math.sqrt(len(kept))
    if len(kept) >= 2 * _BATCHES:
        means = [float(batch.mean()) for batch in np.array_split(kept, _BATCHES)]
        error = float(np.std(means, ddof=1)) / math.sqrt(_BATCHES)
    return Traffic(
        # The error of renewals, and that of gamma gaps' coefficient by the delta method.
        Estimate(rate, rate * cv / math.sqrt(num)),
        Estimate(cv, cv * math.sqrt((1 + cv * cv) / 2 / num)),
        Estimate.of([each.prompt_tokens for each in finished]),
        Estimate.of([each.output_tokens for each in finished]),
        tuple((each.prompt_tokens, each.output_tokens) for each in finished),
        Estimate(float(kept.mean()), error),
    )


@dataclass(frozen=True)
class WatchRules:
    period_s: float = 3600.0
    """Longest time between two judgements."""
    window_s: float = 300.0
    min_requests: int = 100
    """Requests of a window, which is as long as they take."""
    shift: float = 0.25
    """Part by which rate, cv or lengths must differ from the plan."""
    short: float = 0.05
    """Part of the requests by which attainment must fall short."""
    gain: float = 0.10
    """Part by which other roles must carry more."""
    cool_down_s: float = 600.0
    """Time without checks after a judgement."""


@dataclass(frozen=True)
class ReplanTrigger:
    reason: str
    traffic: Traffic


class TrafficWatch:
    """Decides from arrivals and finished requests when roles must be judged again. All times are of
    one clock."""

    def __init__(self, slo: Slo, rules: WatchRules, now_s: float) -> None:
        self.slo = slo
        self.rules = rules
        self._arrived: deque[float] = deque(maxlen=MAX_REQUESTS)
        self._finished: deque[tuple[float, FinishedRequest]] = deque(maxlen=MAX_REQUESTS)
        self._planned: Traffic | None = None
        """Traffic that the present roles were judged for."""
        self._window_at = now_s
        self._check_at = now_s
        self._judged_at = now_s
        self._is_asked = False
        self.better: Roles | None = None
        """Roles that the last window wants. The next window must confirm them."""

    def arrived(self, now_s: float) -> None:
        self._arrived.append(now_s)

    def finished(self, now_s: float, seen: FinishedRequest) -> None:
        self._finished.append((now_s, seen))

    def due(self, now_s: float) -> ReplanTrigger | None:
        """Return why roles must be judged now, until ``decided`` or ``put_off``. None if not."""
        if self._is_asked or now_s < self._check_at:
            return None
        rules = self.rules
        self._check_at = now_s + rules.window_s / _CHECKS
        starts_s, least = now_s - rules.window_s, rules.min_requests
        while len(self._arrived) > least and self._arrived[0] < starts_s:
            self._arrived.popleft()
        while len(self._finished) > least and self._finished[0][0] < starts_s:
            self._finished.popleft()
        is_full = min(len(self._arrived), len(self._finished)) >= least
        if not is_full or now_s - self._window_at < rules.window_s:
            return None
        found = traffic(self._arrived, [seen for _, seen in self._finished], self.slo, now_s)
        reason = self._reason(now_s, found)
        self._is_asked = reason is not None
        return None if reason is None else ReplanTrigger(reason, found)

    def _reason(self, now_s: float, found: Traffic) -> str | None:
        if self._planned is None:
            return "the first window is full"
        if self.better is not None:
            return f"a second window, after one that wants {self.better}"
        rules = self.rules
        for name in ("rate", "cv", "prompts", "outputs"):
            now, then = getattr(found, name), getattr(self._planned, name)
            if now.is_off(then, rules.shift):
                return f"{name} {then.value:.4g} -> {now.value:.4g}"
        short = self.slo.attainment - found.kept.value
        if short > rules.short and short - rules.short > SURE * found.kept.error:
            return f"{found.kept.value:.1%} keep the SLO, not {self.slo.attainment:.0%}"
        is_due = now_s - self._judged_at >= rules.period_s
        return f"{rules.period_s:g} s are over" if is_due else None

    def decided(self, now_s: float, due: ReplanTrigger, judged: JudgedRoles | None) -> bool:
        """Take the judgement. None if there is none.

        Returns:
            True if roles should change now: two windows in a row want the same.
        """
        self._is_asked = False
        self._judged_at = now_s
        self._check_at = now_s + self.rules.cool_down_s
        if judged is None:
            return False
        self._planned = due.traffic
        better, self.better = self.better, None
        if judged.best == judged.present or judged.gain < self.rules.gain:
            return False
        # A window may be odd. The next one, which has nothing of it, must confirm.
        self._window_at = now_s
        self._arrived.clear()
        self._finished.clear()
        if better == judged.best:
            return True
        self.better = judged.best
        self._check_at = now_s
        return False

    def put_off(self) -> None:
        """Check again soon, because nothing was judged."""
        self._is_asked = False
