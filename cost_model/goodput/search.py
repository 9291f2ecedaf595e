"""From hardware, requests and an SLO to a placement.

What an instance could carry beyond the rate that is asked for is worth nothing:
its goodput counts up to that rate, so a larger instance isn't chosen for what
nobody sends. Sockets are searched, too: by the objective ``gpu`` a decode instance gets the
fewest with which its goodput is within 1 % of the best; by ``cost``, those with
which its goodput is greatest for its price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from cost_model.closed_forms import whole
from cost_model.goodput.hardware import InstanceHardware, prompts_of
from cost_model.goodput.placements import (
    Degrees,
    InstanceGroup,
    Pair,
    PlacementPlan,
    PlacementPrices,
    RatedInstance,
    ReplicatedInstance,
    best_per_gpu,
    replicate,
)
from cost_model.goodput.rates import Load, greatest_rate
from cost_model.goodput.simulator import (
    DecodeSpec,
    GoodputRun,
    PrefillSpec,
    simulate,
    simulate_colocated,
)

Affinity = Literal["high", "low"]
Objective = Literal["gpu", "cost"]
NEARLY = 0.99
_SLACK = 1.25
"""Bounds from means are this much above what they say."""
_MAX_BATCH = 1 << 16
STEP_TOKENS = 512
"""Of prompts in a step of an instance for both phases."""


@dataclass
class Search:
    """Goodputs of instances and pairs, each found once."""

    hardware: InstanceHardware
    load: Load
    rate: float
    """Requests a second that are to be carried."""
    objective: Objective = "gpu"
    prices: PlacementPrices = field(default_factory=PlacementPrices)
    progress: Callable[[str], object] = lambda _: None
    limits: dict[Degrees, tuple[int, int]] = field(default_factory=dict)
    """Where fewer instances would do with more sockets than there may be: how many
    these are, and with how many they would."""
    _found: dict[object, float] = field(default_factory=dict)

    def prefill(self, degrees: Degrees) -> float:
        """The goodput of one instance: TTFT alone."""
        spec = self.hardware.prefill(degrees)
        most = self._most_prompts(spec)
        return self._rate(("prefill", degrees), lambda r: simulate(r, [spec], []), most)

    def decode(self, degrees: Degrees, sockets: int) -> float:
        """The goodput of one instance: TPOT alone."""
        spec = self.hardware.decode(degrees, sockets)
        key, most = ("decode", degrees, sockets), self._most_decoding(spec)
        return self._rate(key, lambda r: simulate(r, [], [spec]), most)

    def both(self, degrees: Degrees, sockets: int) -> float:
        """The goodput of one instance for both phases."""
        spec = self.hardware.decode(degrees, sockets)
        key = ("both", degrees, sockets)
        most = min(self._most_prompts(self.hardware.prefill(degrees)), self._most_decoding(spec))
        return self._rate(key, lambda r: simulate_colocated(r, [spec], STEP_TOKENS), most)

    def pair(self, pair: Pair, sockets: int) -> float:
        """The goodput of a prefill and a decode instance together."""
        prefill = self.hardware.prefill(pair.prefill)
        decode = self.hardware.decode(pair.decode, sockets)
        run = partial(simulate, prefill=[prefill], decode=[decode])
        most = min(self._most_prompts(prefill), self._most_decoding(decode))
        return self._rate(("pair", pair, sockets), run, most)

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

    def with_sockets(
        self, goodput: Callable[[int], float], degrees: Degrees, gpus: int, most: int | None = None
    ) -> tuple[int, float]:
        """Sockets of the best instance by the objective, and its goodput; (0, 0)
        where there is none. 0 sockets: K and V are on its GPUs. Looked at from few to many until
        more don't help: how many there may be matters only where more would (``limits``)."""
        fits = self.hardware.fits_on_device(degrees)
        on_device = goodput(0) if fits else 0.0
        if on_device >= self.rate:
            return 0, on_device
        best, found = self._with_r_workers(goodput, degrees, gpus, most)
        paid, free = self.prices.of(gpus, best), self.prices.of(gpus, 0)
        worth = found * (free / paid if self.objective == "cost" else NEARLY)
        return (0, on_device) if on_device and on_device >= worth else (best, found)

    def _with_r_workers(
        self, goodput: Callable[[int], float], degrees: Degrees, gpus: int, most: int | None
    ) -> tuple[int, float]:
        counts = self.hardware.sockets(degrees, most)
        look = self._dearest if self.objective == "cost" else self._until_enough
        best, found = look(goodput, counts, gpus)
        if counts and best == counts[-1] and found < self.rate:
            more = self.hardware.sockets(degrees, limited=False)
            further = [count for count in more if count > best]
            beyond, carried = look(goodput, [best, *further], gpus)
            if self._instances(carried) < self._instances(found):
                self.limits[degrees] = best, beyond
        return best, found

    def _instances(self, goodput: float) -> float:
        """That carry the rate."""
        return whole(self.rate / goodput) if goodput else math.inf

    def _until_enough(
        self, goodput: Callable[[int], float], counts: Sequence[int], gpus: int
    ) -> tuple[int, float]:
        """Twice as many each time, until that gives nothing more."""
        best, found, last = 0, 0.0, 0
        for count in counts:
            if count < 2 * last and count != counts[-1]:
                continue
            carried, last = goodput(count), count
            if found and carried * NEARLY <= found:
                break
            best, found = count, carried
            if found >= self.rate:
                break
        return best, found

    def _dearest(
        self, goodput: Callable[[int], float], counts: Sequence[int], gpus: int
    ) -> tuple[int, float]:
        """The most goodput for its price; none carries more than is asked for."""
        best, found, worth = 0, 0.0, -1.0
        for count in counts:
            price = self.prices.of(gpus, count)
            if self.rate / price <= worth:
                break
            carried = goodput(count)
            if carried / price > worth:
                best, found, worth = count, carried, carried / price
        return best, found

    def fewest(
        self, goodput: Callable[[int], float], degrees: Degrees, sockets: int
    ) -> tuple[int, float]:
        """As few sockets as give nearly the goodput of so many, or with which no
        more instances are needed."""
        if self.objective == "cost" or not sockets:
            return sockets, goodput(sockets)
        counts = [count for count in self.hardware.sockets(degrees) if count <= sockets] or [
            sockets
        ]
        best = goodput(sockets)

        def is_enough(carried: float) -> bool:
            as_many = carried > 0 and whole(self.rate / carried) <= whole(self.rate / best)
            return carried >= NEARLY * best or as_many

        low, high = 0, len(counts) - 1
        while low < high:
            middle = (low + high) // 2
            if is_enough(goodput(counts[middle])):
                high = middle
            else:
                low = middle + 1
        return counts[high], goodput(counts[high])

    def degrees(self) -> list[Degrees]:
        """Of instances that hold the model, the smallest first."""
        found = [each for each in self.hardware.cluster.instances() if self.hardware.fits(each)]
        return sorted(found, key=lambda each: (each.num_gpus, each))

    def best_instance(self, goodput: Callable[[Degrees], float]) -> RatedInstance | None:
        """By goodput a GPU. Those so large that they can't be, are left out."""
        best: RatedInstance | None = None
        for degrees in self.degrees():
            if best is not None and self.rate / degrees.num_gpus < best.per_gpu:
                break
            found = RatedInstance(degrees, goodput(degrees))
            best = best_per_gpu([found] if best is None else [best, found])
        return best

    def _rate(
        self, key: object, run_at: Callable[[list[tuple[float, int, int]]], GoodputRun], most: float
    ) -> float:
        if key not in self._found:
            self._found[key] = greatest_rate(self.load, run_at, min(self.rate, most), self.rate)
            self.progress(f"{len(self._found)} instances and pairs simulated")
        return self._found[key]


