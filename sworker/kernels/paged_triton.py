"""Attention over KV blocks where they lie, in Triton: flash decoding over a block table, for
decoded tokens and for prompt chunks alike.

A program takes one KV head (all of its group's query heads at once, so that K and V are read once)
and one **piece**: a few query tokens, and a part of what they see. Pieces are dealt out by length
(``sworker.kv_splits``); those of the same queries are merged by their log-sum-exp. Tao Dao et al.,
"Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention" (2023).

Runs on CUDA; with TRITON_INTERPRET=1, which tests set, on a CPU too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found]  # not there on a CPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from fastdecode.core.spec import AttentionSpec
from sworker.kernels.fused_triton import on_device
from sworker.kv_splits import MERGE_FIELDS, PIECE_FIELDS, Splits

_MERGED_AT_A_TIME = 8
_FIELDS: tl.constexpr = tl.constexpr(PIECE_FIELDS)
_MERGE_FIELDS: tl.constexpr = tl.constexpr(MERGE_FIELDS)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ONE_BLOCK: tl.constexpr
):
    """Block ids of TILE places from ``start`` on, [TILE]; ``ONE_BLOCK``: no tile lies in two
    blocks, so that one is looked up, []. Nothing is read from ``end`` on."""
    place = start
    if not ONE_BLOCK:
        place = start + tl.arange(0, TILE)
    return tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    blocks, start, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ONE_BLOCK: tl.constexpr
):
    """Of TILE places from ``start`` on, int64 [TILE]. ``blocks``: their ``_blocks``."""
    if ONE_BLOCK:
        within = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        within = (start + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * BLOCK_SIZE + within


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(  # type: ignore[no-untyped-def]
    scores, ahead, slope, softcap, sharpness, HAS_SLOPES: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Soft-cap and ALiBi; scores [M, TILE], slope [M], ahead (key - query) [M, TILE] or
    [1, TILE] → base 2."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * sharpness) + 1.0))
    scores = scores * _LOG2E
    if HAS_SLOPES:
        scores += (slope * _LOG2E)[:, None] * ahead.to(tl.float32)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(  # type: ignore[no-untyped-def]
    greatest, mass, weighted, scores, v, v_scale, HAS_SCALES: tl.constexpr, PRECISION: tl.constexpr
):
    """A running softmax takes in a tile: scores (base 2) [M, TILE], v [TILE, D]
    and its scales [TILE] → greatest and mass [M], weighted [M, D]. A row may see nothing."""
    new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
    shift = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
    rescale = tl.exp2(greatest - shift)
    weights = tl.exp2(scores - shift[:, None])
    mass = mass * rescale + tl.sum(weights, axis=1)
    if HAS_SCALES:
        weights = weights * v_scale[None, :]
    weighted = weighted * rescale[:, None] + tl.dot(
        weights.to(v.dtype), v, input_precision=PRECISION
    )
    return new_greatest, mass, weighted


@triton.jit(do_not_specialize=["table_row", "window"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, k_scales, v_scales, tables, context_lens, pieces, slopes, o, parts, lse,
    all_lse, q_row, q_head, kv_row, kv_head, scale_row, table_row, scale, softcap, sharpness,
    window, G: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """q [T, Hq, D], keys and values [slots, Hkv, D], of int8 with scales [slots, Hkv] → o [T, Hq,
    D] of pieces that are all that their queries see, else parts [R, Hq, D] and lse (base 2) [R,
    Hq], float32.

    Grid (Hkv, pieces). Row m of the M of a program is token m // G, query head m % G. With
    ``TOKENS`` of 1 tokens are decoded ones, whose places ``context_lens`` gives. ``sharpness`` is
    2 / softcap, base 2. With ``HAS_LSE``, all_lse [T, Hq], natural log, is written for those."""
    head = tl.program_id(0)
    piece = pieces + tl.program_id(1) * _FIELDS
    num_tokens = tl.load(piece + 1)
    if num_tokens == 0:
        return
    row, table = tl.load(piece).to(tl.int64), tl.load(piece + 3).to(tl.int64) * table_row
    begin, end = tl.load(piece + 4), tl.load(piece + 5)
    m, d = tl.arange(0, M), tl.arange(0, D_PAD)
    if TOKENS == 1:
        token, group_head = tl.zeros([M], tl.int32), m
        is_row = m < G
        first = tl.load(context_lens + row) - 1
    else:
        token, group_head = m // G, m % G
        is_row = token < num_tokens
        first = tl.load(piece + 2)
    low = 0  # what no query of the piece sees lies before it
    if HAS_WINDOW:
        low = tl.maximum(first - window + 1, 0)
    heads = head * G + group_head
    of_query = is_row[:, None] & (d < D)[None, :]
    query_rows = (row + token) * q_row + heads * q_head
    query = tl.load(q + query_rows[:, None] + d[None, :], mask=of_query, other=0.0)
    greatest = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    slope = mass
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=is_row, other=0.0)
    weighted = tl.zeros([M, D_PAD], tl.float32)
    # Loaded a tile ahead: what hangs on a load of the same tile isn't fetched ahead.
    blocks = _blocks(tables + table, begin, end, BLOCK_SIZE, TILE, ONE_BLOCK)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        seen = (place >= low) & (place < end)
        slot = _slots(blocks, start, BLOCK_SIZE, TILE, ONE_BLOCK)
        blocks = _blocks(tables + table, start + TILE, end, BLOCK_SIZE, TILE, ONE_BLOCK)
        at = slot[:, None] * kv_row + head * kv_head + d[None, :]
        within = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale  # [M, TILE]
        v_scale = tl.zeros([TILE], tl.float32)  # of no use
        if HAS_SCALES:
            at_scale = slot * scale_row + head
            scores *= tl.load(k_scales + at_scale, mask=seen, other=0.0)[None, :]
            v_scale = tl.load(v_scales + at_scale, mask=seen, other=0.0)
        if TOKENS == 1:
            ahead = (place - first)[None, :]
            visible = seen[None, :]
        else:
            ahead = place[None, :] - (first + token)[:, None]
            visible = seen[None, :] & (ahead <= 0)
            if HAS_WINDOW:
                visible = visible & (ahead > -window)
        scores = _shaped(scores, ahead, slope, softcap, sharpness, HAS_SLOPES, HAS_SOFTCAP)
        scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(values + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        greatest, mass, weighted = _add_tile(
            greatest, mass, weighted, scores, v, v_scale, HAS_SCALES, PRECISION
        )
    # A row with nothing to see leaves 0, and lse = -inf.
    result = weighted * (1.0 / tl.where(mass > 0, mass, 1.0))[:, None]
    num_heads = tl.num_programs(0) * G
    place_of_part = tl.load(piece + 6)
    if place_of_part < 0:
        to = (row + token) * num_heads + heads
        tl.store(o + to[:, None] * D + d[None, :], result.to(o.dtype.element_ty), mask=of_query)
        if HAS_LSE:
            all_sum = tl.where(mass > 0, greatest + tl.log2(mass), float("-inf"))
            tl.store(all_lse + to, all_sum / _LOG2E, mask=is_row)
    else:
        to = (place_of_part + token).to(tl.int64) * num_heads + heads
        tl.store(parts + to[:, None] * D + d[None, :], result, mask=of_query)
        log_sum = tl.where(mass > 0, greatest + tl.log2(mass), float("-inf"))
        tl.store(lse + to, log_sum, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    parts, lse, merges, out, all_lse, TOKENS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """parts float32 [R, Hq, D], lse (base 2) [R, Hq] → rows of out [T, Hq, D], and of all_lse
    (natural log) [T, Hq]. Grid (Hq, merges · TOKENS). Each row has seen something in some piece."""
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    merge, token = merges + tl.program_id(1) // TOKENS * _MERGE_FIELDS, tl.program_id(1) % TOKENS
    num_tokens = tl.load(merge + 1)
    if token >= num_tokens:
        return
    row, first, count = tl.load(merge).to(tl.int64), tl.load(merge + 2), tl.load(merge + 3)
    d = tl.arange(0, D_PAD)
    # [1], and not []: one exponential for a whole tile of parts
    greatest = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([D_PAD], tl.float32)
    for start in range(0, count, TILE):
        piece = start + tl.arange(0, TILE)
        is_piece = piece < count
        at = (first + piece * num_tokens + token).to(tl.int64) * num_heads + head
        sums = tl.load(lse + at, mask=is_piece, other=float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(sums, axis=0))
        shift = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        share, rescale = tl.exp2(sums - shift), tl.exp2(greatest - shift)
        within = is_piece[:, None] & (d[None, :] < D)
        part = tl.load(parts + at[:, None] * D + d[None, :], mask=within, other=0.0)  # [TILE, D]
        mass = mass * rescale + tl.sum(share, axis=0)
        total = total * rescale + tl.sum(part * share[:, None], axis=0)
        greatest = new_greatest
    to = out + ((row + token) * num_heads + head) * D + d
    tl.store(to, (total / mass).to(out.dtype.element_ty), mask=d < D)
    if HAS_LSE:
        at_row = all_lse + (row + token) * num_heads + head + tl.arange(0, 1)
        tl.store(at_row, (greatest + tl.log2(mass)) / _LOG2E)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    k, v, slots, keys, values, k_scales, v_scales, k_row, k_head, v_row, v_head, kv_row, kv_head,
    scale_row, D: tl.constexpr, D_PAD: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """k, v [T, Hkv, D] → keys, values [slots, Hkv, D], and scales [slots, Hkv].
    Rows with a slot below 0 go nowhere. Grid (T, Hkv)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    is_stored = slot >= 0
    d = tl.arange(0, D_PAD)
    at = slot * kv_row + head * kv_head + d
    new_k = tl.load(k + row * k_row + head * k_head + d, mask=d < D, other=0.0)
    new_v = tl.load(v + row * v_row + head * v_head + d, mask=d < D, other=0.0)
    if HAS_SCALES:
        new_k, k_scale = _quantized(new_k)
        new_v, v_scale = _quantized(new_v)
        tl.store(k_scales + slot * scale_row + head, k_scale, mask=is_stored)
        tl.store(v_scales + slot * scale_row + head, v_scale, mask=is_stored)
    within = d < tl.where(is_stored, D, 0)
    tl.store(keys + at, new_k.to(keys.dtype.element_ty), mask=within)
    tl.store(values + at, new_v.to(values.dtype.element_ty), mask=within)


