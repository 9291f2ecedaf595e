"""Quantised checkpoints load as checkpoints of the decoded weights do, whole
and in parts, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from quantised import WAYS, edit_checkpoint, quantise_checkpoint
from weight_files import assert_same, load

from fastdecode.core.errors import CheckpointError
from sworker.ranks.sharding import Shard

SHAPES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
          "num_key_value_heads": 2}  # fmt: skip


def save_experts(path: Path) -> Path:
    """Save a mixture of experts whose sizes are multiples of every format's groups."""
    config = transformers.Qwen3MoeConfig(
        **{**SHAPES, "vocab_size": 211, "num_hidden_layers": 2, "num_experts": 5,
           "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 128}
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("way", "family"),
    [
        *((way, family) for way in WAYS for family in ("llama", "experts")),
        ("fp8-blocks", "qwen3"),
        ("gptq", "phi3"),
    ],
)
def test_whole_and_in_parts(
    way: str, family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if family == "experts":
        source = save_experts(tmp_path / "experts")
    else:
        source = tiny_checkpoint(family, seed=2, **SHAPES)
    quantised, plain = quantise_checkpoint(source, tmp_path, way)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(load(quantised, dtype=dtype), load(plain, dtype=dtype))
    for rank in range(2):
        part = Shard(rank, 2)
        assert_same(load(quantised, shard=part), load(plain, shard=part))
    later = range(1, 2) if family == "experts" else range(1, 3)
    assert_same(
        load(quantised, layers=later, with_head=False), load(plain, layers=later, with_head=False)
    )


def with_biases(source: Path, target: Path, value: float) -> Path:
    """A bias beside every quantised weight, as some tools write it."""

    def add(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(".scales"):
            return None
        bias = torch.full((tensor.shape[-1],), value, dtype=torch.float16)
        return {name: tensor, f"{name.removesuffix('.scales')}.bias": bias}

    return edit_checkpoint(source, target, add)


def test_biases_of_zeros_are_left_out(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantised, _ = quantise_checkpoint(tiny_checkpoint("llama", seed=2, **SHAPES), tmp_path, "gptq")
    assert_same(load(with_biases(quantised, tmp_path / "zeros", 0.0)), load(quantised))
    with pytest.raises(CheckpointError, match=r"bias.*has no place"):
        load(with_biases(quantised, tmp_path / "ones", 1.0))
