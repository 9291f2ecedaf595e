"""The planner: which batch, how many lanes, how many sockets, and whether to
offload at all.

How it chooses: see ``search``. Beside that plan, which keeps every KV cache on R-workers, stand
the GPU alone and both together; the headline is the one of the three with the most tokens a
second. If no batch keeps every promise, the answer is "infeasible", with the constraint that
stands in the way and the nearest plan that can run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_model.hardware import Gpu, Hardware, Nic
from cost_model.numbers import smallest
from cost_model.plans.constraints import Constraint
from cost_model.plans.gpu_only import GpuOnly, best_gpu_only
from cost_model.plans.hybrid import MOST_OF_GAIN, Hybrid, best_hybrid
from cost_model.plans.placement import PlacementRates
from cost_model.plans.question import Goal, Prices, Setup, split_counts
from cost_model.plans.search import Plan, Search, diagnose, sockets_of
from cost_model.predict import MAX_LANES, StepPrediction, System
from cost_model.quantities import counted, rate_text
from fastdecode.core.measurement import RProfile

# Without prices: no market sells a server socket with its memory for less than
# this part of a datacentre GPU.
CHEAPEST_SOCKET = 0.05
_WORTH_IT = 1.10
"""Times what the GPU alone gives."""


@dataclass(frozen=True)
class WhatIf:
    """The plan's batch with one thing changed."""

    change: str
    sockets: int | None
    """None: no number of sockets gives the plan's tokens a second then."""
    tokens_per_s: float | None
    tpot_s: float | None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Is it worth it, beside the same GPU on its own?"""

    offload: bool
    gain: float
    """Tokens a second, relative to the GPU alone; inf if the GPU alone can't run it."""
    break_even_socket_price: float
    """A socket may cost this part of a GPU before the GPU alone gives cheaper
    tokens; not positive: never."""
    reason: str


@dataclass(frozen=True)
class Cost:
    currency: str
    per_hour: float
    per_million_tokens: float
    gpu_only_per_million_tokens: float | None


@dataclass(frozen=True)
class Job:
    """So many output tokens, or requests, by the headline."""

    hours: float
    kwh: float | None
    """GPUs and sockets at their rated power; None: a profile has none."""
    money: float | None
    """None: without prices."""


@dataclass(frozen=True)
class Headline:
    kv_placement: str
    """gpu, r or hybrid."""
    tokens_per_s: float
    sockets: int
    batch: int
    tpot_s: float
    """Of the slower side."""


@dataclass(frozen=True)
class Sizing:
    """The answer. Frozen all through; everything that ``fastdecode size`` prints is in it."""

    setup: Setup
    goal: Goal
    system: System
    feasible: bool
    plan: Plan | None
    """The recommendation; if infeasible the nearest plan that can run; None if there is none."""
    in_the_way: tuple[Constraint, ...]
    """If infeasible: the constraints that no candidate satisfies."""
    nearest: str
    """If infeasible: what would have to give."""
    over_sockets: tuple[StepPrediction, ...]
    """The plan's batch over rising numbers of sockets."""
    what_ifs: tuple[WhatIf, ...]
    gpu_only: GpuOnly | None
    """None: the GPU alone can't run it."""
    hybrid: Hybrid | None
    """The plan's sockets, or all that there are, beside a GPU that holds what KV it can; None:
    there is no plan, or the GPU alone can't run it."""
    verdict: Verdict | None
    cost: Cost | None
    job: Job | None
    """Of the goal's requests, by the headline."""
    most_tokens_per_s: float
    """That any batch on R-workers gives: the plan gives nearly as many."""

    @property
    def headlines(self) -> tuple[Headline, ...]:
        """Each placement of the KV cache that can run."""
        found = []
        if self.gpu_only is not None:
            alone = self.gpu_only
            found.append(Headline("gpu", alone.tokens_per_s, 0, alone.batch, alone.tpot_s))
        if self.plan is not None:
            plan, step = self.plan, self.plan.expected
            rate, tpot_s = step.tokens_per_s, step.tpot_s
            found.append(Headline("r", rate, plan.sockets, plan.batch, tpot_s))
        both = self.hybrid
        if both is not None and both.away:
            rate, tpot_s = both.tokens_per_s, both.tpot_s
            found.append(Headline("hybrid", rate, both.sockets, both.batch, tpot_s))
        return tuple(found)

    @property
    def headline(self) -> Headline | None:
        """The placement with the most tokens a second; None: nothing can run."""
        return max(self.headlines, key=lambda each: each.tokens_per_s, default=None)

    @property
    def placement(self) -> str | None:
        """Of the KV cache, that gives most, by the rule that ``--kv-placement
        auto`` goes by; None: nothing can run."""
        return PlacementRates(
            gpu=None if self.gpu_only is None else self.gpu_only.tokens_per_s,
            r=None if self.plan is None else self.plan.expected.tokens_per_s,
            hybrid=None if self.hybrid is None else self.hybrid.tokens_per_s,
        ).best


