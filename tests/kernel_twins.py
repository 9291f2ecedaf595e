"""Compiled kernels beside their NumPy twins, on random inputs and with poisoned outputs."""

from __future__ import annotations

from functools import partial

import numpy as np

import cpu_kernels
from cpu_kernels import allocate_pool, reference

SEED = 20240321


def random_batch(rng, layout, num_q_heads, context_lens, num_queries, source, stale=None):
    """A pool filled through ``append`` in a random block order, and everything ``attend`` needs."""
    needed = [-(-length // layout.block_size) for length in context_lens]
    num_blocks = sum(needed) + 3
    pool = allocate_pool(layout, 1, num_blocks)
    # What blocks held before is anything.
    pool[:] = rng.integers(0, 100, pool.shape, dtype=np.uint8) if stale is None else stale
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(context_lens), max([*needed, 1])), -1, np.int32)
    used = 0
    for n, count in enumerate(needed):
        tables[n, :count] = ids[used : used + count]
        used += count
    kv_shape = (sum(context_lens), layout.num_kv_heads, layout.head_dim)
    k, v = (rng.standard_normal(kv_shape, np.float32) for _ in range(2))
    slots = np.concatenate(
        [
            tables[n, np.arange(length) // layout.block_size].astype(np.int64) * layout.block_size
            + np.arange(length) % layout.block_size
            for n, length in enumerate(context_lens)
        ]
    )
    num_rows = sum(num_queries)
    q = rng.standard_normal((num_rows, num_q_heads, layout.head_dim), np.float32)
    starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
    positions = np.array(
        [max(0, length - count) for length, count in zip(context_lens, num_queries, strict=True)],
        np.int32,
    )
    k, v, q = (reference.from_float32(x, source) for x in (k, v, q))
    return pool, k, v, slots, q, tables, starts, positions, np.array(context_lens, np.int32)


def compare(
    layout, num_q_heads, context_lens, num_queries, source="float32", tolerance=2e-6, atol=None,
    level=None, stale=None, **options,
):  # fmt: skip
    """Append and attend with the kernels and with their twins. Returns the kernels' o and lse."""
    rng = np.random.default_rng(SEED)
    pool, k, v, slots, q, tables, starts, positions, lens = random_batch(
        rng, layout, num_q_heads, context_lens, num_queries, source, stale
    )
    twin_pool = pool.copy()
    cpu_kernels.append(layout, pool[0], k, v, slots, source=source)
    reference.append(layout, twin_pool[0], k, v, slots, source=source)
    np.testing.assert_array_equal(pool, twin_pool)
    results = []
    own = partial(cpu_kernels.attend, level=level)
    for attend in (own, reference.attend):
        out = (
            np.full(q.shape, 0x7FC0, q.dtype)
            if source != "float32"
            else np.full(q.shape, np.nan, q.dtype)
        )
        lse = np.full(q.shape[:2], np.nan, np.float32)
        attend(
            layout, pool[0], q, tables, starts, positions, lens,
            scale=layout.head_dim**-0.5, out=out, lse=lse, source=source, **options,
        )  # fmt: skip
        results.append((reference.to_float32(out, source), lse))
    (out, lse), (twin_out, twin_lse) = results
    tolerance = max(tolerance, {"bfloat16": 2e-5, "int8": 3e-4, "int4": 2e-2}.get(layout.dtype, 0))
    if source == "float16":
        tolerance = max(tolerance, 2e-3)
    if source == "bfloat16":
        tolerance = max(tolerance, 1.6e-2)
    np.testing.assert_allclose(out, twin_out, rtol=tolerance, atol=atol or tolerance)
    lse_tolerance = 1e-5
    if layout.dtype in ("int8", "int4"):
        lse_tolerance = 3e-4 if layout.dtype == "int8" else 2e-2
    elif layout.dtype == "bfloat16":
        lse_tolerance = 2e-3 if source == "bfloat16" else 2e-5
    np.testing.assert_allclose(lse, twin_lse, rtol=lse_tolerance, atol=lse_tolerance)
    return out, lse
