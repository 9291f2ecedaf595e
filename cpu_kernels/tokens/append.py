# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""Writing tokens' K and V into their blocks, quantised where the cache is, or
as they were read out of others.

A token's K is a column: one cell in every row of its block's K; its V is one
element in every cell of a row. Units are KV heads, so that no two threads ever
write to the same cell.
"""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.elements import float_to_brain, float_to_half, read_row
from cpu_kernels.codegen.memory import (
    as_record,
    bits_of,
    keep_alive,
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    prefetch,
    store_f32,
    store_u16,
    store_u32,
)
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units

APPEND_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pool", "k", "v", "scales", "slots", "num_tokens", "num_heads", "first_head",
            "row_bytes", "source", "dtype", "pack", "head_dim", "block_size", "block_bytes",
            "head_bytes", "v_offset", "scale_offset", "padded_tokens", "padded_dims", "dim_words",
            "tile_dims", "tile_bytes",
        )
    ]
)  # fmt: skip
"""What all units of one call share."""

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = range(5)  # the order of layout.DTYPES
LINE_BYTES = 64
TOKENS_AHEAD = 2
"""Whose memory is asked for while a token is written."""


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
def _read_stored(dtype, row, count, codes):
    """Elements as they are stored → their bits in the cache, one in each uint32 of ``codes``."""
    if dtype == FLOAT32:
        for d in range(count):
            store_u32(codes + 4 * d, load_u32(row + 4 * d))
    elif dtype <= BFLOAT16:
        for d in range(count):
            store_u32(codes + 4 * d, np.uint32(load_u16(row + 2 * d)))
    elif dtype == INT8:
        for d in range(count):
            store_u32(codes + 4 * d, np.uint32(load_u8(row + d)))
    else:
        for d in range(count):
            pair = np.uint32(load_u8(row + d // 8 * 4 + d % 4))
            store_u32(codes + 4 * d, np.uint32((pair >> np.uint32(d // 4 % 2 * 4)) & np.uint32(15)))


@part
def _read_codes(job, row, spare, codes):
    """One head's K or V of a token → its bits in the cache. Returns the scale,
    where it is made here."""
    if job.source == job.dtype:
        _read_stored(job.dtype, row, job.head_dim, codes)
        return np.float32(1)
    read_row(job.source, row, job.head_dim, spare)
    return _encode_row(job.dtype, spare, job.head_dim, codes)


@part
def _shift(dtype, pack, element):
    if dtype == INT4:
        return np.uint32(8 * (element % 4) + 4 * (element // 4))
    return np.uint32(element * (32 // pack))


@part
def _write_column(job, codes, cells):
    """One token's K: the first cell at ``cells``."""
    row_bytes = job.padded_tokens * (2 if job.dtype == FLOAT16 else 4)
    if job.dtype == FLOAT16:
        for d in range(job.head_dim):
            store_u16(cells + d * row_bytes, np.uint16(load_u32(codes + 4 * d)))
        return
    for w in range(job.dim_words):
        cell = np.uint32(0)
        for element in range(job.pack):
            code = load_u32(codes + 4 * (w * job.pack + element))
            cell |= np.uint32(code << _shift(job.dtype, job.pack, element))
        store_u32(cells + w * row_bytes, cell)


@part
def _write_row(job, codes, cells, element):
    """One token's V: its elements within the cells from ``cells`` on, and those
    of the following tiles."""
    for first in range(0, job.head_dim, job.tile_dims):
        _write_tile_row(
            job, codes + 4 * first, min(job.tile_dims, job.head_dim - first), cells, element
        )
        cells += job.tile_bytes


