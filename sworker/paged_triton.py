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


@triton.jit(do_not_specialize=["num_rows", "split_tokens", "table_row", "window"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q, keys, values, tables, context_lens, slopes, o, lse,
    q_row, q_head, kv_row, kv_head, table_row, num_rows, split_tokens, scale, softcap, sharpness,
    window, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """q [N, Hq, D], keys and values [slots, Hkv, D] → o [S, N, Hq, D], lse
    float32 (base 2) [S, N, Hq].

    ``sharpness`` is 2 / softcap, base 2; ``ONE_BLOCK``: no tile lies in two
    blocks, so that its place is looked up once. Grid (N, Hkv, S). Loop: tiles
    of TILE tokens of this split; within: K tile, scores [G, TILE], running
    softmax, V tile.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(context_lens + row)
    begin = split * split_tokens
    if HAS_WINDOW:
        begin += tl.maximum(length - window, 0)
    end = tl.minimum(begin + split_tokens, length)
    g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    in_g, in_d = g < G, d < D
    heads = head * G + g
    of_query = in_g[:, None] & in_d[None, :]
    query = tl.load(
        q + row * q_row + heads[:, None] * q_head + d[None, :], mask=of_query, other=0.0
    )
    if HAS_SLOPES:
        slope = tl.load(slopes + heads, mask=in_g, other=0.0) * _LOG2E
    greatest = tl.full([G_PAD], float("-inf"), tl.float32)
    mass = tl.zeros([G_PAD], tl.float32)
    weighted = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        seen = place < end
        if ONE_BLOCK:
            block = tl.load(tables + row * table_row + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            of_place = tables + row * table_row + place // BLOCK_SIZE
            block = tl.load(of_place, mask=seen, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + place % BLOCK_SIZE
        at = slot[:, None] * kv_row + head * kv_head + d[None, :]
        within = seen[:, None] & in_d[None, :]
        k = tl.load(keys + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale  # [G, TILE]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * sharpness) + 1.0))
        scores = scores * _LOG2E
        if HAS_SLOPES:
            scores += slope[:, None] * (place - (length - 1)).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        rescale = tl.exp2(greatest - new_greatest)
        weights = tl.exp2(scores - new_greatest[:, None])
        v = tl.load(values + at, mask=within, other=0.0).to(query.dtype)  # [TILE, D]
        mass = mass * rescale + tl.sum(weights, axis=1)
        weighted = weighted * rescale[:, None] + tl.dot(
            weights.to(query.dtype), v, input_precision="ieee"
        )
        greatest = new_greatest
    out_row = (split * num_rows + row).to(tl.int64) * (tl.num_programs(1) * G) + heads
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


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    longest: int,
    *,
    out: Tensor,
) -> None:
    """One query a sequence over its cached tokens.

    Args:
        q: [N, Hq, D], its last dim dense.
        keys, values: [slots, Hkv, D], of one shape and strides.
        tables: int32 [N, W].
        context_lens: int32 [N], >= 1; the query is the last of these tokens.
        slopes: ALiBi's, float32 [Hq].
        longest: the greatest of the context lengths, or more.
        out: [N, Hq, D], dense, written. Scores and sums are float32; softmax
            weights are rounded to q's dtype.
    """
    num_rows, Hq, D = q.shape
    Hkv, G = spec.num_kv_heads, spec.group_size
    most = longest if spec.sliding_window is None else min(longest, spec.sliding_window)
    splits = num_splits(num_rows * Hkv, most, _num_sms(q.device))
    split_tokens = triton.cdiv(most, splits * TILE) * TILE
    # As few launches as may be: with one split its result is the result.
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    o = out if splits == 1 else empty((splits, *q.shape))
    lse = empty((splits, num_rows, Hq))
    cap = spec.logit_softcap or 1.0
    with on_device(q):
        _decode[(num_rows, Hkv, splits)](
            q, keys, values, tables, context_lens, slopes if slopes is not None else context_lens,
            o, lse, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), tables.stride(0),
            num_rows, split_tokens, spec.scale, cap, 2.0 * _LOG2E.value / cap,
            spec.sliding_window or 0, G=G, G_PAD=max(16, triton.next_power_of_2(G)), D=D,
            D_PAD=max(16, triton.next_power_of_2(D)), BLOCK_SIZE=block_size, TILE=TILE,
            HAS_SLOPES=slopes is not None, HAS_SOFTCAP=spec.logit_softcap is not None,
            HAS_WINDOW=spec.sliding_window is not None,
            ONE_BLOCK=block_size % TILE == 0 and spec.sliding_window is None,
        )  # fmt: skip
        if splits > 1:
            _merge[(num_rows * Hq,)](
                o, lse, out, splits, num_rows * Hq,
                D=D, D_PAD=triton.next_power_of_2(D), S_PAD=triton.next_power_of_2(splits),
                TILE=_MERGED_AT_A_TIME,
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
