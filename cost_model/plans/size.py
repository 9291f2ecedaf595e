"""The planner: which batch, how many lanes, how many sockets, and whether to
offload at all.

How it chooses. A candidate is a lane's batch and a number of lanes; its sockets
are the most that any constraint (``constraints``) asks for. Of the
lanes, the fewest are taken, unless one more saves a fifth of the sockets. Of
the batches, the smallest is taken from which doubling gives less than
``min_gain`` more tokens a second, or would break a promise. If no candidate
keeps the GPU busy and every promise, the answer is "infeasible", with the
constraint that stands in the way and the nearest plan that can run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_model.hardware import Gpu, Hardware, Nic
from cost_model.plans.constraints import (
    BUSY,
    Constraint,
    best_effort_constraints,
    gpu_busy_constraints,
)
from cost_model.plans.gpu_only import GpuOnly, best_gpu_only
from cost_model.plans.hybrid import Hybrid, best_hybrid
from cost_model.plans.placement import PlacementRates
from cost_model.plans.question import Goal, Prices, Setup, split_counts
from cost_model.plans.search import Plan, choose, diagnose, find_plans, plan_of
from cost_model.predict import MAX_LANES, StepPrediction, System
from cost_model.quantities import counted, rate_text
from fastdecode.core.measurement import RProfile

# Without prices: no market sells a server socket with its memory for less than
# this part of a datacentre GPU.
CHEAPEST_SOCKET = 0.05


@dataclass(frozen=True)
class WhatIf:
    """The plan's batch with one thing changed."""

    change: str
    sockets: int | None
    """None: no number of sockets keeps the GPU busy then."""
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
    """Money, when prices are given."""

    currency: str
    per_hour: float
    per_million_tokens: float
    gpu_only_per_million_tokens: float | None


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
    """The plan's sockets beside a GPU that holds what KV it can; None: there is
    no plan, or the GPU alone can't run it."""
    verdict: Verdict | None
    cost: Cost | None

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
    """Find the plan, and everything one wants to know beside it.

    Args:
        hardware: for the what-if of a faster NIC; None leaves it out.
        prices: for the cost of a million tokens.

    Raises:
        ConfigError: a profile doesn't fit the model, or a price is missing.
    """
    system = setup.system()
    promises = goal.promises(system)
    # A single lane can't overlap with itself: who asks for one doesn't ask for a busy GPU.
    wanted = best_effort_constraints if goal.lanes == 1 else gpu_busy_constraints
    plan = choose(find_plans(system, goal, promises, wanted), goal.min_gain)
    feasible = plan is not None
    if plan is None:
        plan = choose(find_plans(system, goal, promises, best_effort_constraints), goal.min_gain)
    in_the_way, nearest = ((), "") if feasible else diagnose(setup, system, goal, promises, plan)
    gpu_only = best_gpu_only(system, promises.step_limit_s)
    verdict = None if plan is None else _verdict(setup, goal, plan, gpu_only, prices)
    return Sizing(
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
        hybrid=None
        if plan is None or gpu_only is None
        else best_hybrid(system, gpu_only, plan.sockets, promises.step_limit_s),
        verdict=verdict,
        cost=None
        if plan is None or prices is None
        else _cost(setup, system, plan, gpu_only, prices),
    )


# --- beside the plan
# --------------------------------------------------------------------------------------------------


