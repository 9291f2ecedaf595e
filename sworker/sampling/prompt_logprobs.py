"""Log-probabilities of a prompt's tokens, each after those before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.sampling.penalties import to_device
from sworker.sampling.sampler import MAX_BLOCK_ELEMENTS, MAX_CPU_BLOCK_ELEMENTS
from sworker.sampling.weights import logprobs_of


@torch.inference_mode()
def prompt_logprobs(
    logits_of: Callable[[NDArray[np.int64]], Tensor],
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    count: int,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Of the model's own distribution, a bounded number of rows at a time.

    Args:
        logits_of: rows of a step [b] → float32 [b, V].
        rows: [P] whose logits.
        tokens: [P] what follows each in its prompt.
        count: of the likeliest.

    Returns:
        float64 [P, 2 + 2 · count], on the device: see ``logprobs_of``.
    """
    most = MAX_CPU_BLOCK_ELEMENTS if device.type == "cpu" else MAX_BLOCK_ELEMENTS
    size = max(1, most // vocab_size)
    found = []
    for first in range(0, len(rows), size):
        logits = logits_of(rows[first : first + size])
        following = to_device(tokens[first : first + size], device)[:, None]
        greatest = logits.amax(dim=1, keepdim=True)
        found.append(logprobs_of(logits, greatest, following, min(count, vocab_size)))
    return torch.cat(found)
