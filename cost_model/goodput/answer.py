"""Answer to a question of goodput (a model, GPUs, requests, an SLO): text, JSON, placement file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cost_model.goodput.placements import Degrees
from cost_model.goodput.search import (
    PlacementPlan,
    Question,
    Search,
    plan_colocated,
    plan_high_affinity,
    plan_low_affinity,
)
from cost_model.goodput.simulator import simulate
from cost_model.printing import counted, picked, round_to, seconds_text
from fastdecode.core.config.placement import PLACEMENT_FORMAT
from fastdecode.core.errors import ConfigError

_SLACK = 1.05
_NEARLY = 0.99
_QUIET = 1 << 10
"""At a rate this many times below the given one, requests hardly ever wait."""


@dataclass(frozen=True)
class Nearest:
    """A TTFT and a TPOT that can be kept, by requests that never wait."""

    ttft_s: float
    tpot_s: float
    sockets: int | None
    """Sockets of the instance that keeps the TPOT. 0 if its K and V are on the GPU. None if no
    instance decodes."""
    described: str


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
    def plans(self) -> list[PlacementPlan]:
        return [plan for plan in (self.disaggregated, self.colocated) if plan is not None]

    @property
    def best(self) -> PlacementPlan | None:
        """The cheapest that keeps the SLO: by GPUs, or by price. None if none does."""

        def cost(plan: PlacementPlan) -> tuple[float, float, bool]:
            gpus, sockets = plan.num_gpus, plan.num_sockets
            return (*self.question.cost(gpus, sockets), plan.kind == "disaggregated")

        return min((plan for plan in self.plans if plan.keeps_slo), key=cost, default=None)

    @property
    def verdict(self) -> str:
        best = self.best
        if best is None:
            return self._infeasible()
        other = self.colocated if best is self.disaggregated else self.disaggregated
        words = "disaggregate" if best.kind == "disaggregated" else "don't disaggregate"
        if other is None:
            return f"{words}: the other way, no instance keeps the SLO"
        if not other.keeps_slo:
            gpus = counted(other.num_gpus, "GPU")
            return f"{words}: the other way takes {gpus}, or misses the SLO"
        if hardware_text(best) == hardware_text(other):
            return f"{words}: either way takes {hardware_text(best)}"
        beside = f"{hardware_text(best)} instead of {hardware_text(other)}"
        if best.num_gpus == other.num_gpus:
            return f"{words}: {beside}"
        ratio = f"{round_to(best.goodput_per_gpu / other.goodput_per_gpu, 3):g}"
        return f"{words}: {ratio} times the goodput a GPU of the other way; {beside}"

    def _infeasible(self) -> str:
        if self.nearest is not None:
            kept = self.nearest.described
            return f"no instance keeps the SLO, at any rate; the nearest that one keeps: {kept}"
        gpus, rate = self.question.hardware.num_gpus, f"{self.question.rate:g} requests a second"
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
    """Search both ways. Raises ConfigError: If the model fits on no instance."""
    hardware = question.hardware
    search = Search(question, progress)
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
    load, hardware = search.asked.load, search.asked.hardware
    requests = load.requests(search.asked.rate / _QUIET)
    ttfts: list[float] = []
    tpots: list[tuple[float, Degrees, int, bool]] = []

    def tpot_on(degrees: Degrees, sockets: int) -> float:
        tokens = simulate(requests, [], [hardware.decode(degrees, sockets)])
        return load.slo.quantiles(tokens.times)[1]

    for degrees in search.degrees():
        prompts = simulate(requests, [hardware.prefill(degrees)], [])
        ttfts.append(load.slo.quantiles(prompts.times)[0])
        counts = hardware.sockets(degrees)
        for count in counts:
            tpot_s = tpot_on(degrees, count)
            if tpots and tpots[-1][1] == degrees and tpot_s > _NEARLY * tpots[-1][0]:
                break  # more sockets hardly help
            tpots.append((tpot_s, degrees, count, count == counts[-1]))
        if hardware.fits_on_device(degrees):
            tpots.append((tpot_on(degrees, 0), degrees, 0, False))
    ttft_s, tpot_s, sockets = max(load.slo.ttft_s, _SLACK * min(ttfts)), load.slo.tpot_s, None
    on = ""
    if tpots:
        least_s, degrees, sockets, is_last = min(tpots, key=lambda each: each[0])
        tpot_s = max(load.slo.tpot_s, _SLACK * least_s)
        on = f", the latter on {degrees} "
        on += f"and {counted(sockets, 'socket')}" if sockets else "with KV on the GPU"
        if is_last and _SLACK * least_s > load.slo.tpot_s:
            on += ", which are all that there may be: more make it shorter"
    limits = f"ttft={seconds_text(ttft_s)},tpot={seconds_text(tpot_s)}".replace(" ", "")
    return Nearest(ttft_s, tpot_s, sockets, limits + on)


def as_json(answer: Answer) -> dict[str, Any]:
    question, best = answer.question, answer.best
    return {
        "format": "fastdecode.plan.goodput",
        "version": 1,
        **picked(question, "model rate objective"),
        "slo": {**asdict(question.load.slo), "semantics": question.load.how},
        "verdict": answer.verdict,
        "chosen": best and best.kind,
        "nearest_slo_s": answer.nearest and (answer.nearest.ttft_s, answer.nearest.tpot_s),
        "nearest_sockets": answer.nearest and answer.nearest.sockets,
        "plans": {plan.kind: _plan_as_json(plan) for plan in answer.plans},
        "times": answer.provenance,
        "workload": question.described,
        "limits": answer.limits,
    }


def _plan_as_json(plan: PlacementPlan) -> dict[str, Any]:
    ttft_s, tpot_s = plan.quantiles
    return {
        "gpus": plan.num_gpus,
        "sockets": plan.num_sockets,
        **picked(plan, "price goodput_per_gpu"),
        "goodput_per_price": plan.goodput / plan.price,
        **picked(plan, "attainment keeps_slo"),
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
    question, slo = answer.question, answer.question.load.slo
    lines = [
        f"{question.model}: {question.rate:g} requests a second, of which {slo.attainment:.0%} are "
        f"to have their first token within {seconds_text(slo.ttft_s)}",
        f"and the others within {seconds_text(slo.tpot_s)} each ({question.load.how}); "
        f"{counted(question.hardware.num_gpus, 'GPU')}",
        question.described,
        "",
        f"  Verdict  {answer.verdict}",
        *(f"  Limit    {limit}" for limit in answer.limits),
    ]
    for plan in answer.plans:
        lines += ["", *_plan_lines(plan, is_best=plan is answer.best)]
    if explain:
        lines += ["", f"  Times     {answer.provenance}"]
        for plan in answer.plans:
            lines += _busy_lines(plan)
    return "\n".join(lines)


def _plan_lines(plan: PlacementPlan, *, is_best: bool) -> Iterator[str]:
    (ttft_s, tpot_s), asked = plan.quantiles, plan.asked
    yield f"  {plan.kind}{'  <- chosen' if is_best else ''}"
    for each in plan.instances:
        sockets = f", {counted(each.sockets, 'socket')} each" if each.sockets else ""
        sockets += ", KV on the GPU" if each.is_on_device else ""
        gpus = counted(each.degrees.num_gpus, "GPU")
        yield (
            f"    {each.count} x {each.role} ({each.degrees}: {gpus}{sockets}), "
            f"{round_to(each.goodput, 3):g} requests a second each"
        )
    yield (
        f"    {hardware_text(plan)}, price {round_to(plan.price, 3):g}; "
        f"{round_to(plan.goodput_per_gpu, 3):g} requests a second and GPU"
    )
    yield (
        f"    at {asked.rate:g} a second {plan.attainment:.1%} keep the SLO; at the "
        f"{asked.load.slo.attainment:.0%} quantile TTFT {seconds_text(ttft_s)}, TPOT "
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


def placement_file(plan: PlacementPlan) -> dict[str, Any]:
    asked = plan.asked
    return {
        "format": PLACEMENT_FORMAT,
        "model": asked.model,
        "instances": [
            {**picked(each, "role"), **asdict(each.degrees), "r_worker_sockets": each.sockets}
            for each in plan.instances
            for _ in range(each.count)
        ],
        "slo": asdict(asked.load.slo),
        "workload": {"rate": asked.rate, "described": asked.described},
    }
