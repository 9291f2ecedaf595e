"""Rotary frequencies equal transformers', and the table rounds once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from sworker.model.rope import RotaryTable, frequencies

_SIZES = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 1, "intermediate_size": 64,
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


def _read(scaling: dict[str, Any]) -> ModelSpec:
    return read_model_spec({**_SIZES, "rope_scaling": scaling}, name="demo")


def test_attention_factor_is_transformers() -> None:
    """The one option that no checkpoint of ``test_model_exact.py`` has."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
               "attention_factor": 0.7}  # fmt: skip
    options = {key: value for key, value in _SIZES.items() if key != "architectures"}
    config = transformers.LlamaConfig(**options, rope_scaling=dict(scaling))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = _read(scaling).ropes[0]
    assert rope is not None
    torch.testing.assert_close(
        frequencies(rope, torch.arange(4.0)), theirs.inv_freq, rtol=1e-6, atol=0
    )
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_table_turns_in_float32_and_rounds_once() -> None:
    rope = _read({"rope_type": "default"}).ropes[0]
    assert rope is not None
    table = RotaryTable(rope, 64)
    table.fill(torch.device("cpu"))
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 63], dtype=torch.int32)
    exact = table(x.bfloat16().float(), positions)
    assert torch.equal(table(x.bfloat16(), positions), exact.bfloat16())
    # it only turns
    torch.testing.assert_close(exact.norm(dim=-1), x.bfloat16().float().norm(dim=-1))
    assert torch.equal(exact[0], x.bfloat16().float()[0]), "position 0 doesn't turn"
