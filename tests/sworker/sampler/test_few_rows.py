"""Few rows on a CPU are drawn with NumPy: the tokens are those of many rows."""

from __future__ import annotations

import math

import pytest
import torch

from fastdecode.core.sequence import SamplingParams
from sworker.sampling.groups import FEW_ELEMENTS
from sworker.sampling.sampler import SamplingState, sample


def states_of(num_rows: int, vocab_size: int) -> list[SamplingState]:
    temperatures = (1.0, 0.3, 2.5)
    return [
        SamplingState(SamplingParams(temperature=temperatures[i % 3]), i, [], [], vocab_size)
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("vocab_size", [1, 7, 255, 256, 257, 1000, 8192])
def test_few_rows_draw_the_tokens_of_many(vocab_size: int) -> None:
    num_rows = FEW_ELEMENTS // vocab_size + 1 if vocab_size >= 255 else 300
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    states = states_of(num_rows, vocab_size)
    together = [found.token_id for found in sample(logits.clone(), states)]
    one_by_one = [
        sample(logits[i : i + 1].clone(), states[i : i + 1])[0].token_id for i in range(num_rows)
    ]
    assert together == one_by_one
    assert len(set(together)) > 1 or vocab_size == 1


def test_a_bad_row_among_few_harms_no_other() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[:1].clone(), states_of(1, 700))[0].token_id
    logits[1, 600], logits[2] = math.nan, -math.inf
    found = sample(logits.clone(), states_of(3, 700))
    assert found[0].token_id == alone
    assert found[1].error is not None and found[2].error is not None
