"""Mean time to first token in closed form.

Prompts that arrive at random (Poisson) and all take the same time find an
M/D/1 queue. With rate R and time D of one prompt on one device:

=====================================  =============================
one device                             D + R·D² / 2(1 - R·D)
pipeline of n equal stages             D + R·D² / 2n(n - R·D)
tensor parallelism with speed-up K     D/K + R·D² / 2K(K - R·D)
m replicas, each request to one        D + R·D² / 2(m - R·D)
=====================================  =============================

All are one form: a time without waiting, and the wait of a queue whose slowest
stage takes so long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError

MAX_DEGREE = 1 << 20


@dataclass(frozen=True)
class PromptQueue:
    """Where prompts wait, in any one unit of time."""

    bare_s: float
    """From first stage to last, with nobody before."""
    stage_s: float
    """Of the slowest stage: the queue moves on once in this time."""
    num_queues: int = 1
    """Alike; each arrival joins any of them with the same probability."""

    def utilisation(self, rate: float) -> float:
        """The part of its time in which the slowest stage is busy."""
        return _checked("rate", rate, 0.0) / self.num_queues * self.stage_s

    def mean_ttft_s(self, rate: float) -> float:
        """Infinite where requests come at least as fast as they are served.

        Raises:
            ConfigError: the rate is negative or not finite.
        """
        busy = self.utilisation(rate)
        if busy >= 1.0:
            return math.inf
        return self.bare_s + busy * self.stage_s / (2.0 * (1.0 - busy))

    def greatest_rate(self, mean_ttft_s: float) -> float:
        """The rate at which the mean TTFT is this one; 0 where prompts take as
        long without any queue.

        Raises:
            ConfigError: the time isn't positive and finite.
        """
        spare_s = _checked("mean_ttft", mean_ttft_s, math.nextafter(0.0, 1.0)) - self.bare_s
        if spare_s <= 0.0:
            return 0.0
        # spare = busy·stage / 2(1 - busy), solved for busy.
        busy = 2.0 * spare_s / (self.stage_s + 2.0 * spare_s)
        return busy * self.num_queues / self.stage_s


def one_device(prompt_s: float) -> PromptQueue:
    """Raises ConfigError, as all of these, if a number isn't positive and finite."""
    return replicas(prompt_s, 1)


def pipeline(prompt_s: float, num_stages: int) -> PromptQueue:
    """A prompt takes as long as on one device, but the next one follows a stage behind."""
    _check_degree("num_stages", num_stages)
    return PromptQueue(_positive("prompt_s", prompt_s), prompt_s / num_stages)


def tensor_parallel(prompt_s: float, speed_up: float) -> PromptQueue:
    """Several devices that share every layer are one that is so many times as fast."""
    faster_s = _positive("prompt_s", prompt_s) / _positive("speed_up", speed_up)
    return PromptQueue(faster_s, faster_s)


def replicas(prompt_s: float, num_replicas: int) -> PromptQueue:
    """So many devices, each with a queue of its own."""
    _check_degree("num_replicas", num_replicas)
    return PromptQueue(_positive("prompt_s", prompt_s), prompt_s, num_replicas)


def crossing(speed_up: float) -> float:
    """Where two devices are as good as a pipeline as they are with tensor
    parallelism: R·D of equal mean TTFT. Below, tensor parallelism is better;
    above, the pipeline.

    Args:
        speed_up: K of two devices that share every layer, from 1 (none) to 2
            (perfect).

    Raises:
        ConfigError: it isn't within 1..2.
    """
    k = speed_up
    if not 1.0 <= k <= 2.0:
        raise ConfigError(f"speed_up={k!r}: two devices are 1 to 2 times as fast as one")
    # (3K-2)x² - (3K-2)(K+2)x + 8K(K-1) = 0, its smaller root.
    half = (k + 2.0) / 2.0
    square = half * half - 8.0 * k * (k - 1.0) / (3.0 * k - 2.0)
    return half - math.sqrt(max(0.0, square))


def _positive(name: str, value: float) -> float:
    return _checked(name, value, math.nextafter(0.0, 1.0))


def _checked(name: str, value: float, least: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or value < least:
        limit = "at least 0" if least == 0.0 else "above 0"
        raise ConfigError(f"{name}={value!r} must be a finite number, {limit}")
    return value


def _check_degree(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEGREE:
        raise ConfigError(f"{name}={value!r} is not a whole number from 1 to {MAX_DEGREE}")
