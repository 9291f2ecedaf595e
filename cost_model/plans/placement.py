"""Where the KV cache is best kept: on R-workers, on the GPU, or on both sides.

One rule for ``fastdecode size`` and for ``--kv-placement auto``: the placement that gives the most
tokens a second, or the simplest of the ones that give nearly as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cost_model.hardware import Cpu, Efficiency, Gpu, Hardware, Nic
from cost_model.plans.constraints import r_memory_bytes, s_worker_fits
from cost_model.plans.gpu_only import best_gpu_only
from cost_model.plans.hybrid import best_hybrid
from cost_model.predict import MAX_LANES, System

_NEARLY = 0.95
"""Of the most tokens a second: for less than that a simpler placement isn't taken."""
ASSUMED_CPU = "EPYC 7763"
ASSUMED_NIC = "100GbE"
"""What R-workers are taken for before they have been reached."""
_LARGE, _SMALL, _LARGE_BYTES = "H100-SXM", "A10", 40e9
"""GPUs in place of one that ``hardware.toml`` doesn't have, by its memory."""


@dataclass(frozen=True)
class PlacementRates:
    """Tokens a second by placement; None: that can't run."""

    gpu: float | None
    r: float | None
    hybrid: float | None

    @property
    def ranking(self) -> tuple[str, ...]:
        """Placements that can run, the best first. Of placements that give nearly
        the most, the simplest comes first: the GPU alone, R-workers, both."""
        found = {name: rate for name, rate in vars(self).items() if rate is not None}
        most = max(found.values(), default=0.0)
        near = [name for name, rate in found.items() if rate >= _NEARLY * most]
        rest = sorted(set(found).difference(near), key=lambda name: -found[name])
        return (*near, *rest)

    @property
    def best(self) -> str | None:
        return next(iter(self.ranking), None)


def placement_rates(system: System, sockets: int, most_sequences: int) -> PlacementRates:
    """What each placement gives with these R-workers.

    Args:
        sockets: R-workers that there are, one a socket; 0: none.
        most_sequences: that may run at once.
    """
    alone = best_gpu_only(system, math.inf, most_sequences)
    gpu = None if alone is None else alone.tokens_per_s
    if not sockets:
        return PlacementRates(gpu, None, None)
    rates = (
        system.predict(lane_batch, lanes, sockets).tokens_per_s
        for lane_batch, lanes in _lanes(most_sequences)
        if s_worker_fits(system, lane_batch, lanes)
        and r_memory_bytes(system, lane_batch, lanes) <= sockets * system.r.capacity_bytes
    )
    both = None
    if alone is not None:
        both = best_hybrid(system, alone, sockets, math.inf, most_sequences=most_sequences)
    added = None if both is None else both.tokens_per_s
    return PlacementRates(gpu, max(rates, default=None), added)


def _lanes(most_sequences: int) -> Iterator[tuple[int, int]]:
    """A lane's sequences, and lanes, of up to so many sequences."""
    for lanes in range(1, MAX_LANES + 1):
        most = most_sequences // lanes
        powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        yield from ((lane_batch, lanes) for lane_batch in (*powers, most) if lane_batch)


def gpu_like(name: str, memory_bytes: int, usable: float, hardware: Hardware) -> tuple[Gpu, bool]:
    """A GPU by the name that its driver gives, with the memory that is there;
    and whether it is known. One that isn't known is taken for one of its size.

    Args:
        usable: part of the memory.
    """
    known = hardware.printed_gpu(name)
    gpu = known or hardware.gpu(_LARGE if memory_bytes >= _LARGE_BYTES else _SMALL)
    part = Efficiency(min(0.999, max(0.001, usable)), "what is free of it")
    return replace(gpu, memory_bytes=memory_bytes, memory_usable=part), known is not None


def assumed_r_worker(hardware: Hardware, *, is_here: bool) -> tuple[Cpu, Nic]:
    """A socket and its port. ``is_here``: in the S-worker's own host, where
    nothing goes over a network."""
    fastest = max(hardware.nics.values(), key=lambda nic: nic.line_bits_per_s)
    return hardware.cpu(ASSUMED_CPU), fastest if is_here else hardware.nic(ASSUMED_NIC)
