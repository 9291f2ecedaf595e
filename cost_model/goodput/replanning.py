"""Roles of running instances that are alike: step times fitted to their steps, the rate that each
choice of roles carries (simulated), and the traffic that makes another choice due.

A process of its own answers ``RoleQuestion`` as JSON, at the lowest priority (``main``).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TextIO, TypeAlias, TypeVar

import msgspec
import numpy as np

from cost_model.fit import non_negative
from cost_model.goodput.instances import DecodeSpec, PrefillSpec
from cost_model.goodput.simulator import (
    PRECISION,
    GoodputRun,
    Load,
    greatest_rate,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import RequestTimes, Slo
from cost_model.goodput.workload import MAX_CV, Draw, drawn_from
from cost_model.numbers import whole
from fastdecode.schedule.simulation.instance_time import InstanceTime
from fastdecode.schedule.times import Prompts, StepTime

T = TypeVar("T")
FinishedRequest: TypeAlias = tuple[RequestTimes, int, int]
"""Times of a request, and its prompt and output tokens."""
HEADROOM = 1.2
"""Goodput above this many times the arriving rate counts for nothing."""
SEEDS = (0, 1, 2, 3, 4)
"""Other roles must carry more in the draws of all seeds."""
_MAX_TRIED = 16
"""Splits to try. Of more instances, some of all splits and those near the present one."""
_REQUESTS = 400
_MAX_REQUESTS = 4000
_NICEST = 19
_MAX_ROWS = 2000
_MIN_ROWS = 20
_MIN_S = 1e-3
"""Seconds of steps between two looks. Less is noise."""
_MAX_IN_WINDOW = 10_000
_CHECKS = 10
"""Checks in the time of a window."""
SURE = 3.0
"""Standard errors beyond which a difference is not chance."""
_BATCHES = 10


@dataclass(frozen=True)
class InstanceTotals:
    steps: float = 0.0
    tokens: float = 0.0
    """Sampled tokens, one for each sequence of a step."""
    load: float = 0.0
    """Cached tokens of all running sequences, summed over steps."""
    prompt_tokens: float = 0.0
    seconds: float = 0.0
    fetched_tokens: float = 0.0
    fetching_s: float = 0.0

    def since(self, before: InstanceTotals) -> InstanceTotals:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return InstanceTotals(*(now - then for now, then in pairs))


@dataclass(frozen=True)
class LinearTimes(StepTime):
    """Straight lines of an instance as a whole. The link's time is part of its steps."""

    step_s: float
    token_s: float
    """Added for each sequence that samples a token."""
    cached_s: float
    """Added for each attended token."""
    prompt_s: float
    """Added for each token of a prompt."""
    fetched_s: float = 0.0
    """Time to fetch K and V of a token from another instance. 0 if none were fetched."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        # Prompts alone sample a token each.
        num_sampled, run = num_decoding or len(prompts), sum(new for _, new in prompts)
        return self.step_s + self.token_s * num_sampled + self.prompt_s * run

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.cached_s * load_tokens

    def transfer_s(self, num_tokens: float) -> float:
        return self.fetched_s * num_tokens


class StepLog:
    """The latest differences between totals of instances."""

    def __init__(self) -> None:
        self._last: dict[str, InstanceTotals] = {}
        self._rows: deque[InstanceTotals] = deque(maxlen=_MAX_ROWS)

    def look(self, name: str, totals: InstanceTotals) -> None:
        """Add an instance's current totals. They fall if another process took its place."""
        before = self._last.get(name)
        self._last[name] = totals
        if before is None or totals.steps < before.steps:
            return
        row = totals.since(before)
        if row.steps > 0 and row.seconds >= _MIN_S:
            self._rows.append(row)

    def measured(self) -> LinearTimes | None:
        """Fit step times. None if too little has run, or no prompts, or no decoding."""
        rows = list(self._rows)
        has_both = sum(row.tokens for row in rows) and sum(row.prompt_tokens for row in rows)
        if len(rows) < _MIN_ROWS or not has_both:
            return None
        table = np.array([[row.steps, row.tokens, row.load, row.prompt_tokens] for row in rows])
        seconds = np.array([row.seconds for row in rows])
        found = non_negative(table / seconds[:, None], np.ones(len(rows)))
        # What took long by chance counted too little there: again, by what it should have taken.
        weights = 1 / np.sqrt(np.maximum(table @ np.array(found), _MIN_S))
        found = non_negative(table * weights[:, None], seconds * weights)
        fetched = sum(row.fetched_tokens for row in rows)
        fetching_s = sum(row.fetching_s for row in rows)
        step_s, token_s, cached_s, prompt_s = found
        fetched_s = fetching_s / fetched if fetched > 0 else 0.0
        return LinearTimes(step_s, token_s, cached_s, prompt_s, fetched_s)


