"""Compiled products of experts: against float64, in every shape of tile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from moe_blocks import PLAIN, block_of
from torch import Tensor

from cpu_kernels.isa import LEVELS, host_levels
from fastdecode.core.model.moe import Moe
from sworker.kernels import expert_products
from sworker.kernels.expert_products import ExpertProducts, can_multiply
from sworker.kernels.fused import fuse
from sworker.model.moe import Experts

pytestmark = pytest.mark.skipif(
    not host_levels()[-1].has_bf16_dot or bool(host_levels()[-1].tiles),
    reason="needs vdpbf16ps, and no AMX",
)
HIDDEN, INNER = 96, 64
COUNTS = (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 300)
"""Rows of each expert: all tiles, blocks of unequal size, and two groups."""
BASE = replace(PLAIN, num_experts=len(COUNTS), inner=INNER)
BLOCKS = {
    "silu": BASE,
    "clamped": replace(BASE, biases=True, gate="clamped", limit=0.3, alpha=1.702),
    "clamped-after": replace(BASE, gate="clamped_after", limit=0.2),
}


def bfloat16_block(moe: Moe, activation: str = "silu") -> Experts:
    return block_of(moe, torch.bfloat16, hidden=HIDDEN, activation=activation)


def rows_of(counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, HIDDEN], experts [T, 2] and weights: so many rows of each expert,
    and one of an expert elsewhere where they are odd."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    random.Random(0).shuffle(experts)
    experts += [len(COUNTS)] * (len(experts) % 2)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(experts).view(-1, 2)
    x = torch.randn(len(chosen), HIDDEN, generator=generator).bfloat16()
    return x, chosen, torch.rand(chosen.shape, generator=generator)


def exact(block: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    wide = bfloat16_block(block.moe).double()
    wide.load_state_dict(block.state_dict())
    wide.act = block.act
    return wide.sum_experts(x.double(), chosen, weights.double())


@pytest.mark.parametrize("name", [*BLOCKS, "gelu_tanh"])
@torch.inference_mode()
def test_sums_are_as_exact_as_torch_s(name: str) -> None:
    block = bfloat16_block(BLOCKS.get(name, BASE), "silu" if name in BLOCKS else name)
    assert can_multiply(block)
    given = rows_of(COUNTS)
    expected = exact(block, *given)
    found = ExpertProducts(block)(block.up, block.down, *given)
    error = (found.double() - expected).abs().max()
    torch_s = (block.sum_experts(*given).double() - expected).abs().max()
    assert error <= 1.5 * torch_s


@torch.inference_mode()
def test_a_row_depends_on_the_others_only_by_how_many_share_its_expert() -> None:
    block = bfloat16_block(BLOCKS["clamped"])
    products = ExpertProducts(block)
    x, _, _ = rows_of((0, 120))
    weights = torch.ones(len(x), 1)
    chosen = torch.full((len(x), 1), 5)

    def found(num_rows: int) -> Tensor:
        return products(block.up, block.down, *(t[:num_rows] for t in (x, chosen, weights)))

    few, many = found(8), found(60)
    for num_rows in (1, 2, 3, 7):
        assert torch.equal(found(num_rows), few[:num_rows])
    for num_rows in (9, 17, 33, 59):
        assert torch.equal(found(num_rows), many[:num_rows])


@torch.inference_mode()
def test_threads_change_nothing_and_rows_may_be_apart() -> None:
    block = bfloat16_block(BASE)
    products = ExpertProducts(block)
    x, chosen, weights = rows_of(COUNTS)
    threads = torch.get_num_threads()
    apart = x.repeat(1, 2)[:, HIDDEN:]
    found = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found.append(products(block.up, block.down, apart, chosen, weights))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    assert torch.equal(found[0], products(block.up, block.down, x, chosen, weights))


@torch.inference_mode()
def test_no_rows_and_rows_of_experts_elsewhere() -> None:
    block = bfloat16_block(BASE)
    products = ExpertProducts(block)
    x, chosen, weights = rows_of((4,))
    none = products(block.up, block.down, x[:0], chosen[:0], weights[:0])
    assert none.shape == (0, HIDDEN)
    elsewhere = torch.full_like(chosen, len(COUNTS))
    assert not products(block.up, block.down, x, elsewhere, weights).any()


@pytest.mark.parametrize("level", ["avx512", "amx"])
def test_other_blocks_and_cpus_have_torch_s(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = bfloat16_block(BASE)
    assert not can_multiply(block_of(BASE, hidden=HIDDEN)), "float32"
    assert not can_multiply(bfloat16_block(replace(BASE, inner=48)))
    assert not can_multiply(bfloat16_block(BASE, "relu"))
    assert not can_multiply(bfloat16_block(replace(BASE, weighs_input=True)))
    levels = {isa.name: isa for isa in LEVELS}
    monkeypatch.setattr(expert_products, "default_level", lambda: levels[level])
    assert not can_multiply(block)


@torch.inference_mode()
def test_a_model_gets_them_unless_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_blocks import model_of

    model = model_of(BASE, torch.bfloat16, hidden=HIDDEN)
    block = model.layers[0].mlp
    x = torch.randn(20, HIDDEN).bfloat16()
    before = block(x)
    assert fuse(model, torch.device("cpu"))
    assert isinstance(block.products, ExpertProducts)
    torch.testing.assert_close(block(x), before, rtol=0.03, atol=0.03)

    wrong = model_of(BASE, torch.bfloat16, hidden=HIDDEN)
    monkeypatch.setattr(
        ExpertProducts, "__call__", lambda self, up, down, x, *others: torch.zeros_like(x)
    )
    fuse(wrong, torch.device("cpu"))
    assert wrong.layers[0].mlp.products is None
