"""What was measured lately: percentiles of the last minute, and a history that
every page shows alike. Times are seconds of a clock that never goes back."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

LATELY_S: Final = 60.0
MOST_VALUES: Final = 20_000
"""That are kept; of more in a minute the latest count."""
EVERY_S: Final = 2.0
KEPT: Final = 300
"""Samples: ten minutes."""


class Lately:
    """Values that were observed within the last minute.

    Args:
        span_s: how long a value counts.
        most: values that are kept.
    """

    def __init__(self, span_s: float = LATELY_S, most: int = MOST_VALUES) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque(maxlen=most)  # with their times

    def observe(self, now_s: float, value: float) -> None:
        self._values.append((now_s, value))
        self._forget(now_s)

    def num(self, now_s: float) -> int:
        """Values that count."""
        self._forget(now_s)
        return len(self._values)

    def quantiles(self, now_s: float, *parts: float) -> list[float | None]:
        """Of the values that count, by nearest rank: each is one that was
        observed. None: there is none."""
        self._forget(now_s)
        found = sorted(value for _, value in self._values)
        if not found:
            return [None] * len(parts)
        return [found[max(0, math.ceil(part * len(found)) - 1)] for part in parts]

    def _forget(self, now_s: float) -> None:
        while self._values and self._values[0][0] <= now_s - self._span_s:
            self._values.popleft()


@dataclass(frozen=True)
class Sample:
    """How a server was."""

    tokens_per_s: float
    """Generated since the sample before."""
    num_running: int
    """Sequences."""
    num_waiting: int
    kv_used: float
    """Part of the KV blocks, 0 to 1."""


class SampleHistory:
    """A sample every ``every_s`` seconds; where there was none, a gap.

    Args:
        every_s: seconds between two samples.
        kept: samples.
    """

    def __init__(self, every_s: float = EVERY_S, kept: int = KEPT) -> None:
        self.every_s = every_s
        self._samples: deque[Sample | None] = deque(maxlen=kept)
        self._slot: int | None = None
        """Number of the last sample, or gap."""
        self._before: tuple[float, float] | None = None
        """When the last sample was taken, and all tokens until then."""

    def note(
        self, now_s: float, num_tokens: float, num_running: int, num_waiting: int, kv_used: float
    ) -> None:
        """How the server is; called more often than samples are taken.

        Args:
            num_tokens: generated since the server began.
        """
        slot = int(now_s // self.every_s)
        if self._slot is not None and slot <= self._slot:
            return
        self._fill(slot - 1)
        before_s, before = self._before or (now_s, num_tokens)
        rate = (num_tokens - before) / (now_s - before_s) if now_s > before_s else 0.0
        self._samples.append(Sample(rate, num_running, num_waiting, kv_used))
        self._slot, self._before = slot, (now_s, num_tokens)

    def columns(self, now_s: float) -> dict[str, Any]:
        """The samples by what they say, the oldest first; null: a gap."""
        self._fill(int(now_s // self.every_s) - 1)
        names = ("tokens_per_s", "num_running", "num_waiting", "kv_used")
        return {
            "every_s": self.every_s,
            "kept": self._samples.maxlen,
            **{
                name: [
                    None if sample is None else round(getattr(sample, name), 4)
                    for sample in self._samples
                ]
                for name in names
            },
        }

    def _fill(self, slot: int) -> None:
        """Gaps up to a slot."""
        if self._slot is None:
            return
        kept = self._samples.maxlen or 0
        self._samples.extend([None] * min(max(0, slot - self._slot), kept))
        self._slot = max(self._slot, slot)
