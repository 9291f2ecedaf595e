"""Quantised checkpoints load as those that hold the decoded weights do, whole
and in parts, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised import WAYS, quantise_checkpoint
from weight_files import assert_same, load

from sworker.ranks.sharding import Shard

SHAPES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
          "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_whole_and_in_parts(
    way: str, family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, seed=2, **SHAPES)
    quantised, plain = quantise_checkpoint(source, tmp_path, way)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same(load(quantised, dtype=dtype), load(plain, dtype=dtype))
    for rank in range(2):
        part = Shard(rank, 2)
        assert_same(load(quantised, shard=part), load(plain, shard=part))
    later = range(1, 3)
    assert_same(
        load(quantised, layers=later, with_head=False), load(plain, layers=later, with_head=False)
    )
