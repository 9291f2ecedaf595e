"""Loading to a device: two pinned buffers, of which one is filled while the
device copies from the other. The device here is late (see ``late_gpu``): a buffer
that is written too soon gives other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_gpu import LateGpu
from quantised import quantise_checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from weight_files import assert_same, load

import sworker.load.reader
from sworker.load.weights import load_model


def load_late(path: Path, seed: int | None, **options: Any) -> tuple[LateGpu, Any]:
    gpu = LateGpu(seed)
    with gpu, torch.inference_mode():
        _, model = load_model(path, device="cpu", gpu=gpu, dtype=torch.float32, **options)
    gpu.finish()
    return gpu, model


def decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is the host's work."""
    real = sworker.load.reader.decode

    def decode(*args: Any) -> None:
        with _disable_current_modes():
            real(*args)

    monkeypatch.setattr(sworker.load.reader, "decode", decode)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("way", [None, "fp8-blocks", "gptq"])
def test_a_late_device_gets_the_same_weights(
    way: str | None,
    seed: int | None,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint("llama", hidden_size=64, intermediate_size=96, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    if way is not None:
        path, _ = quantise_checkpoint(path, tmp_path, way)
    expected = load(path)
    decode_at_once(monkeypatch)
    gpu, model = load_late(path, seed)
    assert_same(dict(model.named_parameters()), expected)
    assert gpu.num_late >= len(expected)
    assert len(gpu._host) == 2
    assert gpu._host[0].numel() == max(tensor.nbytes for tensor in expected.values())
