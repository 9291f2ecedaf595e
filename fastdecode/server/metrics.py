"""Counters and histograms in Prometheus's text format. Where a number means
what one of vLLM's means, it has its name and its buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
N_BUCKETS = (1, 2, 5, 10, 20)


def length_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to so many tokens."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most) or (1,)


class Counter:
    """Numbers that only grow, by the value of one label.

    Args:
        label: its name; empty: there is one number only.
        values: that there are from the start.
    """

    kind = "counter"

    def __init__(self, help: str, label: str = "", values: Sequence[str] = ()) -> None:
        self.help = help
        self._label = label
        self._counts: dict[str, float] = dict.fromkeys(values if label else ("",), 0)

    def add(self, amount: float = 1, value: str = "") -> None:
        self._counts[value] = self._counts.get(value, 0) + amount

    def of(self, value: str) -> float:
        """Of one value."""
        return self._counts.get(value, 0)

    @property
    def total(self) -> float:
        """Of all values."""
        return sum(self._counts.values())

    def named(self, help: str) -> Counter:
        """The same numbers, explained otherwise."""
        other = Counter(help, self._label)
        other._counts = self._counts
        return other

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        for value, count in self._counts.items():
            more = {self._label: value} if self._label else {}
            yield f"{name}{labelled({**labels, **more})} {count:.17g}"


class Histogram:
    """Counts observations by size."""

    kind = "histogram"

    def __init__(self, help: str, buckets: Sequence[float]) -> None:
        self.help = help
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """So many observations of one value."""
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        seen = 0
        for bound, count in zip((*self._buckets, float("inf")), self._counts, strict=True):
            seen += count
            limit = "+Inf" if bound == float("inf") else str(float(bound))
            yield f"{name}_bucket{labelled({**labels, 'le': limit})} {seen}"
        yield f"{name}_sum{labelled(labels)} {self._sum:.17g}"
        yield f"{name}_count{labelled(labels)} {seen}"


class Gauge:
    """A number as it is now, perhaps several by their labels."""

    kind = "gauge"

    def __init__(self, help: str, *values: tuple[Mapping[str, str], float]) -> None:
        self.help = help
        self._values = values

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        for more, value in self._values:
            yield f"{name}{labelled({**labels, **more})} {value:.17g}"


def labelled(labels: Mapping[str, str]) -> str:
    """``{a="b",…}``."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def exposition(
    families: Mapping[str, Counter | Histogram | Gauge], labels: Mapping[str, str]
) -> str:
    """The text that Prometheus reads.

    Args:
        families: by name.
        labels: that all have.
    """
    lines: list[str] = []
    for name, family in families.items():
        lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines.extend(family.lines(name, labels))
    return "\n".join(lines) + "\n"