@part
def _write_tile_row(job, codes, count, cells, element):
    if job.dtype == FLOAT16:
        for d in range(count):
            store_u16(cells + 2 * d, np.uint16(load_u32(codes + 4 * d)))
        return
    # V's bytes are signed, K's are raised by 128.
    signs = np.uint32(0x80) if job.dtype == INT8 else np.uint32(0)
    shift = _shift(job.dtype, job.pack, element)
    mask = np.uint32(~np.uint32(np.uint32(0xFFFFFFFF >> (32 - 32 // job.pack)) << shift))
    for d in range(count):
        kept = np.uint32(load_u32(cells + 4 * d) & mask)
        store_u32(
            cells + 4 * d, np.uint32(kept | np.uint32((load_u32(codes + 4 * d) ^ signs) << shift))
        )


@part
def _cells_of(job, slot, head):
    """Address of a head's cells in the slot's block, and the token's place in the block."""
    return (
        job.pool + slot // job.block_size * job.block_bytes + head * job.head_bytes,
        slot % job.block_size,
    )


@part
def _ask_for(job, token, head):
    """Ask for the memory of a token's cells: while a sequence decodes, each of
    its K's cells is in a cache line of its own, and none of them was touched
    since the token before."""
    slot = load_i64(job.slots + 8 * token)
    base, offset = _cells_of(job, slot, head)
    cell_bytes = 2 if job.dtype == FLOAT16 else 4
    if (
        token > 0
        and load_i64(job.slots + 8 * token - 8) == slot - 1
        and offset * cell_bytes % LINE_BYTES != 0
    ):
        return  # asked for with the token before
    num_rows = job.head_dim if job.dtype == FLOAT16 else job.dim_words
    for w in range(num_rows):
        prefetch(base + offset * cell_bytes + w * job.padded_tokens * cell_bytes)
    row_bytes = job.tile_dims * cell_bytes
    cells = base + job.v_offset + offset // job.pack * row_bytes
    for _ in range(0, job.head_dim, job.tile_dims):
        for byte in range(0, row_bytes, LINE_BYTES):
            prefetch(cells + byte)
        cells += job.tile_bytes


@entry
def append_unit(variant, job_address, head, scratch):
    """Write all tokens' K and V of one head. ``variant`` is not used."""
    job = as_record(job_address, APPEND_JOB)
    spare, codes = scratch, scratch + 4096
    for d in range(job.head_dim, job.head_dim + 8):
        store_u32(codes + 4 * d, np.uint32(0))  # what fills up the last cell
    cell_bytes = 2 if job.dtype == FLOAT16 else 4
    for t in range(min(TOKENS_AHEAD, job.num_tokens)):
        _ask_for(job, t, job.first_head + head)
    for t in range(job.num_tokens):
        if t + TOKENS_AHEAD < job.num_tokens:
            _ask_for(job, t + TOKENS_AHEAD, job.first_head + head)
        base, offset = _cells_of(job, load_i64(job.slots + 8 * t), job.first_head + head)
        row = t * job.num_heads + head
        k_scale = _read_codes(job, job.k + row * job.row_bytes, spare, codes)
        _write_column(job, codes, base + offset * cell_bytes)
        v_scale = _read_codes(job, job.v + row * job.row_bytes, spare, codes)
        cells = base + job.v_offset + offset // job.pack * job.tile_dims * cell_bytes
        _write_row(job, codes, cells, offset % job.pack)
        if job.dtype >= INT8:
            if job.source == job.dtype:
                k_scale = load_f32(job.scales + 8 * row)
                v_scale = load_f32(job.scales + 8 * row + 4)
            store_f32(base + job.scale_offset + 4 * offset, k_scale)
            store_f32(base + job.scale_offset + 4 * (job.padded_tokens + offset), v_scale)


@entry
def run_append(entry, team, scratch, fields, pool, k, v, scales, slots, first_head):
    """Check the slots and run. Returns False if one is out of range."""
    shape = as_record(fields.ctypes.data, SHAPE)
    limit = pool.shape[0] * shape.block_size
    for t in range(slots.shape[0]):
        if slots[t] < 0 or slots[t] >= limit:
            return False
    jobs = np.zeros(1, APPEND_JOB)
    job = jobs[0]
    job.pool, job.slots = pool.ctypes.data, slots.ctypes.data
    job.k, job.v, job.scales = k.ctypes.data, v.ctypes.data, scales.ctypes.data
    job.num_heads, job.first_head, job.row_bytes = k.shape[1], first_head, k.shape[2] * k.itemsize
    job.num_tokens = slots.shape[0]
    job.source = shape.source
    job.dtype = shape.dtype
    job.pack = shape.pack
    job.head_dim, job.block_size = shape.head_dim, shape.block_size
    job.block_bytes, job.head_bytes = shape.block_bytes, shape.head_bytes
    job.v_offset, job.scale_offset = shape.v_offset, shape.scale_offset
    job.padded_tokens, job.padded_dims = shape.padded_tokens, shape.padded_dims
    job.dim_words = shape.dim_words
    job.tile_dims = shape.tile_dims
    job.tile_bytes = shape.tile_bytes
    run_units(team, entry, jobs.ctypes.data, k.shape[1], scratch)
    keep_alive(jobs)
    return True
