"""Times of a step: one protocol of five numbers, for policies, the number of lanes, the rule of KV
on both sides, plans and simulations. They are measured as the engine runs, fitted, from
datasheets, tabled, or drawn."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

Prompts: TypeAlias = Seq[tuple[int, int]]
"""Parts of prompts in a step: the tokens that ran before each, and its own."""


class StepTime(Protocol):
    """Five numbers of a lane's step, in seconds through all layers. None falls when its argument
    grows. Without what a subclass leaves out, the link is never busy, and the trip and transfers
    take no time."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        """Return the time of the S-part: the paper's T(B), over all layers. NaN while unknown.
        Where prompts run in steps all the time, it may include them at their average.

        Args:
            num_decoding: sequences that decode.
            prompts: parts of prompts in the same step.
        """

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        """Return the time of an R-worker whose sequences have ``load_tokens`` cached: the paper's
        R·W."""

    def link_s(self, num_tokens: int) -> float:
        """Return for how long a step of these tokens keeps the link to R-workers from other
        lanes."""
        return 0.0

    def trip_s(self, num_tokens: int) -> float:
        """Return the time from sending q, k, v of these tokens to having o, without the R-part.
        Infinite while unknown."""
        return 0.0

    def transfer_s(self, num_tokens: float) -> float:
        """Return the time in which K and V of these tokens reach another memory: of another
        instance or machine, or of the host."""
        return 0.0


def num_tokens_of(num_decoding: int, prompts: Prompts) -> int:
    """Count the tokens of a step, where tokens of prompts cost what others cost."""
    return num_decoding + sum(new for _, new in prompts)


def cycle_s(
    num_lanes: int, s_part_s: float, r_part_s: float, trip_s: float, link_s: float = 0.0
) -> float:
    """Return the time of a step of each of several equal lanes. The S-worker, R-workers and the
    link each serve all lanes in turn, and a lane does not overtake itself::

        max(K·S, K·R, K·link, S + trip + R)

    This is the bound of a closed queueing network. With K = 2 and a perfect network it is the
    paper's 2·T(B) (arXiv 2403.11421, section 4.3).

    Args:
        s_part_s, r_part_s, trip_s, link_s: times of one lane, R of the busiest R-worker.
    """
    return max(num_lanes * max(s_part_s, r_part_s, link_s), s_part_s + trip_s + r_part_s)


def balanced_loads(
    times: StepTime, num_tokens: int, capacity_tokens: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the load to which each R-worker attends within the time of the S-part, for a lane that
    runs ``num_tokens`` per step: then neither waits for the other (FastDecode, section
    "Workload-balanced hardware selection", R·W ≈ T(B)). At least one token, at most what its memory
    holds. None while the S-part's time is unknown."""
    s_part_s = times.s_part_s(num_tokens)
    if math.isnan(s_part_s):
        return None
    return tuple(
        max(1, bisect_right(range(capacity + 1), s_part_s, key=partial(times.r_part_s, worker)) - 1)
        for worker, capacity in enumerate(capacity_tokens)
    )


@dataclass(frozen=True)
class RPartTime:
    load_tokens: int
    """Cached tokens to which it attended."""
    num_prompt_tokens: int
    """Tokens of prompts that it stored."""
    compute_s: float