def size(
    setup: Setup, goal: Goal, hardware: Hardware | None = None, prices: Prices | None = None
) -> Sizing:
    """Find the plan, and what surrounds it: the GPU alone, both sides, what-ifs, costs.

    Args:
        hardware: for the what-if of a faster NIC; None leaves it out.
        prices: for the cost of a million tokens.

    Raises:
        ConfigError: a profile doesn't fit the model, or a price is missing.
    """
    system = setup.system()
    search = Search(system, goal, goal.promises(system))
    plan, most = search.best()
    feasible = plan is not None
    in_the_way: tuple[Constraint, ...] = ()
    nearest = ""
    if plan is None:
        in_the_way, nearest, plan = diagnose(setup, search)
    gpu_only = best_gpu_only(system, search.promises.step_limit_s, goal.batch)
    hybrid = _both_sides(search, plan, gpu_only)
    sizing = Sizing(
        setup=setup,
        goal=goal,
        system=system,
        feasible=feasible,
        plan=plan,
        in_the_way=in_the_way,
        nearest=nearest,
        over_sockets=() if plan is None else _over_sockets(system, plan),
        what_ifs=() if plan is None else tuple(_what_ifs(setup, goal, plan, hardware)),
        gpu_only=gpu_only,
        hybrid=hybrid,
        verdict=None if plan is None else _verdict(setup, goal, plan, hybrid, gpu_only, prices),
        cost=None if plan is None or prices is None else _cost(setup, plan, gpu_only, prices),
        job=None,
        most_tokens_per_s=most,
    )
    if goal.requests is None or sizing.headline is None:
        return sizing
    num_tokens = goal.requests * setup.workload.output_tokens
    return replace(sizing, job=job(sizing, sizing.headline, num_tokens, prices))


# --- beside the plan
# --------------------------------------------------------------------------------------------------


def _both_sides(search: Search, plan: Plan | None, alone: GpuOnly | None) -> Hybrid | None:
    """With the plan's sockets, or with all that there are."""
    if plan is None or alone is None:
        return None
    goal, limit_s = search.goal, search.promises.step_limit_s
    sockets, part = plan.sockets, MOST_OF_GAIN
    if goal.max_sockets is not None:
        sockets, part = search.most_sockets, 1.0 / (1.0 + goal.gain)
    return best_hybrid(search.system, alone, sockets, limit_s, most_sequences=goal.batch, part=part)


