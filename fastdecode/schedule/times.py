"""How long a step takes: one protocol of five numbers. They are measured as the
engine runs, fitted, from datasheets, tabled, or drawn.

Policies, the number of lanes, the rule of KV on both sides, plans and simulations
all ask a ``StepTime``."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

Prompts: TypeAlias = Seq[tuple[int, int]]
"""Parts of prompts in a step: of each, the tokens that ran before it, and its own."""


class StepTime(Protocol):
    """Five numbers of a lane's step, in seconds through all layers. None falls when
    its argument grows. A subclass leaves out what it does not know: then the link
    is never busy, and the trip and transfers take no time."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        """The S-part of a step: the paper's T(B), over all layers. NaN while
        unknown. Where prompts run in steps all the time, they may be counted in, at
        their average.

        Args:
            num_decoding: sequences that decode.
            prompts: that run in the same step.
        """

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        """One R-worker's part of a step whose sequences there, so many, have so many
        cached tokens: the paper's R·W."""

    def link_s(self, num_tokens: int) -> float:
        """The link to R-workers is busy with a step of so many tokens: no other lane
        can use it meanwhile."""
        return 0.0

    def trip_s(self, num_tokens: int) -> float:
        """From sending q, k, v of so many tokens to having o, without the R-part.
        Infinite while unknown."""
        return 0.0

    def transfer_s(self, num_tokens: float) -> float:
        """K and V of so many tokens on their way to another memory: of another
        instance or machine, or of the host."""
        return 0.0


def num_tokens_of(num_decoding: int, prompts: Prompts) -> int:
    """Tokens of a step, where tokens of prompts cost what others cost."""
    return num_decoding + sum(new for _, new in prompts)


def cycle_s(
    num_lanes: int, s_part_s: float, r_part_s: float, trip_s: float, link_s: float = 0.0
) -> float:
    """A step of each of several equal lanes. The S-worker, R-workers and the link each
    serve all lanes in turn, and a lane does not overtake itself::

        max(K·S, K·R, K·link, S + trip + R)

    (the bound of a closed queueing network; with K = 2 and a perfect network it is
    the paper's 2·T(B), arXiv 2403.11421, section 4.3).

    Args:
        s_part_s, r_part_s, trip_s, link_s: of one lane; R of the busiest R-worker.
    """
    return max(num_lanes * max(s_part_s, r_part_s, link_s), s_part_s + trip_s + r_part_s)


def balanced_loads(
    times: StepTime, num_tokens: int, capacity_tokens: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The load of each R-worker that it attends to within the time of the
    S-part, for a lane that runs ``num_tokens`` a step: then neither waits for
    the other (FastDecode, section "Workload-balanced hardware selection", R·W ≈
    T(B)). Never more than its memory holds, never below one token. None while
    the S-part's time is unknown."""
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
    """Cached tokens that it attended to."""
    num_prompt_tokens: int
    """Tokens of prompts that it stored."""
    compute_s: float


class MeasuredTimes(StepTime):
    """Step times fitted to the steps that were run lately: straight lines, old
    steps weighing less and less.

    With a large batch nearly every step runs a part of some prompt, too. What
    prompts cost is told apart from what decoding costs by least squares over
    both, and then counted in at its average: a load is in balance if R-workers
    need as long for it as the S-worker needs for its steps as they are.

    Args:
        half_life: after so many steps a measurement weighs half.
        min_observed: steps that are enough.
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
        """A lane's step was run. One in which nothing decoded says nothing of
        those to come, and is passed over.

        Args:
            num_decoding: sequences that decoded.
            num_prompt_tokens: of all prompts that ran beside them.
            s_part_s: all that the S-worker's thread did for the step.
            r_parts: by R-worker.
        """
        if not num_decoding:
            return
        self._s_part.observe(num_decoding, num_prompt_tokens, s_part_s, self._keep)
        for worker, part in r_parts.items():
            line = self._r_part.setdefault(worker, _Line())
            line.observe(part.load_tokens, part.num_prompt_tokens, part.compute_s, self._keep)

    def observe_trip(self, round_trip_s: float) -> None:
        """A lane's step in which something decoded was run.

        Args:
            round_trip_s: for all layers, from sending q, k, v to having o,
                without the R-worker's compute; infinite: no R-worker attended.
        """
        if round_trip_s < math.inf:
            self._trip_s = min(self._trip_s * _FORGET, round_trip_s)

    def trip_s(self, num_tokens: int) -> float:
        """The least that was seen lately, whatever the batch."""
        return self._trip_s

    def s_part_s(self, num_decoding: int, prompts: Prompts = (), *, hopeful: bool = False) -> float:
        """While all batches had one size, the time is taken to be
        the same for any: the weights are read for any batch. ``hopeful``: or in
        proportion, if that is less. A step of another size measures it."""
        line, num_tokens = self._s_part, num_tokens_of(num_decoding, prompts)
        if line.num_observed < self._min_observed:
            return math.nan
        slope = line.mean_y / max(line.mean_x, 1.0) if hopeful and num_tokens < line.mean_x else 0.0
        return line.at(num_tokens, slope_if_unknown=slope)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        line = self._r_part.get(worker)
        if line is None or line.num_observed < self._min_observed:
            return 0.0
        # Attention reads every cached token and little else: as long as the
        # load hasn't varied, through the origin.
        return line.at(load_tokens, slope_if_unknown=line.mean_y / max(line.mean_x, 1.0))


# What the least round trip that was seen rises by with each step: a network may get slower.
_FORGET = 1.005
# Relative to the mean: less variation than this says nothing about a slope.
_MIN_VARIATION = 0.02
# Of the variation of x, the part that has to be left when what follows z is taken off.
_MIN_OWN_VARIATION = 0.05


@dataclass
class _Line:
    """y over x at the mean z: a weighted least-squares fit of y to x and z, updated in place."""

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
        """A new point of weight 1; what came before keeps the part ``keep`` of its weight."""
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
        """The line at x, with a slope of at least 0 and a value of at least 0."""
        x_on_z = self.xz / self.zz if self.zz > 0 else 0.0
        own_variation = self.xx - x_on_z * self.xz
        slope = slope_if_unknown
        enough = max(
            self.weight * (_MIN_VARIATION * self.mean_x) ** 2, _MIN_OWN_VARIATION * self.xx
        )
        if own_variation > enough:
            slope = max(0.0, (self.xy - x_on_z * self.zy) / own_variation)
        return max(0.0, self.mean_y + slope * (x - self.mean_x))
