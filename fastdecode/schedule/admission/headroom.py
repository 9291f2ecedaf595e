"""Leaving room for the sequences that start later: what keeps a stabilised load
stable.

Load control asks whether the sequences that have started fit under the limit to
their end. Taken alone it fills the distant future with whoever comes first: the
sequences it lets in together end together, the next ones start together again,
and the mean load sinks to half of the limit. (Even starts don't last either:
equal lengths drift into such convoys within a few generations.) In a steady
state the load h steps from now will be the limit again, but only a part of it
is due to sequences that have started by now; the others will have run for up to
h steps. So at a horizon of h steps the sequences that have started may use only

    W_lim · (1 - G(h)),   G(h) = mean load of a sequence over its first h steps
                                 / its load over all of its steps,

which for equal lengths S from nothing is the W_lim·(1 - (h/S)²) that an even
stagger has. From an empty system this is also the ramp that a cold start needs.
Two terms are added. Sequences are whole: one more always has to fit, or nothing
could start. And lengths vary: where they do, the projected load swings around
its mean by itself, with the variance of the sum over all sequences in the
system, and room that is left on top of such swings is wasted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.admission.load_control import MicroBatch

# Lengths of so many sequences that started last are known.
_WINDOW = 256
# Sequences at their full length that fit at any horizon.
_WHOLE_SEQUENCES = 1.5
# Standard deviations of the projected load that fit at any horizon.
_DEVIATIONS = 1.5


class Headroom:
    """Learns from the sequences of one lane what those that start later will need."""

    def __init__(self) -> None:
        # First length, number of steps, peak.
        self._started: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)
        self._num_new = 0
        self._reached_end = 1.0
        self._peak = 0
        # Over the horizon h: G(h), and the standard deviation of the projected
        # load for a load limit of 1.
        self._later = [0.0]
        self._deviation = [0.0]

    def started(self, batch: MicroBatch) -> None:
        """A micro-batch of one has started; of a split sequence, a part: limits
        are an R-worker's."""
        self._started.append((batch.first_length, batch.num_steps, batch.peak))
        self._num_new += 1
        if self._num_new * 8 > len(self._started):
            self._learn()
            self._num_new = 0

    def ended(self, *, early: bool) -> None:
        """A sequence is over. Where most end before the step that was
        projected, room comes free all the time without being left on purpose;
        the rule applies to the part of them that reach it."""
        self._reached_end += ((not early) - self._reached_end) / 32

    def limit_for(
        self, batch: MicroBatch, limit: int, peak: int | None = None
    ) -> Callable[[int], float]:
        """What the load may come to at a step, projected now, when the sequence
        ``batch`` starts under W_lim. ``peak``: of all of its parts on the
        R-worker, if ``batch`` is one of several."""
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
        # Over the age u = 0, 1, … of a sequence: how many of the known ones get
        # that old, and their lengths then.
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
    """For each age, the summed weights of the sequences that run for more steps than that."""
    by_steps = np.bincount(num_steps.astype(np.int64), weights)  # [longest + 1]
    return by_steps[::-1].cumsum()[::-1][1:]
