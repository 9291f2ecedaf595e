"""Where the KV cache is best kept: on R-workers, on the GPU, or on both sides.

One rule for ``fastdecode size`` and for ``--kv-placement auto``: the placement that gives the most
tokens a second, or the simplest of those that give nearly as many. The GPU alone has weights and
KV cache in its own memory, and no R-workers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from cost_model.hardware import Cpu, Efficiency, Gpu, Hardware, Nic
from cost_model.numbers import at_most, largest, smallest, whole
from cost_model.plans.constraints import fastest, r_memory_bytes, s_worker_fits
from cost_model.predict import MAX_LANES, System, SystemTime
from fastdecode.schedule.hybrid.forecast import Costs, Layout, paces

_NEARLY = 0.95
"""A simpler placement must give this part of the most tokens per second."""
ASSUMED_CPU, ASSUMED_NIC = "EPYC 7763", "100GbE"
"""Hardware of R-workers that have not been reached yet."""
_LARGE, _SMALL, _LARGE_BYTES = "H100-SXM", "A10", 40e9
"""GPUs in place of one that ``hardware.toml`` doesn't have, by its memory."""
_AWAY_STEP, _HOME_STEP = 1.25, 2.0
"""Ratios of the numbers of sequences to try, on R-workers and on the device."""
MOST_OF_GAIN = 0.8
"""Part of the gain to reach. More of it costs many more sequences, each slower."""


@dataclass(frozen=True)
class GpuOnly:
    """The best that the GPU does alone, its KV cache paged without waste: a generous rival."""

    batch: int
    tpot_s: float
    tokens_per_s: float
    limit: str
    """Limit of the batch: memory, latency, ``--batch``, gain (more sequences add little), or that
    nothing larger was measured."""
    kv_room_bytes: float


def gpu_only_step_s(system: System, batch: int) -> float:
    """Return the time of the S-part, its share of prompts, and attention that reads all K and V at
    the GPU's bandwidth."""
    return system.costs.num_layers * system.on_device().lane(batch, 1).chain_s


def gpu_only_memory_bytes(system: System, batch: int) -> float:
    """Return weights, activations, and the cached tokens of the load, without reservations."""
    kv_bytes = batch * system.workload.mean_context_tokens * system.costs.kv_bytes
    return system.costs.weight_bytes + batch * system.costs.peak_activation_bytes + kv_bytes


def gpu_only_on(system: System, batch: int) -> GpuOnly:
    """Predict ``batch`` sequences on the GPU alone, whether they fit or not."""
    step_s = gpu_only_step_s(system, batch)
    used = system.costs.weight_bytes + batch * system.costs.peak_activation_bytes
    return GpuOnly(batch, step_s, batch / step_s, "", system.s.usable_memory_bytes - used)


def best_gpu_only(
    system: System, step_limit_s: float, most_sequences: int | None = None, least_gain: float = 0.0
) -> GpuOnly | None:
    """Find the largest batch that fits and keeps the promise. None if one sequence does not.

    The batch ends where the largest gives no more than ``least_gain`` more tokens/s: for a CPU,
    whose memory holds far more sequences than its cores keep up with.
    """

    def fits(batch: int) -> bool:
        return gpu_only_memory_bytes(system, batch) <= system.s.usable_memory_bytes

    def fast(batch: int) -> bool:
        return at_most(gpu_only_step_s(system, batch), step_limit_s)

    measured, asked = system.s.max_batch or sys.maxsize, most_sequences or sys.maxsize
    batch = largest(lambda batch: fits(batch) and fast(batch), min(measured, asked))
    if not batch:
        return None
    enough = gpu_only_on(system, batch).tokens_per_s / (1.0 + least_gain)
    if least_gain and gpu_only_on(system, 1).tokens_per_s < enough:
        batch = smallest(lambda few: gpu_only_on(system, few).tokens_per_s >= enough, batch)
        return replace(gpu_only_on(system, batch), limit="gain")
    limit = "--batch" if batch == asked else "what was measured"
    if not fits(batch + 1):
        limit = "memory"
    elif not fast(batch + 1):
        limit = "latency"
    return replace(gpu_only_on(system, batch), limit=limit)


@dataclass(frozen=True)
class Hybrid:
    """The best that the GPU does with KV in its own memory, and R-workers with more of it."""

    layout: str
    """Steps of sequences on R-workers: mixed, split-1. gpu-only if they add nothing."""
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
    """Find the fewest sequences on R-workers that give ``part`` of what any number would add,
    beside the number on the GPU that gives the most. Fewer of the ``sockets`` are used where more
    only add messages."""
    rate = alone.tokens_per_s
    nothing = Hybrid("gpu-only", alone.batch, 0, sockets, alone.tpot_s, None, rate)
    every = _plans(system, alone, sockets, step_limit_s, most_sequences or sys.maxsize)
    plans = [plan for plan in every if plan.tokens_per_s > rate]
    most = max((plan.tokens_per_s for plan in plans), default=0.0) - rate
    enough = (plan for plan in plans if plan.tokens_per_s - rate >= part * most)
    return min(enough, key=lambda plan: (plan.away, -plan.tokens_per_s), default=nothing)


def hybrid_on(system: System, plan: Hybrid) -> Hybrid:
    layout, layers = Layout(plan.layout), system.costs.num_layers
    costs = costs_of(system, lambda num: layers * system.s_s(num), plan.away, plan.sockets)
    return _beside(costs, layout, plan.sockets, plan.away, system.attended_tokens, plan.home)


