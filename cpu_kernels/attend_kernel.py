# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose types are not Python's.
"""Attention of a few query rows over a span of one sequence's cached tokens.

A **unit** of work is (sequence, range of KV heads, range of query rows, chunk of tokens). The kernel walks the
chunk's blocks, a **superblock** (about 128 tokens) at a time and all heads of the unit within it, because memory is
read fastest when neighbouring heads of few blocks follow each other::

    for each superblock
        for each head, for each register tile of query rows
            scores  = queries · K            register tiles of rows x tokens
            weights = exp2(scores - running max), the running sums brought up to date
            state   = state · rescale + weights · V

Each of the two products prefetches what the next one will read. Everything a row keeps (running max, sum, weighted
values) is float32. A sequence longer than a chunk gives one partial result a chunk; whoever finishes the last
chunk merges them, in the order of the chunks, so that a result depends on the sequence alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cpu_kernels.numbers import read_row, write_row
from cpu_kernels.simd import (
    as_record,
    exp2,
    fma,
    iota,
    keep_within,
    lane0,
    load,
    load_f32,
    load_i32,
    load_i64,
    max_lane,
    maximum,
    splat,
    store,
    store_f32,
    store_i32,
    store_i64,
    sum_lanes,
    tanh,
    unless_zero,
)
from cpu_kernels.team import fetch_add
from cpu_kernels.tiles import (
    BIAS,
    MAX_INTEGER,
    PLANE_BYTES,
    RESCALE,
    ROW_BYTES,
    UNIT,
    accumulate_scores,
    accumulate_values,
    begin_low_plane,
    copy_low_halves,
    fold_values,
    prefetch_cells,
    store_query,
    store_scores,
    store_weights,
    zero_scores,
    zero_values,
)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SUPERBLOCK_TOKENS = 128
CHUNK_TOKENS = 1024
MAX_ROWS = 128
"""Query rows (over all heads) of a unit."""

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
def _pack_query(variant, job, address, row, operands):
    """One query (``head_dim`` elements at ``address``) to an operand row, by way of float32 at ``row``."""
    lanes = variant.lanes
    for d in range(job.head_dim, job.padded_dims):
        store_f32(row + 4 * d, np.float32(0))
    read_row(job.source, address, job.head_dim, row)
    factor = np.float32(1)
    if variant.is_integer:
        top = splat(variant, np.float32(0))
        for d in range(0, job.padded_dims, lanes):
            value = load(variant, row + 4 * d)
            top = maximum(top, maximum(value, splat(variant, np.float32(0)) - value))
        largest = max_lane(top)
        factor = np.float32(MAX_INTEGER) / largest if largest > 0 else np.float32(0)
        store_f32(operands + UNIT, largest * np.float32(1.0 / MAX_INTEGER))
    total = splat(variant, np.float32(0))
    for d in range(0, job.padded_dims, lanes):
        value = load(variant, row + 4 * d) * splat(variant, factor)
        total = total + store_query(variant, value, operands + d * variant.operand_bytes)
    if variant.is_integer:
        store_i32(operands + BIAS, np.int32(sum_lanes(total)) * np.int32(variant.element_bias))


@njit(nogil=True, cache=True)
def _score_superblock(variant, job, queries, blocks, num_blocks, head_offset, scores, prefetching):
    """Dot products of a tile of rows with the superblock's K: float32 [rows][num_blocks · padded_tokens]."""
    row_bytes = job.padded_tokens * variant.cell_bytes
    word_bytes = 4 * variant.pack if variant.operand_bytes == 4 else max(4, variant.pack)
    step = variant.score_vectors * variant.lanes
    for b in range(num_blocks):
        keys = load_i64(blocks + 8 * b) + head_offset
        for t in range(0, job.padded_tokens, step):
            cells = keys + t * variant.cell_bytes
            tile = zero_scores(variant)
            for plane in range(2 if variant.is_integer else 1):
                operands = queries + plane * PLANE_BYTES
                if plane > 0:
                    tile = begin_low_plane(tile)
                for w in range(job.dim_words):
                    if prefetching and plane == 0:
                        prefetch_cells(variant, tile, cells + job.v_offset + w * row_bytes)
                    tile = accumulate_scores(variant, tile, operands + w * word_bytes, cells + w * row_bytes)
            store_scores(variant, tile, queries, scores + 4 * (b * job.padded_tokens + t))


