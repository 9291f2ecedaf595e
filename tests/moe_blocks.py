"""Blocks of experts with random weights."""

from __future__ import annotations

from typing import Any

import torch

from fastdecode.core.model.moe import Moe, Router
from fastdecode.core.model.spec import ModelSpec
from sworker.load.weights import random_model
from sworker.model.moe import Experts
from sworker.model.skeleton import Model

PLAIN = Moe(6, 2, 16, Router(renorm=True))


def spec_of(moe: Moe, hidden: int = 32, activation: Any = "silu") -> ModelSpec:
    return ModelSpec(
        name="random", family="", architecture="", dtype=None, vocab_size=8, hidden_size=hidden,
        embedding_size=hidden, intermediate_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1,
        head_dim=16, attention=(), max_model_len=8, activation=activation, norm="rms",
        norm_eps=1e-6, gated_mlp=True, ropes=(None,), moe=moe,
    )  # fmt: skip


def model_of(moe: Moe, dtype: torch.dtype = torch.float32, **shape: Any) -> Model:
    """One layer, whose block has larger weights than other random models."""
    model = random_model(spec_of(moe, **shape), device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.layers[0].mlp.parameters():
        parameter.normal_(0, 0.4, generator=generator)
    return model


def block_of(moe: Moe, dtype: torch.dtype = torch.float32, **shape: Any) -> Experts:
    block = model_of(moe, dtype, **shape).layers[0].mlp
    assert isinstance(block, Experts)
    return block