def plan_colocated(search: Search, sockets_per_node: int | None = None) -> PlacementPlan | None:
    """Instances for both phases. None: none keeps the SLO.

    Args:
        sockets_per_node: an instance gets the part of them that its GPUs are of
            a node's. None: as many as are best.
    """
    rate = search.rate
    chosen = _with_best_sockets(search, search.both, sockets_per_node)
    if chosen is None:
        return None
    degrees, count, found = chosen
    several = replicate(RatedInstance(degrees, found), rate)
    spec = search.hardware.decode(degrees, count)

    def run(num: int) -> GoodputRun:
        return simulate_colocated(search.load.requests(rate), [spec] * num, STEP_TOKENS)

    num, outcome = _grown(search, several, run)
    instances = InstanceGroup("both", degrees, num, count, found)
    return _plan(search, "colocated", (instances,), num * found, outcome)


def _plan(
    search: Search,
    kind: Literal["disaggregated", "colocated"],
    instances: tuple[InstanceGroup, ...],
    goodput: float,
    run: GoodputRun,
    segments: int = 1,
) -> PlacementPlan:
    load = search.load
    counted = tuple(run.counted(load.residence_s))
    carried = load.is_carried(run)
    share = load.slo.share(counted)
    return PlacementPlan(
        kind, instances, search.rate, goodput, run, share, carried, counted, segments
    )


def _with_best_sockets(
    search: Search,
    goodput: Callable[[Degrees, int], float],
    sockets_per_node: int | None = None,
) -> tuple[Degrees, int, float] | None:
    """The best instance of a phase, its sockets, and its goodput."""
    sockets: dict[Degrees, int] = {}
    gpus_per_node = search.hardware.gpus_per_node

    def judge(degrees: Degrees) -> float:
        of_these, gpus = partial(goodput, degrees), degrees.num_gpus
        share = None if sockets_per_node is None else sockets_per_node * gpus // gpus_per_node
        sockets[degrees], found = search.with_sockets(of_these, degrees, gpus, share)
        return found

    best = search.best_instance(judge)
    if best is None:
        return None
    assert isinstance(best.what, Degrees)
    count, found = search.fewest(partial(goodput, best.what), best.what, sockets[best.what])
    return best.what, count, found


