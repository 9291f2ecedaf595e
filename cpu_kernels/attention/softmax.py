# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""The online softmax of one block: raw dot products of a register tile's rows →
weights for the product with V."""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.operands import FACTOR_BYTES, ROW_BYTES, store_weights
from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.lanes import (
    count_lanes,
    exp2_lanes,
    fill_lanes,
    first_lane,
    fold_rows,
    load_lanes,
    spread_lanes,
    store_lanes,
)
from cpu_kernels.codegen.memory import load_rows, load_scalars, store_rows
from cpu_kernels.codegen.simd import (
    added,
    exp2,
    fma,
    iota,
    keep_within,
    larger,
    maximum,
    splat,
    tanh,
    zero_if_infinite,
)

LOG2_E = 1.4426950408889634
_TINY = np.float32(1e-30)
"""Values of V all smaller than this count as zero: their inverse might not be finite."""


@part
def find_maxima(variant, num_scores, scores):
    """The column whose lanes hold each row's largest raw dot products."""
    top = splat(variant, np.float32(-np.inf))
    for i in range(0, num_scores, variant.lanes):
        top = maximum(top, load_rows(variant, scores + 4 * i, ROW_BYTES))
    return top


@part
def shape_scores(
    variant, job, scales, num_scores, scores, first, masked, low, high, positions, slopes
):  # fmt: skip
    """Raw dot products → scores in powers of two, in place; returns the column
    of their largest lanes.

    Args:
        scales: address of K's scales, read where the cache is quantised.
        first: the block's first token.
        masked: whether some row doesn't see all of the block.
        low, high, positions: float32 [rows], each row's first visible token,
            their end, and its own position.
        slopes: float32 [rows] in powers of two, or 0.
    """
    lanes = variant.lanes
    factor = splat(variant, np.float32(job.scale * np.float32(LOG2_E)))
    lowest, highest = load_scalars(variant, low), load_scalars(variant, high)
    end = splat(variant, np.float32(first + job.block_size))
    top = splat(variant, np.float32(-np.inf))
    for t in range(0, num_scores, lanes):
        value = load_rows(variant, scores + 4 * t, ROW_BYTES)
        if variant.is_quantized:
            value = value * load_rows(variant, scales + 4 * t, 0)
        if job.softcap > 0:
            cap = np.float32(job.softcap)
            value = tanh(variant, value * splat(variant, np.float32(job.scale / cap)))
            value = value * splat(variant, np.float32(cap * np.float32(LOG2_E)))
        else:
            value = value * factor
        token = iota(variant, np.float32(first + t))
        if slopes != 0:
            distance = token - load_scalars(variant, positions)
            value = fma(variant, distance, load_scalars(variant, slopes), value)
        if masked:
            value = keep_within(value, token, lowest, highest)
            if job.block_size != job.padded_tokens:
                value = keep_within(value, token, lowest, end)
        store_rows(value, scores + 4 * t, ROW_BYTES)
        top = maximum(top, value)
    return top


@part
def scale_values(variant, num_scores, scales, num_tokens, v_scales):
    """V's scales (a token's scale goes into its weight), made so that the largest uses all of an
    integer weight.

    Returns what a weight of one is worth then. Tokens that aren't the sequence's get 0, whatever
    was there before."""
    zero, end = fill_lanes(variant, np.float32(0)), fill_lanes(variant, np.float32(num_tokens))
    top = zero
    for t in range(0, num_scores, variant.lanes):
        known = keep_within(
            load_lanes(variant, scales + 4 * t), count_lanes(variant, np.float32(t)), zero, end
        )
        known = zero_if_infinite(known)
        store_lanes(known, v_scales + 4 * t)
        top = maximum(top, known)
    if not variant.is_integer:
        return np.float32(1)
    most = first_lane(fold_rows(top, larger))
    factors = fill_lanes(
        variant, np.float32(variant.max_weight) / most if most > _TINY else np.float32(0)
    )
    for t in range(0, num_scores, variant.lanes):
        store_lanes(load_lanes(variant, v_scales + 4 * t) * factors, v_scales + 4 * t)
    return most * np.float32(1.0 / variant.max_weight)


@part
def weigh_scores(
    variant, num_scores, factor, value_unit, top, scores, v_scales, tops, totals, factors, weights
):
    """exp2(score · factor - running max) as operand rows of the product with V; running maxima
    and sums brought on.

    Float weights are relative to the running max; integer ones to the block's own, or they would
    lose their digits.

    Args:
        top: the column of the scores' largest lanes.
        tops, totals: the rows' running maxima (in powers of two) and sums, a vector each.
        factors: gets what the rows' state has to be multiplied with first, and after it what a
            unit of integer weight is worth, a vector each.
    """
    own = fold_rows(top, larger) * fill_lanes(variant, factor)
    old = load_lanes(variant, tops)
    new = maximum(old, own)
    floor = zero_if_infinite(new)  # rows that see nothing yet keep minus infinity, and weights of 0
    rescale = exp2_lanes(variant, old - floor)
    base, worth = floor, fill_lanes(variant, np.float32(1))
    if variant.is_integer:
        base, worth = zero_if_infinite(own), exp2_lanes(variant, own - floor)
        store_lanes(worth * fill_lanes(variant, value_unit), factors + FACTOR_BYTES)
    store_lanes(new, tops)
    store_lanes(rescale, factors)
    minus = spread_lanes(variant, fill_lanes(variant, np.float32(0)) - base)
    multiplier, total = splat(variant, factor), splat(variant, np.float32(0))
    for i in range(0, num_scores, variant.lanes):
        weight = exp2(
            variant, fma(variant, load_rows(variant, scores + 4 * i, ROW_BYTES), multiplier, minus)
        )
        total = total + weight
        if variant.is_quantized:
            weight = weight * load_rows(variant, v_scales + 4 * i, 0)
        store_weights(variant, weight, weights + i * variant.operand_bytes)
    store_lanes(load_lanes(variant, totals) * rescale + fold_rows(total, added) * worth, totals)
