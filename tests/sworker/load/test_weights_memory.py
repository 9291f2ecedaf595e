"""A load's peak memory is the model and its largest tensor, not a second copy of the weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from quantised import edit_checkpoint

from examples import TRIES_ALL

_SIZES = {"hidden_size": 1024, "vocab_size": 1024, "max_position_embeddings": 128,
          "tie_word_embeddings": True}  # fmt: skip
CONFIGS = {
    "dense": transformers.LlamaConfig(
        **_SIZES, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16,
        num_key_value_heads=16,
    ),
    "experts": transformers.Qwen3MoeConfig(
        **_SIZES, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=512, head_dim=64,
        num_hidden_layers=4, num_key_value_heads=2, num_attention_heads=2,
    ),
}  # fmt: skip
"""Weights take 300 MB in float32, the largest tensor of them 16 MB, and an expert's 2 MB."""

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


def save_zeros(path: Path, name: str) -> Path:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(path)
    return path


def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Projections in FP8: of 4 MB at most."""
    if not name.endswith("_proj.weight"):
        return None
    scale = torch.ones(tensor.shape[0] // 128, tensor.shape[1] // 128)
    return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", *["float32"] * TRIES_ALL])
@pytest.mark.parametrize("made", ["dense", "quantised", "experts"])
def test_peak_memory(
    made: str, dtype: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = save_zeros(tmp_path / "plain", "experts" if made == "experts" else "dense")
    if made == "quantised":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        path = edit_checkpoint(path, tmp_path / "fp8", quantise, quantization_config=config)
    command = [sys.executable, "-c", _MEASURE, str(path), str(tiny_checkpoint("llama")), dtype]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    before, before_peak, peak, model_bytes = map(int, run.stdout.split())
    largest_bytes, slack_bytes = 4 * 1024 * 4096, 8 << 20
    print(f"before {before}, model {model_bytes}, above both {peak - before - model_bytes}")
    assert model_bytes > 10 * largest_bytes / (2 if dtype == "bfloat16" else 1)
    assert peak <= max(before_peak, before + model_bytes + largest_bytes) + slack_bytes
