"""From hardware, requests and an SLO to a placement.

The instances of a phase carry the asked rate at the least cost: ``⌈rate / goodput⌉`` of one kind.
The objective ``gpu`` counts GPUs before money. What an instance could carry beyond the rate is
worth nothing, and more sockets pay only where fewer instances do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from cost_model.goodput.hardware import InstanceHardware, prompts_of
from cost_model.goodput.placements import (
    Degrees,
    InstanceGroup,
    Pair,
    PlacementPlan,
    PlacementPrices,
)
from cost_model.goodput.rates import Load, greatest_rate
from cost_model.goodput.simulator import (
    DecodeSpec,
    GoodputRun,
    PrefillSpec,
    simulate,
    simulate_colocated,
)
from cost_model.numbers import largest, smallest, whole

Role = Literal["prefill", "decode", "both"]
Affinity = Literal["high", "low"]
Objective = Literal["gpu", "cost"]
What: TypeAlias = Degrees | Pair
Requests: TypeAlias = list[tuple[float, int, int]]
_SLACK = 1.25
"""Bounds from means are this much above what they say."""
_MOST_INSTANCES = 1 << 12
_MAX_BATCH = 1 << 16
STEP_TOKENS = 512
"""Of prompts in a step of an instance for both phases."""


@dataclass(frozen=True)
class Simulated:
    run: Callable[[Requests, int], GoodputRun]
    """Requests through so many of them."""
    most: float
    """Requests a second of one: about a bound of what it carries."""


@dataclass
class Phase:
    """Instances of one kind, with so many sockets each: how many carry the rate."""

    load: Load
    rate: float
    """The asked requests a second: more counts for nothing."""
    num_gpus: int
    """That there are. Of more than fit on them, one is simulated with its part of the rate."""
    simulated: Callable[[What, int], Simulated]
    progress: Callable[[], object] = lambda: None
    _goodputs: dict[tuple[What, int], float] = field(default_factory=dict)

    def goodput(self, what: What, sockets: int) -> float:
        """Requests a second of one; 0: it doesn't meet the SLO at any rate."""
        found = self._goodputs.get((what, sockets))
        if found is None:
            one = self.simulated(what, sockets)
            most = min(self.rate, one.most)
            found = greatest_rate(self.load, lambda r: one.run(r, 1), most, self.rate)
            self._goodputs[what, sockets] = found
        return found

    def fewest(self, what: What, sockets: int, most: int) -> int:
        """The fewest of up to ``most`` that carry the rate together; 0: none do."""
        one = self.simulated(what, sockets)
        least = whole(self.rate / one.most)
        if least > most:
            return 0
        self.progress()

        def carry(count: int) -> bool:
            together = count if count * what.num_gpus <= self.num_gpus else 1
            requests = self.load.requests(self.rate * together / count)
            return self.load.is_carried(one.run(requests, together))

        if most == _MOST_INSTANCES:
            most = self._enough(what, sockets, carry)
        if most and carry(most):
            return smallest(carry, most, above=least - 1)
        return 0

    def _enough(self, what: What, sockets: int, carry: Callable[[int], bool]) -> int:
        """How many do, by what one carries. With queues of their own it may take some more."""
        goodput = self.goodput(what, sockets)
        count = whole(self.rate / goodput) if goodput else 0
        while 0 < count < _MOST_INSTANCES and not carry(count):
            count += 1 + count // 8
        return count


@dataclass(frozen=True)
class Chosen:
    what: What
    sockets: int
    """Of each that decodes; 0: K and V are on its GPUs."""
    count: int


