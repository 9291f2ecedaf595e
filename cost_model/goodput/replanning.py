"""Running instances that are alike: step times fitted to what they did, and what each choice of
their roles carries, by simulation.

A process of its own answers ``RoleQuestion`` as JSON, at the lowest priority (``main``).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TextIO, TypeVar

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
from cost_model.goodput.slo import Slo
from cost_model.goodput.workload import Draw, drawn_from
from cost_model.numbers import whole
from fastdecode.schedule.simulation.instance_time import InstanceTime
from fastdecode.schedule.times import Prompts, StepTime

T = TypeVar("T")
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

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.prefill, self.decode, self.both

    def flips_to(self, other: Roles) -> int:
        return sum(max(0, b - a) for a, b in zip(self.counts, other.counts, strict=True))

    def __str__(self) -> str:
        named = zip(self.counts, ("prefill", "decode", "both"), strict=True)
        return " + ".join(f"{count} {name}" for count, name in named if count)


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


def to_json(asked: RoleQuestion | JudgedRoles) -> str:
    return json.dumps(asdict(asked))


def from_json(text: str, kind: type[T]) -> T:
    """Raises ValueError: If the text is not one of ``kind``."""
    return msgspec.convert(json.loads(text), kind)


def main(questions: TextIO = sys.stdin, answers: TextIO = sys.stdout) -> None:
    os.nice(_NICEST)
    question = from_json(questions.read(), RoleQuestion)
    print(to_json(question.answer()), file=answers, flush=True)
