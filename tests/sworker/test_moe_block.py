"""The block of experts: against its definition, on a pretended CUDA device, and what is padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_blocks import PLAIN, block_of, spec_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastdecode.core.model.moe import Router
from sworker.graphs import StepGraphs
from sworker.load.weights import random_model
from sworker.model import moe as block_module
from sworker.model.moe import can_group

BLOCKS = {
    "plain": PLAIN,
    "shared": replace(PLAIN, shared_inner=24, shared_gate=True, scale_after=2.5),
    "average": replace(PLAIN, shared_inner=8, shared_average=True),
    "biases": replace(PLAIN, biases=True, gate="clamped", limit=0.3, alpha=1.702),
    "clamped-after": replace(PLAIN, gate="clamped_after", limit=0.2),
    "weighs-input": replace(
        PLAIN, top_k=1, weighs_input=True, router=Router("sigmoid", chosen_first=True)
    ),
}


def grouped_reference(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """What torch's grouped product does on CUDA: rows past the last end aren't written."""
    y = torch.full((x.shape[0], weight.shape[2]), float("nan"), dtype=x.dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        y[start:end] = x[start:end] @ weight[expert]
        start = end
    return y


@pytest.mark.parametrize("held", [None, (2, 3)], ids=["all", "some"])
@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_grouped_products_equal_the_loop(
    name: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank has some experts only; rows of others come out as 0."""
    block = block_of(replace(BLOCKS[name], held=held))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(3))
    expected = block(x)
    assert torch.isfinite(expected).all()
    monkeypatch.setattr(block_module, "can_group", lambda weight: True)
    monkeypatch.setattr(block_module, "grouped_product", lambda: grouped_reference)
    # Histograms of whole numbers are CUDA's.
    histc = torch.histc
    monkeypatch.setattr(torch, "histc", lambda x, **how: histc(x.float(), **how))
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-4)


def test_groups_need_bfloat16_on_cuda_and_aligned_rows() -> None:
    with FakeTensorMode():
        good = torch.empty(2, 8, 16, dtype=torch.bfloat16, device="cuda")
        assert can_group(good)
        assert not can_group(good.float())
        assert not can_group(torch.empty(2, 8, 12, dtype=torch.bfloat16, device="cuda"))
        assert not can_group(torch.empty(2, 8, 16, dtype=torch.bfloat16))


def test_units_whose_host_waits_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(spec_of(PLAIN), device="cpu", dtype=torch.float32)
    graphs = StepGraphs(model, torch.device("cpu"), capture=True, max_rows=8)
    assert "grouped product" in caplog.text
    graphs.prepare()
    assert graphs.num_graphs == 0


def test_padding_rows_are_alike() -> None:
    """Whatever a larger step left in the lane's memory."""
    model = random_model(spec_of(PLAIN), device="cpu", dtype=torch.float32)
    graphs = StepGraphs(model, torch.device("cpu"), capture=False, max_rows=8)
    graphs.buffers(0).o.normal_()
    bucket = graphs.fill(0, torch.ones((2, 5), dtype=torch.int64))
    assert bucket == 8
    for unit in range(graphs.num_units):
        graphs.run(0, unit, bucket)
    padding = graphs.buffers(0).x[5:bucket]
    assert torch.equal(padding, padding[:1].expand_as(padding))
