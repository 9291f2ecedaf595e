"""From hardware, requests and an SLO to a placement.

The instances of a phase carry the given rate at the least cost: ``⌈rate / goodput⌉`` of one kind.
The objective ``gpu`` counts GPUs before money. What an instance could carry beyond the rate is
worth nothing, and more sockets pay only where fewer instances do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from cost_model.goodput.instances import DecodeSpec, PrefillSpec
from cost_model.goodput.placements import Degrees, InstanceHardware, Pair, prompts_of
from cost_model.goodput.simulator import (
    GoodputRun,
    Load,
    greatest_rate,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import RequestTimes
from cost_model.numbers import largest, smallest, whole

Role = Literal["prefill", "decode", "both"]
Affinity = Literal["high", "low"]
Objective = Literal["gpu", "cost"]
Kind: TypeAlias = Role | Literal["pair"]
What: TypeAlias = Degrees | Pair
Run: TypeAlias = Callable[[list[tuple[float, int, int]], int], GoodputRun]
_SLACK = 1.25
"""Bounds from means are this much above what they say."""
_MAX_INSTANCES = 1 << 12
_MAX_BATCH = 1 << 16
STEP_TOKENS = 512
"""Prompt tokens in a step of an instance for both phases."""


@dataclass(frozen=True)
class Question:
    """``rate`` is in requests per second, ``described`` the requests in words. With low affinity a
    pair gets its part of ``sockets_per_node``. ``prices`` are those of a GPU and a socket."""

    model: str
    hardware: InstanceHardware
    load: Load
    rate: float
    affinity: Affinity = "high"
    sockets_per_node: int = 2
    objective: Objective = "gpu"
    prices: tuple[float, float] = (1.0, 0.05)
    described: str = ""

    def cost(self, gpus: int, sockets: int) -> tuple[float, float]:
        """Return what to minimise, the more important first."""
        price = self.price(gpus, sockets)
        return (gpus, price) if self.objective == "gpu" else (price, gpus)

    def price(self, gpus: int, sockets: int) -> float:
        return gpus * self.prices[0] + sockets * self.prices[1]


@dataclass(frozen=True)
class InstanceGroup:
    role: Role
    degrees: Degrees
    count: int
    sockets: int
    goodput: float
    """Requests per second of each, by itself."""

    @property
    def is_on_device(self) -> bool:
        """True if K and V are in the GPUs' memory while it decodes."""
        return self.role != "prefill" and not self.sockets

    @property
    def num_gpus(self) -> int:
        return self.count * self.degrees.num_gpus


