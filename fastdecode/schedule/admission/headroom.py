"""Room for the sequences that start later, which keeps a stabilised load stable.

Load control asks whether the sequences that have started fit under the limit to their end. Alone it
fills the distant future with the first arrivals: sequences that it lets in together end together,
the next ones start together again, and the mean load sinks to half of the limit. Even starts do
not last either: equal lengths drift into such convoys within a few generations. In a steady state
the load h steps from now will be the limit again, but only a part of it is due to sequences that
have started by now. The others will have run for up to h steps. So at a horizon of h steps the
sequences that have started may use only

    W_lim · (1 - G(h)),   G(h) = mean load of a sequence over its first h steps
                                 / its load over all of its steps,

which for equal lengths S from nothing is the W_lim·(1 - (h/S)²) of an even stagger. From an empty
system this is also the ramp of a cold start. Two terms are added. Sequences are whole: one more
always has to fit, or nothing could start. And where lengths vary, the projected load swings around
its mean with the variance of the sum over all sequences: room on top of such swings is wasted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.admission.load_control import MicroBatch

# Sequences that started last whose lengths count.
_WINDOW = 256
# Sequences of full length that fit at any horizon.
_WHOLE_SEQUENCES = 1.5
# Standard deviations of the projected load that fit at any horizon.
_DEVIATIONS = 1.5


class Headroom:
    """Learns from the sequences of one lane what later ones will need."""

    def __init__(self) -> None:
        # First length, number of steps, peak.
        self._started: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)
        self._num_new = 0
        self._reached_end = 1.0
        self._peak = 0
        # Over the horizon h: G(h), and the standard deviation of the projected load (limit 1).
        self._later = [0.0]
        self._deviation = [0.0]

    def started(self, batch: MicroBatch) -> None:
        """Learn from a sequence that has started, or from a part of a split one."""
        self._started.append((batch.first_length, batch.num_steps, batch.peak))
        self._num_new += 1
        if self._num_new * 8 > len(self._started):
            self._learn()
            self._num_new = 0

    def ended(self, *, early: bool) -> None:
        """Learn from a sequence that is over. Where most end before their projected step, room
        becomes free all the time: the rule applies to the share that reaches it."""
        self._reached_end += ((not early) - self._reached_end) / 32

    def limit_for(
        self, batch: MicroBatch, limit: int, peak: int | None = None
    ) -> Callable[[int], float]:
        """Return what gives the highest projected load at a step when ``batch`` starts under W_lim.

        Args:
            peak: peak of all of its parts on the R-worker, if ``batch`` is one of several.
        """
        whole = _WHOLE_SEQUENCES * max(batch.peak if peak is None else peak, self._peak)
        later = self._reached_end * max(0.0, limit - whole)
        slack = self._reached_end * _DEVIATIONS * math.sqrt(limit)
        last = len(self._later) - 1

        def limit_at(step: int) -> float:
            h = min(step - batch.start, last)
            return limit - max(0.0, later * self._later[h] - slack * self._deviation[h])

        return limit_at

    def _learn(self) -> None:
        first, num_steps, peaks = np.array(self._started, np.float64).T
        self._peak = int(peaks.max())
        # Over the age u = 0, 1, …: how many known sequences get that old, and their lengths then.
        ages = np.arange(int(num_steps.max()))
        n, sum_first, sum_squares = (
            _older(num_steps, weight) for weight in (np.ones_like(first), first, first**2)
        )
        mean = (sum_first + ages * n) / len(first)
        variance = (sum_squares + 2 * ages * sum_first + ages**2 * n) / len(first) - mean**2
        area = mean.sum()
        later_variance = np.maximum(variance, 0.0)[::-1].cumsum()[::-1]
        self._later = [0.0, *(mean.cumsum() / area).tolist()]
        self._deviation = [*np.sqrt(later_variance / area).tolist(), 0.0]


def _older(num_steps: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each age the summed weights of the sequences that run for more steps."""
    by_steps = np.bincount(num_steps.astype(np.int64), weights)  # [longest + 1]
    return by_steps[::-1].cumsum()[::-1][1:]
