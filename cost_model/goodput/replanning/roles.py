"""Roles of so many instances that are alike: what each choice carries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cost_model.goodput.rates import PRECISION, Load, greatest_rate
from cost_model.goodput.replanning.measured import LinearTimes
from cost_model.goodput.simulator import (
    DecodeSpec,
    GoodputRun,
    PrefillSpec,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import Slo
from cost_model.goodput.workload import Draw, drawn_from
from cost_model.numbers import whole
from fastdecode.schedule.simulation.instance_time import InstanceTime

HEADROOM = 1.2
"""What is carried beyond so many times the rate that comes, counts for nothing."""
SEEDS = (0, 1, 2, 3, 4)
"""Of draws; other roles carry more in each, or don't."""
_MOST_TRIED = 16
"""Splits; of more instances, those near the present one and far from it."""
_REQUESTS = 400
_MOST_REQUESTS = 4000


@dataclass(frozen=True, order=True)
class Roles:
    prefill: int
    decode: int
    both: int = 0

    @property
    def num(self) -> int:
        return self.prefill + self.decode + self.both

    def flips_to(self, other: Roles) -> int:
        """Instances that change on the way there."""
        pairs = zip(self.each, other.each, strict=True)
        return sum(max(0, there - here) for here, there in pairs)

    @property
    def each(self) -> tuple[int, int, int]:
        return self.prefill, self.decode, self.both

    def __str__(self) -> str:
        named = zip(self.each, ("prefill", "decode", "both"), strict=True)
        return " + ".join(f"{count} {name}" for count, name in named if count)


@dataclass(frozen=True)
class Alike:
    times: LinearTimes
    batch_tokens: int
    """Of prompts that one runs at once."""
    capacity_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class Comes:
    rate: float
    cv: float
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens, to draw from."""

    def draw(self, seed: int) -> Draw:
        """From the second seed on, of requests that might have been the window's
        as well (bootstrap)."""
        pairs = self.lengths
        if seed:
            picked = np.random.Generator(np.random.PCG64([seed, 2])).integers(
                0, len(pairs), len(pairs)
            )
            pairs = tuple(pairs[index] for index in picked)
        wanted = min(_MOST_REQUESTS, math.ceil(_REQUESTS * max(1.0, self.cv * self.cv / 4)))
        return drawn_from(pairs, self.cv, wanted, seed)


@dataclass(frozen=True)
class JudgedRoles:
    present: Roles
    present_goodput: float
    """Requests a second within the SLO, up to ``HEADROOM`` times what comes."""
    best: Roles
    best_goodput: float
    gain: float
    """By which part the best carries more, in the draw in which that is least."""
    enough: int
    """Instances that would carry what comes, by what the best ones carry each;
    0: no request keeps the SLO."""


@dataclass
class Judge:
    """Goodputs of roles, each found once."""

    alike: Alike
    comes: Comes
    slo: Slo
    progress: Callable[[str], object] = lambda _: None
    _found: dict[tuple[Roles, int], float] = field(default_factory=dict)

    def judge(self, present: Roles) -> JudgedRoles:
        """Try others. Of roles that carry the same, the ones that change least."""
        most = HEADROOM * self.comes.rate
        if self.goodput(present) >= most:
            return JudgedRoles(present, most, present, most, 0.0, present.num)
        best = present
        others = [roles for roles in _tried(present) if roles != present]
        for roles in sorted(others, key=present.flips_to):
            than = self.goodput(best)
            if than < most and self._may_carry_more(roles, than) and self.goodput(roles) > than:
                best = roles
        gain = 0.0
        if best != present and self.goodput(best) > 0:
            for seed in SEEDS:
                gain = min(gain if seed else math.inf, self._gain(present, best, seed))
                if gain <= 0:
                    break
        each = self.goodput(best) / best.num
        enough = whole(self.comes.rate / each) if each else 0
        return JudgedRoles(present, self.goodput(present), best, self.goodput(best), gain, enough)

    def goodput(self, roles: Roles, seed: int = SEEDS[0]) -> float:
        """Requests a second within the SLO, up to ``HEADROOM`` times what comes."""
        key = roles, seed
        if key not in self._found:
            most = HEADROOM * self.comes.rate
            run = simulation_of(self.alike, roles)
            self._found[key] = greatest_rate(self._load(seed), run, most)
            self.progress(f"{roles}: {self._found[key]:.4g} requests a second")
        return self._found[key]

    def _may_carry_more(self, roles: Roles, than: float) -> bool:
        """One run says so of most; what they carry takes ten to find."""
        if not than:
            return True
        load = self._load(SEEDS[0])
        rate = min(than * (1 + PRECISION), HEADROOM * self.comes.rate)
        return load.is_carried(simulation_of(self.alike, roles)(load.requests(rate)))

    def _load(self, seed: int) -> Load:
        draw = self.comes.draw(seed)
        return Load(draw, self.slo, min_requests=len(draw.lengths))

    def _gain(self, present: Roles, best: Roles, seed: int) -> float:
        before, after = self.goodput(present, seed), self.goodput(best, seed)
        if not before:
            return math.inf if after else 0.0
        return after / before - 1.0


def simulation_of(
    alike: Alike, roles: Roles
) -> Callable[[list[tuple[float, int, int]]], GoodputRun]:
    """What comes of requests where instances have these roles."""
    times = InstanceTime(alike.times)
    decode = DecodeSpec(times, alike.capacity_tokens, alike.max_sequences, opens_at_once=False)
    if roles.both or not (roles.prefill and roles.decode):
        # The remaining instances do both.
        both = [decode] * roles.num
        return lambda requests: simulate_colocated(requests, both, alike.batch_tokens)
    # What was measured is how one fetches: prefill instances never hold it up.
    times = InstanceTime(replace(alike.times, fetched_s=0.0))
    prefill = PrefillSpec(times, alike.batch_tokens, alike.capacity_tokens)
    first, second = [prefill] * roles.prefill, [decode] * roles.decode
    return lambda requests: simulate(requests, first, second)


def _tried(present: Roles) -> list[Roles]:
    """Splits, and all for both. Mixed ones are judged as if all were for both."""
    num = present.num
    splits = [Roles(count, num - count) for count in range(1, num)]
    if len(splits) > _MOST_TRIED:
        step = len(splits) / _MOST_TRIED
        few = {round(index * step) for index in range(_MOST_TRIED)}
        near = range(present.prefill - 2, present.prefill + 3)
        splits = [each for i, each in enumerate(splits) if i in few or each.prefill in near]
    mixed = [present] if present.both not in (0, num) else []
    return [*mixed, *splits, Roles(0, 0, num)]
