"""Attention over a paged KV cache against a dense reference: decoded tokens, later and first
chunks, in one step; and K and V in int8, beside exact attention to the very numbers that the
device and an R-worker hold: who is how far off, and why."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from attention_cases import CPU, SPECS, CachedSequences
from numpy.typing import NDArray
from triton_interpreter import DEVICE, interpret_kernels

import cpu_kernels
from cpu_kernels import BlockLayout, allocate_pool
from cpu_kernels.reference import quantize
from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker import paged
from sworker.paged import PagedKV
from sworker.prefill import as_cached

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


OF_BOTH = AttentionSpec(6, 2, 20, 20**-0.5)  # its kernel is compiled by other tests, too
LENGTHS = (5, 16, 90, 700)
Array = NDArray[np.float32]


def on_r_worker(step: CachedSequences) -> Array:
    layout = BlockLayout(2, 20, "int8", 64)
    tables = step.step().tables.numpy()
    pool = allocate_pool(layout, 1, sum(-(-length // 64) for length in LENGTHS) + 3)
    slots, k, v, q = (torch.cat(x).numpy() for x in (step.slots, step.k, step.v, step.q))
    cpu_kernels.append(layout, pool[0], k, v, slots)
    lens, o = np.array(LENGTHS, np.int32), np.empty_like(q)
    starts = np.arange(len(LENGTHS) + 1, dtype=np.int32)
    cpu_kernels.attend(
        layout, pool[0], q, tables, starts, lens - 1, lens, scale=OF_BOTH.scale, out=o
    )
    return o


def most_off(step: CachedSequences) -> Array:
    """[N, Hq, 1]: what rounding a query to 15 bits may change of o, and a
    softmax weight to 16 bits of the greatest."""
    bounds = []
    for (row,), *kv in zip(step.q, step.k, step.v, strict=True):
        held = (as_cached(x, DType.INT8).abs().numpy() for x in kv)
        keys, values = (np.repeat(x, OF_BOTH.group_size, axis=1) for x in held)  # [L, Hq, D]
        unit = row.abs().amax(-1).numpy() / 2**13.99
        of_scores = OF_BOTH.scale * keys.sum(-1).max(0) * unit / 2  # [Hq]
        of_weights = 2.0**-16 * len(keys)
        bounds.append((2 * of_scores + of_weights) * 2 * values.max((0, 2)))
    return np.stack(bounds)[..., None].astype(np.float32)


@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "sharp"])
def test_either_side_is_as_exact_as_it_is_said_to_be(spread: float) -> None:
    """Both hold the same bits. The device multiplies them by queries as they are, and an R-worker
    by queries and weights that it has rounded: that accounts for all that it is off, and so for
    tokens that fall otherwise on one side than on the other."""
    step = CachedSequences(
        OF_BOTH, [n - 1 for n in LENGTHS], [1] * len(LENGTHS), block_size=64, kv_dtype=DType.INT8
    )
    step.q = [q * spread for q in step.q]
    assert step.error() < 1e-5
    off = np.abs(on_r_worker(step) - step.expected().numpy())
    assert (off <= most_off(step)).all()
    assert off.max() < (5e-4 if spread == 1.0 else 2e-3)  # docs/design/kernels.md: 5e-4
