"""Rotary frequencies equal transformers', and dynamic scaling keeps the promise
that RopeSpec makes."""

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
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn-options": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024,
                     "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.8,
                     "mscale_all_dim": 0.5},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 2048, "attention_factor": 0.7},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 1024,
                 "short_factor": [1 + i / 64 for i in range(64)],
                 "long_factor": [2 + i / 8 for i in range(64)]},
}  # fmt: skip


def _read(scaling: dict[str, Any]) -> ModelSpec:
    return read_model_spec({**_SIZES, "rope_scaling": scaling}, name="demo")


@pytest.mark.parametrize("name", _SCALINGS)
def test_frequencies_equal_transformers(name: str) -> None:
    spec = _read(_SCALINGS[name]).ropes[0]
    assert spec is not None
    options = {key: value for key, value in _SIZES.items() if key != "architectures"}
    config = transformers.LlamaConfig(**options, rope_scaling=dict(_SCALINGS[name]))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = frequencies(spec, torch.arange(4.0))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_table_turns_in_float32_and_rounds_once() -> None:
    rope = _read(_SCALINGS["default"]).ropes[0]
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
