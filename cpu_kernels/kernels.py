"""The public kernels: check the arguments, then run compiled code without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import scalar
from cpu_kernels.checks import check_append, check_attend, check_copy, check_score_options
from cpu_kernels.layout import SOURCES, BlockLayout

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4}


def _shape_codes(layout: BlockLayout, source: str) -> NDArray[np.int64]:
    return np.array(
        [
            _CODES[layout.dtype], layout.pack, layout.block_size, layout.num_kv_heads, layout.head_dim,
            layout.padded_tokens, layout.padded_dims, layout.v_offset, layout.scale_offset, layout.head_words,
            SOURCES.index(source),
        ],
        np.int64,
    )  # fmt: skip


def append(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    k: NDArray[Any],
    v: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    source: str = "float32",
    num_threads: int = 1,
) -> None:
    """Write new tokens' K and V into one layer's blocks.

    Args:
        pool_layer: uint8 [num_blocks, block_bytes], one layer of ``allocate_pool``.
        k, v: [T, Hkv, D], float32 or the bits of a 16-bit float in uint16, as ``source`` says.
        slots: int64 [T], block id * block_size + offset; where two are equal, either may win.

    Raises:
        ValueError: an argument doesn't fit; nothing was written.
    """
    check_append(layout, pool_layer, k, v, slots, source)
    scalar.append(
        _shape_codes(layout, source),
        pool_layer.view(np.uint32),
        k.view(np.uint32 if source == "float32" else np.uint16),
        v.view(np.uint32 if source == "float32" else np.uint16),
        slots,
    )


def attend(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    q: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    query_positions: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    logit_softcap: float | None = None,
    out: NDArray[Any],
    lse: NDArray[np.float32] | None = None,
    source: str = "float32",
    num_threads: int = 1,
) -> None:
    """o = softmax(f(scale · q·kᵀ) + bias) · v of every query over its own sequence's cached tokens.

    Query i of sequence n stands at position p = ``query_positions[n] + i`` and sees the keys j with j <= p,
    j < ``context_lens[n]`` and j > p - ``sliding_window``. f(s) = c·tanh(s / c) with c = ``logit_softcap``; the bias
    is ``alibi_slopes[h]`` · (j - p). Sums are in float32. A sequence's rows depend on that sequence alone, bit by
    bit, whatever else is in the batch and however many threads run.

    Args:
        pool_layer: uint8 [num_blocks, block_bytes].
        q: [T, Hq, D], float32 or the bits of a 16-bit float in uint16, as ``source`` says; query head h reads KV
            head h // (Hq / Hkv).
        block_tables: int32 [N, max_blocks]; entries beyond a sequence's context are not read.
        query_starts: int32 [N + 1], rows of q where each sequence begins; the last is T.
        query_positions: int32 [N], the position of each sequence's first query.
        context_lens: int32 [N], cached tokens.
        alibi_slopes: float32 [Hq].
        out: [T, Hq, D] of q's kind, overwritten; zeros where nothing is visible.
        lse: float32 [T, Hq], overwritten with the natural log of the sum of exponentials; -inf where nothing is
            visible.

    Raises:
        ValueError: an argument doesn't fit; nothing was written.
    """
    check_attend(layout, pool_layer, q, block_tables, query_starts, query_positions, context_lens, out, lse, source)
    check_score_options(q.shape[1], scale, sliding_window, alibi_slopes, logit_softcap)
    bits = np.uint32 if source == "float32" else np.uint16
    scalar.attend(
        _shape_codes(layout, source),
        pool_layer.view(np.uint32),
        q.view(bits),
        block_tables,
        query_starts,
        query_positions,
        context_lens,
        np.float32(scale),
        sliding_window or 0,
        np.zeros(0, np.float32) if alibi_slopes is None else alibi_slopes,
        np.float32(logit_softcap or 0.0),
        out.view(bits),
        np.zeros((0, 0), np.float32) if lse is None else lse,
    )


def copy_blocks(pool: NDArray[np.uint8], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
    """Copy whole blocks in every layer, for copy-on-write.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
        source_ids, target_ids: int64 [n] block ids.

    Raises:
        ValueError: an id is out of range; nothing was copied.
    """
    check_copy(pool, source_ids, target_ids)
    for source_id, target_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        pool[:, target_id] = pool[:, source_id]
