"""Mean time to first token in closed form: prompts that arrive at random and all take the same
time find an M/D/1 queue. Two devices are a pipeline, or share every layer (K times as fast)."""

from __future__ import annotations

import math

from fastdecode.core.errors import ConfigError


def mean_ttft_s(bare_s: float, stage_s: float, rate: float) -> float:
    """Return the mean, infinite where requests come at least as fast as they are served.

    Args:
        bare_s: Of a prompt from first stage to last, with none before it.
        stage_s: Of the slowest stage: the queue moves on once in this time.
    """
    busy = rate * stage_s
    return bare_s + busy * stage_s / (2.0 * (1.0 - busy)) if busy < 1.0 else math.inf


def crossing(speed_up: float) -> float:
    """Return R·D of equal mean TTFT: below it two devices are better as tensor parallel ones, which
    are ``speed_up`` times as fast as one (1 to 2), and above it as a pipeline."""
    k = speed_up
    if not 1.0 <= k <= 2.0:
        raise ConfigError(f"speed_up={k!r}: two devices are 1 to 2 times as fast as one")
    # (3K-2)x² - (3K-2)(K+2)x + 8K(K-1) = 0, its smaller root.
    half = (k + 2.0) / 2.0
    square = half * half - 8.0 * k * (k - 1.0) / (3.0 * k - 2.0)
    return half - math.sqrt(max(0.0, square))
