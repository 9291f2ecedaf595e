"""What a row may draw, and how often, against transformers' logits processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_rows import assert_drawn_as, draw_row
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SamplingState

V = 97


def processors_of(p: SamplingParams) -> LogitsProcessorList:
    chain = LogitsProcessorList()
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    chain.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    return chain


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 12},
        {"top_p": 0.85},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.15},
        {"temperature": 0.7, "top_k": 10, "top_p": 0.95},
    ],
    ids=str,
)
def test_drawn_frequencies_are_the_processed_probabilities(options: dict[str, Any]) -> None:
    params, rng = SamplingParams(**options), np.random.default_rng(17)
    row = torch.from_numpy(rng.normal(0, 2, V).astype(np.float32))
    prompt, output = rng.integers(0, V, 6).tolist(), rng.integers(0, V, 3).tolist()
    processed = processors_of(params)(torch.tensor([prompt + output]), row[None].clone())  # type: ignore[arg-type]
    expected = torch.softmax(processed, dim=-1)[0].double().numpy()
    state = SamplingState(params, 0, prompt, (), V, 0, output)
    assert_drawn_as(draw_row(row.numpy(), state), expected)