@dataclass
class Search:
    hardware: InstanceHardware
    load: Load
    rate: float
    """Requests a second that are to be carried."""
    objective: Objective = "gpu"
    prices: PlacementPrices = field(default_factory=PlacementPrices)
    progress: Callable[[str], object] = lambda _: None
    limits: dict[Degrees, tuple[int, int]] = field(default_factory=dict)
    """Where fewer instances would do with more sockets than there may be: how many
    are taken, and with how many they would."""
    _num_found: int = 0

    def phase(self, kind: Role | Literal["pair"]) -> Phase:
        """Prompts alone, by TTFT; tokens alone, by TPOT; or both, by both."""
        of: dict[str, Callable[[What, int], Simulated]] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "both": self._both,
            "pair": self._pair,
        }
        return Phase(self.load, self.rate, self.hardware.cluster.num_gpus, of[kind], self._tell)

    def _tell(self) -> None:
        self._num_found += 1
        self.progress(f"{self._num_found} instances and pairs simulated")

    def _prefill(self, what: What, _: int = 0) -> Simulated:
        spec = self.hardware.prefill(what.prefill)
        return Simulated(lambda r, num: simulate(r, [spec] * num, []), self._most_prompts(spec))

    def _decode(self, what: What, sockets: int) -> Simulated:
        spec = self.hardware.decode(what.decode, sockets)
        return Simulated(lambda r, num: simulate(r, [], [spec] * num), self._most_decoding(spec))

    def _both(self, what: What, sockets: int) -> Simulated:
        spec = self.hardware.decode(what.decode, sockets)
        most = min(self._prefill(what).most, self._decode(what, sockets).most)
        return Simulated(lambda r, num: simulate_colocated(r, [spec] * num, STEP_TOKENS), most)

    def _pair(self, what: What, sockets: int) -> Simulated:
        prefill = self.hardware.prefill(what.prefill)
        decode = self.hardware.decode(what.decode, sockets)
        most = min(self._prefill(what).most, self._decode(what, sockets).most)
        return Simulated(lambda r, num: simulate(r, [prefill] * num, [decode] * num), most)

    def _most_prompts(self, spec: PrefillSpec) -> float:
        """Requests a second, if it never had to wait for one: a bound."""
        prompts = prompts_of(spec.batch_tokens, self.hardware.mean_prompt)
        return _SLACK * len(prompts) / spec.times.prefill_s(prompts)

    def _most_decoding(self, spec: DecodeSpec) -> float:
        """Requests a second of the largest batch that keeps the TPOT at mean
        contexts: about a bound."""
        draw, tpot_s = self.load.draw, self.load.slo.tpot_s
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
        """Of instances that hold the model, the smallest first."""
        found = [each for each in self.hardware.cluster.instances() if self.hardware.fits(each)]
        return sorted(found, key=lambda each: (each.num_gpus, each.pp))

    def _cost(self, what: What, sockets: int, count: int) -> tuple[float, float]:
        gpus = count * what.num_gpus
        price = self.prices.of(gpus, count * sockets)
        return (gpus, price) if self.objective == "gpu" else (price, gpus)

    def cheapest(
        self, phase: Phase, candidates: Iterable[tuple[What, int]], than: Chosen | None = None
    ) -> Chosen | None:
        """That carries the rate at the least cost; None: none meets the SLO, or is cheaper.

        Args:
            candidates: instances, or pairs, and the sockets of each.
            than: what has to be cheaper.
        """
        best, least = None, (math.inf, math.inf)
        if than is not None:
            least = self._cost(than.what, than.sockets, than.count)
        for what, sockets in candidates:
            most = self._most_below(least, what, sockets)
            count = phase.fewest(what, sockets, most) if most else 0
            if count:
                best = Chosen(what, sockets, count)
                least = self._cost(what, sockets, count)
        return best

    def _most_below(self, least: tuple[float, float], what: What, sockets: int) -> int:
        """How many instances would still cost less; 0: not even one."""
        return largest(lambda count: self._cost(what, sockets, count) < least, _MOST_INSTANCES)

    def choose(
        self, phase: Phase, whats: Sequence[What], sockets_per_node: int | None = None
    ) -> Chosen | None:
        """The cheapest, with K and V on GPUs or on R-workers. Where more sockets than there may be
        would make them cheaper, ``limits`` has them.

        Args:
            sockets_per_node: an instance may have its share of them, by its part of a node's
                GPUs; None: all that there may be of one.
        """
        best = self.cheapest(phase, self._with_sockets(whats, sockets_per_node))
        if best is not None:
            there = {sockets for _, sockets in self._with_sockets([best.what], sockets_per_node)}
            every = self.hardware.sockets(best.what.decode, limited=False)
            beyond = ((best.what, count) for count in every if count > max(there))
            cheaper = self.cheapest(phase, beyond, best)
            if cheaper is not None:
                self.limits[best.what.decode] = best.sockets, cheaper.sockets
        return best

    def _with_sockets(
        self, whats: Iterable[What], sockets_per_node: int | None
    ) -> Iterator[tuple[What, int]]:
        gpus_per_node, share = self.hardware.gpus_per_node, None
        for what in whats:
            if sockets_per_node is not None:
                share = sockets_per_node * what.num_gpus // gpus_per_node
            if self.hardware.fits_on_device(what.decode):
                yield what, 0
            for sockets in self.hardware.sockets(what.decode, share):
                yield what, sockets