@njit(nogil=True, cache=True)
def _shape_scores(variant, job, blocks, num_blocks, head_offset, scores, first, position, low, high, slope):
    """Raw dot products → scores in powers of two, in place; what lies outside low <= token < high becomes -inf.

    Returns the largest.
    """
    lanes = variant.lanes
    factor = splat(variant, np.float32(job.scale * np.float32(LOG2_E)))
    masked = low > first or high < first + num_blocks * job.block_size or job.block_size != job.padded_tokens
    top = splat(variant, np.float32(-np.inf))
    for b in range(num_blocks):
        scales = load_i64(blocks + 8 * b) + head_offset + job.scale_offset
        for t in range(0, job.padded_tokens, lanes):
            target = scores + 4 * (b * job.padded_tokens + t)
            value = load(variant, target)
            if variant.is_quantized:
                value = value * load(variant, scales + 4 * t)
            if job.softcap > 0:
                cap = np.float32(job.softcap)
                value = tanh(variant, value * splat(variant, np.float32(job.scale / cap)))
                value = value * splat(variant, np.float32(cap * np.float32(LOG2_E)))
            else:
                value = value * factor
            token = first + b * job.block_size + t
            if slope != 0:
                distance = iota(variant) + splat(variant, np.float32(token - position))
                value = fma(variant, distance, splat(variant, slope), value)
            if masked:
                end = min(high, first + (b + 1) * job.block_size)
                value = keep_within(value, iota(variant), np.float32(low - token), np.float32(end - token))
            store(value, target)
            top = maximum(top, value)
    return max_lane(top)


@njit(nogil=True, cache=True)
def _weigh_scores(variant, job, blocks, num_blocks, head_offset, scores, top, weights):
    """exp2(score - top) as an operand row of the product with V. Returns the sum."""
    lanes = variant.lanes
    highest = splat(variant, top if top > -np.inf else np.float32(0))
    total = splat(variant, np.float32(0))
    if not variant.is_quantized:
        for i in range(0, num_blocks * job.padded_tokens, lanes):
            weight = exp2(variant, load(variant, scores + 4 * i) - highest)
            total = total + store_weights(variant, weight, weights + i * variant.operand_bytes)
        return sum_lanes(total)

    # V's scale belongs to the token, so it goes into the weight.
    largest = splat(variant, np.float32(0))
    for b in range(num_blocks):
        scales = load_i64(blocks + 8 * b) + head_offset + job.scale_offset + 4 * job.padded_tokens
        for t in range(0, job.padded_tokens, lanes):
            target = scores + 4 * (b * job.padded_tokens + t)
            weight = exp2(variant, load(variant, target) - highest)
            total = total + weight
            weight = unless_zero(weight, weight * load(variant, scales + 4 * t))
            store(weight, target)
            largest = maximum(largest, weight)
    factor = np.float32(1)
    if variant.is_integer:
        most = max_lane(largest)
        factor = np.float32(MAX_INTEGER) / most if most > 0 else np.float32(0)
        store_f32(weights + UNIT, most * np.float32(1.0 / MAX_INTEGER))
    held = splat(variant, np.float32(0))
    for i in range(0, num_blocks * job.padded_tokens, lanes):
        weight = load(variant, scores + 4 * i) * splat(variant, factor)
        held = held + store_weights(variant, weight, weights + i * variant.operand_bytes)
    if variant.is_integer:
        store_i32(weights + BIAS, np.int32(sum_lanes(held)) * np.int32(variant.element_bias))
    return sum_lanes(total)


@njit(nogil=True, cache=True)
def _gather_segments(variant, job, blocks, num_blocks, head_offset, num_tokens, segments, tail):
    """Where the superblock's V words lie: (address, words, operand offset) a segment. Returns their number.

    A word that only half belongs to the sequence holds whatever its block held before, perhaps NaN; its lower half
    is copied to ``tail``.
    """
    row_bytes = job.padded_dims * variant.cell_bytes
    count = 0
    for b in range(num_blocks):
        tokens = min(job.block_size, num_tokens - b * job.block_size)
        address = load_i64(blocks + 8 * b) + head_offset + job.v_offset
        operand = b * job.padded_tokens * variant.operand_bytes
        words = (tokens + variant.pack - 1) // variant.pack
        if variant.pack == 2 and tokens % 2 == 1:
            words -= 1
            for d in range(0, job.padded_dims, 16):
                copy_low_halves(address + words * row_bytes + 4 * d, tail + 4 * d)
            store_i64(segments + 24 * count, tail)
            store_i64(segments + 24 * count + 8, 1)
            store_i64(segments + 24 * count + 16, operand + words * 2 * variant.operand_bytes)
            count += 1
        store_i64(segments + 24 * count, address)
        store_i64(segments + 24 * count + 8, words)
        store_i64(segments + 24 * count + 16, operand)
        count += 1
    return count


