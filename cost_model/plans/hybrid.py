"""KV on both sides: the GPU alone, and what R-workers add to it (``--kv-placement hybrid``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from cost_model.numbers import at_most, largest, smallest, whole
from cost_model.plans.constraints import fastest
from cost_model.plans.gpu_only import GpuOnly
from cost_model.predict import System
from cost_model.step_time import SystemTime
from fastdecode.schedule.hybrid.forecast import Costs, Layout, paces

_STEP = 1.25
"""From one number of sequences on R-workers that is looked at to the next."""
_HOME_STEP = 2.0
"""The same of sequences on the device."""
MOST_OF_GAIN = 0.8
"""Of the gain that there is: more of it costs many more sequences, each slower."""


@dataclass(frozen=True)
class Hybrid:
    """The best that the GPU does with KV in its own memory, and R-workers with more of it."""

    layout: str
    """Where sequences on R-workers step: mixed, split-1, split-2; gpu-only:
    R-workers add nothing."""
    home: int
    """Sequences whose KV is on the GPU."""
    away: int
    """Sequences whose KV is on R-workers."""
    sockets: int
    home_tpot_s: float
    away_tpot_s: float | None
    tokens_per_s: float

    @property
    def batch(self) -> int:
        return self.home + self.away

    @property
    def tpot_s(self) -> float:
        """Of the slower side."""
        return max(self.home_tpot_s, self.away_tpot_s or 0.0)


def best_hybrid(
    system: System,
    alone: GpuOnly,
    sockets: int,
    step_limit_s: float,
    *,
    most_sequences: int | None = None,
    part: float = MOST_OF_GAIN,
) -> Hybrid:
    """As few sequences on R-workers, in whatever lanes, as give nearly all that
    any number of them would, beside the number on the GPU that gives the most.

    Args:
        alone: what the GPU does alone.
        sockets: R-workers that there are; fewer are taken where more only add messages.
        step_limit_s: promised of every token.
        most_sequences: that run at once, on both sides; None: as many as fit.
        part: of what R-workers can add, at least this much is reached.
    """
    nothing = Hybrid(
        "gpu-only", alone.batch, 0, sockets, alone.tpot_s, None, tokens_per_s=alone.tokens_per_s
    )
    plans = [
        plan
        for plan in _plans(system, alone, sockets, step_limit_s, most_sequences or sys.maxsize)
        if plan.tokens_per_s > alone.tokens_per_s
    ]
    most = max((plan.tokens_per_s for plan in plans), default=0.0) - alone.tokens_per_s
    enough = (p for p in plans if p.tokens_per_s - alone.tokens_per_s >= part * most)
    return min(enough, key=lambda plan: (plan.away, -plan.tokens_per_s), default=nothing)


def hybrid_on(system: System, plan: Hybrid) -> Hybrid:
    """Predict the sequences and sockets of ``plan`` on another system."""
    layout, layers = Layout(plan.layout), system.costs.num_layers
    lane_batch = -(-plan.away // max(1, layout.num_away_lanes))
    costs = costs_of(system, lambda num: layers * system.s_s(num), lane_batch, plan.sockets)
    return _beside(costs, layout, plan.sockets, plan.away, system.attended_tokens, plan.home)


def _plans(
    system: System, alone: GpuOnly, sockets: int, step_limit_s: float, most_sequences: int
) -> Iterator[Hybrid]:
    load = system.attended_tokens
    sequence_bytes = system.workload.mean_context_tokens * system.costs.kv_bytes
    most_bytes, measured = sockets * system.r.capacity_bytes, system.s.max_batch or sys.maxsize
    s_part = cache(lambda num: system.costs.num_layers * system.s_s(num))
    for away in _numbers(int(most_bytes / sequence_bytes), _STEP):
        room = whole(away * sequence_bytes / system.r.capacity_bytes)
        for layout in Layout:
            lanes = max(1, layout.num_away_lanes)
            if away < lanes or -(-away // lanes) > measured:
                continue
            most_home = min(alone.batch, most_sequences - away)
            if layout is Layout.MIXED:
                most_home = min(most_home, measured - away)
            for used in _sockets(system, -(-away // lanes), lanes, room, sockets):
                costs = costs_of(system, s_part, -(-away // lanes), used)
                beside = cache(partial(_beside, costs, layout, used, away, load))
                home = _home(beside, most_home, step_limit_s)
                if home:
                    yield beside(home)


def _beside(
    costs: Costs, layout: Layout, sockets: int, away: int, load: float, home: int
) -> Hybrid:
    """``load``: cached tokens of one sequence."""
    pace = paces(costs, layout, (home, home * load), (away, away * load))
    rate = home / pace.home_s + away / pace.away_s
    return Hybrid(layout.value, home, away, sockets, pace.home_s, pace.away_s, rate)


def _sockets(system: System, lane_batch: int, lanes: int, fewest: int, most: int) -> set[int]:
    """Numbers of sockets that may be best for so many lanes: with these a lane is back soonest,
    alone or among the others. More only add messages."""
    lane_over = system.lane_over(lane_batch)

    def away_s(num_lanes: int, sockets: float) -> float:
        lane = lane_over(sockets)
        r_s = max(lane.r_s, lane.out_s, lane.back_s)
        return max(num_lanes * r_s, r_s + lane.trip_s)

    return {max(fewest, fastest(partial(away_s, num), most)) for num in (1, lanes)}


def _home(beside: Callable[[int], Hybrid], most: int, step_limit_s: float) -> int:
    """Sequences on the device that give the most tokens/s and keep the promise; 0: none does.
    Their KV takes its time, too: the device need not be full.

    Where steps grow as a line or faster, tokens/s rise up to one number and fall after it.
    """

    def rate(home: int) -> float:
        return beside(home).tokens_per_s

    most = largest(lambda home: at_most(beside(home).tpot_s, step_limit_s), most)
    if most < 2:
        return most
    few = [*_numbers(most - 1, _HOME_STEP), most]
    best = few.index(max(few, key=rate))
    low, high = few[max(0, best - 1)], few[min(best + 1, len(few) - 1)]
    return smallest(lambda home: rate(home + 1) <= rate(home), high, above=low - 1)


def _numbers(most: int, step: float) -> Iterator[int]:
    """A few of all numbers from 1 to ``most``."""
    number = 1.0
    while number <= most:
        yield int(number)
        number = max(number + 1, number * step)


def costs_of(
    system: System, s_part: Callable[[int], float], lane_batch: int, sockets: int
) -> Costs:
    """Of steps, with so many sequences of a lane on R-workers."""
    times, device = SystemTime(system, sockets), SystemTime(system.on_device(), 1)

    @cache
    def r_part(num_sequences: int, load: float) -> float:
        """Or the link, if that is slower."""
        a_worker = max(1.0, num_sequences / sockets)
        r_part_s = times.r_part_s(0, a_worker * load / num_sequences, a_worker)
        return max(r_part_s, times.link_s(num_sequences))

    return Costs(s_part, partial(device.r_part_s, 0), r_part, times.trip_s(lane_batch))
