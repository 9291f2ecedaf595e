# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose types are not Python's.
"""Attention of a few query rows over a span of one sequence's cached tokens.

A **unit** of work is (sequence, range of KV heads, range of query rows, chunk of tokens). The kernel walks the
chunk's blocks, a **superblock** (``SUPERBLOCK_TOKENS``) at a time and all heads of the unit within it, because memory
is read fastest when neighbouring heads of few blocks follow each other::

    for each superblock
        for each head
            scores  = queries · K            block by block, register tiles of rows x tokens
            weights = exp2(scores - running max), the running sums brought up to date
            state   = state · rescale + weights · V, block by block

K and V of one head and block are **pieces** of memory; while one is multiplied, the next is prefetched in the order
in which it lies. Everything a row keeps (running max, sum, weighted values) is float32. A sequence longer than a
chunk gives one partial result a chunk; whoever finishes the last chunk merges them, in the order of the chunks, so
that a result depends on the sequence alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cpu_kernels.elements import read_row, write_row
from cpu_kernels.simd import (
    as_record,
    bits_of,
    exp2,
    exp2_scalar,
    float_of,
    fma,
    iota,
    keep_within,
    load_f32,
    load_i32,
    load_i64,
    load_rows,
    load_scalars,
    maximum,
    prefetch,
    splat,
    store_f32,
    store_i32,
    store_i64,
    store_row_maxima,
    store_row_sums,
    store_rows,
    tanh,
)
from cpu_kernels.team import fetch_add
from cpu_kernels.tiles import (
    BIAS,
    PLANE_BYTES,
    RESCALE,
    ROW_BYTES,
    UNIT,
    accumulate_scores,
    accumulate_values,
    begin_low_scores,
    begin_low_values,
    begin_values,
    copy_low_halves,
    end_values,
    prefetch_cells,
    store_query,
    store_scores,
    store_weights,
    zero_scores,
)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SUPERBLOCK_TOKENS = 64
CHUNK_TOKENS = 1024
MAX_ROWS = 128
"""Query rows (over all heads) of a unit."""
MAX_TILE_ROWS = 16
_BOUND_ROWS = MAX_ROWS + MAX_TILE_ROWS

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pool", "q", "tables", "starts", "positions", "context_lens", "slopes", "out", "lse",
            "units", "partials", "partial_starts", "pending",
            "source", "num_q_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks", "window",
            "block_bytes", "head_bytes", "v_offset", "scale_offset", "padded_tokens", "padded_dims",
            "dim_words", "superblock", "chunk_blocks",
        )
    ]
    + [("scale", np.float32), ("softcap", np.float32)],
    align=True,
)  # fmt: skip
"""What all units of one call share: addresses, shapes and options."""

UNIT_FIELDS = 7
"""int32 fields of a unit: sequence, first and last head, first and last row, chunk, number of chunks."""


@njit(nogil=True, cache=True)
def _pack_queries(variant, job, rows, operands, spare):
    """A tile of queries (float32 rows, ROW_BYTES apart) to operand rows. ``spare``: room for two floats a row."""
    lanes = variant.lanes
    factors = splat(variant, np.float32(1))
    if variant.is_integer:
        top = splat(variant, np.float32(0))
        for d in range(0, job.padded_dims, lanes):
            value = load_rows(variant, rows + 4 * d, ROW_BYTES)
            top = maximum(top, maximum(value, splat(variant, np.float32(0)) - value))
        store_row_maxima(top, spare)
        for r in range(variant.rows):
            largest = load_f32(spare + 4 * r)
            store_f32(operands + r * ROW_BYTES + UNIT, largest * np.float32(1.0 / variant.max_query))
            store_f32(spare + 4 * r, np.float32(variant.max_query) / largest if largest > 0 else np.float32(0))
        factors = load_scalars(variant, spare)
    total = splat(variant, np.float32(0))
    for d in range(0, job.padded_dims, lanes):
        value = load_rows(variant, rows + 4 * d, ROW_BYTES) * factors
        total = total + store_query(variant, value, operands + d * variant.operand_bytes)
    if variant.is_integer:
        store_row_sums(total, spare)
        for r in range(variant.rows):
            bias = np.int32(load_f32(spare + 4 * r)) * np.int32(variant.element_bias)
            store_i32(operands + r * ROW_BYTES + BIAS, bias)


@njit(nogil=True, cache=True)
def _score_block(variant, job, keys, ahead, queries, scores, num_tiles):
    """Dot products of all rows with one block's K: float32 [rows][padded_tokens]; asks for the piece ``ahead``."""
    row_bytes = job.padded_tokens * variant.cell_bytes
    step = variant.score_vectors * variant.lanes
    for tile_index in range(num_tiles):
        operands = queries + tile_index * variant.rows * ROW_BYTES
        target = scores + tile_index * variant.rows * ROW_BYTES
        for t in range(0, job.padded_tokens, step):
            cells = keys + t * variant.cell_bytes
            tile = zero_scores(variant)
            for plane in range(variant.passes):
                words = operands + plane * PLANE_BYTES
                if plane > 0:
                    tile = begin_low_scores(tile)
                if plane == 0 and tile_index == 0:
                    for w in range(job.dim_words):
                        prefetch_cells(variant, tile, ahead)
                        ahead += step * variant.cell_bytes
                        tile = accumulate_scores(variant, tile, words + w * variant.word_bytes, cells + w * row_bytes)
                else:
                    for w in range(job.dim_words):
                        tile = accumulate_scores(variant, tile, words + w * variant.word_bytes, cells + w * row_bytes)
            store_scores(variant, tile, operands, target + 4 * t)


