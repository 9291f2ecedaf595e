"""Loading to a device: two pinned buffers, of which one is filled while the device copies
from the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised import quantise_checkpoint
from recorded_gpu import HOST, RecordedEvent, RecordedGpu, span_of
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from weight_files import assert_same, load

from fastdecode.core.model.tensor_entry import TensorEntry
from sworker.load.reader import TensorReader
from sworker.load.weights import load_model


@pytest.mark.parametrize("way", [None, "fp8-blocks", "gptq"])
def test_load_fills_buffers_that_were_copied(
    way: str | None,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint("llama", hidden_size=64, intermediate_size=96, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    if way is not None:
        path, _ = quantise_checkpoint(path, tmp_path, way)
    expected = load(path)
    gpu, read = RecordedGpu(), TensorReader.read

    def recorded(self: TensorReader, entry: TensorEntry) -> Tensor:
        with _disable_current_modes():  # reading and decoding are the host's work
            out = read(self, entry)
        span = span_of(out)
        assert span is not None
        gpu.checker.access(HOST, [span], "a tensor that is read", writes=True)
        return out

    monkeypatch.setattr(TensorReader, "read", recorded)

    def load_recorded() -> dict[str, Tensor]:
        with gpu, torch.inference_mode():
            _, model = load_model(path, device="cpu", gpu=gpu, dtype=torch.float32)
        return dict(model.named_parameters())

    assert_same(load_recorded(), expected)
    assert gpu.calls["pinned"] == 2 and gpu.checker.num_accesses > len(expected)
    assert gpu.checker.races == []
    monkeypatch.setattr(RecordedEvent, "synchronize", lambda self: None)
    load_recorded()
    assert gpu.checker.races, "a buffer is filled while it is copied"
