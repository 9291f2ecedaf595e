"""Triton kernels for parts of a layer against torch: in the interpreter, or on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from sworker import fused
from sworker.fused import FusedRMSNorm, FusedRotary, fuse, fuse_checked
from sworker.weights import load_model
from sworker.worker import SWorker

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")


# A whole rotary head, a part of one, and none; gates of SiLU and GELU, and none; norms after a sum and without one, of
# heads, with an offset, and of another kind.
@pytest.mark.parametrize(("family", "rotates", "gates", "norms", "adds"), [
    ("llama", True, True, True, True), ("qwen3", True, True, True, True), ("gemma2", True, True, True, False),
    ("gpt_neox", True, False, False, False), ("gpt2", False, False, False, False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter truncates to bfloat16
@torch.inference_mode()
def test_fused_layers_say_the_same(
    family: str,
    rotates: bool,
    gates: bool,
    norms: bool,
    adds: bool,
    dtype: torch.dtype,
    tiny_checkpoint: Callable[..., Path],
    interpreted: None,
) -> None:
    found = []
    for is_fused in (False, True):
        spec, model = load_model(tiny_checkpoint(family), device=DEVICE, dtype=dtype)
        if is_fused:
            assert fuse_checked(model) == (rotates or gates or norms)
            last = model.layers[-1]
            assert isinstance(last.rope, FusedRotary) == rotates
            assert (last.mlp.gate_kernel is not None) == gates
            assert isinstance(last.attn_norm, FusedRMSNorm) == isinstance(model.final_norm, FusedRMSNorm) == norms
            assert (last.add_norm_kernel is not None) == adds
            assert isinstance(last.q_norm, FusedRMSNorm) == (family == "qwen3")
        step = SWorker(spec, model, DEVICE).begin(np.arange(5, 12), np.arange(40, 47))
        seen, goes_on = [step.q, step.k, step.v], True
        while goes_on:
            goes_on = step.advance(step.q.clone())
            seen += [step.q, step.k, step.v] if goes_on else []
        found.append([*seen, step.logits(np.arange(7))])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other.float(), plain.float(), atol=tolerance, rtol=tolerance)


def test_kernels_that_fail_are_not_used(tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    _, model = load_model(tiny_checkpoint("llama"), device="cpu", dtype=torch.float32)
    before = dict(model.named_modules())
    with mock.patch.object(fused.importlib.util, "find_spec", return_value=object()):
        with mock.patch.object(fused, "_same_parts", side_effect=RuntimeError("no compiler")):
            assert not fuse(model, torch.device("cuda", 0))
        assert "no compiler" in caplog.text
        with mock.patch.object(fused, "_same_parts", return_value=False):
            assert not fuse(model, torch.device("cuda", 0))
        assert not fuse(model, torch.device("cpu"))
    assert dict(model.named_modules()) == before
