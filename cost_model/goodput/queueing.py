"""Mean time to first token in closed form.

Prompts that arrive at random (Poisson) and all take the same time find an
M/D/1 queue: on one device that takes D a prompt, at rate R, a mean prompt waits
R·D² / 2(1 - R·D) before its own D. Two devices are a pipeline, or share every layer
(tensor parallelism, K times as fast).
"""

from __future__ import annotations

import math

from fastdecode.core.errors import ConfigError


def mean_ttft_s(bare_s: float, stage_s: float, rate: float) -> float:
    """Infinite where requests come at least as fast as they are served.

    Args:
        bare_s: of a prompt from first stage to last, with none before it.
        stage_s: of the slowest stage: the queue moves on once in this time.
        rate: requests a second.
    """
    busy = rate * stage_s
    return bare_s + busy * stage_s / (2.0 * (1.0 - busy)) if busy < 1.0 else math.inf


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
