"""Keys beside large biases: evened out for int8 and int4, and products as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weight_files import Make, Tensors, copy_with, edit_config

from fastdecode.core.dtype import DType
from sworker.load.weights import load_model
from sworker.model.skeleton import Model

BIASES = {13: 60.0, 14: -45.0, 31: 25.0}
"""Slow dims of a head of 32."""
SHAPES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}


def with_biases(source: Path, directory: Path, dtype: torch.dtype) -> Path:
    def bias(tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor *= 0.5
            if name.endswith("k_proj.bias"):
                for dim, bias in BIASES.items():
                    tensor.view(-1, 32)[:, dim] = bias
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    copy_with(source, directory, bias)
    edit_config(directory, dtype=str(dtype)[6:])
    return directory


def scores(model: Model, seed: int = 0, *, bits: int | None = None) -> list[Tensor]:
    """q · k of each layer's pairs of tokens, k rounded as a cache of ``bits`` does."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, model.spec.hidden_size, generator=generator).to(model.dtype)
    found = []
    for layer in model.layers:
        x, (q, k, v) = layer.pre_attention(x, None, torch.arange(40))
        q, k = q.double(), k.double()
        if bits is not None:
            step = k.abs().amax(-1, keepdim=True) / ((1 << (bits - 1)) - 1)
            k = (k / step).round() * step
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        found.append(torch.einsum("qhd,khd->hqk", q, k))
        x, added = layer.post_attention(x, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
        x = x if added is None else x + added
    return found


def load(path: Path, kv_dtype: DType | None, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, device="cpu", dtype=dtype, kv_dtype=kv_dtype)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_evened_keys_are_bit_for_bit_the_same(
    tiny_checkpoint: Make, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = with_biases(tiny_checkpoint("qwen2", **SHAPES), tmp_path / "biased", dtype)
    plain, evened = load(path, DType.FLOAT32, dtype), load(path, DType.INT8, dtype)
    assert not torch.equal(plain.layers[0].qkv.weight, evened.layers[0].qkv.weight)
    for before, after in zip(scores(plain), scores(evened), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("bits", [8, 4])
def test_evened_keys_are_rounded_less(tiny_checkpoint: Make, tmp_path: Path, bits: int) -> None:
    path = with_biases(tiny_checkpoint("qwen2", **SHAPES), tmp_path / "biased", torch.float32)
    kv_dtype = DType.INT8 if bits == 8 else DType.INT4
    plain, evened = load(path, None), load(path, kv_dtype)
    exact = scores(plain)

    def error(rounded: list[Tensor]) -> float:
        """Error of scores relative to one another, as in softmax."""
        differences = [(a - b) - (a - b).mean(-1, keepdim=True)
                       for a, b in zip(rounded, exact, strict=True)]  # fmt: skip
        return float(torch.cat([d.flatten() for d in differences]).square().mean().sqrt())

    assert error(scores(evened, bits=bits)) < 0.5 * error(scores(plain, bits=bits))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt2"])
def test_models_without_large_biases_stay_as_they_are(tiny_checkpoint: Make, family: str) -> None:
    plain, quantised = (load(tiny_checkpoint(family), kind) for kind in (None, DType.INT4))
    for (name, before), after in zip(plain.named_parameters(), quantised.parameters(), strict=True):
        assert torch.equal(before, after), name
    for before, after in zip(scores(plain), scores(quantised), strict=True):
        assert torch.equal(before, after)


def test_weights_that_cannot_take_it_stay_with_a_warning(
    tiny_checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Small weights in float16 would lose bits."""
    source = tiny_checkpoint("qwen2", **SHAPES)
    path = with_biases(source, tmp_path / "biased", torch.float16)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor.fill_(6.11e-5)  # no number of float16 is a sixteenth of it
    save_file(tensors, path / "model.safetensors")
    plain, evened = (load(path, kind, torch.float16) for kind in (None, DType.INT8))
    assert torch.equal(plain.layers[0].qkv.weight, evened.layers[0].qkv.weight)
    assert torch.equal(plain.layers[0].qkv.bias, evened.layers[0].qkv.bias)
    assert "3 layers have biases that outweigh" in caplog.text


def test_int4_beside_large_biases_is_warned_of(
    tiny_checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_biases(tiny_checkpoint("qwen2", **SHAPES), tmp_path / "biased", torch.float32)
    load(path, DType.INT8)
    load(tiny_checkpoint("qwen2", **SHAPES), DType.INT4)
    assert not caplog.records
    load(path, DType.INT4)
    assert "--kv-dtype int8 or auto" in caplog.text