@triton.jit
def _quantized(x):  # type: ignore[no-untyped-def]
    """[D] → whole numbers within ±127, float32, and what one stands for."""
    wide = x.to(tl.float32)
    # Exact divisions, and no sum fused with a product: an R-worker's bits.
    scale = tl.div_rn(tl.max(tl.abs(wide), axis=0), 127.0)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    # 1.5 · 2^23: the fraction drops off, to the nearest, ties to even.
    whole = (wide * inverse + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(whole, -127.0), 127.0), scale


def paged_store(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    """Write tokens' K and V to their slots, rounded to what the cache holds.

    Args:
        k, v: [T, Hkv, D], their last dim dense.
        slots: int64 [T]; below 0 for rows that aren't stored.
        keys, values: [slots, Hkv, D], of one shape and strides.
        scales: of int8 only, float32 [slots, Hkv] each, written.
    """
    num_rows, Hkv, D = k.shape
    k_scales, v_scales = scales or (keys, values)
    with on_device(k):
        _store[(num_rows, Hkv)](
            k, v, slots, keys, values, k_scales, v_scales, k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), keys.stride(0), keys.stride(1), k_scales.stride(0), D=D,
            D_PAD=triton.next_power_of_2(D), HAS_SCALES=scales is not None, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


LARGE_SHARED_MEMORY = 160 << 10
"""Bytes a program may have on A100, H100, H200 and B200; others have 99 KiB."""


@dataclass(frozen=True)
class Tiling:
    """How a program of ``_attend`` is laid out.

    Args:
        tile: tokens of a step of its loop, 16, 32 or 64: they divide ``kv_splits.UNIT``.
        num_stages: of its loop; K and V have one buffer each less of them.
        precision: of products of float32: "ieee", or "tf32x3", which is off by 2^-22 of a
            product and takes a third of the registers where rows are many.
    """

    tile: int
    num_warps: int = 4
    num_stages: int = 3
    precision: str = "ieee"


def tiling_of(
    dtype: torch.dtype, head_dim: int, num_rows: int, *, is_int8: bool, shared_memory: int
) -> Tiling:
    """What spills no registers up to heads of 128, and fits.

    K and V of a tile take 32 KiB at most, or 16 KiB where shared memory is short: so three
    programs with two buffers each fit into a multiprocessor, or two.

    Args:
        shared_memory: bytes that a program may have.
    """
    is_large, padded = shared_memory >= LARGE_SHARED_MEMORY, max(16, _power_of_2(head_dim))
    tile = (32 if is_large else 16) * 1024 // (2 * padded * dtype.itemsize)
    if dtype == torch.float32:
        if is_int8 or num_rows > 16:
            tile, num_stages = (32, 2) if padded <= 128 else (16, 1)
            return Tiling(tile, 8, num_stages, "tf32x3")
        tile = max(16, min(32, tile))
        return Tiling(tile, tile // 4)
    if is_int8:
        # Registers are short before memory is: K and V are widened in them. Masks of heads
        # that aren't a power of two take some, too.
        most_rows = 64 if head_dim == padded else 16
        tile = 32 if num_rows <= most_rows else 16
        if num_rows > 64 and padded <= 64:
            return Tiling(32, 8, 2)
    tile = max(16, min(64, tile))
    if num_rows <= 64 and padded <= 128:
        return Tiling(tile)
    return Tiling(tile, 8, 3 if padded <= 128 else 2)


def chunk_tokens(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Tokens of a query tile of a prompt chunk; all query heads of a group are in it."""
    num_rows = 16 if dtype == torch.float32 else 128 if spec.head_dim <= 128 else 64
    return max(1, num_rows // spec.group_size)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 << 10))


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    context_lens: Tensor,
    splits: Splits,
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """One query a sequence over its cached tokens. May be captured.

    Args:
        q: [N, Hq, D], its last dim dense.
        keys, values: [slots, Hkv, D], of one shape and strides.
        scales: of int8 only, float32 [slots, Hkv] each.
        tables: int32 [N, W].
        context_lens: int32 [N], >= 1; the query is the last of these tokens.
        splits: ``kv_splits.plan_decode`` of these lengths and the spec's window.
        slopes: ALiBi's, float32 [Hq].
        out: [N, Hq, D], dense, written. Scores and sums are float32; softmax
            weights are rounded to q's dtype.
        lse: the natural log-sum-exp of the scores, float32 [N, Hq], dense,
            written; None: it isn't wanted.
        tiling: in place of ``tiling_of``'s.
    """
    _launch(
        q, keys, values, scales, tables, tables.stride(0), context_lens, splits, spec, slopes,
        block_size, out, lse, tiling,
    )  # fmt: skip


def paged_chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    splits: Splits,
    spec: AttentionSpec,
    slopes: Tensor | None,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Prompt chunks over all of their sequences' tokens that are cached, their own included,
    which they see up to themselves.

    Args:
        q: [T, Hq, D], its last dim dense; other rows than the chunks' are left alone.
        keys, values, scales, slopes: as for ``paged_decode``.
        slots: int64 [sum of the chunks' keys], chunk after chunk.
        splits: of ``kv_splits.chunk_tiles``, of ``chunk_tokens`` tokens each.
        out: [T, Hq, D], dense, written.
        lse: as for ``paged_decode``, [T, Hq].
    """
    _launch(q, keys, values, scales, slots, 1, slots, splits, spec, slopes, 1, out, lse, tiling)


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    table_row: int,
    context_lens: Tensor,
    splits: Splits,
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    out: Tensor,
    all_lse: Tensor | None,
    tiling: Tiling | None,
) -> None:
    G, D, Hq, tokens = spec.group_size, spec.head_dim, spec.num_q_heads, splits.shape.tile_tokens
    M = max(16, triton.next_power_of_2(tokens * G))
    tiling = tiling or tiling_of(
        q.dtype, D, M, is_int8=scales is not None, shared_memory=_shared_memory(q.device)
    )
    cap = spec.logit_softcap or 1.0
    k_scales, v_scales = scales or (keys, values)
    # As few launches as may be: where nothing is cut, nothing is merged.
    num_parts = splits.shape.num_parts if splits.num_merges else 0
    parts = torch.empty((num_parts, Hq, D + 1), dtype=torch.float32, device=q.device).flatten()
    lse = parts[num_parts * Hq * D :]
    with on_device(q):
        _attend[(spec.num_kv_heads, splits.num_pieces)](
            q, keys, values, k_scales, v_scales, tables, context_lens, splits.pieces,
            lse if slopes is None else slopes, out, parts, lse,
            lse if all_lse is None else all_lse, q.stride(0), q.stride(1),
            keys.stride(0), keys.stride(1), k_scales.stride(0), table_row, spec.scale, cap,
            2.0 * _LOG2E.value / cap, spec.sliding_window or 0,
            G=G, TOKENS=tokens, M=M, D=D, D_PAD=max(16, triton.next_power_of_2(D)),
            BLOCK_SIZE=block_size, TILE=tiling.tile, HAS_SCALES=scales is not None,
            HAS_SLOPES=slopes is not None, HAS_SOFTCAP=spec.logit_softcap is not None,
            HAS_WINDOW=spec.sliding_window is not None,
            ONE_BLOCK=block_size % tiling.tile == 0, PRECISION=tiling.precision,
            HAS_LSE=all_lse is not None, num_warps=tiling.num_warps,
            num_stages=tiling.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        if splits.num_merges:
            _merge[(Hq, splits.num_merges * tokens)](
                parts, lse, splits.merges, out, lse if all_lse is None else all_lse,
                TOKENS=tokens, D=D, D_PAD=triton.next_power_of_2(D), TILE=_MERGED_AT_A_TIME,
                HAS_LSE=all_lse is not None, enable_fp_fusion=True,
            )  # fmt: skip