@njit(nogil=True, cache=True)
def _add_values(variant, job, segments, num_segments, weights, state, num_tiles, rescaling):
    """state += weights · V over the words of some segments: (address, words, operand offset, piece to ask for)."""
    row_bytes = job.padded_dims * variant.cell_bytes
    state_bytes = job.padded_dims * 4
    step = variant.value_vectors * variant.lanes
    for tile_index in range(num_tiles):
        rows = weights + tile_index * variant.rows * ROW_BYTES
        target = state + tile_index * variant.rows * state_bytes
        for d in range(0, job.padded_dims, step):
            tile = begin_values(variant, rows, target + 4 * d, state_bytes, rescaling)
            for plane in range(variant.passes):
                if plane > 0:
                    tile = begin_low_values(tile)
                for s in range(num_segments):
                    cells = load_i64(segments + 32 * s) + d * variant.cell_bytes
                    num_words = load_i64(segments + 32 * s + 8)
                    operands = rows + load_i64(segments + 32 * s + 16) + plane * PLANE_BYTES
                    if plane == 0 and tile_index == 0:
                        ahead = load_i64(segments + 32 * s + 24) + d * num_words * variant.cell_bytes
                        for w in range(num_words):
                            prefetch_cells(variant, tile, ahead)
                            ahead += step * variant.cell_bytes
                            tile = accumulate_values(
                                variant, tile, operands + w * variant.word_bytes, cells + w * row_bytes
                            )
                    else:
                        for w in range(num_words):
                            tile = accumulate_values(
                                variant, tile, operands + w * variant.word_bytes, cells + w * row_bytes
                            )
            end_values(variant, tile, rows, target + 4 * d, state_bytes, rescaling)


