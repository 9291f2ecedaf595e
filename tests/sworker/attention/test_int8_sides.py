"""K and V in int8 on the device and on an R-worker, beside exact attention to
the very numbers that both hold: who is how far off, and why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import dense
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import BlockLayout, allocate_pool
from cpu_kernels.reference import quantize
from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import PagedKV, PagedStep

SPEC = AttentionSpec(8, 2, 32, 32**-0.5)
LENGTHS = (5, 16, 90, 700)
WIDTH = 44  # blocks of 16 for the longest
Array = NDArray[np.float32]


def drawn(spread: float) -> tuple[Array, Array, Array]:
    """q of a token a sequence [N, Hq, D]; k and v of all tokens [L, Hkv, D]."""
    rng = np.random.default_rng(11)
    q = rng.standard_normal((len(LENGTHS), 8, 32), np.float32) * np.float32(spread)
    k, v = rng.standard_normal((2, sum(LENGTHS), 2, 32), np.float32)
    return q, k, v


def places() -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Block tables [N, W], and every token's slot [L]."""
    blocks = np.random.default_rng(3).permutation(len(LENGTHS) * WIDTH).astype(np.int32)
    tables = blocks.reshape(len(LENGTHS), WIDTH)
    at = [np.arange(length) for length in LENGTHS]
    slots = [
        table[i // 16].astype(np.int64) * 16 + i % 16 for table, i in zip(tables, at, strict=True)
    ]
    return tables, np.concatenate(slots)


def on_device(q: Array, k: Array, v: Array) -> Array:
    tables, slots = places()
    cache = PagedKV(KVSpec(1, 2, 32, DType.INT8, 16), [SPEC], tables.size, torch.device("cpu"))
    ends = np.cumsum(LENGTHS)
    is_past = np.ones(sum(LENGTHS), np.bool_)
    is_past[ends - 1] = False
    past, new = np.flatnonzero(is_past), ends - 1
    cache.store(0, *(torch.from_numpy(x[past]) for x in (k, v)), torch.from_numpy(slots[past]))
    lens = np.array(LENGTHS, np.int32)
    step = PagedStep(
        slots=torch.from_numpy(slots[new]),
        tables=torch.from_numpy(tables),
        context_lens=torch.from_numpy(lens),
        context_lens_host=lens,
        later=(),
        first_rows=slice(len(LENGTHS), len(LENGTHS)),
        first_starts=(),
    )
    o: Array = cache.attend(0, *(torch.from_numpy(x) for x in (q, k[new], v[new])), step).numpy()
    return o


def on_r_worker(q: Array, k: Array, v: Array) -> Array:
    tables, slots = places()
    layout = BlockLayout(2, 32, "int8", 16)
    pool = allocate_pool(layout, 1, tables.size)
    cpu_kernels.append(layout, pool[0], k, v, slots)
    lens, o = np.array(LENGTHS, np.int32), np.empty_like(q)
    starts = np.arange(len(LENGTHS) + 1, dtype=np.int32)
    cpu_kernels.attend(layout, pool[0], q, tables, starts, lens - 1, lens, scale=SPEC.scale, out=o)
    return o


def by_sequence(x: Array) -> list[Array]:
    return np.split(x, np.cumsum(LENGTHS)[:-1])


def dequantized(x: Array) -> Array:
    whole, scales = quantize(x, "int8")
    return whole.astype(np.float32) * scales[..., None]


def exact(q: Array, k: Array, v: Array) -> Array:
    """In float64, of the numbers that both hold."""
    parts = zip(q[:, None], *(by_sequence(dequantized(x)) for x in (k, v)), strict=True)
    return np.concatenate([
        dense(*map(torch.from_numpy, part), SPEC, past=len(part[1]) - 1)[0].numpy()
        for part in parts
    ])  # fmt: skip


def most_off(q: Array, k: Array, v: Array) -> Array:
    """[N, Hq, 1]: what rounding a query to 15 bits may change of o, and a
    softmax weight to 16 bits of the greatest."""
    bounds = []
    for row, keys, values in zip(
        q, by_sequence(dequantized(k)), by_sequence(dequantized(v)), strict=True
    ):
        keys, values = (np.repeat(np.abs(x), 4, axis=1) for x in (keys, values))  # [L, Hq, D]
        unit = np.abs(row).max(-1) / 2**13.99
        of_scores = SPEC.scale * keys.sum(-1).max(0) * unit / 2  # [Hq]
        of_weights = 2.0**-16 * len(keys)
        bounds.append((2 * of_scores + of_weights) * 2 * values.max((0, 2)))
    return np.stack(bounds)[..., None].astype(np.float32)


@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "sharp"])
def test_either_side_is_as_exact_as_it_is_said_to_be(spread: float) -> None:
    """Both hold the same bits. The device multiplies them by queries as they
    are, and an R-worker by queries and weights that it has rounded: that
    accounts for all that it is off, and so for tokens that fall otherwise on
    one side than on the other."""
    q, k, v = drawn(spread)
    expected = exact(q, k, v)
    device, r_worker = on_device(q, k, v), on_r_worker(q, k, v)
    np.testing.assert_allclose(device, expected, rtol=0, atol=1e-5)
    off = np.abs(r_worker - expected)
    assert (off <= most_off(q, k, v)).all()
    assert off.max() < (5e-4 if spread == 1.0 else 2e-3)  # docs/design/kernels.md: 5e-4
