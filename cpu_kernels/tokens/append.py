# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Writing tokens' K and V into their blocks, quantised where the cache is, or as they were read
out of others.

A token's K is a column: one cell in every row of its block's K; its V is one element in every cell
of a row. What isn't a stored row yet becomes one first, token by token; stored rows are written in
runs. Units are KV heads, so that no two threads ever write to the same cell."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.elements import float_to_brain, float_to_half, read_row
from cpu_kernels.codegen.memory import (
    LINE_BYTES,
    address_of_record,
    as_record,
    bits_of,
    data_of,
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    new_record,
    prefetch,
    store_f32,
    store_u8,
    store_u16,
    store_u32,
)
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units
from cpu_kernels.tokens.cells import SIDE, copy_bytes, put_cells, put_square
from cpu_kernels.tokens.job import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    JOB,
    cells_of,
    fill_job,
    run_length,
    shift_of,
)

APPEND_SCRATCH_BYTES = 16 << 10  # what ``append_unit`` takes of a thread's memory
TOKENS_AHEAD = 2  # whose memory is asked for while a token is written


@part
def _largest(row, count):
    top = np.float32(0)
    for d in range(count):
        value = np.abs(load_f32(row + 4 * d))
        if not value <= top:  # NaN too
            top = value
    return top


@part
def _encode_row(dtype, row, count, codes):
    """float32 elements → their bits in the cache, one in each uint32 of
    ``codes``. Returns the scale."""
    scale = np.float32(1)
    if dtype == FLOAT32:
        for d in range(count):
            store_u32(codes + 4 * d, bits_of(load_f32(row + 4 * d)))
    elif dtype == FLOAT16:
        for d in range(count):
            store_u32(codes + 4 * d, float_to_half(load_f32(row + 4 * d)))
    elif dtype == BFLOAT16:
        for d in range(count):
            store_u32(codes + 4 * d, float_to_brain(load_f32(row + 4 * d)))
    else:
        most = 127 if dtype == INT8 else 7
        scale = np.float32(_largest(row, count) / np.float32(most))
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for d in range(count):
            value = np.float32(load_f32(row + 4 * d) * inverse)
            bounded = max(np.float32(-most), min(np.float32(most), np.float32(np.rint(value))))
            store_u32(codes + 4 * d, np.uint32(np.int32(bounded) + most + 1))
    return scale


