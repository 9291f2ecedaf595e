"""Attention of one query a sequence over KV blocks where they lie, in Triton:
flash decoding over a block table.

A program takes one sequence, one KV head (all of its group's query heads at
once, so that K and V are read once) and one **split** of the context; splits
are merged by their log-sum-exp. Tao Dao et al., "Flash-Decoding for
long-context inference" (2023); Kwon et al., "PagedAttention" (2023).

Runs on CUDA; with TRITON_INTERPRET=1, which tests set, on a CPU too.
"""

from __future__ import annotations

from functools import partial

import torch
import triton  # type: ignore[import-not-found]  # not there on a CPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from fastdecode.core.spec import AttentionSpec
from sworker.kernels.fused_triton import on_device

TILE = 64
"""Tokens of a step of a program's loop."""
MIN_SPLIT_TOKENS = 256
_PROGRAMS_PER_SM = 4
_MERGED_AT_A_TIME = 8
_DEFAULT_NUM_SMS = 128
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ONE_BLOCK: tl.constexpr
):
    """Of TILE places from ``start`` on, int64. ``table``: the sequence's block
    ids; ``ONE_BLOCK``: no tile lies in two blocks, so that one is looked up."""
    place = start + tl.arange(0, TILE)
    if ONE_BLOCK:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, TILE)
    blocks = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(  # type: ignore[no-untyped-def]
    scores, ahead, slope, softcap, sharpness, HAS_SLOPES: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Soft-cap and ALiBi; scores [G, TILE], slope [G], ahead (key - query)
    [TILE] → base 2."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * sharpness) + 1.0))
    scores = scores * _LOG2E
    if HAS_SLOPES:
        scores += (slope * _LOG2E)[:, None] * ahead.to(tl.float32)[None, :]
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(greatest, mass, weighted, scores, v, v_scale, HAS_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A running softmax takes in a tile: scores (base 2) [G, TILE], v [TILE, D]
    and its scales [TILE] → greatest and mass [G], weighted [G, D]."""
    new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
    rescale = tl.exp2(greatest - new_greatest)
    weights = tl.exp2(scores - new_greatest[:, None])
    mass = mass * rescale + tl.sum(weights, axis=1)
    if HAS_SCALES:
        weights = weights * v_scale[None, :]
    weighted = weighted * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_greatest, mass, weighted


@triton.jit(do_not_specialize=["num_rows", "table_row", "window"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q, keys, values, k_scales, v_scales, tables, context_lens, slopes, o, lse,
    q_row, q_head, kv_row, kv_head, scale_row, table_row, num_rows, scale, softcap, sharpness,
    window, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """q [N, Hq, D], keys and values [slots, Hkv, D], of int8 with scales
    [slots, Hkv] → o [S, N, Hq, D], lse float32 (base 2) [S, N, Hq].

    ``sharpness`` is 2 / softcap, base 2. Grid (N, Hkv, S): a program takes one
    of S like splits of what its row sees, in tiles of TILE tokens.
    """
    row, head, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(2)
    length = tl.load(context_lens + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    split_tokens = tl.cdiv(tl.cdiv(length - first, num_splits), TILE) * TILE
    begin = first + tl.program_id(2) * split_tokens
    end = tl.minimum(begin + split_tokens, length)
    g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    in_g, in_d = g < G, d < D
    heads = head * G + g
    of_query = in_g[:, None] & in_d[None, :]
    query = tl.load(
        q + row * q_row + heads[:, None] * q_head + d[None, :], mask=of_query, other=0.0
    )
    greatest = tl.full([G_PAD], float("-inf"), tl.float32)
    mass = tl.zeros([G_PAD], tl.float32)
    slope = mass
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=in_g, other=0.0)
    weighted = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        seen = place < end
        slot = _slots(tables + row * table_row, start, end, BLOCK_SIZE, TILE, ONE_BLOCK)
        at = slot[:, None] * kv_row + head * kv_head + d[None, :]
        within = seen[:, None] & in_d[None, :]
        k = tl.load(keys + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale  # [G, TILE]
        v_scale = mass  # of no use
        if HAS_SCALES:
            at_scale = slot * scale_row + head
            scores *= tl.load(k_scales + at_scale, mask=seen, other=0.0)[None, :]
            v_scale = tl.load(v_scales + at_scale, mask=seen, other=0.0)
        ahead = place - (length - 1)
        scores = _shaped(scores, ahead, slope, softcap, sharpness, HAS_SLOPES, HAS_SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.load(values + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        greatest, mass, weighted = _add_tile(
            greatest, mass, weighted, scores, v, v_scale, HAS_SCALES
        )
    out_row = (tl.program_id(2) * num_rows + row).to(tl.int64) * (tl.num_programs(1) * G) + heads
    # A split with nothing to see leaves o = 0 and lse = -inf.
    share = tl.where(mass > 0, 1.0 / mass, 0.0)
    tl.store(o + out_row[:, None] * D + d[None, :], weighted * share[:, None], mask=of_query)
    tl.store(lse + out_row, tl.where(mass > 0, greatest + tl.log2(mass), float("-inf")), mask=in_g)


@triton.jit(do_not_specialize=["num_splits", "num_outputs"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    parts, lse, out, num_splits, num_outputs,
    D: tl.constexpr, D_PAD: tl.constexpr, S_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """parts float32 [S, N · Hq, D], lse (base 2) [S, N · Hq] → out [N · Hq, D].
    Grid (N · Hq). Some split has seen something."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, S_PAD), tl.arange(0, D_PAD)
    sums = tl.load(lse + s * num_outputs + row, mask=s < num_splits, other=float("-inf"))
    greatest = tl.max(sums, axis=0)
    mass = tl.sum(tl.exp2(sums - greatest), axis=0)
    total = tl.zeros([D_PAD], tl.float32)
    for start in range(0, num_splits, TILE):
        split = start + tl.arange(0, TILE)
        is_split = split < num_splits
        share = tl.exp2(
            tl.load(lse + split * num_outputs + row, mask=is_split, other=float("-inf")) - greatest
        )
        at = (split[:, None] * num_outputs + row) * D + d[None, :]
        # [TILE, D]
        part = tl.load(parts + at, mask=is_split[:, None] & (d[None, :] < D), other=0.0)
        total += tl.sum(part * share[:, None], axis=0)
    tl.store(out + row * D + d, total / mass, mask=d < D)


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
    within = (d < D) & is_stored
    tl.store(keys + at, new_k.to(keys.dtype.element_ty), mask=within)
    tl.store(values + at, new_v.to(values.dtype.element_ty), mask=within)


@triton.jit
def _quantized(x):  # type: ignore[no-untyped-def]
    """[D] → whole numbers within ±127, float32, and what one stands for."""
    wide = x.to(tl.float32)
    scale = tl.max(tl.abs(wide), axis=0) / 127.0
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
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
        )  # fmt: skip


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    longest: int,
    *,
    out: Tensor,
) -> None:
    """One query a sequence over its cached tokens. May be captured.

    Args:
        q: [N, Hq, D], its last dim dense.
        keys, values: [slots, Hkv, D], of one shape and strides.
        scales: of int8 only, float32 [slots, Hkv] each.
        tables: int32 [N, W].
        context_lens: int32 [N], >= 1; the query is the last of these tokens.
        slopes: ALiBi's, float32 [Hq].
        longest: the greatest of the context lengths, or more: what splits are
            chosen for.
        out: [N, Hq, D], dense, written. Scores and sums are float32; softmax
            weights are rounded to q's dtype.
    """
    num_rows, Hq, D = q.shape
    most = longest if spec.sliding_window is None else min(longest, spec.sliding_window)
    splits = num_splits(num_rows * spec.num_kv_heads, most, _num_sms(q.device))
    # As few launches as may be: with one split its result is the result.
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    o = out if splits == 1 else empty((splits, *q.shape))
    lse = empty((splits, num_rows, Hq))
    with on_device(q):
        _launch(q, keys, values, scales, tables, context_lens, spec, slopes, block_size, o, lse)
        if splits > 1:
            _merge[(num_rows * Hq,)](
                o, lse, out, splits, num_rows * Hq,
                D=D, D_PAD=triton.next_power_of_2(D), S_PAD=triton.next_power_of_2(splits),
                TILE=_MERGED_AT_A_TIME,
            )  # fmt: skip


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    tables: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    o: Tensor,
    lse: Tensor,
) -> None:
    """``_decode``, in as many splits as lse [S, N, Hq] has."""
    splits, num_rows, _ = lse.shape
    G, D = spec.group_size, spec.head_dim
    cap = spec.logit_softcap or 1.0
    k_scales, v_scales = scales or (keys, values)
    _decode[(num_rows, spec.num_kv_heads, splits)](
        q, keys, values, k_scales, v_scales, tables, context_lens,
        slopes if slopes is not None else lse, o, lse, q.stride(0), q.stride(1), keys.stride(0),
        keys.stride(1), k_scales.stride(0), tables.stride(0), num_rows, spec.scale, cap,
        2.0 * _LOG2E.value / cap, spec.sliding_window or 0,
        G=G, G_PAD=max(16, triton.next_power_of_2(G)), D=D,
        D_PAD=max(16, triton.next_power_of_2(D)), BLOCK_SIZE=block_size, TILE=TILE,
        HAS_SCALES=scales is not None, HAS_SLOPES=slopes is not None,
        HAS_SOFTCAP=spec.logit_softcap is not None, HAS_WINDOW=spec.sliding_window is not None,
        ONE_BLOCK=block_size % TILE == 0 and spec.sliding_window is None,
    )  # fmt: skip


def num_splits(num_programs: int, longest: int, num_sms: int) -> int:
    """Parts to cut contexts into, so that a GPU with few sequences is full, and
    no part is too short to be worth it."""
    wanted = -(-_PROGRAMS_PER_SM * num_sms // num_programs)
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS))


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
