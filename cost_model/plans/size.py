"""The planner: which batch, how many lanes and sockets, and whether to offload at all.

Beside the plan on R-workers (``search``) stand the GPU alone and both sides. The headline is what
the verdict recommends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import TypeAlias

from cost_model.hardware import Gpu, Hardware, Nic
from cost_model.numbers import at_most, smallest, whole
from cost_model.plans.constraints import (
    Constraint,
    fastest,
    s_worker_fits,
    sockets_for,
    sockets_with_room,
)
from cost_model.plans.placement import (
    MOST_OF_GAIN,
    GpuOnly,
    Hybrid,
    best_gpu_only,
    best_hybrid,
    gpu_only_on,
    hybrid_on,
    ranking,
)
from cost_model.plans.question import MAX_SOCKETS, Goal, Prices, Setup, split_counts
from cost_model.plans.search import Plan, Search, diagnose
from cost_model.predict import MAX_LANES, StepPrediction, System
from cost_model.printing import counted, rate_text
from fastdecode.core.measurement import RProfile

_Placed: TypeAlias = StepPrediction | Hybrid | GpuOnly
CHEAPEST_SOCKET = 0.05
"""No market sells a server socket with its memory for less than this part of a datacentre GPU."""
_WORTH_IT = 1.10
"""Times what the GPU alone gives."""
_NEARLY = 1.02
"""Times as much is too little for more sockets, or for more seconds a token."""


@dataclass(frozen=True)
class WhatIf:
    """The plan's sequences at the plan's pace, with one thing changed."""

    change: str
    sockets: int | None = None
    """None if no number of sockets keeps the plan's pace."""
    tokens_per_s: float | None = None
    tpot_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The recommendation: to offload, or to use the GPU alone."""

    offload: bool
    gain: float
    """Tokens a second, relative to the GPU alone; inf if the GPU alone can't run it."""
    break_even_socket_price: float
    """Price of a socket, in GPUs, at which both ways cost the same. 0 or less if there is none."""
    reason: str
    rival: WhatIf | None
    """The strongest GPU alone, in FP8, if it gives as much as what is recommended."""


@dataclass(frozen=True)
class Cost:
    currency: str
    per_hour: float
    per_million_tokens: float
    gpu_only_per_million_tokens: float | None


@dataclass(frozen=True)
class Job:
    hours: float
    kwh: float | None
    """GPUs and sockets at their rated power. None if a profile has none."""
    money: float | None


@dataclass(frozen=True)
class Pace:
    """Tokens a second of all sequences, and seconds a token of the slower side."""

    tokens_per_s: float
    tpot_s: float


@dataclass(frozen=True)
class Headline:
    kv_placement: str
    """gpu, r or hybrid."""
    tokens_per_s: float
    sockets: int
    batch: int
    tpot_s: float
    ttft_s: float
    """To the first token: half a step until the next one starts, the prompt, and a step."""
    latency_s: float
    fast: Pace
    """If every input is better than thought by its own error."""
    slow: Pace
    """If every input is worse than thought by its own error."""


