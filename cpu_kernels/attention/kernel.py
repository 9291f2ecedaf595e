# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Attention of a few query rows over a span of one sequence's cached tokens.

A **unit** of work is (sequence, range of KV heads, range of query rows, chunk
of tokens). The kernel walks the chunk's blocks, and all heads of the unit
within each, in the order in which they lie in memory::

    for each block
        for each head
            scores  = queries · K            register tiles of rows x tokens
            weights = exp2(scores - running max), the running sums brought up to date
            state   = state · rescale + weights · V

K and V of one head and block are **pieces** of memory, and memory is kept busy
all the time: while scores are made, the head's V is prefetched, and while V is
multiplied, the next head's K.
Of a block that is at most half full, only the lines that hold its tokens are
prefetched and read. Everything a row keeps (running max, sum, weighted values)
is float32. A sequence longer than a chunk gives one partial result a chunk; the
unit that finishes the last chunk merges them, in the order of the chunks, so
that a result depends on the sequence alone.

Where a call brings each sequence's last token with it, the unit that walks to
that token writes it, a head at a time, right before that head's scores: the
lines that its K is spread over have just been asked for.
"""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.amx_products import configure_tiles, release_tiles
from cpu_kernels.attention.merge import merge_chunks, write_result
from cpu_kernels.attention.operands import BIAS, FACTOR_BYTES, ROW_BYTES, UNIT, store_query
from cpu_kernels.attention.products import add_block, ask_keys, ask_values, score_block
from cpu_kernels.attention.softmax import (
    LOG2_E,
    find_maxima,
    scale_values,
    shape_scores,
    weigh_scores,
)
from cpu_kernels.codegen.amx import FILE_BYTES
from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.memory import (
    as_record,
    load_f32,
    load_i32,
    load_rows,
    load_scalars,
    prefetch,
    store_f32,
    store_folded,
    store_i32,
)
from cpu_kernels.codegen.rows import clear_tail, fill_row, read_row
from cpu_kernels.codegen.simd import added, larger, maximum, splat
from cpu_kernels.team import SCRATCH_BYTES, call_entry, fetch_add
from cpu_kernels.tokens.append import APPEND_SCRATCH_BYTES

CHUNK_TOKENS = 1024
MAX_ROWS = 128  # query rows (over all heads) of a unit
MAX_TILE_ROWS = 16
_BOUND_ROWS = MAX_ROWS + MAX_TILE_ROWS
_ROW_STATE = 64  # bytes of one number for each row of a tile: a vector

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pool", "q", "tables", "starts", "positions", "context_lens", "slopes", "out", "lse",
            "units", "partials", "partial_starts", "pending", "append_entry", "append_job",
            "source", "num_q_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks",
            "window", "block_bytes", "head_bytes", "v_offset", "scale_offset", "padded_tokens",
            "padded_dims", "dim_words", "tile_dims", "tile_bytes", "chunk_blocks",
        )
    ]
    + [("scale", np.float32), ("softcap", np.float32)],
    align=True,
)  # fmt: skip
"""What all units of one call share: addresses, shapes and options."""

UNIT_FIELDS = 7
"""int32 fields of a unit: sequence, first and last head, first and last row,
chunk, number of chunks."""


@part
def _pack_queries(variant, job, rows, operands, spare):
    """A tile of queries (float32 rows, ROW_BYTES apart) to operand rows.
    ``spare``: room for two floats a row."""
    lanes = variant.lanes
    factors = splat(variant, np.float32(1))
    if variant.is_integer:
        top = splat(variant, np.float32(0))
        for d in range(0, job.padded_dims, lanes):
            value = load_rows(variant, rows + 4 * d, ROW_BYTES)
            top = maximum(top, maximum(value, splat(variant, np.float32(0)) - value))
        store_folded(top, spare, larger)
        for r in range(variant.rows):
            largest = load_f32(spare + 4 * r)
            store_f32(
                operands + r * ROW_BYTES + UNIT, largest * np.float32(1.0 / variant.max_query)
            )
            store_f32(
                spare + 4 * r,
                np.float32(variant.max_query) / largest if largest > 0 else np.float32(0),
            )
        factors = load_scalars(variant, spare)
    total = splat(variant, np.float32(0))
    for d in range(0, job.padded_dims, lanes):
        value = load_rows(variant, rows + 4 * d, ROW_BYTES) * factors
        total = total + store_query(variant, value, operands + d * variant.operand_bytes)
    if variant.is_integer:
        store_folded(total, spare, added)
        for r in range(variant.rows):
            bias = np.int32(load_f32(spare + 4 * r)) * np.int32(variant.element_bias)
            store_i32(operands + r * ROW_BYTES + BIAS, bias)


@part
def _begin_rows(
    variant, job, start, head_begin, num_heads, row_begin, row_end, num_tiles, slopes, tops, totals,
    state, queries, spare,
):  # fmt: skip
    """Fetch the unit's queries, as operand rows, and clear what its rows keep.
    ``spare``: a tile of float32 rows."""
    group = job.num_q_heads // job.num_kv_heads
    element = 4 if job.source == 0 else 2
    rows = variant.rows
    fill_row(variant.plain, tops, num_heads * num_tiles * (_ROW_STATE // 4), np.float32(-np.inf))
    fill_row(variant.plain, totals, num_heads * num_tiles * (_ROW_STATE // 4), np.float32(0))
    fill_row(variant.plain, state, num_heads * num_tiles * rows * job.padded_dims, np.float32(0))
    for h in range(num_heads):
        for tile in range(num_tiles):
            index = h * num_tiles + tile
            for r in range(rows):
                row = min(row_begin + tile * rows + r, row_end - 1)
                q_head = (head_begin + h) * group + row % group
                address = (
                    job.q
                    + ((start + row // group) * job.num_q_heads + q_head) * job.head_dim * element
                )
                target = spare + r * ROW_BYTES
                read_row(variant.plain, job.source, address, job.head_dim, target)
                clear_tail(target, job.head_dim, job.padded_dims)
                if job.slopes != 0:
                    slope = load_f32(job.slopes + 4 * q_head) * np.float32(LOG2_E)
                    store_f32(slopes + 4 * (index * rows + r), np.float32(slope))
            _pack_queries(variant, job, spare, queries + index * rows * ROW_BYTES, slopes - 128)


@part
def _round_up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@part
def _tokens_to_read(job, num_tokens):
    """Return how many tokens of a block are prefetched and read, if its sequence has ``num_tokens``
    there. More than half a block is read whole: whole register tiles are that much quicker."""
    return num_tokens if 2 * num_tokens <= job.padded_tokens else job.block_size


@part
def _count_scores(variant, job, num_tokens):
    """Return the scores that a row needs of a block, whose sequence has ``num_tokens`` there: of
    whole steps of the product with V, and of whole vectors or register tiles."""
    weights = _round_up(num_tokens, variant.pack * variant.step_words)
    if _tokens_to_read(job, num_tokens) == num_tokens:
        return _round_up(weights, variant.lanes)
    return _round_up(weights, variant.score_vectors * variant.lanes)


@part
def _ask(variant, job, keys, of_values, num_tokens):
    """Whether a product has to prefetch the whole of one piece while it runs. It hasn't where the
    walk has ended, or where the piece has few tokens: their lines are prefetched here.

    Args:
        keys: where the piece's head begins.
        of_values: whether the piece is V.
        num_tokens: the sequence's tokens of that block; 0: the walk has ended.
    """
    if _tokens_to_read(job, num_tokens) == job.block_size:
        return True
    if of_values:
        ask_values(variant, job, keys + job.v_offset, num_tokens)
    else:
        ask_keys(variant, job, keys, num_tokens)
    return False


@entry
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
    num_tiles = (
        (num_rows + variant.product_rows - 1) // variant.product_rows * variant.product_tiles
    )
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

    # Scratch: AMX's tiles | V's scales | words of a last step | what rows see |
    # factors | room for _pack_queries | slopes | maxima, sums | state | scores
    # | weights | queries
    file = scratch
    v_scales = file + FILE_BYTES
    last_step = v_scales + 2048
    lows = last_step + 2048 * variant.step_words
    highs = lows + 4 * _BOUND_ROWS
    positions = highs + 4 * _BOUND_ROWS
    factors = positions + 4 * _BOUND_ROWS
    slopes = factors + num_tiles * 2 * FACTOR_BYTES + 128
    tops = slopes + num_heads * padded_rows * 4
    tops += -tops % 64
    totals = tops + num_heads * num_tiles * _ROW_STATE
    state_bytes = job.padded_dims * 4
    state = totals + num_heads * num_tiles * _ROW_STATE
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
        store_f32(lows + 4 * r, np.float32(row_low))
        store_f32(highs + 4 * r, np.float32(row_high))
        store_f32(positions + 4 * r, np.float32(row_position))
    _begin_rows(
        variant, job, start, head_begin, num_heads, row_begin, row_end, num_tiles, slopes, tops,
        totals, state, queries, scores,
    )  # fmt: skip

    configure_tiles(variant, file, job.dim_words)
    table = job.tables + 4 * sequence * job.max_blocks
    heads_offset = head_begin * job.head_bytes
    block = job.pool
    if end_block > first_block:
        block += np.int64(load_i32(table + 4 * first_block)) * job.block_bytes + heads_offset
    for b in range(first_block, end_block):
        first = b * job.block_size
        num_tokens = min(high - first, job.block_size)
        num_scores = _count_scores(variant, job, num_tokens)
        next_block, next_tokens = block, np.int64(0)
        if b + 1 < end_block:
            next_tokens = min(high - first - job.block_size, job.block_size)
            next_block = (
                job.pool + np.int64(load_i32(table + 4 * (b + 1))) * job.block_bytes + heads_offset
            )
        masked = (
            masks_below > first
            or masks_above < first + job.block_size
            or job.block_size != job.padded_tokens
        )
        shaped = masked or variant.is_quantized or job.softcap > 0 or job.slopes != 0
        factor = np.float32(1) if shaped else np.float32(job.scale * np.float32(LOG2_E))
        for h in range(num_heads):
            keys = block + h * job.head_bytes
            values, scales = keys + job.v_offset, keys + job.scale_offset
            next_keys, tokens_after = keys + job.head_bytes, num_tokens
            if h + 1 == num_heads:
                next_keys, tokens_after = next_block, next_tokens
            if variant.is_quantized:
                for line in range(0, 4 * num_scores, 64):
                    prefetch(scales + line)
                    prefetch(scales + 4 * job.padded_tokens + line)
            head_tiles = h * num_tiles
            if job.append_entry != 0 and first + job.block_size >= context_len:
                row = (sequence + 1) * job.num_kv_heads + head_begin + h
                spare = scratch + (SCRATCH_BYTES - APPEND_SCRATCH_BYTES)
                call_entry(job.append_entry, job.append_job, row, spare)
            is_asking = _ask(variant, job, keys, True, num_tokens)
            score_block(
                variant, job, file, keys, is_asking, values,
                queries + head_tiles * rows * ROW_BYTES, scores, num_scores, num_tiles,
            )  # fmt: skip
            value_unit = np.float32(1)
            if variant.is_quantized:
                v_rows = scales + 4 * job.padded_tokens
                value_unit = scale_values(variant, num_scores, v_rows, num_tokens, v_scales)
            for tile in range(num_tiles):
                tile_scores = scores + tile * rows * ROW_BYTES
                row_offset = 4 * tile * rows
                if shaped:
                    tile_slopes = slopes + 4 * (head_tiles + tile) * rows if job.slopes != 0 else 0
                    top = shape_scores(
                        variant, job, scales, num_scores, tile_scores, first, masked,
                        lows + row_offset, highs + row_offset, positions + row_offset, tile_slopes,
                    )  # fmt: skip
                else:
                    top = find_maxima(variant, num_scores, tile_scores)
                weigh_scores(
                    variant, num_scores, factor, value_unit, top, tile_scores, v_scales,
                    tops + (head_tiles + tile) * _ROW_STATE,
                    totals + (head_tiles + tile) * _ROW_STATE, factors + tile * 2 * FACTOR_BYTES,
                    weights + tile * rows * ROW_BYTES,
                )  # fmt: skip
            is_asking = _ask(variant, job, next_keys, False, tokens_after)
            add_block(
                variant, job, file, values, num_tokens, is_asking, next_keys, weights, factors,
                state + head_tiles * rows * state_bytes, num_tiles, last_step,
            )  # fmt: skip
        block = next_block
    release_tiles(variant, file)

    for h in range(num_heads):
        for r in range(num_rows):
            index = (h * num_tiles + r // rows) * _ROW_STATE + 4 * (r % rows)
            q_head = (head_begin + h) * group + (row_begin + r) % group
            write_result(
                variant.plain, job, sequence, num_chunks, chunk, row_begin + r, q_head,
                load_f32(tops + index), load_f32(totals + index),
                state + (h * padded_rows + r) * state_bytes,
            )  # fmt: skip
    if num_chunks > 1:
        # The units of a head range carry the same counter; the last to finish merges.
        counter = job.pending + 8 * (sequence * job.num_kv_heads + head_begin)
        if fetch_add(counter, -1) == 1:
            for h in range(num_heads):
                for r in range(num_rows):
                    q_head = (head_begin + h) * group + (row_begin + r) % group
                    merge_chunks(
                        variant.plain, job, sequence, num_chunks, row_begin + r, q_head, scores
                    )
