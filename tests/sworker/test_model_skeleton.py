"""The skeleton: what goes in and out of its halves, in any dtype, without a look at the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FEW_FAMILIES, prompts

from sworker.load.weights import load_model

Make = Callable[..., Path]


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_16_bit_floats(family: str, dtype: torch.dtype, tiny_checkpoint: Make) -> None:
    """Activations stay in the model's dtype, and differ from float32 by no more
    than its rounding explains."""
    path = tiny_checkpoint(family)
    spec, wide = load_model(path, device="cpu", dtype=torch.float32)
    _, narrow = load_model(path, device="cpu", dtype=dtype)
    for parameter, exact in zip(narrow.parameters(), wide.parameters(), strict=True):
        exact.copy_(parameter)  # the weights' own rounding isn't the question
    (text,) = prompts((9,))
    tokens, positions = torch.tensor(text), torch.arange(9, dtype=torch.int32)
    x, y = wide.embed(tokens, positions), narrow.embed(tokens, positions)
    _assert_near(y, x, dtype)
    for a, b in zip(wide.layers, narrow.layers, strict=True):
        _, qkv = a.pre_attention(x, None, positions)
        y, narrow_qkv = b.pre_attention(x.to(dtype), None, positions)
        for exact, rounded in zip(qkv, narrow_qkv, strict=True):
            _assert_near(rounded, exact, dtype)
        x, y = _sum(a.post_attention(x, qkv[0])), _sum(b.post_attention(y, qkv[0].to(dtype)))
        _assert_near(y, x, dtype)
    assert narrow.logits(y).dtype == torch.float32
    assert narrow.logits(y).shape == (9, spec.vocab_size)


def _sum(halves: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """The next layer's input."""
    x, added = halves
    return x if added is None else x + added


def _assert_near(rounded: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert rounded.dtype == dtype
    error = (rounded.float() - exact).norm() / exact.norm()
    assert error < 6 * torch.finfo(dtype).eps