@dataclass(frozen=True)
class Served:
    users: int
    think_s: float
    running: int
    requests_per_s: float
    queue_s: float
    """Seconds that a request waits for its start, beside what is running."""


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
    gpu_only: GpuOnly | None
    """None if the GPU alone can't run it."""
    hybrid: Hybrid | None
    """The plan's sockets, or all that there are, beside a GPU that holds what KV it can. None if
    there is no plan, or the GPU alone can't run it."""
    most_tokens_per_s: float
    """Most of any batch on R-workers. The plan gives nearly as many."""
    over_sockets: tuple[StepPrediction, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    verdict: Verdict | None = None
    cost: Cost | None = None
    job: Job | None = None
    served: Served | None = None

    @property
    def headlines(self) -> tuple[Headline, ...]:
        found, slow, fast = [], self.system.scaled(+1), self.system.scaled(-1)
        alone, plan, both = self.gpu_only, self.plan, self.hybrid
        if alone is not None:
            paces = (alone, gpu_only_on(fast, alone.batch), gpu_only_on(slow, alone.batch))
            found.append(self._headline("gpu", 0, alone.batch, *paces))
        if plan is not None and self.feasible:
            steps = (plan.expected, plan.fast, plan.slow)
            found.append(self._headline("r", plan.sockets, plan.batch, *steps))
        if both is not None and both.away:
            sides = (both, hybrid_on(fast, both), hybrid_on(slow, both))
            found.append(self._headline("hybrid", both.sockets, both.batch, *sides))
        return tuple(found)

    def _headline(self, where: str, sockets: int, batch: int, *placed: _Placed) -> Headline:
        pace, fast, slow = (Pace(each.tokens_per_s, each.tpot_s) for each in placed)
        ttft_s = self.system.prompt_s + 1.5 * pace.tpot_s
        latency_s = self.system.latency_s(pace.tpot_s)
        return Headline(
            where, pace.tokens_per_s, sockets, batch, pace.tpot_s, ttft_s, latency_s, fast, slow
        )

    @property
    def headline(self) -> Headline | None:
        """The placement that the verdict recommends. None if nothing can run."""
        found, verdict = self.headlines, self.verdict
        if verdict is not None:
            found = tuple(x for x in found if (x.kv_placement != "gpu") is verdict.offload)
        return self.preferred(found)

    def preferred(self, found: Iterable[Headline]) -> Headline | None:
        """Choose among placements within 2 % of the most tokens/s: the fewest sockets, then the
        fewest seconds a token. If sockets are at hand, the other way round."""
        is_owned, found = self.goal.max_sockets is not None, tuple(found)
        most = max((each.tokens_per_s for each in found), default=0.0) / _NEARLY
        near = (x for x in found if x.tokens_per_s >= most)
        at = attrgetter(*("tpot_s sockets" if is_owned else "sockets tpot_s").split())
        return min(near, key=at, default=None)

    @property
    def placement(self) -> str | None:
        """KV placement that gives most, as ``--kv-placement auto`` has it. None if none runs."""
        plan = self.plan.expected if self.plan else None
        placed = (("gpu", self.gpu_only), ("r", plan), ("hybrid", self.hybrid))
        rates = {name: each.tokens_per_s for name, each in placed if each is not None}
        return next(iter(ranking(rates)), None)


def size(
    setup: Setup, goal: Goal, hardware: Hardware | None = None, prices: Prices | None = None
) -> Sizing:
    """Find the plan, and what surrounds it: the GPU alone, both sides, what-ifs, costs. Raises
    ConfigError: If a profile doesn't fit the model, or a price is missing."""
    sizing = _size(setup, goal, hardware, prices)
    headline, users = sizing.headline, goal.users
    while headline is not None and users is not None:
        latency_s = headline.latency_s
        running = whole(users * latency_s / (latency_s + goal.think_s))
        if running >= headline.batch:
            most_per_s = headline.tokens_per_s / setup.workload.output_tokens
            rate = min(most_per_s, users / (latency_s + goal.think_s))
            queue_s = max(0.0, users / rate - goal.think_s - latency_s)
            served = Served(users, goal.think_s, min(headline.batch, users), rate, queue_s)
            return replace(sizing, goal=goal, served=served)
        # Fewer at once are faster, so that even fewer run at once.
        fewer = replace(goal, users=None, think_s=0.0, batch=running)
        sizing = _size(setup, fewer, hardware, prices)
        headline = sizing.headline
    return sizing


def _size(setup: Setup, goal: Goal, hardware: Hardware | None, prices: Prices | None) -> Sizing:
    system = setup.system()
    search = Search(system, goal)
    plan, most = search.best()
    in_the_way: tuple[Constraint, ...] = ()
    feasible, nearest = plan is not None, ""
    if plan is None:
        in_the_way, nearest, plan = diagnose(setup, search)
    gain = 0.10 if setup.is_without_gpu else 0.0
    limit_s, both = search.step_limit_s, None
    gpu_only = best_gpu_only(system, limit_s, goal.batch, gain)
    if plan is not None and gpu_only is not None and not setup.is_without_gpu:
        sockets, part = plan.sockets, MOST_OF_GAIN
        if goal.max_sockets is not None:
            sockets, part = search.most_sockets, 1.0 / (1.0 + goal.gain)
        both = best_hybrid(system, gpu_only, sockets, limit_s, most_sequences=goal.batch, part=part)
    sizing = Sizing(setup, goal, system, feasible, plan, in_the_way, nearest, gpu_only, both, most)
    if plan is not None:
        rivals = tuple(_rivals(setup, goal))
        sizing = replace(
            sizing,
            over_sockets=_over_sockets(system, plan),
            what_ifs=(*_what_ifs(search, setup, plan, hardware), *rivals),
            verdict=_verdict(sizing, next(iter(rivals), None), prices),
        )
    headline = sizing.headline
    if headline is not None and prices is not None:
        per_hour, alone = _per_hour(setup, headline.sockets, prices), None
        if gpu_only is not None:
            alone = _per_hour(setup, 0, prices) / (gpu_only.tokens_per_s * 3600) * 1e6
        a_million = per_hour / (headline.tokens_per_s * 3600) * 1e6
        sizing = replace(sizing, cost=Cost(prices.currency, per_hour, a_million, alone))
    if headline is not None and goal.requests is not None:
        num_tokens = goal.requests * setup.workload.output_tokens
        sizing = replace(sizing, job=job(sizing, headline, num_tokens, prices))
    return sizing


def _over_sockets(system: System, plan: Plan) -> tuple[StepPrediction, ...]:
    """Predict the plan's batch over sockets: powers of two up to twice the plan's, the
    plan's, and the counts at which the limit changes."""
    own = plan.sockets
    counts = {own, 2 * own, max(1, own // 2), max(1, own * 3 // 4)}
    counts |= {1 << i for i in range((2 * own).bit_length())}
    on = cache(partial(plan.on, system))

    def differs(limit: str, count: int) -> bool:
        return on(count).limit != limit

    for low, high in itertools.pairwise(sorted(counts)):
        if differs(on(low).limit, high):
            counts.add(smallest(partial(differs, on(low).limit), high, above=low))
    return tuple(map(on, sorted(counts)))


def what_if(search: Search, plan: Plan, change: str, setup: Setup, lanes: int) -> WhatIf:
    """Find the fewest sockets that run the plan's batch at the plan's own pace, and at that of a
    slow R-part."""
    system, goal, lane_batch = setup.system(), search.goal, -(-plan.batch // lanes)
    own = search.system.lane(plan.lane_batch, plan.sockets - plan.spare_sockets)
    own_s, slow_s = own.cycle_s(plan.lanes), own.cycle_s(plan.lanes, goal.headroom)
    if not s_worker_fits(system, lane_batch, lanes):
        return WhatIf(change, note="not met: S-worker memory")
    cycle_s = system.cycle_over(lane_batch, lanes)
    needs = (
        sockets_with_room(system, lane_batch, lanes, goal.replicas),
        sockets_for(cycle_s, own_s),
        sockets_for(system.cycle_over(lane_batch, lanes, goal.headroom), max(own_s, slow_s)),
    )
    working = max(count or MAX_SOCKETS for count in needs)
    if not at_most(cycle_s(working), own_s):
        best = system.lane(lane_batch, fastest(cycle_s, MAX_SOCKETS))
        return WhatIf(change, note=f"not met: {best.limit(lanes)}")
    sockets = working + goal.survive
    if goal.max_sockets is not None and sockets > goal.max_sockets:
        return WhatIf(change, note=f"not met: it needs {sockets:,} sockets")
    step = system.predict(lane_batch, lanes, sockets, plan.batch)
    return WhatIf(change, sockets, step.tokens_per_s, step.tpot_s)


def _what_ifs(
    search: Search, setup: Setup, plan: Plan, hardware: Hardware | None
) -> Iterator[WhatIf]:
    """Change one thing at a time, with the plan's sequences at the plan's pace."""
    lanes, ask = plan.lanes, partial(what_if, search, plan)
    # Of a measured R-part nothing is known but in its own KV dtype.
    if not isinstance(setup.cpu, RProfile):
        for kv_dtype in {"int8": ("int4",), "int4": ()}.get(setup.kv_dtype, ("int8", "int4")):
            changed = replace(setup, kv_dtype=kv_dtype)
            yield ask(f"KV cache in {kv_dtype}", changed, lanes)
    if lanes < min(MAX_LANES, plan.batch):
        yield ask(f"one lane more ({lanes + 1})", setup, lanes + 1)
    if lanes > 1:
        yield ask(f"one lane fewer ({lanes - 1})", setup, lanes - 1)
    if hardware is not None and isinstance(setup.nic, Nic):
        faster = hardware.faster_nic(setup.nic)
        if faster is not None:
            yield ask(f"NIC of {faster.name}", replace(setup, nic=faster), lanes)


def _rivals(setup: Setup, goal: Goal) -> Iterator[WhatIf]:
    if not isinstance(setup.gpu, Gpu) or setup.is_without_gpu:
        return
    yield _gpus_alone(setup.fp8_rival(), goal, f"{setup.gpu.name} alone, FP8 weights and KV")
    for num_gpus in split_counts(setup.spec, setup.num_gpus)[:1]:
        yield _gpus_alone(
            replace(setup, num_gpus=num_gpus), goal, f"{setup.gpu.name} alone, no offload"
        )


def _gpus_alone(setup: Setup, goal: Goal, how: str) -> WhatIf:
    system = setup.system()
    alone = best_gpu_only(system, Search(system, goal).step_limit_s, goal.batch)
    change = f"{setup.num_gpus} x {how}"
    if alone is None:
        return WhatIf(change, note="too small or too slow")
    return WhatIf(change, 0, alone.tokens_per_s, alone.tpot_s, counted(alone.batch, "sequence"))


def _verdict(sizing: Sizing, fp8: WhatIf | None, prices: Prices | None) -> Verdict | None:
    """Compare the better one of R-workers alone and both sides with the GPU alone. None if nothing
    keeps the promises."""
    setup, gpu_only, gpu = sizing.setup, sizing.gpu_only, sizing.setup.s_part_word
    offered = sizing.preferred(x for x in sizing.headlines if x.kv_placement != "gpu")
    if gpu_only is None:
        if offered is None:
            return None
        why = "no room for even one sequence's KV cache, or not fast enough"
        return Verdict(True, math.inf, math.inf, f"the {gpu} alone can't: {why}", None)
    if offered is None:
        return Verdict(False, 0.0, 0.0, f"only the {gpu} alone keeps the promises", None)
    tokens_per_s, sockets = offered.tokens_per_s, offered.sockets
    how = " on both sides" if offered.kv_placement == "hybrid" else ""
    gain = tokens_per_s / gpu_only.tokens_per_s
    break_even = (gain - 1.0) * setup.num_gpus / sockets
    mine, alone = rate_text(tokens_per_s), rate_text(gpu_only.tokens_per_s)
    reason = f"{mine} tokens/s{how} beside {alone} of the {gpu} alone"
    is_worth_it, owned = True, sizing.goal.max_sockets is not None
    if setup.is_without_gpu:
        is_worth_it = gain > 1 + sockets
        together = rate_text((1 + sockets) * gpu_only.tokens_per_s)
        reason += f"; {counted(1 + sockets, 'such socket')}, each alone, give {together}"
    elif prices is not None:
        socket_share = prices.of("socket", _cpu_name(setup)) / _gpu_price(setup, prices)
        is_worth_it = socket_share < break_even
        reason += (
            f"; a socket costs {socket_share:.2g} of a {gpu}, and may cost "
            f"{max(0.0, break_even):.2g} of one before the {gpu} alone gives cheaper tokens"
        )
    elif gain < _WORTH_IT or (break_even < CHEAPEST_SOCKET and not owned):
        is_worth_it = False
        reason += f": not worth {counted(sockets, 'socket')}"
    elif not owned:
        reason += (
            f"; it pays while a socket costs less than {break_even:.2g} of a {gpu} (--prices "
            "decides)"
        )
    best = max(tokens_per_s, gpu_only.tokens_per_s)
    is_rival = fp8 is not None and fp8.tokens_per_s is not None and fp8.tokens_per_s >= best
    return Verdict(is_worth_it, gain, break_even, reason, fp8 if is_rival else None)


def _per_hour(setup: Setup, sockets: int, prices: Prices) -> float:
    gpus = setup.num_gpus * _gpu_price(setup, prices)
    return gpus + (sockets * prices.of("socket", _cpu_name(setup)) if sockets else 0.0)


def job(sizing: Sizing, headline: Headline, num_tokens: float, prices: Prices | None) -> Job:
    """Return hours, energy and price of ``num_tokens`` output tokens at a constant rate."""
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


def _gpu_price(setup: Setup, prices: Prices) -> float:
    if setup.is_without_gpu:
        return prices.of("socket", _cpu_name(setup))
    gpu = setup.gpu
    return prices.of("gpu", gpu.name if isinstance(gpu, Gpu) else gpu.machine.device)


def _cpu_name(setup: Setup) -> str:
    return setup.cpu.name if hasattr(setup.cpu, "name") else setup.cpu.machine.cpu
