"""The whole question, answered: a model on GPUs, requests, an SLO. As text, JSON, or a placement
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cost_model.goodput.placements import Degrees, InstanceHardware
from cost_model.goodput.search import (
    Affinity,
    Objective,
    PlacementPlan,
    PlacementPrices,
    Search,
    plan_colocated,
    plan_high_affinity,
    plan_low_affinity,
)
from cost_model.goodput.simulator import Load, simulate
from cost_model.goodput.slo import Slo
from cost_model.printing import counted, picked, round_to, seconds_text
from fastdecode.core.config.placement import PLACEMENT_FORMAT
from fastdecode.core.errors import ConfigError

_SLACK = 1.05
_NEARLY = 0.99
_QUIET = 1 << 10
"""At a rate this many times below the given one, requests hardly ever wait."""


@dataclass(frozen=True)
class Question:
    """
    Args:
        sockets_per_node: With low affinity, a pair gets its part of these.
        described: The requests, in words.
    """

    model: str
    hardware: InstanceHardware
    load: Load
    rate: float
    affinity: Affinity
    sockets_per_node: int
    objective: Objective
    prices: PlacementPrices
    described: str

    @property
    def num_gpus(self) -> int:
        return self.hardware.num_gpus


@dataclass(frozen=True)
class Nearest:
    """A TTFT and a TPOT that can be kept, by requests that never wait."""

    ttft_s: float
    tpot_s: float
    degrees: Degrees
    """Degrees of the instance that keeps the TPOT."""
    sockets: int | None
    """Its sockets. 0 if its K and V are on the GPU. None if no instance decodes."""
    is_bound: bool
    """True if more sockets would make the TPOT shorter, and there may be none."""

    def __str__(self) -> str:
        ttft, tpot = seconds_text(self.ttft_s), seconds_text(self.tpot_s)
        limits = f"ttft={ttft.replace(' ', '')},tpot={tpot.replace(' ', '')}"
        if self.sockets is None:
            return limits
        if not self.sockets:
            return f"{limits}, the latter on {self.degrees} with KV on the GPU"
        more = ", which are all that there may be: more make it shorter" if self.is_bound else ""
        sockets = counted(self.sockets, "socket")
        return f"{limits}, the latter on {self.degrees} and {sockets}{more}"


@dataclass(frozen=True)
class Answer:
    question: Question
    disaggregated: PlacementPlan | None
    colocated: PlacementPlan | None
    nearest: Nearest | None
    """Set if no plan keeps the SLO."""
    provenance: str
    limits: tuple[str, ...]
    """Limits of the search that bind."""

    @property
    def slo(self) -> Slo:
        return self.question.load.slo

    @property
    def plans(self) -> list[PlacementPlan]:
        return [plan for plan in (self.disaggregated, self.colocated) if plan is not None]

    def keeps(self, plan: PlacementPlan) -> bool:
        """True if the plan keeps the SLO on the GPUs at hand."""
        return plan.num_gpus <= self.question.num_gpus and plan.is_carried

    @property
    def best(self) -> PlacementPlan | None:
        """The cheapest that keeps the SLO: by GPUs, or by price. None if none does."""

        def cost(plan: PlacementPlan) -> tuple[float, float, bool]:
            gpus, price = float(plan.num_gpus), plan.price(self.question.prices)
            first, second = (gpus, price) if self.question.objective == "gpu" else (price, gpus)
            return first, second, plan.kind == "disaggregated"

        return min((plan for plan in self.plans if self.keeps(plan)), key=cost, default=None)

    @property
    def verdict(self) -> str:
        best = self.best
        if best is None:
            return self._infeasible()
        other = self.colocated if best is self.disaggregated else self.disaggregated
        words = "disaggregate" if best.kind == "disaggregated" else "don't disaggregate"
        if other is None:
            return f"{words}: the other way, no instance keeps the SLO"
        if not self.keeps(other):
            return (
                f"{words}: the other way takes {counted(other.num_gpus, 'GPU')}, or misses the SLO"
            )
        if hardware_text(best) == hardware_text(other):
            return f"{words}: either way takes {hardware_text(best)}"
        ratio = f"{round_to(best.gpu_goodput / other.gpu_goodput, 3):g}"
        beside = f"{hardware_text(best)} instead of {hardware_text(other)}"
        if best.num_gpus == other.num_gpus:
            return f"{words}: {beside}"
        return f"{words}: {ratio} times the goodput a GPU of the other way; {beside}"

    def _infeasible(self) -> str:
        if self.nearest is not None:
            return (
                "no instance keeps the SLO, at any rate; the nearest that one keeps: "
                f"{self.nearest}"
            )
        gpus, rate = self.question.num_gpus, f"{self.question.rate:g} requests a second"
        least = min(plan.num_gpus for plan in self.plans)
        if least <= gpus:
            return f"the SLO is missed at {rate}; try a lower --rate"
        most = round_to(max(plan.carried_by(gpus) for plan in self.plans), 3)
        carried = f"which carry about {most:g}: give more, or lower --rate"
        too_few = "too few for any instance that keeps the SLO: give more"
        needed = f"{rate} take {counted(least, 'GPU')} and there are {gpus}"
        return f"{needed}, {carried if most else too_few}"


def hardware_text(plan: PlacementPlan) -> str:
    sockets = f" and {counted(plan.num_sockets, 'socket')}" if plan.num_sockets else ""
    return f"{counted(plan.num_gpus, 'GPU')}{sockets}"


def answer(question: Question, progress: Callable[[str], object] = lambda _: None) -> Answer:
    """Search both ways.

    Raises:
        ConfigError: If the model fits on no instance.
    """
    hardware = question.hardware
    search = Search(
        hardware, question.load, question.rate, question.objective, question.prices, progress
    )
    if not search.degrees():
        raise ConfigError(
            f"{question.model} fits on no instance of up to {hardware.num_gpus} GPUs: take "
            "larger GPUs, more a node, or a smaller dtype"
        )
    if question.affinity == "high":
        option = "--max-sockets"
        colocated = plan_colocated(search)
        apart = plan_high_affinity(search)
    else:
        option = f"--sockets-per-node {question.sockets_per_node}"
        colocated = plan_colocated(search, question.sockets_per_node)
        apart = plan_low_affinity(search, question.sockets_per_node)
    nearest = None if colocated or apart else _nearest(search)
    system = hardware.system(1)
    parts = (system.s, system.r, system.link)
    times = ", ".join(f"{part.name} ({part.provenance})" for part in parts)
    limits = tuple(
        f"{option} binds: an instance ({degrees}) has {counted(few, 'socket')}, and with "
        f"{enough} each fewer instances would do"
        for degrees, (few, enough) in sorted(search.limits.items())
    )
    return Answer(question, apart, colocated, nearest, times, limits)


def _nearest(search: Search) -> Nearest:
    """Return what requests see that never wait, on the instances that are best for each limit. A
    limit that is kept stays as given."""
    load, hardware = search.load, search.hardware
    requests = load.requests(search.rate / _QUIET)
    ttfts: list[float] = []
    tpots: list[tuple[float, Degrees, int, bool]] = []

    def tpot_on(degrees: Degrees, sockets: int) -> float:
        tokens = simulate(requests, [], [hardware.decode(degrees, sockets)])
        return load.slo.quantiles(tokens.times)[1]

    for degrees in search.degrees():
        prompts = simulate(requests, [hardware.prefill(degrees)], [])
        ttfts.append(load.slo.quantiles(prompts.times)[0])
        counts = hardware.sockets(degrees)
        for sockets in counts:
            tpot_s = tpot_on(degrees, sockets)
            if tpots and tpots[-1][1] == degrees and tpot_s > _NEARLY * tpots[-1][0]:
                break  # more sockets hardly help
            tpots.append((tpot_s, degrees, sockets, sockets == counts[-1]))
        if hardware.fits_on_device(degrees):
            tpots.append((tpot_on(degrees, 0), degrees, 0, False))
    ttft_s = max(load.slo.ttft_s, _SLACK * min(ttfts))
    if not tpots:
        return Nearest(ttft_s, load.slo.tpot_s, search.degrees()[0], None, False)
    tpot_s, degrees, sockets, is_last = min(tpots, key=lambda each: each[0])
    is_bound = is_last and _SLACK * tpot_s > load.slo.tpot_s
    return Nearest(ttft_s, max(load.slo.tpot_s, _SLACK * tpot_s), degrees, sockets, is_bound)


def as_json(answer: Answer) -> dict[str, Any]:
    question, best = answer.question, answer.best
    return {
        "format": "fastdecode.plan.goodput",
        "version": 1,
        **picked(question, "model rate objective"),
        "slo": {**asdict(answer.slo), "semantics": question.load.how},
        "verdict": answer.verdict,
        "chosen": best and best.kind,
        "nearest_slo_s": answer.nearest and (answer.nearest.ttft_s, answer.nearest.tpot_s),
        "nearest_sockets": answer.nearest and answer.nearest.sockets,
        "plans": {plan.kind: _plan_as_json(plan, answer) for plan in answer.plans},
        "times": answer.provenance,
        "workload": question.described,
        "limits": answer.limits,
    }


def _plan_as_json(plan: PlacementPlan, answer: Answer) -> dict[str, Any]:
    price, (ttft_s, tpot_s) = plan.price(answer.question.prices), plan.quantiles
    return {
        "gpus": plan.num_gpus,
        "sockets": plan.num_sockets,
        "price": price,
        "goodput_per_gpu": plan.gpu_goodput,
        "goodput_per_price": plan.goodput / price,
        "attainment": plan.share,
        "keeps_slo": answer.keeps(plan),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        **picked(plan, "goodput binds segments"),
        **picked(plan.run, "prefill_busy decode_busy"),
        "port_busy": plan.run.link_busy,
        "most_buffered_tokens": plan.run.most_buffered,
        "instances": [
            {**picked(each, "role count sockets goodput"), **asdict(each.degrees)}
            for each in plan.instances
        ],
    }


def as_text(answer: Answer, *, explain: bool = False) -> str:
    """Return the answer for people. ``explain`` adds what it follows from."""
    slo, question = answer.slo, answer.question
    lines = [
        f"{question.model}: {question.rate:g} requests a second, of which {slo.attainment:.0%} are "
        f"to have their first token within {seconds_text(slo.ttft_s)}",
        f"and the others within {seconds_text(slo.tpot_s)} each ({question.load.how}); "
        f"{counted(question.num_gpus, 'GPU')}",
        question.described,
        "",
        f"  Verdict  {answer.verdict}",
        *(f"  Limit    {limit}" for limit in answer.limits),
    ]
    for plan in answer.plans:
        lines += ["", *_plan_lines(plan, answer)]
    if explain:
        lines += ["", f"  Times     {answer.provenance}"]
        for plan in answer.plans:
            lines += _busy_lines(plan)
    return "\n".join(lines)


def _plan_lines(plan: PlacementPlan, answer: Answer) -> Iterator[str]:
    ttft_s, tpot_s = plan.quantiles
    yield f"  {plan.kind}{'  <- chosen' if plan is answer.best else ''}"
    for each in plan.instances:
        sockets = f", {counted(each.sockets, 'socket')} each" if each.sockets else ""
        sockets += ", KV on the GPU" if each.is_on_device else ""
        gpus = counted(each.degrees.num_gpus, "GPU")
        yield (
            f"    {each.count} x {each.role} ({each.degrees}: {gpus}{sockets}), "
            f"{round_to(each.goodput, 3):g} requests a second each"
        )
    yield (
        f"    {hardware_text(plan)}, price {round_to(plan.price(answer.question.prices), 3):g}; "
        f"{round_to(plan.gpu_goodput, 3):g} requests a second and GPU"
    )
    yield (
        f"    at {answer.question.rate:g} a second {plan.share:.1%} keep the SLO; at the "
        f"{answer.slo.attainment:.0%} quantile TTFT {seconds_text(ttft_s)}, TPOT "
        f"{seconds_text(tpot_s)}; {plan.binds} binds"
    )


def _busy_lines(plan: PlacementPlan) -> Iterator[str]:
    run = plan.run
    if plan.kind == "colocated":
        yield f"  Busy      instances for both {_mean(run.decode_busy)}"
        return
    yield (
        f"  Busy      prefill {_mean(run.prefill_busy)}, decode {_mean(run.decode_busy)}, prefill "
        f"hosts' ports {_mean(run.link_busy)}"
    )
    yield f"  Buffer    at most {run.most_buffered:,} tokens on a prefill instance"


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / max(1, len(shares)):.0%}"


def placement_file(answer: Answer) -> dict[str, Any]:
    plan = answer.best
    assert plan is not None
    return {
        "format": PLACEMENT_FORMAT,
        "model": answer.question.model,
        "instances": [
            {**picked(each, "role"), **asdict(each.degrees), "r_worker_sockets": each.sockets}
            for each in plan.instances
            for _ in range(each.count)
        ],
        "slo": asdict(answer.slo),
        "workload": {"rate": answer.question.rate, "described": answer.question.described},
    }
