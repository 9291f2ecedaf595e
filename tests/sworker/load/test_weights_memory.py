"""A load's peak memory is the model and its largest tensor, not a second copy of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised import edit_checkpoint
from safetensors.torch import save_file

from examples import TRIES_ALL

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 1024, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "dtype": "float32",
}  # fmt: skip

_MEASURE = """
import sys, torch
from pathlib import Path
from sworker.load.weights import load_model

def memory(field):  # bytes
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) << 10

large, tiny, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
load_model(tiny, device="cpu", dtype=dtype)  # brings in the code, which takes memory too
before, before_peak = memory("VmRSS"), memory("VmHWM")
spec, model = load_model(large, device="cpu", dtype=dtype)
print(before, before_peak, memory("VmHWM"), sum(p.numel() * p.itemsize for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """340 MB in float32; the largest tensor takes 16 MB."""
    path = tmp_path_factory.mktemp("large")
    hidden, inner = 1024, 4096
    tensors = {
        "model.embed_tokens.weight": torch.zeros(1024, hidden),
        "model.norm.weight": torch.zeros(hidden),
    }
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = torch.zeros(hidden, hidden)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = torch.zeros(shape)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}{name}_layernorm.weight"] = torch.zeros(hidden)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(_CONFIG))
    return path


@pytest.fixture(scope="module")
def quantised(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with projections in FP8: of 4 MB at most."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith("_proj.weight"):
            return None
        scale = torch.ones(tensor.shape[0] // 128, tensor.shape[1] // 128)
        return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}

    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = tmp_path_factory.mktemp("quantised") / "fp8"
    return edit_checkpoint(checkpoint, path, quantise, quantization_config=config)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB in float32, nearly all of it in experts of 2 MB a tensor."""
    path = tmp_path_factory.mktemp("experts")
    hidden, inner, num = 1024, 512, 12
    sizes = {"num_experts": num, "num_experts_per_tok": 2, "moe_intermediate_size": inner,
             "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 64, "num_hidden_layers": 4,
             "num_key_value_heads": 2, "num_attention_heads": 2}  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": torch.zeros(1024, hidden),
        "model.norm.weight": torch.zeros(hidden),
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = torch.zeros(128, hidden)
        tensors[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(hidden, 128)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{prefix}{name}.weight"] = torch.zeros(64)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}{name}_layernorm.weight"] = torch.zeros(hidden)
        tensors[f"{prefix}mlp.gate.weight"] = torch.zeros(num, hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                            ("down", (hidden, inner))):  # fmt: skip
            tensors |= {
                f"{prefix}mlp.experts.{expert}.{name}_proj.weight": torch.zeros(shape)
                for expert in range(num)
            }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**_CONFIG, **sizes}))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", *["float32"] * TRIES_ALL])
@pytest.mark.parametrize("made", ["checkpoint", "quantised", "experts"])
def test_peak_memory(
    made: str,
    dtype: str,
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    checkpoint = request.getfixturevalue(made)
    command = [
        sys.executable,
        "-c",
        _MEASURE,
        str(checkpoint),
        str(tiny_checkpoint("llama")),
        dtype,
    ]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    before, before_peak, peak, model_bytes = map(int, run.stdout.split())
    largest_bytes = 4 * 1024 * 4096
    slack_bytes = 8 << 20
    print(
        f"before {before}, model {model_bytes}, largest {largest_bytes}, above both "
        f"{peak - before - model_bytes}"
    )
    assert model_bytes > 10 * largest_bytes / (2 if dtype == "bfloat16" else 1)
    assert peak <= max(before_peak, before + model_bytes + largest_bytes) + slack_bytes