def plan_colocated(search: Search, sockets_per_node: int | None = None) -> PlacementPlan | None:
    """Instances for both phases. None: none keeps the SLO.

    Args:
        sockets_per_node: an instance gets the part of them that its GPUs are of
            a node's. None: as many as are best.
    """
    phase, requests = search.phase("both"), search.load.requests(search.rate)
    chosen = search.choose(phase, search.degrees(), sockets_per_node)
    if chosen is None:
        return None
    outcome = phase.simulated(chosen.what, chosen.sockets).run(requests, chosen.count)
    group = _group(search, "both", phase, chosen)
    goodput = chosen.count * group.goodput
    return PlacementPlan("colocated", (group,), goodput, search.load, outcome)


def _group(search: Search, role: Role, phase: Phase, chosen: Chosen) -> InstanceGroup:
    """The instances of one role, with what one of them carries by itself: at least its share."""
    what, sockets = chosen.what, 0 if role == "prefill" else chosen.sockets
    goodput = max(phase.goodput(what, sockets), search.rate / chosen.count)
    degrees = what.prefill if role == "prefill" else what.decode
    return InstanceGroup(role, degrees, chosen.count, sockets, goodput)


def plan_high_affinity(search: Search) -> PlacementPlan | None:
    """Each phase by itself, as algorithm 1 does, then as many of both as carry the rate
    together. None: a phase keeps its limit on no instance."""
    degrees = search.degrees()
    prompts, tokens = search.phase("prefill"), search.phase("decode")
    first = search.cheapest(prompts, ((each, 0) for each in degrees))
    second = search.choose(tokens, degrees) if first is not None else None
    if first is None or second is None:
        return None
    groups = _group(search, "prefill", prompts, first), _group(search, "decode", tokens, second)
    return _together(search, *groups)


def _together(search: Search, prefill: InstanceGroup, decode: InstanceGroup) -> PlacementPlan:
    """Each phase alone keeps its limit for enough requests; both together may
    not. Whichever phase breaks more gets an instance more, a few times."""
    hardware, load, gpus = search.hardware, search.load, search.hardware.cluster.num_gpus
    first = hardware.prefill(prefill.degrees)
    second = hardware.decode(decode.degrees, decode.sockets)
    requests = load.requests(search.rate)
    while True:
        run = simulate(requests, [first] * prefill.count, [second] * decode.count)
        is_first_late = _slow_first_tokens(load, run) >= 0.5
        more = prefill if is_first_late else decode
        used = prefill.num_gpus + decode.num_gpus + more.degrees.num_gpus
        if load.is_carried(run) or used > gpus:
            break
        more = replace(more, count=more.count + 1)
        prefill, decode = (more, decode) if is_first_late else (prefill, more)
    goodput = min(each.count * each.goodput for each in (prefill, decode))
    return PlacementPlan("disaggregated", (prefill, decode), goodput, load, run)


def _slow_first_tokens(load: Load, run: GoodputRun) -> float:
    """Of the requests that break the SLO, the part whose first token is late."""
    broken = [each for each in run.counted(load.residence_s) if not load.slo.is_met_by(each)]
    late = sum(each.ttft_s > load.slo.ttft_s for each in broken)
    return late / len(broken) if broken else 1.0


def plan_low_affinity(search: Search, sockets_per_node: int) -> PlacementPlan | None:
    """Pairs whose segments stay on a node, as algorithm 2 has them, with the sockets that
    are their part of it."""
    hardware = replace(search.hardware, crosses_nodes=False)
    search = replace(search, hardware=hardware)
    every = sorted(hardware.cluster.pairs(), key=lambda each: (each.num_gpus, each))
    pairs = [each for each in every if hardware.fits(each.prefill) and hardware.fits(each.decode)]
    phase, requests = search.phase("pair"), search.load.requests(search.rate)
    chosen = search.choose(phase, pairs, sockets_per_node)
    if chosen is None:
        return None
    pair = chosen.what
    assert isinstance(pair, Pair)
    outcome = phase.simulated(pair, chosen.sockets).run(requests, chosen.count)
    roles: tuple[Role, ...] = ("prefill", "decode")
    groups = tuple(_group(search, role, search.phase(role), chosen) for role in roles)
    goodput = max(search.rate, chosen.count * phase.goodput(pair, chosen.sockets))
    return PlacementPlan("disaggregated", groups, goodput, search.load, outcome, pair.pp_cross)
