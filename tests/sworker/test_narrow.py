"""16-bit weights that are widened as products read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FEW_FAMILIES

from sworker.kernels import narrow, packing
from sworker.load.weights import load_model
from sworker.model.linear import Linear

pytestmark = pytest.mark.skipif(
    not narrow.is_possible(), reason="needs AVX2 and torch with GNU's OpenMP runtime"
)
DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (136, 200), (7, 33), (64, 1025), (97, 2051))
"""Outputs and inputs: whole panels and parts, one pass over the inputs and several."""


def matrix(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.1).to(dtype)


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without products of 16 bits."""
    monkeypatch.setattr(packing, "_has_products", lambda dtype: dtype == torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_product_exact(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = matrix(dtype, *shape), matrix(torch.float32, shape[0])
    product = narrow.NarrowWeight(weight, bias)
    for num_rows in (1, 2, 3, 5, 8, 13, 100):
        x = torch.randn(num_rows, shape[1])
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(product(x).double(), exact, rtol=1e-5, atol=1e-4)
        assert product(x).is_contiguous()
    assert product(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_row_independent_of_batch(dtype: torch.dtype) -> None:
    product = narrow.NarrowWeight(matrix(dtype, 97, 1030))
    x = torch.randn(201, 1030)
    together = product(x)
    for num_rows in (*range(1, 14), 95, 96, 97, 193):
        assert torch.equal(product(x[:num_rows]), together[:num_rows])
        assert torch.equal(product(x[-num_rows:]), together[-num_rows:])
    assert torch.equal(product(x.repeat(1, 2)[:, 1030:]), together), "rows that aren't side by side"
    assert torch.equal(product(x.T.contiguous().T), together), "columns side by side"


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_and_numbers(dtype: torch.dtype) -> None:
    weight, biases = matrix(dtype, 3, 45, 30), matrix(dtype, 3, 45)
    product = narrow.NarrowWeight(weight, biases)
    x = torch.randn(4, 30)
    for number in range(3):
        exact = x @ weight[number].float().T + biases[number].float()
        torch.testing.assert_close(product(x, number), exact, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([44, 0, 7, 7, 31])
    assert torch.equal(product.rows(rows), weight[0][rows].float())
    assert product.rows(rows[:0]).shape == (0, 30)


@torch.inference_mode()
def test_infinite_weight_stays() -> None:
    weight = matrix(torch.float16, 20, 8)
    weight[3, 2], weight[19, 0] = float("inf"), float("nan")
    found = narrow.NarrowWeight(weight)(torch.ones(2, 8))
    assert found[:, 3].isinf().all() and found[:, 19].isnan().all()
    assert found[:, [*range(3), *range(4, 19)]].isfinite().all()


@pytest.mark.usefixtures("no_products")
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_pack_keeps_no_weight_twice(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    _, model = load_model(tiny_checkpoint(family), device="cpu", dtype=torch.bfloat16)
    packing.widen(model)
    assert model.dtype == torch.float32
    packing.pack(model)
    assert not any(isinstance(module, Linear) for module in model.modules())
    matrices = [name for name, x in model.named_parameters() if x.dtype == torch.bfloat16]
    assert all(name.startswith("embed_") for name in matrices)
    assert not (matrices and model.spec.tied_embeddings)


@pytest.mark.usefixtures("no_products")
def test_widened_once_without_kernels(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "is_possible", lambda: False)
    cpu = torch.device("cpu")
    assert not packing.stays_narrow(torch.float16, cpu)
    assert packing.stays_narrow(torch.float32, cpu)
    _, model = load_model(tiny_checkpoint("llama"), device="cpu", dtype=torch.float16)
    packing.widen(model)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