@njit(nogil=True, cache=True)
def _add_values(variant, job, weights, segments, num_segments, ahead, state, state_bytes):
    """state = state · rescale + weights · V; meanwhile ask for the lines ``ahead[segment]`` begins."""
    row_bytes = job.padded_dims * variant.cell_bytes
    word_bytes = 4 * variant.pack if variant.operand_bytes == 4 else max(4, variant.pack)
    step = variant.value_vectors * variant.lanes
    for d in range(0, job.padded_dims, step):
        tile = zero_values(variant)
        for plane in range(2 if variant.is_integer else 1):
            if plane > 0:
                tile = begin_low_plane(tile)
            for s in range(num_segments):
                cells = load_i64(segments + 24 * s) + d * variant.cell_bytes
                words = load_i64(segments + 24 * s + 8)
                operands = weights + plane * PLANE_BYTES + load_i64(segments + 24 * s + 16)
                target = load_i64(ahead + 8 * s) + d * variant.cell_bytes
                for w in range(words):
                    if plane == 0:
                        prefetch_cells(variant, tile, target + w * row_bytes)
                    tile = accumulate_values(variant, tile, operands + w * word_bytes, cells + w * row_bytes)
        fold_values(variant, tile, weights, state + 4 * d, state_bytes)


@njit(nogil=True, cache=True)
def _find_blocks(job, sequence, first_block, end_block, blocks):
    """Addresses of a superblock's blocks. Returns their number."""
    num_blocks = max(0, min(job.superblock, end_block - first_block))
    for b in range(num_blocks):
        block = np.int64(load_i32(job.tables + 4 * (sequence * job.max_blocks + first_block + b)))
        store_i64(blocks + 8 * b, job.pool + block * job.block_bytes)
    return num_blocks


@njit(nogil=True, cache=True)
def _look_ahead(job, blocks, num_blocks, next_blocks, num_next, head_offset, num_segments, ahead):
    """What to prefetch while V is read: the same blocks' next head, or the next superblock's first."""
    for s in range(num_segments):
        if num_next == 0:
            store_i64(ahead + 8 * s, load_i64(blocks + 8 * min(s, num_blocks - 1)) + head_offset)
        else:
            store_i64(ahead + 8 * s, load_i64(next_blocks + 8 * min(s, num_next - 1)) + head_offset)


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
            weight = lane0(exp2(variant, splat(variant, load_f32(source) - top)))
            total += weight * share
            for d in range(job.head_dim):
                store_f32(state + 4 * d, load_f32(state + 4 * d) + weight * load_f32(source + 64 + 4 * d))
    _write_result(job, sequence, 1, 0, row, q_head, top, total, state)


