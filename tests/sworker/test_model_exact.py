"""Every family says what transformers says: logits within 1e-4, and the same greedy text.

Batches are ragged; transformers sees each sequence alone, so a token that leaked between sequences would show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import oracle, prompts

from sworker.model.decoder import forward
from sworker.model.reference import ReferenceAttention
from sworker.weights import load_model

NUM_TOKENS = 72
LENGTHS = (5, 23, 1)  # the longest is longer than every window

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
]


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join([variant[0], *variant[1]]))
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    family, overrides = request.param
    return tiny_checkpoint(family, **overrides)


@torch.inference_mode()
def test_logits_of_a_ragged_batch(checkpoint: Path) -> None:
    spec, model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    texts = prompts((31, 1, 58, 12))
    attend = ReferenceAttention(spec.attention)
    positions = attend.begin_step(range(len(texts)), [len(text) for text in texts])
    x = forward(model, torch.tensor(sum(texts, [])), positions, attend)
    for text, ours in zip(texts, model.logits(x).split([len(text) for text in texts]), strict=True):
        torch.testing.assert_close(ours, oracle(checkpoint).logits(text), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_greedy_text_of_a_ragged_batch(checkpoint: Path) -> None:
    spec, model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    texts = prompts(LENGTHS, seed=1)
    attend = ReferenceAttention(spec.attention)
    ids = range(len(texts))
    fed, outputs = texts, [list[int]() for _ in texts]
    for _ in range(NUM_TOKENS):
        counts = [len(tokens) for tokens in fed]
        positions = attend.begin_step(ids, counts)
        x = forward(model, torch.tensor(sum(fed, [])), positions, attend)
        last = torch.tensor(counts).cumsum(0) - 1
        drawn = model.logits(x[last]).argmax(-1).tolist()
        fed = [[token] for token in drawn]
        for output, token in zip(outputs, drawn, strict=True):
            output.append(token)
    for text, output in zip(texts, outputs, strict=True):
        expected, lead = oracle(checkpoint).greedy(text, NUM_TOKENS)
        assert lead > 1e-3, "two tokens are nearly tied: this checkpoint can't judge; draw another"
        assert len(set(expected)) > 8, "the text is nearly constant: this checkpoint can't judge; draw another"
        assert output == expected
