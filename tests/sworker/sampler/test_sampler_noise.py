"""Rows of a large vocabulary, and the same rows with the noise of another way
of running the model: both draw the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from examples import examples
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SamplingState, sample

VOCAB = 128_256
NOISE = 1e-5
NUM_ROWS = examples(96, share=3)


def rows_of(kind: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(7)
    spread = {"flat": 0.5, "likely": 3.0, "untrained": 1.0}[kind]
    rows = rng.normal(0, spread, (NUM_ROWS, VOCAB)).astype(np.float32)
    if kind == "untrained":
        # A few likely tokens, and behind them many that were never trained.
        rows -= 8
        rows[:, rng.permutation(VOCAB)[:30_000]] = 0.5
        rows[:, rng.permutation(VOCAB)[:20]] += 12
    return rows


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "hot": {"temperature": 1.5},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "both": {"top_k": 50, "top_p": 0.9},
}


@pytest.mark.parametrize("kind", ["flat", "likely", "untrained"])
def test_noise_changes_no_draw(kind: str) -> None:
    """Inverse CDF in order of id, as it was: of these draws dozens change."""
    rows = rows_of(kind)
    noise = np.random.default_rng(8).standard_normal(rows.shape, np.float32) * np.float32(NOISE)
    noisy = torch.from_numpy(rows + noise)
    clean = torch.from_numpy(rows)
    changed = {}
    for name, options in OPTIONS.items():
        if kind == "flat" and options.get("top_p"):
            continue  # half of the vocabulary is sorted for each row
        params = SamplingParams(**options)
        states = [SamplingState(params, row, (), (), VOCAB) for row in range(NUM_ROWS)]
        before, after = sample(clean, states), sample(noisy, states)
        changed[name] = sum(a != b for a, b in zip(before, after, strict=True))
    assert not any(changed.values()), changed