@njit(nogil=True, cache=True)
def attend_unit(variant, job_address, unit_index, scratch):
    """Run one unit. ``scratch``: ``SCRATCH_BYTES`` of this thread's own memory, 64-byte aligned."""
    job = as_record(job_address, JOB)
    unit = job.units + 4 * UNIT_FIELDS * unit_index
    sequence, head_begin, head_end = (
        np.int64(load_i32(unit)),
        np.int64(load_i32(unit + 4)),
        np.int64(load_i32(unit + 8)),
    )
    row_begin, row_end = np.int64(load_i32(unit + 12)), np.int64(load_i32(unit + 16))
    chunk, num_chunks = np.int64(load_i32(unit + 20)), np.int64(load_i32(unit + 24))

    group = job.num_q_heads // job.num_kv_heads
    start = np.int64(load_i32(job.starts + 4 * sequence))
    position = np.int64(load_i32(job.positions + 4 * sequence))
    context_len = np.int64(load_i32(job.context_lens + 4 * sequence))
    num_rows = row_end - row_begin
    rows = variant.rows
    num_tiles = (num_rows + rows - 1) // rows
    padded_rows = num_tiles * rows
    num_heads = head_end - head_begin

    # Visible to any row of the unit, within the chunk.
    low = np.int64(0)
    if job.window > 0:
        low = max(np.int64(0), position + row_begin // group - job.window + 1)
    high = min(context_len, position + (row_end - 1) // group + 1)
    first_chunk = np.int64(0)
    if num_chunks > 1:
        chunk_tokens = job.chunk_blocks * job.block_size
        first_chunk = low // chunk_tokens
        low = max(low, (first_chunk + chunk) * chunk_tokens)
        high = min(high, (first_chunk + chunk + 1) * chunk_tokens)
    first_block, end_block = low // job.block_size, (high + job.block_size - 1) // job.block_size
    if high <= low:
        end_block = first_block

    # Scratch: float32 row | scores | weights | block lists | segments | tail | stats | state | queries
    row_buffer = scratch
    scores = row_buffer + ROW_BYTES
    weights = scores + rows * ROW_BYTES
    blocks = weights + rows * ROW_BYTES
    next_blocks = blocks + 512
    ahead = next_blocks + 512
    segments = ahead + 1024
    tail = segments + 2048
    stats = tail + 2048
    state_bytes = job.padded_dims * 4
    state = stats + num_heads * padded_rows * 8
    state += -state % 64
    queries = state + num_heads * padded_rows * state_bytes

    element = 4 if job.source == 0 else 2
    for h in range(num_heads):
        for r in range(padded_rows):
            index = h * padded_rows + r
            row = min(row_begin + r, row_end - 1)  # rows that fill up the last tile repeat the last
            q_head = (head_begin + h) * group + row % group
            address = job.q + ((start + row // group) * job.num_q_heads + q_head) * job.head_dim * element
            _pack_query(variant, job, address, row_buffer, queries + index * ROW_BYTES)
            store_f32(stats + 8 * index, np.float32(-np.inf))
            store_f32(stats + 8 * index + 4, np.float32(0))
            for d in range(job.padded_dims):
                store_f32(state + index * state_bytes + 4 * d, np.float32(0))

    num_blocks = _find_blocks(job, sequence, first_block, end_block, blocks)
    for superblock in range(first_block, end_block, job.superblock):
        first = superblock * job.block_size
        num_tokens = min(high - first, num_blocks * job.block_size)
        num_next = _find_blocks(job, sequence, superblock + job.superblock, end_block, next_blocks)
        for h in range(num_heads):
            head_offset = (head_begin + h) * job.head_bytes
            num_segments = _gather_segments(variant, job, blocks, num_blocks, head_offset, num_tokens, segments, tail)
            if h + 1 < num_heads:
                _look_ahead(job, blocks, num_blocks, blocks, 0, head_offset + job.head_bytes, num_segments, ahead)
            else:
                _look_ahead(
                    job, blocks, num_blocks, next_blocks, num_next, head_begin * job.head_bytes, num_segments, ahead
                )
            for tile in range(num_tiles):
                index = h * padded_rows + tile * rows
                operands = queries + index * ROW_BYTES
                _score_superblock(variant, job, operands, blocks, num_blocks, head_offset, scores, tile == 0)
                for r in range(rows):
                    row = min(row_begin + tile * rows + r, row_end - 1)
                    row_position = position + row // group
                    slope = np.float32(0)
                    if job.slopes != 0:
                        q_head = (head_begin + h) * group + row % group
                        slope = np.float32(load_f32(job.slopes + 4 * q_head) * np.float32(LOG2_E))
                    row_low = low
                    if job.window > 0:
                        row_low = max(low, row_position - job.window + 1)
                    row_scores, row_weights = scores + r * ROW_BYTES, weights + r * ROW_BYTES
                    row_stats = stats + 8 * (index + r)
                    old_top = load_f32(row_stats)
                    top = max(
                        old_top,
                        _shape_scores(
                            variant, job, blocks, num_blocks, head_offset, row_scores, first, row_position,
                            row_low, min(high, row_position + 1), slope,
                        ),
                    )  # fmt: skip
                    total = _weigh_scores(variant, job, blocks, num_blocks, head_offset, row_scores, top, row_weights)
                    rescale = np.float32(1)
                    if top > old_top:
                        rescale = lane0(exp2(variant, splat(variant, old_top - top)))
                    store_f32(row_weights + RESCALE, rescale)
                    store_f32(row_stats, top)
                    store_f32(row_stats + 4, load_f32(row_stats + 4) * rescale + total)
                _add_values(
                    variant, job, weights, segments, num_segments, ahead, state + index * state_bytes, state_bytes
                )
        blocks, next_blocks = next_blocks, blocks
        num_blocks = num_next

    for h in range(num_heads):
        for r in range(num_rows):
            index = h * padded_rows + r
            q_head = (head_begin + h) * group + (row_begin + r) % group
            _write_result(
                job, sequence, num_chunks, chunk, row_begin + r, q_head,
                load_f32(stats + 8 * index), load_f32(stats + 8 * index + 4), state + index * state_bytes,
            )  # fmt: skip
    if num_chunks > 1:
        # The units of a head range carry the same counter; the last to finish merges.
        counter = job.pending + 8 * (sequence * job.num_kv_heads + head_begin)
        if fetch_add(counter, -1) == 1:
            for h in range(num_heads):
                for r in range(num_rows):
                    q_head = (head_begin + h) * group + (row_begin + r) % group
                    _merge_chunks(variant, job, sequence, num_chunks, row_begin + r, q_head, row_buffer)
