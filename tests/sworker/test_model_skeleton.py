"""The skeleton: what goes in and out of its halves, in any dtype, without a look at the data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, prompts

from fastdecode.core.model.checkpoint import open_checkpoint
from sworker.load.weights import load_model
from sworker.model.reference import ReferenceAttention
from sworker.model.skeleton import Model, forward

Make = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_without_data(family: str, tiny_checkpoint: Make) -> None:
    """Runs on tensors that have no data: so no layer waits for the device or
    branches on what it computed."""
    spec = open_checkpoint(tiny_checkpoint(family)).spec()
    with torch.device("meta"):
        model = Model(spec)
        tokens, positions = torch.empty(7, dtype=torch.int64), torch.empty(7, dtype=torch.int64)
    x, added = model.embed(tokens, positions), None
    assert x.shape == (7, spec.hidden_size)
    for layer in model.layers:
        assert not hasattr(layer, "attention")
        x, (q, k, v) = layer.pre_attention(x, added, positions)
        assert q.shape == (7, spec.num_q_heads, spec.head_dim)
        assert k.shape == v.shape == (7, spec.num_kv_heads, spec.head_dim)
        x, added = layer.post_attention(x, torch.empty_like(q))
        assert x.shape == (7, spec.hidden_size)
        assert added is None or added.shape == x.shape
    logits = model.logits(x[:2])
    assert (logits.shape, logits.dtype) == ((2, spec.vocab_size), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bloom"])
@torch.inference_mode()
def test_a_prompt_in_pieces(family: str, tiny_checkpoint: Make) -> None:
    """A token's logits don't depend on how its sequence was cut, nor on what ran beside it."""
    spec, model = load_model(tiny_checkpoint(family), device="cpu", dtype=torch.float32)
    a, b = prompts((40, 17))
    whole = ReferenceAttention(spec.attention)
    expected = model.logits(forward(model, torch.tensor(a), whole.begin_step([0], [40]), whole))
    pieces = ReferenceAttention(spec.attention)
    outputs = []
    for start, stop, beside in ((0, 1, b[:5]), (1, 19, b[5:6]), (19, 40, b[6:])):
        tokens = torch.tensor([*chain(beside, a[start:stop])])
        positions = pieces.begin_step([1, 0], [len(beside), stop - start])
        outputs.append(model.logits(forward(model, tokens, positions, pieces)[len(beside) :]))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=0)
    pieces.close(0)
    assert pieces.begin_step([0, 1], [1, 1]).tolist() == [0, 17], "a closed sequence starts anew"


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gated and not
def test_weights_are_gone_with_their_model(family: str, tiny_checkpoint: Make) -> None:
    """At once: the next engine's weights need their memory before the garbage collector comes."""
    _, model = load_model(tiny_checkpoint(family), device="cpu", dtype=torch.float32)
    weights = {name: weakref.ref(weight) for name, weight in model.named_parameters()}
    gc.disable()
    try:
        del model
        assert [name for name, weight in weights.items() if weight() is not None] == []
    finally:
        gc.enable()
