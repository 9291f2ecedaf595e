"""What sampling sends to a GPU goes by way of pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastdecode.core.sequence import SamplingParams
from sworker import buffers
from sworker.sampling.sampler import SamplingState, draw


class Uploading:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.sizes.append(host.nbytes)
        return host.clone()


def test_penalties_are_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long prompts they are megabytes a step: CUDA waits for the stream before
    it copies so much plain memory. Before, ``Tensor.to`` copied them."""
    gpu: Any = Uploading()
    vocab, length = 5000, 4000
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={3: 1.0})
    prompts = [tuple(rng.integers(0, vocab, length).tolist()) for _ in range(4)]
    states = [SamplingState(params, 0, prompt, (), vocab, 0) for prompt in prompts]
    logits = torch.randn(4, vocab)
    expected = draw(logits.clone(), states).result()
    monkeypatch.setattr(buffers, "gpu_of", lambda device: gpu)
    assert draw(logits.clone(), states).result() == expected
    num_ids = sum(len(set(prompt)) for prompt in prompts)
    # Rows, ids and counts of each token that is penalised, and three factors.
    assert sorted(gpu.sizes)[-4:] == [num_ids * 4, num_ids * 8, num_ids * 8, num_ids * 12]