@dataclass(frozen=True)
class PlacementPlan:
    kind: Literal["disaggregated", "colocated"]
    instances: tuple[InstanceGroup, ...]
    goodput: float
    """Requests per second that they carry."""
    asked: Question
    run: GoodputRun
    segments: int = 1
    """Nodes that a pair is spread over."""

    @property
    def num_gpus(self) -> int:
        return sum(each.num_gpus for each in self.instances)

    @property
    def num_sockets(self) -> int:
        return sum(each.count * each.sockets for each in self.instances)

    @cached_property
    def counted(self) -> list[RequestTimes]:
        """Requests of the run that decide whether the SLO is kept."""
        return self.run.counted(self.asked.load.residence_s)

    @property
    def attainment(self) -> float:
        return self.asked.load.slo.share(self.counted)

    @cached_property
    def keeps_slo(self) -> bool:
        is_here = self.num_gpus <= self.asked.hardware.num_gpus
        return is_here and self.asked.load.is_carried(self.run)

    @cached_property
    def quantiles(self) -> tuple[float, float]:
        return self.asked.load.slo.quantiles(self.counted)

    @property
    def binds(self) -> str:
        """The limit that the requests come nearer to."""
        (ttft_s, tpot_s), slo = self.quantiles, self.asked.load.slo
        return "ttft" if ttft_s / slo.ttft_s >= tpot_s / slo.tpot_s else "tpot"

    @property
    def goodput_per_gpu(self) -> float:
        return self.goodput / self.num_gpus

    def carried_by(self, gpus: int) -> float:
        """Return requests per second of such instances on this many GPUs. 0 if those do not hold
        one of each role."""
        first, *others = self.instances
        most = 0.0
        for count in range(1, gpus // first.degrees.num_gpus + 1):
            left, carried = gpus - count * first.degrees.num_gpus, count * first.goodput
            for other in others:
                num = count if self.segments > 1 else left // other.degrees.num_gpus
                fits = num * other.degrees.num_gpus <= left
                carried = min(carried, num * other.goodput) if fits else 0.0
            most = max(most, carried)
        return most

    @property
    def price(self) -> float:
        return self.asked.price(self.num_gpus, self.num_sockets)


@dataclass(frozen=True)
class Chosen:
    what: What
    sockets: int
    """Sockets of each that decodes. 0 if K and V are on its GPUs."""
    count: int


@dataclass
class Search:
    asked: Question
    progress: Callable[[str], object] = lambda _: None
    limits: dict[Degrees, tuple[int, int]] = field(default_factory=dict)
    """Where more sockets than there may be would do with fewer instances: the chosen number of
    sockets, and that number."""
    _num_found: int = 0
    _goodputs: dict[tuple[Kind, What, int], float] = field(default_factory=dict)

    def goodput(self, kind: Kind, what: What, sockets: int) -> float:
        """Return requests per second of one. 0 if it meets the SLO at no rate."""
        found = self._goodputs.get((kind, what, sockets))
        if found is None:
            run, most = self.simulated(kind, what, sockets)
            rate = self.asked.rate
            found = greatest_rate(self.asked.load, lambda r: run(r, 1), min(rate, most), rate)
            self._goodputs[kind, what, sockets] = found
        return found

    def fewest(self, kind: Kind, what: What, sockets: int, most: int) -> int:
        """Return the fewest, up to ``most``, that carry the rate together. 0 if none do."""
        run, most_each = self.simulated(kind, what, sockets)
        asked = self.asked
        least = whole(asked.rate / most_each)
        if least > most:
            return 0
        self._num_found += 1
        self.progress(f"{self._num_found} instances and pairs simulated")

        def carry(count: int) -> bool:
            # Of more than there are GPUs for, one is simulated with its part of the rate.
            together = count if count * what.num_gpus <= asked.hardware.num_gpus else 1
            requests = asked.load.requests(asked.rate * together / count)
            return asked.load.is_carried(run(requests, together))

        if most == _MAX_INSTANCES:
            # As many as one's goodput says. With queues of their own it may take some more.
            goodput = self.goodput(kind, what, sockets)
            most = whole(asked.rate / goodput) if goodput else 0
            while 0 < most < _MAX_INSTANCES and not carry(most):
                most += 1 + most // 8
        if most and carry(most):
            return smallest(carry, most, above=least - 1)
        return 0

    def simulated(self, kind: Kind, what: What, sockets: int) -> tuple[Run, float]:
        """Return what runs requests through a number of them, and about the most requests per
        second of one. Prompts alone are judged by TTFT, tokens alone by TPOT."""
        most, prefill, decode = math.inf, list[PrefillSpec](), list[DecodeSpec]()
        hardware = self.asked.hardware
        if kind != "decode":
            prefill = [hardware.prefill(what.prefill)]
            prompts = prompts_of(prefill[0].batch_tokens, hardware.mean_prompt)
            most = _SLACK * len(prompts) / prefill[0].times.prefill_s(prompts)
        if kind != "prefill":
            decode = [hardware.decode(what.decode, sockets)]
            most = min(most, self._max_decoding(decode[0]))
        if kind == "both":
            return lambda r, num: simulate_colocated(r, decode * num, STEP_TOKENS), most
        return lambda r, num: simulate(r, prefill * num, decode * num), most

    def _max_decoding(self, spec: DecodeSpec) -> float:
        """Return requests per second of the largest batch that keeps the TPOT at mean contexts."""
        draw, tpot_s = self.asked.load.draw, self.asked.load.slo.tpot_s
        context = round(draw.mean_prompt + draw.mean_output / 2)
        room = max(1, spec.capacity_tokens // round(draw.mean_prompt + draw.mean_output))
        most, num = 0.0, 1
        while num <= min(room, spec.max_sequences, _MAX_BATCH):
            step_s = float(spec.times.decode_s(num, num * context, 1)[0])
            if step_s > _SLACK * tpot_s and most:
                break
            most = max(most, 2 * num / step_s / draw.mean_output)
            num *= 2
        return _SLACK * most

    def degrees(self) -> list[Degrees]:
        hardware = self.asked.hardware
        found = [each for each in hardware.instances() if hardware.fits(each)]
        return sorted(found, key=lambda each: (each.num_gpus, each.pp))

    def _cost(self, chosen: Chosen) -> tuple[float, float]:
        count = chosen.count
        return self.asked.cost(count * chosen.what.num_gpus, count * chosen.sockets)

    def cheapest(
        self, kind: Kind, candidates: Iterable[tuple[What, int]], than: Chosen | None = None
    ) -> Chosen | None:
        """Return what carries the rate at the least cost, and below that of ``than``, or None. The
        candidates are instances or pairs, each with the sockets of one."""
        best, least = None, (math.inf, math.inf) if than is None else self._cost(than)
        for what, sockets in candidates:
            most = self._most_below(least, what, sockets)
            count = self.fewest(kind, what, sockets, most) if most else 0
            if count:
                best = Chosen(what, sockets, count)
                least = self._cost(best)
        return best

    def _most_below(self, least: tuple[float, float], what: What, sockets: int) -> int:
        """Return how many instances would still cost less. 0 if not even one."""
        return largest(lambda n: self._cost(Chosen(what, sockets, n)) < least, _MAX_INSTANCES)

    def choose(
        self, kind: Kind, whats: Sequence[What], sockets_per_node: int | None = None
    ) -> Chosen | None:
        """Return the cheapest, with K and V on GPUs or on R-workers, and set ``limits``. A node's
        instances share ``sockets_per_node`` by their GPUs. With None each may have any number."""
        best = self.cheapest(kind, self._with_sockets(whats, sockets_per_node))
        if best is not None:
            tried = {sockets for _, sockets in self._with_sockets([best.what], sockets_per_node)}
            every = self.asked.hardware.sockets(best.what.decode, limited=False)
            beyond = ((best.what, count) for count in every if count > max(tried))
            cheaper = self.cheapest(kind, beyond, best)
            if cheaper is not None:
                self.limits[best.what.decode] = best.sockets, cheaper.sockets
        return best

    def _with_sockets(
        self, whats: Iterable[What], sockets_per_node: int | None
    ) -> Iterator[tuple[What, int]]:
        share, hardware = None, self.asked.hardware
        for what in whats:
            if sockets_per_node is not None:
                share = sockets_per_node * what.num_gpus // hardware.gpus_per_node
            if hardware.fits_on_device(what.decode):
                yield what, 0
            for sockets in hardware.sockets(what.decode, share):
                yield what, sockets

    def group(self, role: Role, chosen: Chosen) -> InstanceGroup:
        """Return the instances of one role. One by itself carries at least its share."""
        what, sockets = chosen.what, 0 if role == "prefill" else chosen.sockets
        goodput = max(self.goodput(role, what, sockets), self.asked.rate / chosen.count)
        degrees = what.prefill if role == "prefill" else what.decode
        return InstanceGroup(role, degrees, chosen.count, sockets, goodput)

    def run(self, kind: Kind, chosen: Chosen) -> GoodputRun:
        run, _ = self.simulated(kind, chosen.what, chosen.sockets)
        return run(self.asked.load.requests(self.asked.rate), chosen.count)


def plan_colocated(search: Search, sockets_per_node: int | None = None) -> PlacementPlan | None:
    chosen = search.choose("both", search.degrees(), sockets_per_node)
    if chosen is None:
        return None
    group, run = search.group("both", chosen), search.run("both", chosen)
    return PlacementPlan("colocated", (group,), chosen.count * group.goodput, search.asked, run)


def plan_high_affinity(search: Search) -> PlacementPlan | None:
    """Plan each phase by itself, as algorithm 1 does, then as many of both as carry the rate
    together. None if a phase keeps its limit on no instance.

    Each phase alone keeps its limit for enough requests; both together may not. The phase that
    breaks more gets an instance more, a few times.
    """
    asked, degrees = search.asked, search.degrees()
    hardware, load = asked.hardware, asked.load
    best_prompts = search.cheapest("prefill", ((each, 0) for each in degrees))
    best_tokens = search.choose("decode", degrees) if best_prompts is not None else None
    if best_prompts is None or best_tokens is None:
        return None
    prefill, decode = search.group("prefill", best_prompts), search.group("decode", best_tokens)
    first = hardware.prefill(prefill.degrees)
    second = hardware.decode(decode.degrees, decode.sockets)
    requests = load.requests(asked.rate)
    while True:
        run = simulate(requests, [first] * prefill.count, [second] * decode.count)
        broken = [each for each in run.counted(load.residence_s) if not load.slo.is_met_by(each)]
        late = sum(each.ttft_s > load.slo.ttft_s for each in broken)
        is_first_late = 2 * late >= len(broken)
        more = prefill if is_first_late else decode
        used = prefill.num_gpus + decode.num_gpus + more.degrees.num_gpus
        if load.is_carried(run) or used > hardware.num_gpus:
            break
        more = replace(more, count=more.count + 1)
        prefill, decode = (more, decode) if is_first_late else (prefill, more)
    goodput = min(each.count * each.goodput for each in (prefill, decode))
    return PlacementPlan("disaggregated", (prefill, decode), goodput, asked, run)


def plan_low_affinity(search: Search, sockets_per_node: int) -> PlacementPlan | None:
    """Plan pairs whose segments stay on a node, as algorithm 2 has them, with their part of its
    sockets. None if no pair keeps the SLO."""
    asked = search.asked
    hardware = replace(asked.hardware, crosses_nodes=False)
    search = replace(search, asked=replace(asked, hardware=hardware), _goodputs={})
    every = sorted(hardware.pairs(), key=lambda each: (each.num_gpus, each))
    pairs = [each for each in every if hardware.fits(each.prefill) and hardware.fits(each.decode)]
    chosen = search.choose("pair", pairs, sockets_per_node)
    if chosen is None:
        return None
    pair = chosen.what
    assert isinstance(pair, Pair)
    roles: tuple[Role, ...] = ("prefill", "decode")
    run, groups = search.run("pair", chosen), tuple(search.group(role, chosen) for role in roles)
    goodput = max(asked.rate, chosen.count * search.goodput("pair", pair, chosen.sockets))
    return PlacementPlan("disaggregated", groups, goodput, asked, run, pair.pp_cross)
