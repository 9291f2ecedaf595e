"""Whether two instruction sets give the same attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cpu_kernels.layout import BlockLayout, allocate_pool
from cpu_kernels.reference import from_float32, to_float32

_LAYOUT = BlockLayout(2, 80, "bfloat16")  # dims that fill two tiles and a half
_GROUP_SIZE = 16
_CONTEXTS = (191, 64)  # ends within a tile, and within a word; a whole block
_TOLERANCE = 0.02
"""Both round softmax weights to bfloat16, then outputs: a unit in the last
place of either, for outputs below 2."""


def disagreement(
    tested: str,
    trusted: str,
    append: Callable[..., None],
    attend: Callable[..., None],
) -> str:
    """What a small random problem shows against the level ``tested``; nothing
    if it agrees with ``trusted``.

    Args:
        append, attend: of ``cpu_kernels.kernels``.
    """
    layout, rng = _LAYOUT, np.random.default_rng(0)
    blocks = [-(-context // layout.block_size) for context in _CONTEXTS]
    pool = allocate_pool(layout, 1, sum(blocks))[0]
    pool[:] = 0xFF  # NaN, where nothing gets written
    slots = np.concatenate(
        [np.arange(_CONTEXTS[0]), blocks[0] * layout.block_size + np.arange(_CONTEXTS[1])]
    )
    kv_shape = (len(slots), layout.num_kv_heads, layout.head_dim)
    k, v = (from_float32(rng.standard_normal(kv_shape, np.float32), "bfloat16") for _ in range(2))
    append(layout, pool, k, v, slots, source="bfloat16")
    tables = np.zeros((2, max(blocks)), np.int32)
    tables[0], tables[1, : blocks[1]] = np.arange(blocks[0]), blocks[0] + np.arange(blocks[1])
    q_shape = (2, _GROUP_SIZE * layout.num_kv_heads, layout.head_dim)
    q = from_float32(rng.standard_normal(q_shape, np.float32), "bfloat16")
    results = []
    for level in (tested, trusted):
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        attend(
            layout, pool, q, tables, np.arange(3, dtype=np.int32), np.array(_CONTEXTS,
                np.int32) - 1,
            np.array(_CONTEXTS, np.int32), scale=layout.head_dim**-0.5, out=out, lse=lse,
            source="bfloat16", level=level,
        )  # fmt: skip
        results.append(np.concatenate([to_float32(out, "bfloat16"), lse[..., None]], axis=-1))
    off = np.abs(results[0] - results[1])
    if np.all(off <= _TOLERANCE):  # NaN isn't
        return ""
    return (
        f"it is off by {np.nanmax(off):.2g} from {trusted}, "
        f"{np.count_nonzero(~np.isfinite(results[0]))} not finite"
    )