@njit(nogil=True, cache=True)
def _shape_scores(variant, job, blocks, num_blocks, head_offset, scores, first, masked, bounds, slopes, maxima):
    """Raw dot products of a tile of rows → scores in powers of two, in place, and their row maxima.

    Args:
        bounds: float32 [3][_BOUND_ROWS], each row's first visible token, end, and position.
        slopes: float32 [rows] in powers of two, or 0.
    """
    lanes = variant.lanes
    factor = splat(variant, np.float32(job.scale * np.float32(LOG2_E)))
    low, high = load_scalars(variant, bounds), load_scalars(variant, bounds + 4 * _BOUND_ROWS)
    top = splat(variant, np.float32(-np.inf))
    for b in range(num_blocks):
        scales = load_i64(blocks + 8 * b) + head_offset + job.scale_offset
        for t in range(0, job.padded_tokens, lanes):
            target = scores + 4 * (b * job.padded_tokens + t)
            value = load_rows(variant, target, ROW_BYTES)
            if variant.is_quantized:
                value = value * load_rows(variant, scales + 4 * t, 0)
            if job.softcap > 0:
                cap = np.float32(job.softcap)
                value = tanh(variant, value * splat(variant, np.float32(job.scale / cap)))
                value = value * splat(variant, np.float32(cap * np.float32(LOG2_E)))
            else:
                value = value * factor
            token = iota(variant, np.float32(first + b * job.block_size + t))
            if slopes != 0:
                distance = token - load_scalars(variant, bounds + 8 * _BOUND_ROWS)
                value = fma(variant, distance, load_scalars(variant, slopes), value)
            if masked:
                value = keep_within(value, token, low, high)
                if job.block_size != job.padded_tokens:
                    end = splat(variant, np.float32(first + (b + 1) * job.block_size))
                    value = keep_within(value, token, low, end)
            store_rows(value, target, ROW_BYTES)
            top = maximum(top, value)
    store_row_maxima(top, maxima)


@njit(nogil=True, cache=True)
def _find_maxima(variant, num_scores, scores, maxima):
    """Row maxima of raw dot products."""
    top = splat(variant, np.float32(-np.inf))
    for i in range(0, num_scores, variant.lanes):
        top = maximum(top, load_rows(variant, scores + 4 * i, ROW_BYTES))
    store_row_maxima(top, maxima)


@njit(nogil=True, cache=True)
def _scale_values(variant, job, blocks, num_blocks, head_offset, num_tokens, v_scales):
    """V's scales (a token's scale goes into its weight), made so that the largest uses all of an integer weight.

    Returns what a weight of one is worth then. Tokens that aren't the sequence's get 0, whatever was there before.
    """
    largest = np.uint32(0)
    for b in range(num_blocks):
        scales = load_i64(blocks + 8 * b) + head_offset + job.scale_offset + 4 * job.padded_tokens
        for t in range(max(0, min(job.block_size, num_tokens - b * job.block_size))):
            largest = max(largest, bits_of(load_f32(scales + 4 * t)))  # positive floats sort like their bits
    most, factor = float_of(largest), np.float32(1)
    if variant.is_integer:
        factor = np.float32(variant.max_weight) / most if most != 0 else np.float32(0)
    for b in range(num_blocks):
        scales = load_i64(blocks + 8 * b) + head_offset + job.scale_offset + 4 * job.padded_tokens
        target = v_scales + 4 * b * job.padded_tokens
        count = max(0, min(job.block_size, num_tokens - b * job.block_size))
        for t in range(count):
            store_f32(target + 4 * t, load_f32(scales + 4 * t) * factor)
        for t in range(count, job.padded_tokens):
            store_f32(target + 4 * t, np.float32(0))
    return most * np.float32(1.0 / variant.max_weight) if variant.is_integer else np.float32(1)