def _over_sockets(system: System, plan: Plan) -> tuple[StepPrediction, ...]:
    """The plan's batch over sockets: powers of two up to twice the plan's, the
    plan's, and where the limit moves."""
    counts = {
        plan.sockets,
        2 * plan.sockets,
        max(1, plan.sockets // 2),
        max(1, plan.sockets * 3 // 4),
    }
    counts |= {1 << i for i in range((2 * plan.sockets).bit_length()) if 1 << i <= 2 * plan.sockets}
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

    if limit(low) == limit(high):
        return None
    before = limit(low)
    while high - low > 1:
        middle = (low + high) // 2
        if limit(middle) == before:
            low = middle
        else:
            high = middle
    return high


def _what_ifs(setup: Setup, goal: Goal, plan: Plan, hardware: Hardware | None) -> Iterator[WhatIf]:
    """The plan's batch with one thing changed at a time; the last one without offloading."""
    pinned = replace(goal, max_sockets=None)
    # Of a measured R-part nothing is known but in its own KV dtype.
    smaller = (
        ()
        if isinstance(setup.cpu, RProfile)
        else {"int8": ("int4",), "int4": ()}.get(setup.kv_dtype, ("int8", "int4"))
    )
    for kv_dtype in smaller:
        yield _what_if(
            f"KV cache in {kv_dtype}",
            replace(setup, kv_dtype=kv_dtype),
            pinned,
            plan.lane_batch,
            plan.lanes,
        )
    if plan.lanes < MAX_LANES:
        yield _what_if(
            f"one lane more ({plan.lanes + 1})", setup, pinned, plan.lane_batch, plan.lanes + 1
        )
    if plan.lanes > 2:
        yield _what_if(
            f"one lane fewer ({plan.lanes - 1})", setup, pinned, plan.lane_batch, plan.lanes - 1
        )
    faster = (
        hardware.faster_nic(setup.nic)
        if hardware is not None and isinstance(setup.nic, Nic)
        else None
    )
    if faster is not None:
        yield _what_if(
            f"NIC of {faster.name}", replace(setup, nic=faster), pinned, plan.lane_batch, plan.lanes
        )
    yield from _gpu_may_wait(setup, goal, plan)
    if isinstance(setup.gpu, Gpu):
        for num_gpus in split_counts(setup.spec, setup.num_gpus)[:1]:
            yield _gpus_alone(replace(setup, num_gpus=num_gpus), goal, setup.gpu.name)


def _gpu_may_wait(setup: Setup, goal: Goal, plan: Plan) -> Iterator[WhatIf]:
    """A busy GPU with a small batch gives fewer tokens than a waiting one with
    a large batch. Where a promise or the network keeps the batch small, say so:
    the plan with the fewest sockets near the most that is to be had."""
    system = setup.system()
    promises = goal.promises(system)
    plans: list[Plan] = []
    for each in find_plans(system, goal, promises, best_effort_constraints):
        plans.append(each)
        if each.lane_batch > 16 * plan.lane_batch:
            break
    most = max((each.expected.tokens_per_s for each in plans), default=0.0)
    if most < (1.0 + goal.min_gain) * plan.expected.tokens_per_s:
        return
    near = [each for each in plans if each.expected.tokens_per_s * (1.0 + goal.min_gain) >= most]
    best = min(near, key=lambda each: (each.sockets, each.batch))
    if (
        best.expected.tokens_per_s > plan.expected.tokens_per_s
        and best.expected.s_utilisation < BUSY
    ):
        change = f"{counted(best.lanes, 'lane')} of {best.lane_batch:,}, the GPU waiting"
        busy = f"GPU {best.expected.s_utilisation:.0%} busy"
        yield WhatIf(change, best.sockets, best.expected.tokens_per_s, best.expected.tpot_s, busy)


def _gpus_alone(setup: Setup, goal: Goal, gpu_name: str) -> WhatIf:
    system = setup.system()
    alone = best_gpu_only(system, system.step_limit_s(goal.latency_s, goal.tpot_s))
    change = f"{setup.num_gpus} x {gpu_name} alone, no offload"
    if alone is None:
        return WhatIf(change, None, None, None, "too small or too slow")
    return WhatIf(change, 0, alone.tokens_per_s, alone.tpot_s, counted(alone.batch, "sequence"))


def _what_if(change: str, setup: Setup, goal: Goal, lane_batch: int, lanes: int) -> WhatIf:
    system = setup.system()
    promises = goal.promises(system)
    rows = gpu_busy_constraints(system, lane_batch, lanes, promises)
    plan = plan_of(system, goal, lane_batch, lanes, rows)
    if plan is not None:
        return WhatIf(change, plan.sockets, plan.expected.tokens_per_s, plan.expected.tpot_s)
    broken = ", ".join(row.name for row in rows if row.min_sockets is None)
    return WhatIf(change, None, None, None, f"not met: {broken}")


def _verdict(
    setup: Setup, goal: Goal, plan: Plan, gpu_only: GpuOnly | None, prices: Prices | None
) -> Verdict:
    if gpu_only is None:
        alone = "the GPU alone can't: no room for even one sequence's KV cache, or not fast enough"
        return Verdict(True, float("inf"), float("inf"), alone)
    gain = plan.expected.tokens_per_s / gpu_only.tokens_per_s
    break_even = (gain - 1.0) * setup.num_gpus / plan.sockets
    mine, alone = rate_text(plan.expected.tokens_per_s), rate_text(gpu_only.tokens_per_s)
    numbers = f"{mine} tokens/s beside {alone} of the GPU alone"
    if prices is not None:
        socket_share = prices.socket(_cpu_name(setup)) / prices.gpu(_gpu_name(setup))
        offload = socket_share < break_even
        reason = (
            f"{numbers}; a socket costs {socket_share:.2g} of a GPU, and may cost "
            f"{max(0.0, break_even):.2g} of one before the GPU alone gives cheaper tokens"
        )
        return Verdict(offload, gain, break_even, reason)
    if gain < 1.0 + goal.min_gain or break_even < CHEAPEST_SOCKET:
        return Verdict(
            False, gain, break_even, f"{numbers}: not worth {counted(plan.sockets, 'socket')}"
        )
    reason = (
        f"{numbers}; it pays while a socket costs less than {break_even:.2g} of a GPU (--prices "
        "decides)"
    )
    return Verdict(True, gain, break_even, reason)


def _cost(
    setup: Setup, system: System, plan: Plan, gpu_only: GpuOnly | None, prices: Prices
) -> Cost:
    gpus_per_hour = setup.num_gpus * prices.gpu(_gpu_name(setup))
    per_hour = gpus_per_hour + plan.sockets * prices.socket(_cpu_name(setup))

    def per_million(money_per_hour: float, tokens_per_s: float) -> float:
        return money_per_hour / (tokens_per_s * 3600) * 1e6

    return Cost(
        currency=prices.currency,
        per_hour=per_hour,
        per_million_tokens=per_million(per_hour, plan.expected.tokens_per_s),
        gpu_only_per_million_tokens=None
        if gpu_only is None
        else per_million(gpus_per_hour, gpu_only.tokens_per_s),
    )


def _gpu_name(setup: Setup) -> str:
    return setup.gpu.name if isinstance(setup.gpu, Gpu) else setup.gpu.machine.device


def _cpu_name(setup: Setup) -> str:
    return setup.cpu.name if hasattr(setup.cpu, "name") else setup.cpu.machine.cpu