@part
def _store_row(dtype, codes, count, row):
    """The bits of ``count`` elements → a stored row, padded with zeros to whole words."""
    if dtype == FLOAT32:
        for d in range(count):
            store_u32(row + 4 * d, load_u32(codes + 4 * d))
    elif dtype <= BFLOAT16:
        for d in range(count):
            store_u16(row + 2 * d, np.uint16(load_u32(codes + 4 * d)))
    elif dtype == INT8:
        for d in range(count):
            store_u8(row + d, np.uint8(load_u32(codes + 4 * d)))
    else:
        for d in range(count, (count + 7) // 8 * 8):
            store_u32(codes + 4 * d, np.uint32(0))
        for byte in range((count + 7) // 8 * 4):
            first = codes + 4 * (byte // 4 * 8 + byte % 4)
            store_u8(row + byte, np.uint8(load_u32(first) | (load_u32(first + 16) << np.uint32(4))))


@part
def _stored_bytes(shape):
    """Bytes of a stored row."""
    if shape.dtype == INT4:
        return (shape.head_dim + 7) // 8 * 4
    if shape.dtype == INT8:
        return shape.head_dim
    return shape.head_dim * (4 if shape.dtype == FLOAT32 else 2)


@part
def _make_row(job, shape, source, codes, row):
    """One head's K or V of a token → a stored row. Returns its scale, where it is made here."""
    if shape.source != shape.dtype:
        read_row(shape.source, source, shape.head_dim, row)
        scale = _encode_row(shape.dtype, row, shape.head_dim, codes)
        _store_row(shape.dtype, codes, shape.head_dim, row)
        return scale
    for byte in range(0, job.row_bytes, 4):
        store_u32(row + byte, load_u32(source + byte))
    last = row + job.row_bytes - 4
    store_u32(last, np.uint32(load_u32(last) & np.uint32(job.last_word)))
    return np.float32(1)


@part
def _put_column(dtype, row, first, end, cells, cells_bytes):
    """One token's K, from byte ``first`` of its stored row to its end."""
    if dtype == FLOAT16:
        for byte in range(first, end, 2):
            store_u16(cells + byte // 2 * cells_bytes, load_u16(row + byte))
        return
    for byte in range(first, end - 3, 4):
        store_u32(cells + byte // 4 * cells_bytes, load_u32(row + byte))
    if end % 4 > 0:
        word = np.uint64(0)
        for byte in range(end % 4):
            word |= np.uint64(load_u8(row + end // 4 * 4 + byte)) << np.uint64(8 * byte)
        store_u32(cells + end // 4 * cells_bytes, word)


@part
def _put_k(shape, base, offset, count, rows, row_bytes, num_bytes):
    """K of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    dtype, num_words = shape.dtype, num_bytes // 4
    cell_bytes = 2 if dtype == FLOAT16 else 4
    cells_bytes = shape.padded_tokens * cell_bytes
    for group in range(offset // SIDE * SIDE, offset + count, SIDE):
        begin, end, done = max(offset, group), min(offset + count, group + SIDE), 0
        if end - begin == SIDE and num_words >= SIDE:
            done = 4 * num_words
            for word in range(0, num_words, SIDE):
                first = 4 * min(word, num_words - SIDE)  # the last square may take some words again
                cells = base + first // cell_bytes * cells_bytes + group * cell_bytes
                source = rows + (begin - offset) * row_bytes + first
                put_square(dtype, source, row_bytes, cells, cells_bytes)
        if done < num_bytes:
            for token in range(begin, end):
                row = rows + (token - offset) * row_bytes
                _put_column(dtype, row, done, num_bytes, base + token * cell_bytes, cells_bytes)


@part
def _put_tail(dtype, row, num_bytes, num_dims, shift, mask, cells, spare):
    """The last elements of a row, which fill no vector. What lies beside them stays."""
    copy = spare + 4 * SIDE
    cell_bytes = 2 if dtype == FLOAT16 else 4
    copy_bytes(row, num_bytes, spare)
    copy_bytes(cells, SIDE * cell_bytes, copy)
    put_cells(dtype, 1, spare, shift, mask, copy)
    copy_bytes(copy, num_dims * cell_bytes, cells)


@part
def _put_v(job, shape, base, offset, count, rows, row_bytes, num_bytes, spare):
    """V of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    dtype, pack_shift, num_dims = shape.dtype, job.pack_shift, shape.tile_dims
    cell_shift = 1 if dtype == FLOAT16 else 2
    share = (1 << (32 >> pack_shift)) - 1
    tile = base + shape.v_offset
    for first in range(0, shape.head_dim, num_dims):
        whole = (min(first + num_dims, shape.head_dim) - first) // SIDE
        done = (first + whole * SIDE << cell_shift) >> pack_shift
        tail = num_bytes - done if first + num_dims >= shape.head_dim else 0
        for token in range(offset, offset + count):
            cells = tile + ((token >> pack_shift) * num_dims << cell_shift)
            shift = shift_of(dtype, pack_shift, token)
            mask = ~(share << shift)
            row = rows + (token - offset) * row_bytes
            put_cells(dtype, whole, row + (first << cell_shift >> pack_shift), shift, mask, cells)
            if tail > 0:
                after = cells + (whole * SIDE << cell_shift)
                _put_tail(dtype, row + done, tail, shape.head_dim % SIDE, shift, mask, after, spare)
        tile += shape.tile_bytes


@part
def _put_scale(shape, base, offset, k_scale, v_scale):
    store_f32(base + shape.scale_offset + 4 * offset, k_scale)
    store_f32(base + shape.scale_offset + 4 * (shape.padded_tokens + offset), v_scale)


@part
def _ask_for(job, shape, token, head):
    """Ask for the memory of a token's cells: while a sequence decodes, each of its K's cells is
    in a cache line of its own, and none of them was touched since the token before."""
    slot = load_i64(job.slots + 8 * token)
    base, offset = cells_of(job, shape, slot, head)
    cell_bytes = 2 if shape.dtype == FLOAT16 else 4
    if (
        token > 0
        and load_i64(job.slots + 8 * token - 8) == slot - 1
        and offset * cell_bytes % LINE_BYTES != 0
    ):
        return  # asked for with the token before
    num_rows = shape.head_dim if shape.dtype == FLOAT16 else shape.dim_words
    for w in range(num_rows):
        prefetch(base + offset * cell_bytes + w * shape.padded_tokens * cell_bytes)
    row_bytes = shape.tile_dims * cell_bytes
    cells = base + shape.v_offset + offset // shape.pack * row_bytes
    for _ in range(0, shape.head_dim, shape.tile_dims):
        for byte in range(0, row_bytes, LINE_BYTES):
            prefetch(cells + byte)
        cells += shape.tile_bytes


@part
def _append_run(job, shape, base, offset, count, row, spare):
    """Stored rows of ``count`` tokens; ``row``: the first one's index."""
    row_bytes = job.num_heads * job.row_bytes
    k, v = job.k + row * job.row_bytes, job.v + row * job.row_bytes
    _put_k(shape, base, offset, count, k, row_bytes, job.row_bytes)
    _put_v(job, shape, base, offset, count, v, row_bytes, job.row_bytes, spare)
    if shape.dtype >= INT8:
        for token in range(count):
            scales = job.scales + 8 * (row + token * job.num_heads)
            _put_scale(shape, base, offset + token, load_f32(scales), load_f32(scales + 4))


@part
def _append_token(job, shape, base, offset, row, scratch):
    """One token whose rows are not, or not quite, stored rows."""
    spare, codes, made = scratch, scratch + 4096, scratch + 8192
    num_bytes, one, none = _stored_bytes(shape), np.int64(1), np.int64(0)
    k_scale = _make_row(job, shape, job.k + row * job.row_bytes, codes, made)
    _put_k(shape, base, offset, one, made, none, num_bytes)
    v_scale = _make_row(job, shape, job.v + row * job.row_bytes, codes, made)
    _put_v(job, shape, base, offset, one, made, none, num_bytes, spare)
    if shape.dtype >= INT8:
        if shape.source == shape.dtype:
            k_scale = load_f32(job.scales + 8 * row)
            v_scale = load_f32(job.scales + 8 * row + 4)
        _put_scale(shape, base, offset, k_scale, v_scale)


@part
def _stores_runs(shape):
    """Whether rows are stored as they come. What fills up the last word of an
    int4 row is the caller's, and anything."""
    return shape.source == shape.dtype and (shape.dtype != INT4 or shape.head_dim % 8 == 0)


@entry
def append_unit(variant, job_address, unit, scratch):
    """Write K and V of one head: all tokens' where ``unit`` is below the number of heads, else
    those of token ``unit // num_heads - 1``. ``variant`` is not used."""
    job = as_record(job_address, JOB)
    shape = as_record(job.shape, SHAPE)
    in_runs = _stores_runs(shape)
    head, token, end = unit % job.num_heads, unit // job.num_heads - 1, unit // job.num_heads
    if token < 0:
        token, end = np.int64(0), job.num_tokens
        for t in range(min(TOKENS_AHEAD, end)):
            _ask_for(job, shape, np.int64(t), head)
    while token < end:
        base, offset = cells_of(job, shape, load_i64(job.slots + 8 * token), head)
        count = np.int64(1)
        if in_runs:
            count = run_length(job, token, end, shape.block_size - offset)
        if token + count + TOKENS_AHEAD <= end:
            _ask_for(job, shape, token + count + TOKENS_AHEAD - 1, head)
        row = token * job.num_heads + head
        if in_runs:
            _append_run(job, shape, base, offset, count, row, scratch)
        else:
            _append_token(job, shape, base, offset, row, scratch)
        token += count


@entry
def run_append(entry, team, scratch, fields, pool, k, v, scales, slots, first_head):
    """Check the slots and run. Returns False if one is out of range."""
    job = new_record(JOB)
    num_tokens = slots.shape[0]
    if not fill_job(
        job, fields, pool, k, v, data_of(scales), data_of(slots), num_tokens, first_head
    ):
        return False
    run_units(team, entry, address_of_record(job), k.shape[1], scratch)
    return True
