"""Attention over a paged KV cache against a dense reference: decoded tokens,
later and first chunks, in one step."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from attention_cases import CPU, SPECS, CachedSequences
from triton_interpreter import DEVICE, interpret_kernels

from cpu_kernels.reference import quantize
from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from sworker import paged
from sworker.paged import PagedKV

BLOCK_SIZE = 16


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT8, DType.INT4])
@pytest.mark.parametrize("name", SPECS)
def test_a_step_of_every_kind_of_row(name: str, dtype: DType) -> None:
    step = CachedSequences(
        SPECS[name], [40, 0, 15, 16, 3, 70, 33, 0, 0], [1, 1, 1, 1, 1, 9, 21, 30, 2], kv_dtype=dtype
    )
    assert step.error() < 1e-5


@pytest.mark.parametrize("name", ["plain", "all"])
def test_groups_of_decoded_tokens(name: str) -> None:
    """Too little room for all of them side by side."""
    spec = SPECS[name]
    step = CachedSequences(spec, [5, 300, 64, 63, 0, 129, 128, 40, 41, 2], [1] * 10)
    room = 4 * spec.num_kv_heads * spec.head_dim * 150
    with mock.patch.object(paged, "MAX_CPU_GATHERED_BYTES", room):
        assert step.error() < 1e-5


# Tiles are of up to 64 tokens.
@pytest.mark.parametrize(
    ("block_size", "dtype"), [(16, DType.FLOAT32), (64, DType.FLOAT32), (128, DType.INT8)]
)
@pytest.mark.parametrize("name", SPECS)
def test_blocks_read_where_they_lie(
    name: str, block_size: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of every kind in one step."""
    interpret_kernels(monkeypatch)
    step = CachedSequences(
        SPECS[name], [5, 700, 64, 63, 0, 20, 70, 33, 0], [1] * 6 + [9, 21, 2], device=DEVICE,
        block_size=block_size, kv_dtype=dtype,
    )  # fmt: skip
    from sworker.kernels import paged_triton

    step.cache.kernels = paged_triton
    assert step.error() < 1e-5


@pytest.mark.parametrize(("dtype", "head_dim"), [("int8", 16), ("int4", 16), ("int4", 15)])
def test_whole_numbers_as_an_r_worker_holds_them(dtype: str, head_dim: int) -> None:
    """Whole numbers and scales are those of the R-workers' kernels, to the bit."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 40, 3, head_dim, generator=generator).unbind(0)
    k[7] = 0.0
    cache = PagedKV(KVSpec(1, 3, head_dim, DType(dtype), BLOCK_SIZE), [SPECS["plain"]], 4, CPU)
    slots = torch.randperm(4 * BLOCK_SIZE, generator=generator)[:40]
    cache.store(0, k, v, slots)
    assert cache.scales is not None
    for half, x in enumerate((k, v)):
        whole, scales = quantize(x.numpy(), dtype)
        found = paged.whole_numbers(cache.pool[0, half, slots], head_dim)
        assert np.array_equal(found.numpy(), whole)
        assert np.array_equal(cache.scales[0, half, slots].numpy(), scales)


def test_copied_blocks() -> None:
    cache = PagedKV(KVSpec(2, 1, 4, DType.FLOAT32, BLOCK_SIZE), [SPECS["plain"]] * 2, 4, CPU)
    cache.pool.copy_(torch.arange(cache.pool.numel()).view(cache.pool.shape))
    before = cache.pool.clone().unflatten(2, (4, BLOCK_SIZE))
    cache.copy_blocks(np.array([3, 1]), np.array([0, 2]))
    after = cache.pool.unflatten(2, (4, BLOCK_SIZE))
    assert torch.equal(after, before[:, :, [3, 1, 1, 3]])