def _grown(
    search: Search, several: ReplicatedInstance, run: Callable[[int], GoodputRun]
) -> tuple[int, GoodputRun]:
    """More of them, until they keep the SLO together: what one carries, several
    with several queues may carry a little less of. Never more than there are GPUs."""
    num = several.count
    most = search.hardware.cluster.num_gpus // several.judged.what.num_gpus
    outcome = run(num)
    while num < most and not search.load.is_carried(outcome):
        num += 1
        outcome = run(num)
    return num, outcome


def plan_high_affinity(search: Search) -> PlacementPlan | None:
    """Algorithm 1: each phase by itself, then as many of both as carry the rate
    together. None: a phase keeps its limit on no instance."""
    prefill = search.best_instance(search.prefill)
    chosen = _with_best_sockets(search, search.decode) if prefill is not None else None
    if prefill is None or chosen is None:
        return None
    degrees, sockets, found = chosen
    decode = replicate(RatedInstance(degrees, found), search.rate)
    return _together(search, replicate(prefill, search.rate), decode, sockets)


def _together(
    search: Search, prefill: ReplicatedInstance, decode: ReplicatedInstance, sockets: int
) -> PlacementPlan:
    """Each phase alone keeps its limit for enough requests; both together may
    not. Whichever phase breaks more gets an instance more, a few times."""
    hardware, load, rate = search.hardware, search.load, search.rate
    first, second = prefill.judged.what, decode.judged.what
    assert isinstance(first, Degrees) and isinstance(second, Degrees)
    p_spec, d_spec = hardware.prefill(first), hardware.decode(second, sockets)
    num_p, num_d = prefill.count, decode.count
    gpus = hardware.cluster.num_gpus
    while True:
        requests = load.requests(rate)
        run = simulate(requests, [p_spec] * num_p, [d_spec] * num_d)
        used = num_p * first.num_gpus + num_d * second.num_gpus
        is_first_late = _slow_first_tokens(load, run) >= 0.5
        more = first if is_first_late else second
        if load.is_carried(run) or used + more.num_gpus > gpus:
            break
        num_p, num_d = num_p + is_first_late, num_d + (not is_first_late)
    goodput = min(num_p * prefill.judged.goodput, num_d * decode.judged.goodput)
    instances = (
        InstanceGroup("prefill", first, num_p, 0, prefill.judged.goodput),
        InstanceGroup("decode", second, num_d, sockets, decode.judged.goodput),
    )
    return _plan(search, "disaggregated", instances, goodput, run)


def _slow_first_tokens(load: Load, run: GoodputRun) -> float:
    """Of the requests that break the SLO, the part whose first token is late."""
    broken = [each for each in run.counted(load.residence_s) if not load.slo.is_met_by(each)]
    late = sum(each.ttft_s > load.slo.ttft_s for each in broken)
    return late / len(broken) if broken else 1.0


def plan_low_affinity(search: Search, sockets_per_node: int) -> PlacementPlan | None:
    """Algorithm 2: pairs whose segments stay on a node, with the sockets that
    are their part of it. No pair carries more than either phase by itself, or
    than is asked for: those that can't be the best aren't simulated."""
    search = replace(search, hardware=replace(search.hardware, crosses_nodes=False), _found={})
    cluster = search.hardware.cluster
    best: RatedInstance | None = None
    sockets_of: dict[Pair, int] = {}
    for pair in sorted(cluster.pairs(), key=lambda each: (each.num_gpus, each)):
        if not (search.hardware.fits(pair.prefill) and search.hardware.fits(pair.decode)):
            continue
        least = 0.0 if best is None else best.per_gpu * pair.num_gpus
        if search.rate < least or search.prefill(pair.prefill) < least:
            continue
        share = sockets_per_node * pair.segment_gpus // cluster.gpus_per_node
        goodput = partial(search.decode, pair.decode)
        sockets, alone = search.with_sockets(
            goodput, pair.decode, pair.num_gpus, pair.pp_cross * share
        )
        if alone and alone >= least:
            sockets_of[pair] = sockets
            found = RatedInstance(pair, search.pair(pair, sockets))
            best = best_per_gpu([found] if best is None else [best, found])
    return None if best is None else _pairs(search, best, sockets_of)


def _pairs(search: Search, best: RatedInstance, sockets_of: dict[Pair, int]) -> PlacementPlan:
    pair, rate = best.what, search.rate
    assert isinstance(pair, Pair)
    sockets, found = search.fewest(partial(search.pair, pair), pair.decode, sockets_of[pair])
    several = replicate(RatedInstance(pair, found), rate)
    hardware = search.hardware
    prefill, decode = hardware.prefill(pair.prefill), hardware.decode(pair.decode, sockets)

    def run(num: int) -> GoodputRun:
        requests = search.load.requests(rate)
        return simulate(requests, [prefill] * num, [decode] * num)

    num, outcome = _grown(search, several, run)
    instances = (
        InstanceGroup("prefill", pair.prefill, num, 0, search.prefill(pair.prefill)),
        InstanceGroup("decode", pair.decode, num, sockets, search.decode(pair.decode, sockets)),
    )
    return _plan(search, "disaggregated", instances, num * found, outcome, pair.pp_cross)
