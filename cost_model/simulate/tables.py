"""Step times from numbers that a user gives: constants, rates, or tables to interpolate in."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.schedule.times import Prompts, StepTime, num_tokens_of

_FORM = "seconds, or a table like 1:0.010,256:0.016 of size:seconds"


@dataclass(frozen=True)
class Table:
    """Seconds over a size: straight lines between the points, the first point's
    value before it, and the last line drawn on after it."""

    points: tuple[tuple[float, float], ...]
    """(size, seconds), sizes ascending, seconds never falling."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        seconds = [value for _, value in self.points]
        if not all(math.isfinite(x) and x >= 0 for x in (*sizes, *seconds)):
            raise ConfigError(f"a time table holds finite numbers of at least 0, not {self.points}")
        if not self.points or sizes != sorted(set(sizes)) or seconds != sorted(seconds):
            raise ConfigError(
                "a time table's sizes ascend and its seconds never fall; these don't: "
                f"{self.points}"
            )

    @classmethod
    def parse(cls, text: str, *, option: str, rate: bool = False) -> Table:
        """A single number is a constant; with ``rate``, it is seconds for each unit of size."""
        try:
            if ":" not in text:
                value = float(text)
                return cls(((0, 0.0), (1, value)) if rate else ((0, value),))
            pairs = [point.split(":") for point in text.split(",")]
            return cls(tuple((float(size), float(seconds)) for size, seconds in pairs))
        except ValueError:
            raise ConfigError(f"{option}={text!r} is not {_FORM}") from None

    def __call__(self, size: float) -> float:
        points = self.points
        after = bisect_right(points, size, key=lambda point: point[0])
        if after == 0 or len(points) == 1:
            return points[0][1]
        (x0, y0), (x1, y1) = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@dataclass(frozen=True)
class TabledTimes(StepTime):
    """Step times read from tables."""

    s_part: Table
    """Over the tokens of a lane's step."""
    r_parts: tuple[Table, ...]
    """Of each R-worker, over the load of the lane's sequences there."""
    way_s: float = 0.0
    """Of a lane's step, to R-workers and back."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        return self.s_part(num_tokens_of(num_decoding, prompts))

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.r_parts[worker](load_tokens)

    def trip_s(self, num_tokens: int) -> float:
        return self.way_s
