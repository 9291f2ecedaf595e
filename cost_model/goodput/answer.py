"""The whole question, answered: a model on GPUs, requests, an SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cost_model.goodput.hardware import InstanceHardware
from cost_model.goodput.placements import Degrees, PlacementPlan, PlacementPrices
from cost_model.goodput.queueing import crossing, mean_ttft_s
from cost_model.goodput.rates import Load
from cost_model.goodput.search import (
    Affinity,
    Objective,
    Search,
    plan_colocated,
    plan_high_affinity,
    plan_low_affinity,
)
from cost_model.goodput.simulator import simulate
from cost_model.goodput.slo import Slo
from cost_model.numbers import number_within
from cost_model.quantities import counted, round_to, seconds_text
from fastdecode.core.errors import ConfigError

_SLACK = 1.05
_NEARLY = 0.99
_QUIET = 1 << 10
"""At a rate so many times below the asked one, requests hardly ever wait."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        sockets_per_node: of which a pair gets its part, with low affinity.
        described: the requests, in words.
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
        return self.hardware.cluster.num_gpus

    def __post_init__(self) -> None:
        number_within("rate", self.rate, 1e-6, 1e6, "number of requests a second")


@dataclass(frozen=True)
class Nearest:
    """A TTFT and a TPOT that could be kept, by requests that never wait."""

    ttft_s: float
    tpot_s: float
    degrees: Degrees
    """Of the instance that keeps the TPOT."""
    sockets: int | None
    """Of it; 0: its K and V are on the GPU; None: no instance decodes."""
    is_bound: bool
    """More sockets would make it shorter, and there may be none."""

    @property
    def told(self) -> str:
        """On what the TPOT is kept."""
        if self.sockets is None:
            return ""
        if not self.sockets:
            return f", the latter on {self.degrees} with KV on the GPU"
        more = ", which are all that there may be: more make it shorter" if self.is_bound else ""
        return f", the latter on {self.degrees} and {counted(self.sockets, 'socket')}{more}"


@dataclass(frozen=True)
class Answer:
    question: Question
    disaggregated: PlacementPlan | None
    colocated: PlacementPlan | None
    nearest: Nearest | None
    """Where no plan keeps the SLO."""
    provenance: str
    notes: tuple[str, ...]
    limits: tuple[str, ...]
    """Of the search, that bind."""

    @property
    def slo(self) -> Slo:
        return self.question.load.slo

    @property
    def plans(self) -> list[PlacementPlan]:
        return [plan for plan in (self.disaggregated, self.colocated) if plan is not None]

    def keeps(self, plan: PlacementPlan) -> bool:
        enough = plan.num_gpus <= self.question.num_gpus
        return enough and plan.is_carried

    @property
    def best(self) -> PlacementPlan | None:
        """The cheapest that keeps the SLO: by GPUs, or by price. None: none does."""
        fitting = [plan for plan in self.plans if self.keeps(plan)]
        return min(fitting, key=self._cost, default=None)

    def _cost(self, plan: PlacementPlan) -> tuple[float, float, bool]:
        gpus, price = float(plan.num_gpus), plan.price(self.question.prices)
        first, second = (gpus, price) if self.question.objective == "gpu" else (price, gpus)
        return first, second, plan.kind == "disaggregated"

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
        gpus, rate = self.question.num_gpus, f"{self.question.rate:g} requests a second"
        if self.nearest is not None:
            ttft, tpot = seconds_text(self.nearest.ttft_s), seconds_text(self.nearest.tpot_s)
            return (
                f"no instance keeps the SLO, at any rate; the nearest that one keeps: "
                f"ttft={ttft.replace(' ', '')},tpot={tpot.replace(' ', '')}{self.nearest.told}"
            )
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
    """Search both ways."""
    hardware = question.hardware
    search = Search(
        hardware, question.load, question.rate, question.objective, question.prices, progress
    )
    if not search.degrees():
        raise ConfigError(
            f"{question.model} fits on no instance of up to {hardware.cluster.num_gpus} GPUs: take "
            "larger GPUs, more a node, or a smaller dtype"
        )
    if question.affinity == "high":
        colocated = plan_colocated(search)
        apart = plan_high_affinity(search)
    else:
        colocated = plan_colocated(search, question.sockets_per_node)
        apart = plan_low_affinity(search, question.sockets_per_node)
    nearest = None if colocated or apart else _nearest(search)
    system = hardware.system(1)
    parts = (system.s, system.r, system.link)
    times = ", ".join(f"{part.name} ({part.provenance})" for part in parts)
    limits = tuple(_limits(search, question))
    return Answer(question, apart, colocated, nearest, times, tuple(_notes(search)), limits)


def _nearest(search: Search) -> Nearest:
    """What requests see where they never wait, on the instances that are best
    for each; the limits that are kept, as asked."""
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
    is_short = _SLACK * tpot_s > load.slo.tpot_s
    return Nearest(
        ttft_s, max(load.slo.tpot_s, _SLACK * tpot_s), degrees, sockets, is_short and is_last
    )


def _limits(search: Search, question: Question) -> list[str]:
    """Where the search ended before more sockets were of no use."""
    option = "--max-sockets"
    if question.affinity == "low":
        option = f"--sockets-per-node {question.sockets_per_node}"
    return [
        f"{option} binds: an instance ({degrees}) has {counted(few, 'socket')}, and with "
        f"{enough} each fewer instances would do"
        for degrees, (few, enough) in sorted(search.limits.items())
    ]


def _notes(search: Search) -> Iterator[str]:
    """What closed forms say of a mean prompt, and its batches."""
    hardware, (one, *more) = search.hardware, search.degrees()
    mean_prompt = [max(1, round(hardware.mean_prompt))]

    def prompt_s(degrees: Degrees) -> float:
        return hardware.prefill(degrees).times.prefill_s(mean_prompt)

    batch, prompt = hardware.prefill(one).batch_tokens, prompt_s(one)
    mean_s = mean_ttft_s(prompt, prompt, search.rate)
    mean = seconds_text(mean_s) if math.isfinite(mean_s) else "grows without end"
    yield f"batches of prompts: up to {batch} tokens ({one})"
    yield f"one GPU, prompts alone, closed form: mean TTFT {mean} at {search.rate:g}/s"
    two = Degrees(2, 1)
    speed_up = prompt / prompt_s(two) if one == Degrees(1, 1) and two in more else 0.0
    if 1.0 <= speed_up <= 2.0:
        below = round_to(crossing(speed_up) / prompt, 3)
        yield (
            f"two GPUs: tensor parallel is {round_to(speed_up, 3):g} times as fast, better than a "
            f"pipeline below {below:g} requests a second"
        )
