"""Random Llama-shaped checkpoints, for benchmarks: what a layer costs doesn't
depend on its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec


def llama_config(**shape: Any) -> dict[str, Any]:
    """A config.json: ``shape`` beside what all of these models have."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", **shape,
    }  # fmt: skip


def write_checkpoint(directory: Path, config: Mapping[str, Any], name: str) -> ModelSpec:
    """Write config.json and model.safetensors, in the config's dtype."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = (head_dim * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    norms = ["model.norm.weight"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.{name}_proj.weight": (out, hidden)
            for name, out in {"q": q, "k": kv, "v": kv}.items()
        }
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        }
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
    dtype: torch.dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    weights |= {name: torch.ones(hidden) for name in norms}
    save_file(
        {name: weight.to(dtype) for name, weight in weights.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_spec(dict(config), name=name)