@dataclass(frozen=True, order=True)
class Roles:
    prefill: int
    decode: int
    both: int = 0

    @property
    def num(self) -> int:
        return self.prefill + self.decode + self.both

    def flips_to(self, other: Roles) -> int:
        return sum(max(0, b - a) for a, b in zip(astuple(self), astuple(other), strict=True))

    def __str__(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in asdict(self).items() if count)


@dataclass(frozen=True)
class InstanceProfile:
    times: LinearTimes
    batch_tokens: int
    capacity_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class TrafficSample:
    rate: float
    cv: float
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens, to draw from."""

    def draw(self, seed: int) -> Draw:
        """Draw requests. Seeds above 0 draw from a bootstrap sample of the lengths."""
        pairs = self.lengths
        if seed:
            generator = np.random.Generator(np.random.PCG64([seed, 2]))
            pairs = tuple(pairs[i] for i in generator.integers(0, len(pairs), len(pairs)))
        wanted = min(_MAX_REQUESTS, math.ceil(_REQUESTS * max(1.0, self.cv * self.cv / 4)))
        return drawn_from(pairs, self.cv, wanted, seed)


@dataclass(frozen=True)
class JudgedRoles:
    """The present roles and the best ones. Goodputs are at most ``HEADROOM`` times the rate."""

    present: Roles
    present_goodput: float
    best: Roles
    best_goodput: float
    gain: float
    """Part by which the best roles carry more, in the draw where that is least."""
    enough: int
    """Instances that would carry the rate, judged by the best roles. 0 if none would."""


@dataclass
class Judge:
    """Simulates goodputs of roles, each once."""

    profile: InstanceProfile
    sample: TrafficSample
    slo: Slo
    _found: dict[tuple[Roles, int], float] = field(default_factory=dict)

    def judge(self, present: Roles) -> JudgedRoles:
        """Return the best roles. Of equal ones, those that change the fewest instances."""
        most = HEADROOM * self.sample.rate
        if self.goodput(present) >= most:
            return JudgedRoles(present, most, present, most, 0.0, present.num)
        best = present
        others = [roles for roles in _candidates(present) if roles != present]
        for roles in sorted(others, key=present.flips_to):
            goodput = self.goodput(best)
            if goodput < most and self._may_exceed(roles, goodput):
                best = roles if self.goodput(roles) > goodput else best
        gain = 0.0
        if best != present and self.goodput(best) > 0:
            for seed in SEEDS:
                before, after = self.goodput(present, seed), self.goodput(best, seed)
                gained = after / before - 1.0 if before else math.inf if after else 0.0
                gain = min(gain, gained) if seed else gained
                if gain <= 0:
                    break
        each = self.goodput(best) / best.num
        enough = whole(self.sample.rate / each) if each else 0
        return JudgedRoles(present, self.goodput(present), best, self.goodput(best), gain, enough)

    def goodput(self, roles: Roles, seed: int = SEEDS[0]) -> float:
        """Return requests per second within the SLO, at most ``HEADROOM`` times the rate."""
        key = roles, seed
        if key not in self._found:
            run = simulation_of(self.profile, roles)
            most = HEADROOM * self.sample.rate
            self._found[key] = greatest_rate(self._load(seed), run, most)
        return self._found[key]

    def _may_exceed(self, roles: Roles, goodput: float) -> bool:
        # One run is a tenth of what finding a goodput takes.
        if not goodput:
            return True
        load = self._load(SEEDS[0])
        rate = min(goodput * (1 + PRECISION), HEADROOM * self.sample.rate)
        return load.is_carried(simulation_of(self.profile, roles)(load.requests(rate)))

    def _load(self, seed: int) -> Load:
        draw = self.sample.draw(seed)
        return Load(draw, self.slo, min_requests=len(draw.lengths))


def simulation_of(
    profile: InstanceProfile, roles: Roles
) -> Callable[[list[tuple[float, int, int]]], GoodputRun]:
    """Return a function that runs requests through instances with these roles."""
    times = InstanceTime(profile.times)
    decode = DecodeSpec(times, profile.capacity_tokens, profile.max_sequences, opens_at_once=False)
    if roles.both or not (roles.prefill and roles.decode):
        # The remaining instances do both.
        both = [decode] * roles.num
        return lambda requests: simulate_colocated(requests, both, profile.batch_tokens)
    # What was measured is how one fetches: prefill instances never hold it up.
    times = InstanceTime(replace(profile.times, fetched_s=0.0))
    prefill = PrefillSpec(times, profile.batch_tokens, profile.capacity_tokens)
    first, second = [prefill] * roles.prefill, [decode] * roles.decode
    return lambda requests: simulate(requests, first, second)


def _candidates(present: Roles) -> list[Roles]:
    """Return splits, and all instances for both. Mixed roles are judged as if all were for both."""
    num = present.num
    splits = [Roles(count, num - count) for count in range(1, num)]
    if len(splits) > _MAX_TRIED:
        step = len(splits) / _MAX_TRIED
        few = {round(index * step) for index in range(_MAX_TRIED)}
        near = range(present.prefill - 2, present.prefill + 3)
        splits = [each for i, each in enumerate(splits) if i in few or each.prefill in near]
    mixed = [present] if present.both not in (0, num) else []
    return [*mixed, *splits, Roles(0, 0, num)]


@dataclass(frozen=True)
class RoleQuestion:
    profile: InstanceProfile
    sample: TrafficSample
    slo: Slo
    present: Roles

    def answer(self) -> JudgedRoles:
        return Judge(self.profile, self.sample, self.slo).judge(self.present)


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
    arrived_s: Sequence[float], finished: Iterable[FinishedRequest], slo: Slo, now_s: float
) -> Traffic:
    """Return the traffic of a window up to now. It needs two arrivals, rising, and a finished
    request."""
    num = len(arrived_s)
    rate = num / max(now_s - arrived_s[0], 1e-9)
    gaps = np.diff(np.asarray(arrived_s))
    mean_s = float(gaps.mean())
    cv = min(MAX_CV, float(gaps.std() / mean_s)) if mean_s > 0 else 1.0
    times, prompts, outputs = zip(*finished, strict=True)
    kept = np.array(list(map(slo.is_met_by, times)), float)
    # Requests that follow each other are alike: the error is that of means of batches.
    error = 0.5 / math.sqrt(len(kept))
    if len(kept) >= 2 * _BATCHES:
        means = [float(batch.mean()) for batch in np.array_split(kept, _BATCHES)]
        error = float(np.std(means, ddof=1)) / math.sqrt(_BATCHES)
    return Traffic(
        # The error of renewals, and that of gamma gaps' coefficient by the delta method.
        Estimate(rate, rate * cv / math.sqrt(num)),
        Estimate(cv, cv * math.sqrt((1 + cv * cv) / 2 / num)),
        Estimate.of(prompts),
        Estimate.of(outputs),
        tuple(zip(prompts, outputs, strict=True)),
        Estimate(float(kept.mean()), error),
    )


@dataclass(frozen=True)
class WatchRules:
    period_s: float = 3600.0
    """Longest time between two judgements."""
    window_s: float = 300.0
    min_requests: int = 100
    """Fewest requests of a window, which lasts until it has them."""
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
        self._arrived: deque[float] = deque(maxlen=_MAX_IN_WINDOW)
        self._finished: deque[tuple[float, FinishedRequest]] = deque(maxlen=_MAX_IN_WINDOW)
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
        found = traffic(self._arrived, (seen for _, seen in self._finished), self.slo, now_s)
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
        """Take the judgement, if there is one. Return True if roles should change now: two windows
        in a row want the same."""
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


def to_json(asked: RoleQuestion | JudgedRoles) -> str:
    return json.dumps(asdict(asked))


def from_json(text: str, kind: type[T]) -> T:
    """Raises ValueError: If the text is not one of ``kind``."""
    return msgspec.convert(json.loads(text), kind)


def main(questions: TextIO = sys.stdin, answers: TextIO = sys.stdout) -> None:
    os.nice(_NICEST)
    question = from_json(questions.read(), RoleQuestion)
    print(to_json(question.answer()), file=answers, flush=True)
