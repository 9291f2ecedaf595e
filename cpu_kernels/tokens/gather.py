# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Reading tokens' K and V out of their blocks, as they are stored: the inverse of ``append``.

Units are a head's ``UNIT_TOKENS`` tokens: no two write to the same row."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.memory import (
    address_of_record,
    as_record,
    data_of,
    load_f32,
    load_i64,
    load_u8,
    new_record,
    store_f32,
    store_u8,
)
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units
from cpu_kernels.tokens.cells import SIDE, copy_bytes, cut_cells, cut_word, take_square
from cpu_kernels.tokens.job import (
    FLOAT16,
    INT4,
    INT8,
    JOB,
    cells_of,
    fill_job,
    run_length,
    shift_of,
)

UNIT_TOKENS = 256


@part
def _gather_square(dtype, cells, cells_bytes, begin, end, rows, row_bytes, scratch):
    """SIDE words of the stored rows of the tokens ``begin`` to ``end`` of a group of SIDE."""
    if begin == 0 and end == SIDE:
        take_square(dtype, cells, cells_bytes, rows, row_bytes)
        return
    take_square(dtype, cells, cells_bytes, scratch, 64)
    for token in range(begin, end):
        cut_word(scratch + 64 * token, np.int64(0), rows + (token - begin) * row_bytes)


@part
def _gather_edge(cells, cells_bytes, cell_bytes, first, end, target):
    """One token's K, from byte ``first`` of its stored row to its end: what fills no square."""
    for byte in range(first, end):
        store_u8(
            target + byte, load_u8(cells + byte // cell_bytes * cells_bytes + byte % cell_bytes)
        )


@part
def _gather_k(job, shape, base, offset, count, rows, row_bytes, scratch):
    """K of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    cell_bytes = 2 if shape.dtype == FLOAT16 else 4
    cells_bytes = shape.padded_tokens * cell_bytes
    dtype, num_words = shape.dtype, job.row_bytes // 4
    for word in range(0, num_words if num_words >= SIDE else 0, SIDE):
        first = 4 * min(word, num_words - SIDE)  # the last square may take some words again
        for group in range(offset // SIDE * SIDE, offset + count, SIDE):
            begin, end = max(offset, group), min(offset + count, group + SIDE)
            cells = base + first // cell_bytes * cells_bytes + group * cell_bytes
            target = rows + (begin - offset) * row_bytes + first
            _gather_square(
                dtype, cells, cells_bytes, begin - group, end - group, target, row_bytes, scratch
            )
    done = 4 * num_words if num_words >= SIDE else 0
    if done < job.row_bytes:
        for token in range(count):
            cells = base + (offset + token) * cell_bytes
            _gather_edge(
                cells, cells_bytes, cell_bytes, done, job.row_bytes, rows + token * row_bytes
            )


@part
def _gather_v(job, shape, base, offset, count, rows, row_bytes, scratch):
    """V of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    dtype, pack_shift, num_dims = shape.dtype, job.pack_shift, shape.tile_dims
    cell_shift = 1 if dtype == FLOAT16 else 2
    tile = base + shape.v_offset
    for first in range(0, shape.head_dim, num_dims):
        whole = (min(first + num_dims, shape.head_dim) - first) // SIDE
        done = (first + whole * SIDE << cell_shift) >> pack_shift
        tail = job.row_bytes - done if first + num_dims >= shape.head_dim else 0
        for token in range(offset, offset + count):
            cells = tile + ((token >> pack_shift) * num_dims << cell_shift)
            shift = shift_of(dtype, pack_shift, token)
            row = rows + (token - offset) * row_bytes
            cut_cells(dtype, whole, cells, shift, row + (first << cell_shift >> pack_shift))
            if tail > 0:
                cut_cells(dtype, 1, cells + (whole * SIDE << cell_shift), shift, scratch)
                copy_bytes(scratch, tail, row + done)
        tile += shape.tile_bytes


@part
def _gather_scales(shape, base, offset, count, scales, row_bytes):
    for token in range(count):
        source = base + shape.scale_offset + 4 * (offset + token)
        target = scales + token * row_bytes
        store_f32(target, load_f32(source))
        store_f32(target + 4, load_f32(source + 4 * shape.padded_tokens))


@part
def _clear_padding(job, rows, count, row_bytes):
    """Zeros for the elements beyond the head's dims: in blocks they are anything."""
    for token in range(count):
        for byte in range(4):
            last = rows + token * row_bytes + job.row_bytes - 4 + byte
            store_u8(last, np.uint8(load_u8(last) & (job.last_word >> (8 * byte))))


@entry
def gather_unit(variant, job_address, unit, scratch):
    """Read UNIT_TOKENS tokens' K and V of one head. ``variant`` is not used."""
    job = as_record(job_address, JOB)
    shape = as_record(job.shape, SHAPE)
    head = unit % job.num_heads
    token = unit // job.num_heads * UNIT_TOKENS
    end = min(token + UNIT_TOKENS, job.num_tokens)
    row_bytes = job.num_heads * job.row_bytes
    while token < end:
        base, offset = cells_of(job, shape, load_i64(job.slots + 8 * token), head)
        count = run_length(job, token, end, shape.block_size - offset)
        row = token * job.num_heads + head
        k, v = job.k + row * job.row_bytes, job.v + row * job.row_bytes
        _gather_k(job, shape, base, offset, count, k, row_bytes, scratch)
        _gather_v(job, shape, base, offset, count, v, row_bytes, scratch)
        if shape.dtype >= INT8:
            _gather_scales(shape, base, offset, count, job.scales + 8 * row, 8 * job.num_heads)
        if shape.dtype == INT4 and shape.head_dim % 8 > 0:
            _clear_padding(job, k, count, row_bytes)
            _clear_padding(job, v, count, row_bytes)
        token += count


@entry
def run_gather(entry, team, scratch, fields, pool, k, v, scales, slots, first_head):
    """Check the slots and run. Returns False if one is out of range."""
    job = new_record(JOB)
    num_tokens = slots.shape[0]
    if not fill_job(
        job, fields, pool, k, v, data_of(scales), data_of(slots), num_tokens, first_head
    ):
        return False
    num_units = (num_tokens + UNIT_TOKENS - 1) // UNIT_TOKENS * k.shape[1]
    run_units(team, entry, address_of_record(job), num_units, scratch)
    return True