@njit(nogil=True, cache=True)
def _update_rows(variant, factor, value_unit, maxima, tops, totals, weights):
    """Running max and sum of a tile's rows, before the superblock's weights are known.

    Leaves in ``maxima`` what to add to a row's scores, and after it (MAX_TILE_ROWS) what its weights are worth: float
    weights are relative to the running max; integer ones to the superblock's own, or they would lose their digits.
    """
    for r in range(variant.rows):
        old, own = load_f32(tops + 4 * r), np.float32(load_f32(maxima + 4 * r) * factor)
        top = own if own > old or own != own else old
        rescale, worth = np.float32(1), np.float32(1)
        if top != old:
            rescale = exp2_scalar(variant, np.float32(old - top))
        base = top
        if variant.is_integer:
            base = own
            worth = exp2_scalar(variant, np.float32(own - top)) if own != top else np.float32(1)
            store_f32(weights + r * ROW_BYTES + UNIT, worth * value_unit)
        store_f32(weights + r * ROW_BYTES + RESCALE, rescale)
        store_f32(maxima + 4 * r, -base if base != -np.inf else np.float32(0))
        store_f32(maxima + 4 * (MAX_TILE_ROWS + r), worth)
        store_f32(tops + 4 * r, top)
        store_f32(totals + 4 * r, load_f32(totals + 4 * r) * rescale)


@njit(nogil=True, cache=True)
def _weigh_scores(variant, num_scores, factor, scores, v_scales, maxima, totals, weights):
    """exp2(score · factor + maxima[r]) as operand rows of the product with V; adds to the running sums."""
    lanes = variant.lanes
    factors, minus = splat(variant, factor), load_scalars(variant, maxima)
    total = splat(variant, np.float32(0))
    for i in range(0, num_scores, lanes):
        weight = exp2(variant, fma(variant, load_rows(variant, scores + 4 * i, ROW_BYTES), factors, minus))
        total = total + weight
        if variant.is_quantized:
            weight = weight * load_rows(variant, v_scales + 4 * i, 0)
        store_weights(variant, weight, weights + i * variant.operand_bytes)
    worth = maxima + 4 * MAX_TILE_ROWS
    sums = worth + 4 * MAX_TILE_ROWS
    store_row_sums(total, sums)
    for r in range(variant.rows):
        share = load_f32(sums + 4 * r) * load_f32(worth + 4 * r)
        store_f32(totals + 4 * r, load_f32(totals + 4 * r) + share)


@njit(nogil=True, cache=True)
def _find_blocks(job, sequence, first_block, end_block, blocks):
    """Addresses of a superblock's blocks. Returns their number."""
    num_blocks = max(0, min(job.superblock, end_block - first_block))
    for b in range(num_blocks):
        block = np.int64(load_i32(job.tables + 4 * (sequence * job.max_blocks + first_block + b)))
        store_i64(blocks + 8 * b, job.pool + block * job.block_bytes)
    return num_blocks


