"""One row, drawn from many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling_rows import make_state

import sworker.sampling.weights as weights
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import sample


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draw one row many times with evenly spread uniforms: frequencies are
    probabilities, to within 1/count.

    With ``draws`` it gives the drawn tokens themselves, by ascending uniforms.
    """

    def run(
        row: NDArray[np.float32], params: SamplingParams, draws: bool = False, **kwargs: Any
    ) -> NDArray[Any]:
        count = 4000
        monkeypatch.setattr(
            weights, "uniforms", lambda states: (np.arange(len(states)) + 0.5) / len(states)
        )
        states = [make_state(params, vocab=len(row), **kwargs)] * count
        tokens = [s.token_id for s in sample(torch.from_numpy(np.tile(row, (count, 1))), states)]
        monkeypatch.undo()
        return np.array(tokens) if draws else np.bincount(tokens, minlength=len(row)) / count

    return run