class MeasuredTimes(StepTime):
    """Step times fitted to the latest steps: straight lines, with ever less weight of old steps.

    With a large batch nearly every step runs a part of some prompt, too. Least squares over both
    separate the cost of prompts from that of decoding. It is then added at its average: a load is
    in balance if R-workers need as long for it as the S-worker needs for its steps.

    Args:
        half_life: steps after which a measurement weighs half.
        min_observed: fewest steps that give a time.
    """

    def __init__(self, *, half_life: float = 200.0, min_observed: int = 32) -> None:
        assert half_life > 0 and min_observed >= 1
        self._keep = 0.5 ** (1 / half_life)
        self._min_observed = min_observed
        self._s_part = _Line()
        self._r_part: dict[int, _Line] = {}
        self._trip_s = math.inf

    def observe(
        self,
        num_decoding: int,
        num_prompt_tokens: int,
        s_part_s: float,
        r_parts: Mapping[int, RPartTime],
    ) -> None:
        """Note a lane's step. One in which nothing decoded says nothing of later steps.

        Args:
            num_decoding: sequences that decoded.
            num_prompt_tokens: tokens of all prompts that ran beside them.
            s_part_s: time of the S-worker's thread for the step.
            r_parts: times by R-worker.
        """
        if not num_decoding:
            return
        self._s_part.observe(num_decoding, num_prompt_tokens, s_part_s, self._keep)
        for worker, part in r_parts.items():
            line = self._r_part.setdefault(worker, _Line())
            line.observe(part.load_tokens, part.num_prompt_tokens, part.compute_s, self._keep)

    def observe_trip(self, round_trip_s: float) -> None:
        """Note a lane's step in which something decoded.

        Args:
            round_trip_s: time of all layers from sending q, k, v to having o, without the
                R-worker's compute. Infinite if no R-worker attended.
        """
        if round_trip_s < math.inf:
            self._trip_s = min(self._trip_s * _FORGET, round_trip_s)

    def trip_s(self, num_tokens: int) -> float:
        """Return the least of the recent times, whatever the batch."""
        return self._trip_s

    def s_part_s(self, num_decoding: int, prompts: Prompts = (), *, hopeful: bool = False) -> float:
        """Return the time of the S-part. While all batches had one size, it is the same for any
        batch, which reads the weights. ``hopeful``: or in proportion, if that is less."""
        line, num_tokens = self._s_part, num_tokens_of(num_decoding, prompts)
        if line.num_observed < self._min_observed:
            return math.nan
        slope = line.mean_y / max(line.mean_x, 1.0) if hopeful and num_tokens < line.mean_x else 0.0
        return line.at(num_tokens, slope_if_unknown=slope)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        line = self._r_part.get(worker)
        if line is None or line.num_observed < self._min_observed:
            return 0.0
        # Attention reads every cached token and little else: through the origin, until loads vary.
        return line.at(load_tokens, slope_if_unknown=line.mean_y / max(line.mean_x, 1.0))


# Factor by which the least round trip grows with each step: a network may get slower.
_FORGET = 1.005
# Least variation, relative to the mean, that tells a slope.
_MIN_VARIATION = 0.02
# Share of the variation of x that has to be left without what follows z.
_MIN_OWN_VARIATION = 0.05


@dataclass
class _Line:
    """y over x at the mean z: a weighted least-squares fit of y to x and z."""

    num_observed: int = 0
    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    mean_z: float = 0.0
    # Sums of squares and products of the deviations from the means.
    xx: float = 0.0
    xz: float = 0.0
    zz: float = 0.0
    xy: float = 0.0
    zy: float = 0.0

    def observe(self, x: float, z: float, y: float, keep: float) -> None:
        """Add a point of weight 1. Earlier ones keep the share ``keep`` of their weight."""
        self.num_observed += 1
        self.weight = self.weight * keep + 1
        dx, dz = x - self.mean_x, z - self.mean_z
        self.mean_x += dx / self.weight
        self.mean_z += dz / self.weight
        self.mean_y += (y - self.mean_y) / self.weight
        self.xx = self.xx * keep + dx * (x - self.mean_x)
        self.xz = self.xz * keep + dx * (z - self.mean_z)
        self.zz = self.zz * keep + dz * (z - self.mean_z)
        self.xy = self.xy * keep + dx * (y - self.mean_y)
        self.zy = self.zy * keep + dz * (y - self.mean_y)

    def at(self, x: float, *, slope_if_unknown: float) -> float:
        """Return the line's value at x. Its slope and the value are at least 0."""
        x_on_z = self.xz / self.zz if self.zz > 0 else 0.0
        own_variation = self.xx - x_on_z * self.xz
        slope = slope_if_unknown
        enough = max(
            self.weight * (_MIN_VARIATION * self.mean_x) ** 2, _MIN_OWN_VARIATION * self.xx
        )
        if own_variation > enough:
            slope = max(0.0, (self.xy - x_on_z * self.zy) / own_variation)
        return max(0.0, self.mean_y + slope * (x - self.mean_x))