def _over_sockets(system: System, plan: Plan) -> tuple[StepPrediction, ...]:
    """The plan's batch over sockets: powers of two up to twice the plan's, the
    plan's, and where the limit moves."""
    own = plan.sockets
    counts = {own, 2 * own, max(1, own // 2), max(1, own * 3 // 4)}
    counts |= {1 << i for i in range((2 * own).bit_length())}
    steps = {count: system.predict(plan.lane_batch, plan.lanes, count) for count in counts}
    known = sorted(steps)
    for low, high in itertools.pairwise(known):
        moved = _limit_moves(system, plan, low, high)
        if moved is not None:
            steps[moved] = system.predict(plan.lane_batch, plan.lanes, moved)
    return tuple(steps[count] for count in sorted(steps))


def _limit_moves(system: System, plan: Plan, low: int, high: int) -> int | None:
    """The first number of sockets in (low, high] with another limit than ``low``."""

    def limit(count: int) -> str:
        return system.predict(plan.lane_batch, plan.lanes, count).limit

    before = limit(low)
    if limit(high) == before:
        return None
    return smallest(lambda count: limit(count) != before, high, above=low)


def _what_ifs(setup: Setup, goal: Goal, plan: Plan, hardware: Hardware | None) -> Iterator[WhatIf]:
    """As many tokens a second with one thing changed at a time; the last one without offloading."""
    lanes = plan.lanes
    # Of a measured R-part nothing is known but in its own KV dtype.
    smaller = (
        ()
        if isinstance(setup.cpu, RProfile)
        else {"int8": ("int4",), "int4": ()}.get(setup.kv_dtype, ("int8", "int4"))
    )
    changes = [(f"KV cache in {each}", replace(setup, kv_dtype=each), lanes) for each in smaller]
    if lanes < MAX_LANES:
        changes.append((f"one lane more ({lanes + 1})", setup, lanes + 1))
    if lanes > 1:
        changes.append((f"one lane fewer ({lanes - 1})", setup, lanes - 1))
    if hardware is not None and isinstance(setup.nic, Nic):
        faster = hardware.faster_nic(setup.nic)
        if faster is not None:
            changes.append((f"NIC of {faster.name}", replace(setup, nic=faster), lanes))
    for change, changed, count in changes:
        yield _what_if(change, changed, goal, plan, count)
    if isinstance(setup.gpu, Gpu):
        yield _gpus_alone(setup.fp8_rival(), goal, f"{setup.gpu.name} alone, FP8 weights and KV")
        for num_gpus in split_counts(setup.spec, setup.num_gpus)[:1]:
            yield _gpus_alone(
                replace(setup, num_gpus=num_gpus), goal, f"{setup.gpu.name} alone, no offload"
            )


def _gpus_alone(setup: Setup, goal: Goal, how: str) -> WhatIf:
    system = setup.system()
    step_limit_s = system.step_limit_s(goal.latency_s, goal.tpot_s)
    alone = best_gpu_only(system, step_limit_s, goal.batch)
    change = f"{setup.num_gpus} x {how}"
    if alone is None:
        return WhatIf(change, None, None, None, "too small or too slow")
    return WhatIf(change, 0, alone.tokens_per_s, alone.tpot_s, counted(alone.batch, "sequence"))


def _what_if(change: str, setup: Setup, goal: Goal, plan: Plan, lanes: int) -> WhatIf:
    system, lane_batch = setup.system(), plan.lane_batch
    search = Search(system, replace(goal, max_sockets=None), goal.promises(system))
    rows = search.rows(lane_batch, lanes, plan.expected.tokens_per_s, search.promises)
    sockets = sockets_of(rows)
    if sockets is None:
        broken = ", ".join(row.name for row in rows if row.min_sockets is None)
        return WhatIf(change, None, None, None, f"not met: {broken}")
    step = system.predict(lane_batch, lanes, sockets + goal.survive)
    return WhatIf(change, step.sockets, step.tokens_per_s, step.tpot_s)


def _verdict(
    setup: Setup,
    goal: Goal,
    plan: Plan,
    hybrid: Hybrid | None,
    gpu_only: GpuOnly | None,
    prices: Prices | None,
) -> Verdict:
    """Of the better one of R-workers alone and both sides."""
    if gpu_only is None:
        alone = "the GPU alone can't: no room for even one sequence's KV cache, or not fast enough"
        return Verdict(True, float("inf"), float("inf"), alone)
    tokens_per_s, sockets, how = plan.expected.tokens_per_s, plan.sockets, ""
    if hybrid is not None and hybrid.away and hybrid.tokens_per_s > tokens_per_s:
        tokens_per_s, sockets, how = hybrid.tokens_per_s, hybrid.sockets, " on both sides"
    gain = tokens_per_s / gpu_only.tokens_per_s
    break_even = (gain - 1.0) * setup.num_gpus / sockets
    mine, alone = rate_text(tokens_per_s), rate_text(gpu_only.tokens_per_s)
    numbers = f"{mine} tokens/s{how} beside {alone} of the GPU alone"
    if prices is not None:
        socket_share = prices.socket(_cpu_name(setup)) / prices.gpu(_gpu_name(setup))
        reason = (
            f"{numbers}; a socket costs {socket_share:.2g} of a GPU, and may cost "
            f"{max(0.0, break_even):.2g} of one before the GPU alone gives cheaper tokens"
        )
        return Verdict(socket_share < break_even, gain, break_even, reason)
    owned = goal.max_sockets is not None
    if gain < _WORTH_IT or (break_even < CHEAPEST_SOCKET and not owned):
        worth = f"{numbers}: not worth {counted(sockets, 'socket')}"
        return Verdict(False, gain, break_even, worth)
    if owned:
        return Verdict(True, gain, break_even, numbers)
    reason = (
        f"{numbers}; it pays while a socket costs less than {break_even:.2g} of a GPU (--prices "
        "decides)"
    )
    return Verdict(True, gain, break_even, reason)


def _cost(setup: Setup, plan: Plan, gpu_only: GpuOnly | None, prices: Prices) -> Cost:
    per_hour, alone = _per_hour(setup, plan.sockets, prices), None
    if gpu_only is not None:
        alone = _per_hour(setup, 0, prices) / (gpu_only.tokens_per_s * 3600) * 1e6
    a_million = per_hour / (plan.expected.tokens_per_s * 3600) * 1e6
    return Cost(prices.currency, per_hour, a_million, alone)


def _per_hour(setup: Setup, sockets: int, prices: Prices) -> float:
    """Money for the GPUs and so many sockets. Raises ConfigError: a price is missing."""
    gpus = setup.num_gpus * prices.gpu(_gpu_name(setup))
    return gpus + (sockets * prices.socket(_cpu_name(setup)) if sockets else 0.0)


def job(sizing: Sizing, headline: Headline, num_tokens: float, prices: Prices | None) -> Job:
    """What so many output tokens take, where the rate is kept all the time.

    Raises:
        ConfigError: a price is missing.
    """
    setup, s, r = sizing.setup, sizing.system.s, sizing.system.r
    hours = num_tokens / headline.tokens_per_s / 3600.0
    power_w = s.power_w
    if headline.sockets and power_w is not None:
        power_w = None if r.power_w is None else power_w + headline.sockets * r.power_w
    return Job(
        hours,
        None if power_w is None else power_w * hours / 1000.0,
        None if prices is None else _per_hour(setup, headline.sockets, prices) * hours,
    )


def _gpu_name(setup: Setup) -> str:
    return setup.gpu.name if isinstance(setup.gpu, Gpu) else setup.gpu.machine.device


def _cpu_name(setup: Setup) -> str:
    return setup.cpu.name if hasattr(setup.cpu, "name") else setup.cpu.machine.cpu