def _plans(
    system: System, alone: GpuOnly, sockets: int, step_limit_s: float, most_sequences: int
) -> Iterator[Hybrid]:
    load = system.attended_tokens
    sequence_bytes = system.workload.mean_context_tokens * system.costs.kv_bytes
    most_bytes, measured = sockets * system.r.capacity_bytes, system.s.max_batch or sys.maxsize
    s_part = cache(lambda num: system.costs.num_layers * system.s_s(num))
    for away in _numbers(int(most_bytes / sequence_bytes), _AWAY_STEP):
        room = whole(away * sequence_bytes / system.r.capacity_bytes)
        for layout in Layout:
            if away > measured:
                continue
            most_home = min(alone.batch, most_sequences - away)
            if layout is Layout.MIXED:
                most_home = min(most_home, measured - away)
            used = _sockets(system, away, room, sockets)
            costs = costs_of(system, s_part, away, used)
            beside = cache(partial(_beside, costs, layout, used, away, load))
            home = _home(beside, most_home, step_limit_s)
            if home:
                yield beside(home)


def _beside(
    costs: Costs, layout: Layout, sockets: int, away: int, load: float, home: int
) -> Hybrid:
    # ``load``: cached tokens of one sequence.
    pace = paces(costs, layout, (home, home * load), (away, away * load))
    rate = home / pace.home_s + away / pace.away_s
    return Hybrid(layout.value, home, away, sockets, pace.home_s, pace.away_s, rate)


def _sockets(system: System, lane_batch: int, fewest: int, most: int) -> int:
    """Return the number of sockets with which a lane returns soonest. More only add messages."""
    lane_over = system.lane_over(lane_batch)

    def away_s(sockets: float) -> float:
        lane = lane_over(sockets)
        return max(lane.r_s, lane.out_s, lane.back_s) + lane.trip_s

    return max(fewest, fastest(away_s, most))


def _home(beside: Callable[[int], Hybrid], most: int, step_limit_s: float) -> int:
    """Return the sequences on the device that give the most tokens/s and keep the promise. 0 if
    none do. Their KV takes time, too: the device need not be full. Where steps grow as a line or
    faster, tokens/s rise up to one number and fall after it."""

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
    number = 1.0
    while number <= most:
        yield int(number)
        number = max(number + 1, number * step)


def costs_of(
    system: System, s_part: Callable[[int], float], lane_batch: int, sockets: int
) -> Costs:
    times, device = SystemTime(system, sockets), SystemTime(system.on_device(), 1)

    @cache
    def r_part(num_sequences: int, load: float) -> float:
        each = max(1.0, num_sequences / sockets)
        r_part_s = times.r_part_s(0, each * load / num_sequences, each)
        return max(r_part_s, times.link_s(num_sequences))

    return Costs(s_part, partial(device.r_part_s, 0), r_part, times.trip_s(lane_batch))


def ranking(rates: Mapping[str, float]) -> list[str]:
    """Return placements by tokens per second, the best first. Of those that give nearly the most,
    the simplest is first: the GPU alone, R-workers, both."""
    most = max(rates.values(), default=0.0)
    near = [each for each in ("gpu", "r", "hybrid") if rates.get(each, -1.0) >= _NEARLY * most]
    return near + sorted(rates.keys() - set(near), key=lambda each: -rates[each])


def placement_rates(system: System, sockets: int, most_sequences: int) -> dict[str, float]:
    """Return what each placement that can run gives with this many R-workers, one per socket."""
    alone = best_gpu_only(system, math.inf, most_sequences)
    found = {} if alone is None else {"gpu": alone.tokens_per_s}
    if not sockets:
        return found
    rates = [
        system.predict(lane_batch, lanes, sockets).tokens_per_s
        for lane_batch, lanes in _lanes(most_sequences)
        if s_worker_fits(system, lane_batch, lanes)
        and r_memory_bytes(system, lane_batch, lanes) <= sockets * system.r.capacity_bytes
    ]
    if rates:
        found["r"] = max(rates)
    if alone is not None:
        both = best_hybrid(system, alone, sockets, math.inf, most_sequences=most_sequences)
        found["hybrid"] = both.tokens_per_s
    return found


def _lanes(most_sequences: int) -> Iterator[tuple[int, int]]:
    for lanes in range(1, MAX_LANES + 1):
        most = most_sequences // lanes
        powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        yield from ((lane_batch, lanes) for lane_batch in (*powers, most) if lane_batch)


def gpu_like(name: str, memory_bytes: int, usable: float, hardware: Hardware) -> tuple[Gpu, bool]:
    """Return a GPU by its driver's name, and True if it is known. An unknown one is taken for
    one of its size."""
    known = hardware.printed_gpu(name)
    gpu = known or hardware.gpu(_LARGE if memory_bytes >= _LARGE_BYTES else _SMALL)
    part = Efficiency(min(0.999, max(0.001, usable)), "what is free of it")
    return replace(gpu, memory_bytes=memory_bytes, memory_usable=part), known is not None


def assumed_r_worker(hardware: Hardware, *, is_here: bool) -> tuple[Cpu, Nic]:
    """Return a socket and its port. ``is_here``: in the S-worker's host, without a network."""
    fastest = max(hardware.nics.values(), key=lambda nic: nic.line_bits_per_s)
    return hardware.cpu(ASSUMED_CPU), fastest if is_here else hardware.nic(ASSUMED_NIC)