@njit(nogil=True, cache=True)
def _write_result(job, sequence, num_chunks, chunk, row, q_head, top, total, state):
    """One row's end: to ``out``, or to the partial results of its chunk."""
    group = job.num_q_heads // job.num_kv_heads
    start = np.int64(load_i32(job.starts + 4 * sequence))
    if num_chunks == 1:
        inverse = np.float32(1) / total if total > 0 or total != total else np.float32(0)
        index = (start + row // group) * job.num_q_heads + q_head
        element = 4 if job.source == 0 else 2
        write_row(job.source, state, job.head_dim, job.out + index * job.head_dim * element, inverse)
        if job.lse != 0:
            lse = np.float32(-np.inf)
            if total > 0 or total != total:
                lse = np.float32((np.float64(top) + np.log2(np.float64(total))) * LN_2)
            store_f32(job.lse + 4 * index, lse)
        return
    partial = load_i64(job.partial_starts + 8 * sequence)
    queries = np.int64(load_i32(job.starts + 4 * sequence + 4)) - start
    index = (chunk * queries + row // group) * job.num_q_heads + q_head
    target = partial + index * (job.padded_dims + 16) * 4
    store_f32(target, top)
    store_f32(target + 4, total)
    for d in range(job.head_dim):
        store_f32(target + 64 + 4 * d, load_f32(state + 4 * d))


@njit(nogil=True, cache=True)
def _merge_chunks(variant, job, sequence, num_chunks, row, q_head, state):
    """Merge one row's partial results, in the order of the chunks, and write it out."""
    group = job.num_q_heads // job.num_kv_heads
    partial = load_i64(job.partial_starts + 8 * sequence)
    queries = np.int64(load_i32(job.starts + 4 * sequence + 4)) - np.int64(load_i32(job.starts + 4 * sequence))
    stride = (job.padded_dims + 16) * 4
    first = partial + ((row // group) * job.num_q_heads + q_head) * stride
    step = queries * job.num_q_heads * stride
    top = np.float32(-np.inf)
    for chunk in range(num_chunks):
        top = max(top, load_f32(first + chunk * step))
    total = np.float32(0)
    for d in range(job.head_dim):
        store_f32(state + 4 * d, np.float32(0))
    for chunk in range(num_chunks):
        source = first + chunk * step
        share = load_f32(source + 4)
        if share > 0 or share != share:
            weight = exp2_scalar(variant, np.float32(load_f32(source) - top))
            total += weight * share
            for d in range(job.head_dim):
                store_f32(state + 4 * d, load_f32(state + 4 * d) + weight * load_f32(source + 64 + 4 * d))
    _write_result(job, sequence, 1, 0, row, q_head, top, total, state)


@njit(nogil=True, cache=True)
def _set_segment(segments, index, address, num_words, offset, ahead):
    store_i64(segments + 32 * index, address)
    store_i64(segments + 32 * index + 8, num_words)
    store_i64(segments + 32 * index + 16, offset)
    store_i64(segments + 32 * index + 24, ahead)


@njit(nogil=True, cache=True)
def _add_superblock(
    variant, job, blocks, num_blocks, head_offset, num_tokens, next_pieces, next_offset, weights, state, num_tiles,
    segments,
):  # fmt: skip
    """state = state · rescale + weights · V over a superblock.

    Few rows leave time to spare: block by block, each asking for the next. Many rows are bound by arithmetic: the
    accumulators then stay in registers over the whole superblock. A word that only half belongs to the sequence holds
    whatever its block held before, perhaps NaN; its lower half is copied away and taken from there.
    """
    row_bytes = job.padded_dims * variant.cell_bytes
    tail = segments + 2048
    count, rescaling = 0, True
    for b in range(num_blocks):
        tokens = min(job.block_size, num_tokens - b * job.block_size)
        values = load_i64(blocks + 8 * b) + head_offset + job.v_offset
        offset = b * job.padded_tokens * variant.operand_bytes
        words = (tokens + variant.pack - 1) // variant.pack
        if variant.holds_values:
            ahead = load_i64(next_pieces + 8 * b) + next_offset
        elif b + 1 < num_blocks:
            ahead = load_i64(blocks + 8 * (b + 1)) + head_offset + job.v_offset
        else:
            ahead = load_i64(next_pieces) + next_offset
        if variant.pack == 2 and tokens % 2 == 1:
            words -= 1
            for d in range(0, job.padded_dims, 16):
                copy_low_halves(values + words * row_bytes + 4 * d, tail + 4 * d)
            _set_segment(segments, count, tail, 1, offset + words * variant.word_bytes, ahead)
            count += 1
        _set_segment(segments, count, values, words, offset, ahead)
        count += 1
        if not variant.holds_values or b + 1 == num_blocks:
            _add_values(variant, job, segments, count, weights, state, num_tiles, rescaling)
            count, rescaling = 0, False


@njit(nogil=True, cache=True)
def attend_unit(variant, job_address, unit_index, scratch):
    """Run one unit. ``scratch``: ``SCRATCH_BYTES`` of this thread's own memory, 64-byte aligned."""
    job = as_record(job_address, JOB)
    unit = job.units + 4 * UNIT_FIELDS * unit_index
    sequence, head_begin = np.int64(load_i32(unit)), np.int64(load_i32(unit + 4))
    num_heads = np.int64(load_i32(unit + 8)) - head_begin
    row_begin, row_end = np.int64(load_i32(unit + 12)), np.int64(load_i32(unit + 16))
    chunk, num_chunks = np.int64(load_i32(unit + 20)), np.int64(load_i32(unit + 24))

    group = job.num_q_heads // job.num_kv_heads
    start = np.int64(load_i32(job.starts + 4 * sequence))
    position = np.int64(load_i32(job.positions + 4 * sequence))
    context_len = np.int64(load_i32(job.context_lens + 4 * sequence))
    num_rows, rows = row_end - row_begin, variant.rows
    num_tiles = (num_rows + rows - 1) // rows
    padded_rows = num_tiles * rows

    # Visible to any row of the unit, within the chunk.
    low = np.int64(0)
    if job.window > 0:
        low = max(np.int64(0), position + row_begin // group - job.window + 1)
    high = min(context_len, position + (row_end - 1) // group + 1)
    if num_chunks > 1:
        chunk_tokens = job.chunk_blocks * job.block_size
        first_chunk = low // chunk_tokens
        low = max(low, (first_chunk + chunk) * chunk_tokens)
        high = min(high, (first_chunk + chunk + 1) * chunk_tokens)
    first_block, end_block = low // job.block_size, (high + job.block_size - 1) // job.block_size
    if high <= low:
        end_block = first_block

    # Scratch: block lists | maxima, worth, sums | V scales | bounds | segments and tail | slopes, tops, totals
    # | state | scores | weights | queries
    blocks, next_blocks = scratch, scratch + 512
    maxima, v_scales = scratch + 1024, scratch + 1280
    bounds = scratch + 3392
    segments = bounds + 12 * _BOUND_ROWS
    slopes = segments + 4096
    tops = slopes + num_heads * padded_rows * 4
    totals = tops + num_heads * padded_rows * 4
    state_bytes = job.padded_dims * 4
    state = totals + num_heads * padded_rows * 4
    state += -state % 64
    scores = state + num_heads * padded_rows * state_bytes
    weights = scores + padded_rows * ROW_BYTES
    queries = weights + padded_rows * ROW_BYTES

    # What the rows see. Rows that fill up the last tile repeat the last.
    masks_below, masks_above = low, high
    for r in range(padded_rows):
        row_position = position + min(row_begin + r, row_end - 1) // group
        row_low, row_high = low, min(high, row_position + 1)
        if job.window > 0:
            row_low = max(low, row_position - job.window + 1)
        masks_below, masks_above = max(masks_below, row_low), min(masks_above, row_high)
        store_f32(bounds + 4 * r, np.float32(row_low))
        store_f32(bounds + 4 * (_BOUND_ROWS + r), np.float32(row_high))
        store_f32(bounds + 4 * (2 * _BOUND_ROWS + r), np.float32(row_position))

    element = 4 if job.source == 0 else 2
    for h in range(num_heads):
        for tile in range(num_tiles):
            for r in range(rows):
                index = h * padded_rows + tile * rows + r
                row = min(row_begin + tile * rows + r, row_end - 1)
                q_head = (head_begin + h) * group + row % group
                address = job.q + ((start + row // group) * job.num_q_heads + q_head) * job.head_dim * element
                target = scores + r * ROW_BYTES
                read_row(job.source, address, job.head_dim, target)
                for d in range(job.head_dim, job.padded_dims):
                    store_f32(target + 4 * d, np.float32(0))
                if job.slopes != 0:
                    slope = load_f32(job.slopes + 4 * q_head) * np.float32(LOG2_E)
                    store_f32(slopes + 4 * index, np.float32(slope))
                store_f32(tops + 4 * index, np.float32(-np.inf))
                store_f32(totals + 4 * index, np.float32(0))
                for d in range(job.padded_dims):
                    store_f32(state + index * state_bytes + 4 * d, np.float32(0))
            _pack_queries(variant, job, scores, queries + (h * padded_rows + tile * rows) * ROW_BYTES, maxima)

    num_blocks = _find_blocks(job, sequence, first_block, end_block, blocks)
    for superblock in range(first_block, end_block, job.superblock):
        first = superblock * job.block_size
        num_tokens = min(high - first, num_blocks * job.block_size)
        num_scores = num_blocks * job.padded_tokens
        num_next = _find_blocks(job, sequence, superblock + job.superblock, end_block, next_blocks)
        masked = masks_below > first or masks_above < first + num_blocks * job.block_size
        masked = masked or job.block_size != job.padded_tokens
        shaped = masked or variant.is_quantized or job.softcap > 0 or job.slopes != 0
        factor = np.float32(1) if shaped else np.float32(job.scale * np.float32(LOG2_E))
        for h in range(num_heads):
            head_offset = (head_begin + h) * job.head_bytes
            head_rows = h * padded_rows
            # What follows this head: the next one in the same blocks, or the first in the next superblock.
            next_pieces, next_offset = blocks, head_offset
            if h + 1 < num_heads:
                next_offset += job.head_bytes
            elif num_next == num_blocks:
                next_pieces, next_offset = next_blocks, head_begin * job.head_bytes
            for b in range(num_blocks):
                keys = load_i64(blocks + 8 * b) + head_offset
                ahead = load_i64(blocks) + head_offset + job.v_offset
                if variant.holds_values:
                    ahead = keys + job.v_offset
                elif b + 1 < num_blocks:
                    ahead = load_i64(blocks + 8 * (b + 1)) + head_offset
                if variant.is_quantized:
                    for line in range(0, 8 * job.padded_tokens, 64):
                        prefetch(keys + job.scale_offset + line)
                _score_block(
                    variant, job, keys, ahead, queries + head_rows * ROW_BYTES,
                    scores + 4 * b * job.padded_tokens, num_tiles,
                )  # fmt: skip
            value_unit = np.float32(1)
            if variant.is_quantized:
                value_unit = _scale_values(variant, job, blocks, num_blocks, head_offset, num_tokens, v_scales)
            for tile in range(num_tiles):
                index = head_rows + tile * rows
                tile_scores, tile_weights = (
                    scores + tile * rows * ROW_BYTES,
                    weights + tile * rows * ROW_BYTES,
                )
                if shaped:
                    _shape_scores(
                        variant, job, blocks, num_blocks, head_offset, tile_scores, first, masked,
                        bounds + 4 * tile * rows, slopes + 4 * index if job.slopes != 0 else 0, maxima,
                    )  # fmt: skip
                else:
                    _find_maxima(variant, num_scores, tile_scores, maxima)
                _update_rows(variant, factor, value_unit, maxima, tops + 4 * index, totals + 4 * index, tile_weights)
                _weigh_scores(
                    variant,
                    num_scores,
                    factor,
                    tile_scores,
                    v_scales,
                    maxima,
                    totals + 4 * index,
                    tile_weights,
                )
            _add_superblock(
                variant, job, blocks, num_blocks, head_offset, num_tokens, next_pieces, next_offset, weights,
                state + head_rows * state_bytes, num_tiles, segments,
            )  # fmt: skip
        blocks, next_blocks = next_blocks, blocks
        num_blocks = num_next

    for h in range(num_heads):
        for r in range(num_rows):
            index = h * padded_rows + r
            q_head = (head_begin + h) * group + (row_begin + r) % group
            _write_result(
                job, sequence, num_chunks, chunk, row_begin + r, q_head,
                load_f32(tops + 4 * index), load_f32(totals + 4 * index), state + index * state_bytes,
            )  # fmt: skip
    if num_chunks > 1:
        # The units of a head range carry the same counter; the last to finish merges.
        counter = job.pending + 8 * (sequence * job.num_kv_heads + head_begin)
        if fetch_add(counter, -1) == 1:
            for h in range(num_heads):
                for r in range(num_rows):
                    q_head = (head_begin + h) * group + (row_begin + r) % group
                    _merge_chunks(variant, job, sequence, num_chunks, row_begin + r, q_head, scores)
