"""The search for a plan: the most that any batch gives, the smallest batch that gives nearly that,
and the fewest sockets for it.

The most is the reference, because it never falls when hardware gets better: every way to run that
the worse hardware had, the better one has, and no slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cost_model.hardware import Gpu
from cost_model.numbers import at_most, largest, smallest
from cost_model.plans.constraints import (
    Constraint,
    constraints,
    fastest,
    r_memory_bytes,
    s_memory_bytes,
    s_worker_fits,
    sockets_for,
    sockets_with_room,
)
from cost_model.plans.placement import best_gpu_only
from cost_model.plans.question import MAX_BATCH, MAX_SOCKETS, Goal, Setup, split_counts
from cost_model.predict import MAX_LANES, StepPrediction, System
from cost_model.printing import counted, rate_text, seconds_text
from fastdecode.core.errors import ConfigError, Given

_NEAR_FEWEST = 1.25
"""The smallest batch wins among plans with up to this many times the fewest sockets."""


@dataclass(frozen=True)
class Plan:
    batch: int
    lane_batch: int
    """Sequences of the largest lane: the paper's B."""
    lanes: int
    sockets: int
    """R-workers, one a socket, spare ones included."""
    spare_sockets: int
    sockets_per_host: int
    expected: StepPrediction
    fast: StepPrediction
    """If every input is better than thought by its own error."""
    slow: StepPrediction
    """If every input is worse than thought by its own error."""
    constraints: tuple[Constraint, ...]
    kv_bytes: float
    s_memory_bytes: float
    load_limit_tokens: int
    """W_lim: cached tokens of one lane that the R-workers keep up with."""

    def on(self, system: System, sockets: int) -> StepPrediction:
        return system.predict(self.lane_batch, self.lanes, sockets, self.batch)

    @property
    def hosts(self) -> int:
        return -(-self.sockets // self.sockets_per_host)

    @property
    def kv_bytes_per_host(self) -> float:
        """What a full host must hold after the spare ones are lost."""
        return (
            self.kv_bytes
            / (self.sockets - self.spare_sockets)
            * min(self.sockets_per_host, self.sockets)
        )

    @property
    def binding(self) -> Constraint:
        """The constraint that asks for the most sockets."""
        return max(self.constraints, key=lambda row: row.min_sockets or 0)


@dataclass(frozen=True)
class Search:
    """One question: what may run, and what is the most that it gives."""

    system: System
    goal: Goal

    @cached_property
    def step_limit_s(self) -> float:
        return self.system.step_limit_s(self.goal.latency_s, self.goal.tpot_s)

    @property
    def most_sockets(self) -> int:
        """Most working sockets, without spare ones."""
        most = MAX_SOCKETS if self.goal.max_sockets is None else self.goal.max_sockets
        return most - self.goal.survive

    @property
    def num_lanes(self) -> Iterator[int]:
        lanes = range(1, MAX_LANES + 1) if self.goal.lanes is None else (self.goal.lanes,)
        return (k for k in lanes if self.goal.batch is None or k <= self.goal.batch)

    def batch(self, lane_batch: int, lanes: int) -> int:
        """Return the sequences of all lanes, of which ``lane_batch`` are in the largest."""
        return min(lane_batch * lanes, self.goal.batch or MAX_BATCH * MAX_LANES)

    def _room(self, lane_batch: int, lanes: int) -> int | None:
        """Return the fewest sockets that hold the KV cache. None if there are too few, or the
        S-worker's memory is too small."""
        if not s_worker_fits(self.system, lane_batch, lanes):
            return None
        room = sockets_with_room(self.system, lane_batch, lanes, self.goal.replicas)
        return room if room <= self.most_sockets else None

    def best_sockets(self, lane_batch: int, lanes: int) -> int | None:
        """Return the sockets that give the most tokens per second. None if no number keeps the
        promises."""
        system = self.system
        room = self._room(lane_batch, lanes)
        if room is None:
            return None
        best = max(room, fastest(system.cycle_over(lane_batch, lanes), self.most_sockets))
        slow_s = system.cycle_over(lane_batch, lanes, self.goal.headroom)
        limit_s = self.step_limit_s / system.costs.num_layers
        if limit_s != math.inf and not at_most(slow_s(best), limit_s):
            best = max(best, sockets_for(slow_s, limit_s) or MAX_SOCKETS + 1)
            if best > self.most_sockets or not at_most(slow_s(best), limit_s):
                return None
        return best

    def rate(self, lane_batch: int, lanes: int) -> float:
        """Return tokens per second on the best number of sockets. 0 if it can't run."""
        sockets = self.best_sockets(lane_batch, lanes)
        return 0.0 if sockets is None else self.rate_on(lane_batch, lanes, sockets)

    def rate_on(self, lane_batch: int, lanes: int, sockets: int) -> float:
        cycle_s = self.system.lane(lane_batch, sockets).cycle_s(lanes)
        return self.batch(lane_batch, lanes) / (self.system.costs.num_layers * cycle_s)

    def tops(self) -> dict[int, tuple[float, int]]:
        """Return the most tokens per second and its batch of a lane, by number of lanes."""
        found = {}
        for lanes in self.num_lanes:
            rates = ((self.rate(batch, lanes), -batch) for batch in self._lane_batches(lanes))
            rate, batch = max(rates, default=(0.0, 0))
            if rate > 0.0:
                found[lanes] = (rate, -batch)
        return found

    def _lane_batches(self, lanes: int) -> Iterator[int]:
        """Yield candidates for the most tokens per second. By a datasheet, the largest that can run
        gives it; a profile may have its best anywhere."""
        measured, asked = self.system.s.max_batch, self.goal.batch
        if asked is not None:
            if measured is not None and -(-asked // max(self.num_lanes)) > measured:
                raise ConfigError(
                    Given("batch", asked),
                    f": the S-part was measured up to {measured} tokens in a lane; calibrate with "
                    "larger batches",
                )
            lane_batch = -(-asked // lanes)
            yield from (lane_batch,) if measured is None or lane_batch <= measured else ()
            return
        # Where nothing is promised of a step, room is all that it takes.
        runs = self._room if self.step_limit_s == math.inf else self.best_sockets
        most = largest(lambda n: runs(n, lanes) is not None, measured or MAX_BATCH // lanes)
        if measured is not None:
            yield from (1 << i for i in range(most.bit_length()) if 1 << i < most)
        if most:
            yield most

    def plans(self, tops: dict[int, tuple[float, int]], most_rate: float) -> Iterator[Plan]:
        """Yield the smallest batch and the fewest sockets that give nearly ``most_rate``, for each
        number of lanes."""
        gain = self.goal.gain
        wanted, first = most_rate / (1.0 + gain), most_rate / (1.0 + gain / 2)
        for lanes, (top, lane_batch) in tops.items():
            if top < wanted * (1.0 - 1e-9):
                continue
            if self.goal.batch is None:
                # A batch somewhat larger than needed first: with it the fewest sockets are found.
                lane_batch = self._smallest(lane_batch, lanes, min(first, top))
            yield self._fewest(lane_batch, lanes, wanted)

    def _smallest(self, known: int, lanes: int, rate: float) -> int:
        return smallest(lambda batch: self.rate(batch, lanes) >= rate, known)

    def _fewest(self, lane_batch: int, lanes: int, wanted: float) -> Plan:
        for goal in (self.goal, replace(self.goal, headroom=0.0)):
            rows = self.rows(lane_batch, lanes, wanted, goal)
            sockets = sockets_of(rows)
            if sockets is not None and sockets <= self.most_sockets:
                break
        else:
            sockets = self.best_sockets(lane_batch, lanes)
            assert sockets is not None
        working = sockets

        def is_enough(batch: int) -> bool:
            if self.rate_on(batch, lanes, working) < wanted:
                return False
            needed = sockets_of(self.rows(batch, lanes, wanted, goal))
            return needed is not None and needed <= working

        if self.goal.batch is None:
            lane_batch = smallest(is_enough, lane_batch)
        return self.plan(lane_batch, lanes, working, self.rows(lane_batch, lanes, wanted, goal))

    def rows(self, lane_batch: int, lanes: int, rate: float, goal: Goal) -> tuple[Constraint, ...]:
        cycle_s = self.batch(lane_batch, lanes) / (self.system.costs.num_layers * rate)
        return constraints(self.system, lane_batch, lanes, goal, cycle_s)

    def plan(self, lane_batch: int, lanes: int, working: int, rows: tuple[Constraint, ...]) -> Plan:
        system, goal = self.system, self.goal
        sockets, batch = working + goal.survive, self.batch(lane_batch, lanes)
        return Plan(
            batch=batch,
            lane_batch=lane_batch,
            lanes=lanes,
            sockets=sockets,
            spare_sockets=goal.survive,
            sockets_per_host=system.r.sockets_per_host,
            expected=system.predict(lane_batch, lanes, sockets, batch),
            fast=system.scaled(-1).predict(lane_batch, lanes, sockets, batch),
            slow=system.scaled(+1).predict(lane_batch, lanes, sockets, batch),
            constraints=rows,
            kv_bytes=r_memory_bytes(system, lane_batch, lanes) * (1 + goal.replicas),
            s_memory_bytes=s_memory_bytes(system, lane_batch, lanes),
            load_limit_tokens=system.load_limit_tokens(lane_batch, working),
        )

    def best(self) -> tuple[Plan | None, float]:
        """Return the plan, and the most tokens per second of any batch on any allowed number of
        sockets. None and 0 if nothing keeps the promises."""
        tops = self.tops()
        if not tops:
            return None, 0.0
        most = max(rate for rate, _ in tops.values())
        plans = list(self.plans(tops, most))
        limit = _NEAR_FEWEST * min(plan.sockets for plan in plans)
        near = [plan for plan in plans if plan.sockets <= limit]
        if self.goal.batch is not None:
            return max(near, key=lambda plan: plan.expected.tokens_per_s), most
        return min(near, key=lambda plan: (plan.batch, plan.sockets)), most


def sockets_of(rows: tuple[Constraint, ...]) -> int | None:
    """Return the fewest that satisfy all rows. None if no number does."""
    needs = [row.min_sockets for row in rows if row.min_sockets is not None]
    return max(1, *needs) if len(needs) == len(rows) else None


def diagnose(setup: Setup, search: Search) -> tuple[tuple[Constraint, ...], str, Plan | None]:
    """Return the constraints in the way where nothing keeps the promises, what would help, and the
    nearest plan that can run."""
    goal, system = search.goal, search.system
    batch = 1 if goal.batch is None else goal.batch
    rows: list[tuple[Constraint, ...]] = []
    for lanes in search.num_lanes:
        free = constraints(system, -(-batch // lanes), lanes, goal, math.inf)
        if setup.is_without_gpu:
            advice = (row.mend.replace("more GPUs", "more memory") for row in free)
            free = tuple(
                replace(row, mend=mend.replace("GPU", "CPU"))
                for row, mend in zip(free, advice, strict=True)
            )
        capped = (_capped(row, goal) for row in free)
        rows.append(tuple(row for row in capped if row.min_sockets is None))
    in_the_way = min((row for row in rows if row), key=len, default=())
    if not s_worker_fits(system, 1, 1):
        return in_the_way, _enough_gpus(setup), None
    if goal.batch is not None:
        plan, _ = replace(search, goal=replace(goal, batch=None)).best()
        if plan is not None:
            step, sequences = plan.expected, counted(plan.batch, "sequence")
            nearest = (
                f"another --batch: {sequences} on {counted(plan.sockets, 'socket')} give "
                f"{rate_text(step.tokens_per_s)} tokens/s, {seconds_text(step.tpot_s)} a token"
            )
            return in_the_way, nearest, plan
    relaxed = replace(goal, latency_s=None, tpot_s=None)
    plan, _ = replace(search, goal=replace(relaxed, batch=None)).best()
    if plan is not None:
        return in_the_way, _shortest_step(replace(search, goal=relaxed)), None
    needed = sockets_of(constraints(system, 1, 1, goal, math.inf))
    if needed is None:
        return in_the_way, "more memory on the R-workers: not even one sequence has room", None
    room = f"{counted(needed + goal.survive, 'socket')}: one sequence has room there"
    return in_the_way, room, None


def _capped(row: Constraint, goal: Goal) -> Constraint:
    """Turn a need beyond the sockets at hand into one that nothing satisfies."""
    needed, most = (row.min_sockets or 0) + goal.survive, goal.max_sockets
    if most is None or row.min_sockets is None or needed <= most:
        return row
    detail = f"{needed} sockets needed, {most} at hand; {row.detail}"
    return replace(row, min_sockets=None, detail=detail)


def _shortest_step(search: Search) -> str:
    """Return the latency that can be kept."""
    system, goal = search.system, search.goal
    lanes = goal.lanes or 1
    lane_batch = -(-(goal.batch or 1) // lanes)
    cycle_s = system.cycle_over(lane_batch, lanes, goal.headroom)
    sockets = fastest(cycle_s, search.most_sockets)
    step_s = system.costs.num_layers * cycle_s(sockets)
    gpu, alone = best_gpu_only(system, math.inf, 1), ""
    if gpu is not None:
        alone = f"; of 1 sequence without R-workers {seconds_text(gpu.tpot_s)}"
    return (
        f"the shortest step that this hardware can make is {seconds_text(step_s)} a token "
        f"({seconds_text(system.latency_s(step_s))} a sequence), with "
        f"{counted(search.batch(lane_batch, lanes), 'sequence')} on {counted(sockets, 'socket')}"
        f"{alone}: ask for no less"
    )


def _enough_gpus(setup: Setup) -> str:
    if not isinstance(setup.gpu, Gpu):
        return "a device with more memory: the weights don't fit into the measured one"
    if setup.is_without_gpu:
        least_gb = s_memory_bytes(setup.system(), 1, 1) / setup.gpu.memory_usable.value / 1e9
        return (
            f"a CPU with {math.ceil(least_gb):,} GB of memory (--dram-gb), or --pp N: N sockets "
            "with some of the layers each"
        )
    for num_gpus in split_counts(setup.spec, setup.num_gpus):
        system = replace(setup, num_gpus=num_gpus).system()
        if s_worker_fits(system, 1, 1):
            return f"--gpus {num_gpus}: the weights fit into {num_gpus} x {setup.gpu.name}"
    return (
        f"a larger GPU: the weights don't fit into as many {setup.gpu.name} as its heads can be "
        "split over"
    )
