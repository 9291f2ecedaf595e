"""Packed weights: the same products, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FEW_FAMILIES

from sworker.kernels.packing import can_pack, pack
from sworker.load.weights import load_model
from sworker.model.linear import Linear, PackedLinear


def linear(dtype: torch.dtype, *, bias: bool) -> Linear:
    torch.manual_seed(0)
    made = Linear(200, (96, 40), bias)
    made.weight.data.normal_(0, 0.1)
    if made.bias is not None:
        made.bias.data.normal_()
    return made.to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_same_products(dtype: torch.dtype, bias: bool) -> None:
    plain = linear(dtype, bias=bias)
    if not can_pack(plain.weight):
        pytest.skip(f"oneDNN has no products in {dtype} for this CPU")
    packed = PackedLinear(plain)
    x = torch.randn(37, 200).to(dtype)
    exact = x.double() @ plain.weight.double().T + (
        0 if plain.bias is None else plain.bias.double()
    )
    torch.testing.assert_close(
        packed(x).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5
    )
    assert packed(x).dtype == dtype
    assert packed(x[:0]).shape == (0, 136)
    assert torch.equal(packed(x.repeat(1, 2)[:, 200:]), packed(x)), "rows that aren't side by side"


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others() -> None:
    packed = PackedLinear(linear(torch.float32, bias=True))
    x = torch.randn(70, 200)
    together = packed(x)
    for num_rows in (1, 2, 7, 16, 33):
        assert torch.equal(packed(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_no_weight_is_kept_twice(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    _, model = load_model(tiny_checkpoint(family), device="cpu", dtype=torch.float32)
    linears = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    weights = {name for name, _ in model.named_parameters()}
    pack(model)
    gone = weights - {name for name, _ in model.named_parameters()}
    assert linears and gone >= {f"{name}.weight" for name in linears}
    assert not any(isinstance(module, Linear) for module in model.modules())
