"""Attention with sinks: each head has a learned score that takes part in the
softmax and has no value (gpt-oss; arXiv 2309.17453).

With the log-sum-exp of the scores of all that a query sees, that is what
attention gives without, times sigmoid(lse - sink). So a sink enters once, after
the last merge, wherever attention ran.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks take their part of o, in place.

    Args:
        o: attention without sinks, [T, Hq, D].
        lse: of the scores, natural log, float32 [T, Hq]; inf for rows that had
            their sinks.
        sinks: float32 [Hq].
    """
    o.copy_(o.float() * torch.sigmoid(lse - sinks)[..., None])
