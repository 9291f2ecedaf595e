"""The whole question, answered: a model on GPUs, requests, an SLO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_model.goodput.hardware import InstanceHardware
from cost_model.goodput.placements import Degrees, PlacementPrices
from cost_model.goodput.rates import Load
from cost_model.goodput.report import Answer, Nearest, queueing_notes
from cost_model.goodput.search import (
    Affinity,
    Objective,
    Search,
    plan_colocated,
    plan_high_affinity,
    plan_low_affinity,
)
from cost_model.goodput.simulator import simulate
from cost_model.quantities import counted
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

    def __post_init__(self) -> None:
        if not 1e-6 <= self.rate <= 1e6:
            raise ConfigError(
                f"--rate {self.rate!r} is not a number of requests a second from 1e-6 to 1e6"
            )


def answer(question: Question, progress: Callable[[str], object] = lambda _: None) -> Answer:
    """Search both ways.

    Raises:
        ConfigError: the model fits on no instance.
    """
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
    return Answer(
        question.model, question.load.slo, question.load.how, question.rate,
        hardware.cluster.num_gpus, question.prices, question.objective, apart, colocated, nearest,
        f"{system.s.name} ({system.s.provenance}), {system.r.name} ({system.r.provenance}), "
        f"{system.link.name} ({system.link.provenance})",
        question.described, tuple(_notes(search)), tuple(_limits(search, question)),
    )  # fmt: skip


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


def _notes(search: Search) -> list[str]:
    hardware, (one, *more) = search.hardware, search.degrees()
    prompt = [max(1, round(hardware.mean_prompt))]

    def prompt_s(degrees: Degrees) -> float:
        return hardware.prefill(degrees).times.prefill_s(prompt)

    twice = [each for each in more if each.pp == one.pp and each.tp == 2 * one.tp]
    two_gpus_s = prompt_s(twice[0]) if twice and one == Degrees(1, 1) else None
    batch = hardware.prefill(one).batch_tokens
    return [
        f"batches of prompts: up to {batch} tokens ({one})",
        *queueing_notes(prompt_s(one), two_gpus_s, search.rate),
    ]
